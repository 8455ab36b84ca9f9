"""Find libmegatrain, load it once at first use, and call it.

The library is looked for in three places, and the first file that exists is the one used:
the path in MEGATRAIN_NATIVE, if set (then nowhere else); this folder, where a wheel puts it; `build/` of
the source tree. A library of another ABI version is an error, never a reason to look further.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path

from megatrain.errors import NativeLibraryMissing

ABI_VERSION = 2
"""Equal to MT_ABI_VERSION in csrc/megatrain.h."""

FILE_NAME = "libmegatrain.so"
PATH_VARIABLE = "MEGATRAIN_NATIVE"

_HOW_TO_BUILD = (
    "Build it in the source tree with `cmake -S . -B build && cmake --build build` (or `make native`), "
    "or reinstall the megatrain wheel."
)


def touch(address: int, nbytes: int, threads: int) -> None:
    """Fault in every page of a range for writing, in parallel, leaving its contents as they are.

    Nobody else may write to the range meanwhile. `threads` is capped by the CPUs this process may use.
    """
    _check(load().mt_touch(address, _size(nbytes), threads), f"touching {nbytes} bytes")


def copy(dst: int, src: int, nbytes: int, threads: int) -> None:
    """Copy between two ranges of host memory that do not overlap, in parallel."""
    _check(load().mt_copy(dst, src, _size(nbytes), threads), f"copying {nbytes} bytes")


GRADIENT_FP32, GRADIENT_BF16, GRADIENT_FP32_TO_BF16 = range(3)
"""How a gradient is stored; the last is an FP32 sum that is rounded to BF16 before use."""


def adamw(
    weight: int,
    residual: int | None,
    exp_avg: int,
    exp_avg_sq: int,
    gradient: int,
    gradient_kind: int,
    count: int,
    scalars: Sequence[float],
    threads: int,
) -> None:
    """One AdamW step on `count` elements in one pass; addresses of the first elements. See csrc/megatrain.h."""
    packed = (ctypes.c_float * 9)(*scalars)
    code = load().mt_adamw(
        weight, residual, exp_avg, exp_avg_sq, gradient, gradient_kind, _size(count), packed, threads
    )
    _check(code, f"updating {count} parameters")


@functools.cache
def load() -> ctypes.CDLL:
    """The library with its signatures declared; calls into it release the GIL."""
    path = find()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeLibraryMissing(f"The native library {path} cannot be loaded: {error}. {_HOW_TO_BUILD}") from error
    _check_abi(library, path)
    library.mt_touch.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.mt_touch.restype = ctypes.c_int
    library.mt_copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.mt_copy.restype = ctypes.c_int
    library.mt_adamw.argtypes = [
        *[ctypes.c_void_p] * 5,
        ctypes.c_int,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_float),
        ctypes.c_int,
    ]
    library.mt_adamw.restype = ctypes.c_int
    return library


def find() -> Path:
    """The library file that `load` would open."""
    candidates = search_paths()
    for path in candidates:
        if path.is_file():
            return path
    searched = ", ".join(str(path) for path in candidates)
    raise NativeLibraryMissing(f"The native library is missing (searched: {searched}). {_HOW_TO_BUILD}")


def search_paths() -> list[Path]:
    """Where the library may be, in the order it is looked for."""
    explicit = os.environ.get(PATH_VARIABLE)
    if explicit:
        return [Path(explicit)]
    here = Path(__file__).resolve().parent
    paths = [here / FILE_NAME]
    source_tree = here.parents[2]
    if (source_tree / "csrc" / "megatrain.h").is_file():
        paths.append(source_tree / "build" / FILE_NAME)
    return paths


def _check_abi(library: ctypes.CDLL, path: Path) -> None:
    try:
        version = library.mt_abi_version
    except AttributeError as error:
        raise NativeLibraryMissing(f"{path} is not MegaTrain's native library. {_HOW_TO_BUILD}") from error
    version.argtypes = []
    version.restype = ctypes.c_int
    found = version()
    if found != ABI_VERSION:
        why = f"The native library {path} has ABI version {found}, this megatrain needs {ABI_VERSION}."
        raise NativeLibraryMissing(f"{why} {_HOW_TO_BUILD}")


def _size(nbytes: int) -> int:
    # ctypes would wrap a negative number around to almost 2**64.
    if nbytes < 0:
        raise ValueError(f"a size cannot be negative: {nbytes}")
    return nbytes


def _check(code: int, doing: str) -> None:
    if code != 0:
        raise OSError(code, f"{os.strerror(code)} while {doing}")
