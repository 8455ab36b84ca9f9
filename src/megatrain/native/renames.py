"""`renameat2`, which Python does not have."""

from __future__ import annotations

import ctypes
import errno
import os

AT_FDCWD = -100
RENAME_EXCHANGE = 2


def exchange(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> None:
    """Let two names change places in one step. OSError where the kernel or the file system cannot do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, "the C library has no renameat2", os.fspath(first))
    rename.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    rename.restype = ctypes.c_int
    if rename(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(first), None, os.fspath(second))
