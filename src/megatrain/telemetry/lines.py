"""A file that one process appends lines to: each is there completely or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import weakref
from contextlib import suppress
from pathlib import Path

from megatrain.telemetry.notices import warn

CANNOT_LOCK = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
_open: weakref.WeakSet[LineFile] = weakref.WeakSet()


class LineFile:
    """A file that cannot be written causes one warning; nothing more is written to it."""

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor = path, -1
        _open.add(self)
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._lock()
            status = os.fstat(self._descriptor)
            size = status.st_size if stat.S_ISREG(status.st_mode) else 0
            # A process that was killed may have left part of a line.
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                os.write(self._descriptor, b"\n")
        except OSError as error:
            self._give_up(error)

    def append(self, line: str) -> None:
        if self._descriptor < 0:
            return
        data, size = line.encode() + b"\n", None
        try:
            status = os.fstat(self._descriptor)
            if status.st_nlink == 0 and not self._path.exists():
                raise FileNotFoundError(errno.ENOENT, "it was deleted")
            size = status.st_size
            while data:
                data = data[os.write(self._descriptor, data) :]
        except BaseException as error:
            # Part of a line may be there: a full disk takes what still fits.
            if size is not None:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, size)
            if not isinstance(error, OSError):
                raise
            self._give_up(error)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _lock(self) -> None:
        """Refuse a file that another run appends to. The lock ends with the process."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError(error.errno, "another run is recorded in it") from None
        except OSError as error:
            if error.errno not in CANNOT_LOCK:
                raise

    def _give_up(self, error: OSError) -> None:
        self.close()
        warn(f"{self._path} cannot be written ({error.strerror}): the run goes on without being recorded")


def _in_child() -> None:
    """A forked child writes nothing, and must not keep the lock when its parent is killed."""
    for file in list(_open):
        file.close()


os.register_at_fork(after_in_child=_in_child)
