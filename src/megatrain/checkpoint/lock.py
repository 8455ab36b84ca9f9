"""A lock, so that one process at a time writes checkpoints into a directory.

It is a `flock` on a file in the directory, which the system releases when the process ends. A process can acquire it
several times. A forked child closes its copy, or it would keep the lock after its parent is killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatrain import files
from megatrain.errors import DirectoryInUse
from megatrain.files import AnyPath
from megatrain.telemetry.lines import CANNOT_LOCK
from megatrain.telemetry.notices import warn

FILE = "_megatrain.lock"
"""Trainers do not upload files whose names start with an underscore."""
FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


_held: dict[Path, tuple[int, int]] = {}
"""Path → the descriptor that holds the lock, and how often it was acquired."""
_guard = threading.Lock()


def acquire(directory: AnyPath) -> Callable[[], None]:
    """Acquire the lock of a directory; returns a function that releases it. Raises DirectoryInUse if it is taken."""
    files.make_directory(directory)
    path = Path(os.path.realpath(directory)) / FILE
    with _guard:
        descriptor, count = _held[path] if path in _held else (_locked(path), 0)
        if descriptor is None:
            return lambda: None
        _held[path] = (descriptor, count + 1)
    owner = os.getpid()
    return lambda: _release(path) if os.getpid() == owner else None


def _locked(path: Path) -> int | None:
    """A descriptor that holds the lock; None if the file system cannot lock."""
    while True:
        descriptor, there = -1, False
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                there = os.path.samestat(os.stat(path), os.fstat(descriptor))
            if there:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()} on {os.uname().nodename}\n".encode(), 0)
                return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, 256, 0).decode(errors="replace").strip()
            os.close(descriptor)
            who = f" (pid {holder})" if holder else ""
            raise DirectoryInUse(
                f"another process{who} is training in {path.parent}, and each would delete the other's checkpoints; "
                "use another output_dir, or stop that process first. Nothing was changed."
            ) from None
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            if error.errno not in CANNOT_LOCK | FORBIDDEN:
                raise
            warn(
                f"{path.parent} cannot be locked ({error.strerror}); make sure that no other process uses this "
                "output_dir"
            )
            return None
        # The previous holder deleted the file after it was opened here.
        os.close(descriptor)


def _release(path: Path) -> None:
    with _guard:
        descriptor, count = _held[path]
        if count > 1:
            _held[path] = (descriptor, count - 1)
            return
        del _held[path]
        # Deleted while it is locked: a process that has opened it sees that the file is gone, and creates a new one.
        with suppress(OSError):
            files.remove(path)
        os.close(descriptor)


def _forget() -> None:
    """In a forked child: only the parent keeps the lock."""
    global _guard
    _guard = threading.Lock()
    for descriptor, _ in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
