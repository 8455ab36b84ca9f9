"""Disk I/O by native threads or io_uring: pieces of files, each with a checksum. csrc/disk.h describes the functions.

Calls release the GIL. A pool belongs to the process that started it.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import threading
import time
from typing import Any, NamedTuple

from megatrain.native import library

POLL_MS = 1000
"""How often a waiting thread returns from the library, to let Ctrl-C through."""
STOP_MS = 3000
FP32 = 1
"""MT_LOSSLESS_FP32 in csrc/lossless.h: the dtype of pieces that are coded."""
BACKENDS = ("threads", "uring")
"""In the order of `enum mt_disk_backend`."""
_RUNNING = -1
"""An outcome's code before the end of its transfer."""
_unfinished: list[object] = []
"""What transfers use that nobody waited for until their end. It must never be freed."""


class Piece(ctypes.Structure):
    """`struct mt_disk_piece`: the unit of a transfer and of a checksum."""

    _fields_ = [
        ("file", ctypes.c_int32),
        ("written", ctypes.c_int32),
        ("offset", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("checksum", ctypes.c_uint64),
        ("stored", ctypes.c_uint64),
        ("dtype", ctypes.c_int32),
    ]


class _Outcome(ctypes.Structure):
    """`struct mt_disk_outcome`."""

    _fields_ = [
        ("code", ctypes.c_int32),
        ("file", ctypes.c_int32),
        ("offset", ctypes.c_uint64),
        ("moved", ctypes.c_uint64),
    ]


class _File(ctypes.Structure):
    """`struct mt_disk_file`."""

    _fields_ = [
        ("magic", ctypes.c_uint64),
        ("memory_align", ctypes.c_uint32),
        ("offset_align", ctypes.c_uint32),
        ("align_known", ctypes.c_int32),
    ]


class FileKind(NamedTuple):
    """A file's system, and the alignment of direct I/O: of memory and of offsets; None if the kernel does not say."""

    magic: int
    alignment: tuple[int, int] | None


class TransferFailed(OSError):
    """A piece could not be transferred: `file` and `offset` say which. EBADMSG: its checksum or encoding was wrong."""

    def __init__(self, code: int, file: int, offset: int) -> None:
        super().__init__(code, os.strerror(code))
        self.file, self.offset = file, offset


def describe(file: int) -> FileKind:
    found = _File()
    library.check(library.load().mt_disk_describe(file, ctypes.byref(found)), "asking for the file system")
    return FileKind(found.magic, (found.memory_align, found.offset_align) if found.align_known else None)


def reserve(file: int, offset: int, nbytes: int) -> None:
    """Allocate the blocks of a range. Where the file system cannot, OSError: `os.posix_fallocate` would then write to
    every block, which takes hours over a network."""
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if fallocate is None:
        raise OSError(errno.ENOSYS, "the C library has no fallocate64")
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    while fallocate(file, 0, offset, nbytes) != 0:
        if (code := ctypes.get_errno()) != errno.EINTR:
            raise OSError(code, os.strerror(code))


def uring_refusal() -> str | None:
    """Why io_uring cannot be used here; None if it can."""
    code = int(library.load().mt_disk_uring())
    return f"{os.strerror(code)} (errno {code})" if code else None


def checksum(address: int, nbytes: int) -> int:
    """XXH64 of a range of memory."""
    return int(library.load().mt_disk_checksum(address, nbytes))


class Stalled(Exception):
    """A transfer takes too long. It goes on, and its memory must stay valid."""


class Transfer:
    """A submitted read or write."""

    def __init__(self, keep: object) -> None:
        # Ctrl-C may come between the end of a call and the next line. These are set inside the calls. (Calls that use
        # a file together with others are made where it does not come: store/disk.py.)
        self.handle = ctypes.c_void_p()
        self._outcome = _Outcome(code=_RUNNING)
        self._keep = keep
        """What the threads use meanwhile: pieces and memory."""

    @property
    def _running(self) -> bool:
        return bool(self.handle) and self._outcome.code == _RUNNING

    def wait(self, seconds: float = math.inf) -> int:
        """Block until it is done; raise `TransferFailed` if a piece failed, `Stalled` if it is not done after about
        this many seconds. Returns the bytes read or written: fewer than those of the pieces if some are coded or were
        never written."""
        deadline, outcome = time.monotonic() + seconds, self._outcome
        while self._running:
            library.load().mt_disk_wait(self.handle, POLL_MS, ctypes.byref(outcome))
            if self._running and time.monotonic() > deadline:
                raise Stalled
        self._keep = None
        if outcome.code > 0:
            raise TransferFailed(outcome.code, outcome.file, outcome.offset)
        return int(outcome.moved)

    def __del__(self) -> None:
        # The threads may still use the memory.
        if self._running:
            _unfinished.append(self._keep)


class Pool:
    """Threads that read and write pieces, `depth` at once, themselves or by one of the other `BACKENDS`."""

    def __init__(self, depth: int, backend: str = "threads") -> None:
        self._lock = threading.Lock()
        """Of the handle: another thread may submit while the pool is stopped."""
        self._handle: Any = ctypes.c_void_p()
        code = library.load().mt_disk_start(depth, BACKENDS.index(backend), ctypes.byref(self._handle))
        library.check(code, f"starting disk I/O by {backend}, {depth} pieces at once")

    def submit(self, pieces: Any, first: int, count: int, address: int, *, write: bool, keep: object) -> Transfer:
        """Transfer `count` pieces from number `first` of an array, from or to consecutive memory."""
        transfer = Transfer((pieces, keep))
        start = ctypes.addressof(pieces) + first * ctypes.sizeof(Piece)
        code = errno.ECANCELED
        with self._lock:
            if self._handle is not None:
                handle = ctypes.byref(transfer.handle)
                code = library.load().mt_disk_submit(self._handle, start, count, address, write, handle)
        library.check(code, f"submitting {count} pieces")
        return transfer

    def stop(self) -> bool:
        """End the threads. False if a piece is stuck in the kernel: files and memory must then stay as they are."""
        with self._lock:
            # Ctrl-C after the call must not leave a handle that is freed.
            handle, self._handle = self._handle, None
            if handle is not None and library.load().mt_disk_stop(handle, STOP_MS) != 0:
                self._handle = handle
            return self._handle is None
