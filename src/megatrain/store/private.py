"""Private directories for scratch files whose names outlive them, on file systems without O_TMPFILE.

Each has mode 0700 and a lock that ends with its process. A directory whose lock can be taken was left by a process that
was killed; the next process that opens scratch beside it removes it. A crash in the middle leaves a directory that is
removed the same way.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path

from megatrain import files
from megatrain.store import forks
from megatrain.telemetry.lines import CANNOT_LOCK

PREFIX = ".megatrain-scratch-"
LOCK, FILE = "lock", "states"


class PrivateDirectory:
    """A directory that only this process uses."""

    def __init__(self, parent: Path) -> None:
        self.owner = forks.Owner()
        self.locked = True
        """Whether the file system can lock. If not, nobody removes the directory after a kill."""
        self._folder, self._lock = -1, -1
        while self._lock < 0 and self.locked:
            self.path = parent / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
            files.make_private(self.path)
            # Until it is locked, another process may take it for a leftover and remove it.
            with suppress(FileNotFoundError, BlockingIOError):
                self._acquire()

    def _acquire(self) -> None:
        self._folder = _open_folder(self.path)
        try:
            self._lock = _locked(self._folder)
        except OSError as error:
            if error.errno in CANNOT_LOCK:
                self.locked = False
                return
            os.close(self._folder)
            raise

    def open(self, flags: int) -> int:
        """Create a file, open it and remove its name."""
        try:
            return os.open(FILE, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._folder)
        finally:
            # Also after an error: some kernels create the file before they refuse O_DIRECT. File systems that cannot
            # remove the name of an open file fail, or give it another name.
            with suppress(OSError):
                files.remove_in(self._folder, FILE)

    @property
    def empty(self) -> bool:
        """Whether no file has a name here."""
        return not {*os.listdir(self._folder)} - {LOCK}

    def close(self) -> None:
        """Remove it, after its files were closed. In a forked child: only close it."""
        if self._folder < 0:
            return
        if self.owner.is_current:
            # If that fails, a later process removes it.
            with suppress(OSError):
                _empty(self._folder)
        for descriptor in (self._folder, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._folder, self._lock = -1, -1
        if self.owner.is_current:
            with suppress(OSError):
                files.remove_empty(self.path)


def remove_stale(parent: Path) -> None:
    """Remove the directories of processes that ended without doing so."""
    for path in parent.glob(f"{PREFIX}*"):
        # It may be in use, of another user, or be removed by another process at the same time.
        with suppress(OSError):
            folder, lock = _open_folder(path), -1
            try:
                lock = _locked(folder)
                _empty(folder)
            finally:
                os.close(folder)
                if lock >= 0:
                    os.close(lock)
            files.remove_empty(path)


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _locked(folder: int) -> int:
    """A descriptor that holds the lock of a directory. Raises BlockingIOError if another process holds it, and
    FileNotFoundError if it has removed the lock."""
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its last holder may have removed it after it was opened here.
        if not os.path.samestat(os.stat(LOCK, dir_fd=folder), os.fstat(lock)):
            raise FileNotFoundError(errno.ENOENT, "the lock was replaced")
    except BaseException:
        os.close(lock)
        raise
    return lock


def _empty(folder: int) -> None:
    """Remove the files in a directory, the lock last."""
    for name in sorted(os.listdir(folder), key=lambda name: name == LOCK):
        files.remove_in(folder, name)
