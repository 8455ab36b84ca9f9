"""One process at a time writes checkpoints into a directory.

The lock is `flock` on a file in it: it goes away with the process, however that ends. A process can take it several
times. A forked child closes its copy: else it would keep the lock when its parent is killed.
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
from megatrain.telemetry.notices import warn

FILE = "_megatrain.lock"
"""Trainers do not upload names that begin with an underscore."""
UNSUPPORTED = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


_held: dict[Path, tuple[int, int]] = {}
"""The descriptor that holds a lock, and how often it was taken."""
_guard = threading.Lock()


def acquire(directory: AnyPath) -> Callable[[], None]:
    """Take the lock of a directory; call what is returned, once, to give it back. DirectoryInUse if it is taken."""
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
    """A descriptor that holds the lock; None where it cannot be locked."""
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
                "use "
                "another output_dir, or stop that process first. Nothing was changed."
            ) from None
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            if error.errno not in UNSUPPORTED | FORBIDDEN:
                raise
            warn(
                f"{path.parent} cannot be locked ({error.strerror}); make sure that no other process uses this "
                "output_dir"
            )
            return None
        # Its last holder deleted the file after it was opened here.
        os.close(descriptor)


def _release(path: Path) -> None:
    with _guard:
        descriptor, count = _held[path]
        if count > 1:
            _held[path] = (descriptor, count - 1)
            return
        del _held[path]
        # While it is still locked: whoever opens it meanwhile sees that it is gone, and makes a new one.
        with suppress(OSError):
            files.remove(path)
        os.close(descriptor)


def _forget() -> None:
    """In a forked child: the parent keeps the lock, and nobody else does."""
    global _guard
    _guard = threading.Lock()
    for descriptor, _ in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
