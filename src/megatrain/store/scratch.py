"""Scratch files without a name: they vanish with the process, even if it is killed.

O_TMPFILE makes one that never had a name. Where the file system does not support it, a file is created in a private
directory (store/private.py) and unlinked at once. Some file systems keep a name of an open file all the same: then the
directory stays until the file is closed, and the next process removes it if this one is killed.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from functools import cache
from pathlib import Path

from megatrain import files
from megatrain.errors import DiskFailed, DiskFull, SettingsError
from megatrain.geometry import ALIGN_BYTES
from megatrain.geometry import DISK_KEPT_FREE as KEPT_FREE
from megatrain.native import disk as native
from megatrain.store.private import PrivateDirectory, remove_stale
from megatrain.telemetry.notices import warn

MEMORY_SYSTEMS = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
"""File systems in RAM, by the magic number of statfs."""
UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EISDIR, errno.ENOENT)


class ScratchFile:
    """An open file without a name."""

    def __init__(self, directory: Path, descriptor: int, private: PrivateDirectory | None = None) -> None:
        self.directory, self.descriptor, self._private = directory, descriptor, private
        self.kind = native.describe(descriptor)
        self.direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT != 0
        """Whether transfers bypass the page cache."""
        self.device = os.fstat(descriptor).st_dev
        """Files with the same one share their free space."""
        self._end = self._reserved = 0

    def place(self, nbytes: int) -> int:
        """The offset of `nbytes` more bytes. Call `reserve` before they are written."""
        self._end += nbytes
        return self._end - nbytes

    @property
    def end(self) -> int:
        """The length of everything placed so far."""
        return self._end

    def require(self, nbytes: int, what: str = "states") -> None:
        """Raise `DiskFull` unless `nbytes` more can be reserved."""
        system = os.fstatvfs(self.descriptor)
        free = system.f_bavail * system.f_frsize
        if nbytes + KEPT_FREE > free:
            raise DiskFull(
                f"{what} need {nbytes / 1e9:.3g} GB in {self.directory}, but only {free / 1e9:.3g} GB are free, of "
                f"which {KEPT_FREE / 1e9:.2g} must stay free; free some space, or name a directory on another drive in "
                "offload_dir."
            )

    def reserve(self, what: str = "states") -> None:
        """Allocate the blocks of everything placed so far, so that writing cannot run out of space."""
        missing = self._end - self._reserved
        if not missing:
            return
        try:
            native.reserve(self.descriptor, self._reserved, missing)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                self._end = self._reserved
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise DiskFull(
                    f"{missing / 1e9:.3g} GB for {what} could not be reserved in {self.directory} "
                    f"({error.strerror}); free some space, raise the quota or file size limit, or name a directory on "
                    "another drive in offload_dir."
                ) from error
            if error.errno not in UNSUPPORTED:
                raise DiskFailed(
                    f"{missing / 1e9:.3g} GB for {what} could not be reserved in {self.directory} "
                    f"({error.strerror}): check the drive (dmesg, smartctl)."
                ) from error
            _warn_once(self.directory, "cannot reserve space: a full drive shows only when states are written")
            os.ftruncate(self.descriptor, self._end)
        self._reserved = self._end

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        if self._private is not None:
            self._private.close()


def open_scratch(directory: Path, allow_tmpfs: bool = False) -> ScratchFile:
    """Open a nameless file for direct I/O. File systems in RAM are refused; without direct I/O, a warning says so."""
    file: ScratchFile | None = None
    try:
        files.make_directory(directory)
        file = _direct(_open_nameless(directory, os.O_DIRECT))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise SettingsError(f"offload_dir={str(directory)!r} cannot be used: {error.strerror or error}.") from error
    if file is None:
        _warn_once(directory, "does not support direct I/O: states pass through the page cache, which takes RAM")
        file = _open_nameless(directory, 0)
        # Pages that are read ahead of a transfer would stay in the cache.
        os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    magic = file.kind.magic
    if magic in MEMORY_SYSTEMS and not allow_tmpfs:
        file.close()
        raise SettingsError(
            f"offload_dir={str(directory)!r} is on {MEMORY_SYSTEMS[magic]}, which is RAM, so nothing would be gained; "
            "name a directory on a drive."
        )
    return file


def _direct(file: ScratchFile) -> ScratchFile | None:
    """The file if a page of it can be written directly, else it is closed. Some file systems accept the flag and refuse
    the transfer."""
    alignment = file.kind.alignment
    try:
        if alignment is None or 0 < max(alignment) <= ALIGN_BYTES:
            # Anonymous mappings are page-aligned.
            os.pwrite(file.descriptor, mmap.mmap(-1, ALIGN_BYTES), 0)
            return file
    except OSError as error:
        if error.errno != errno.EINVAL:
            file.close()
            raise
    file.close()
    return None


def _open_nameless(directory: Path, more: int) -> ScratchFile:
    flags = os.O_RDWR | os.O_CLOEXEC | more
    try:
        return ScratchFile(directory, os.open(directory, flags | os.O_TMPFILE, 0o600))
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    remove_stale(directory)
    private = PrivateDirectory(directory)
    try:
        file = ScratchFile(directory, private.open(flags), private)
    except BaseException:
        private.close()
        raise
    if private.empty:
        private.close()
        return file
    left = "the next run there removes it" if private.locked else f"remove {private.path.name} then"
    _warn_once(directory, f"keeps the name of an open file: it is left behind if the run is killed; {left}")
    return file


@cache
def _warn_once(directory: Path, what: str) -> None:
    warn(f"{directory} {what}")
