"""Find libmegatrain, load it once at first use, and call it.

The library is looked for in three places, and the first file that exists is the one used:
the path in MEGATRAIN_NATIVE, if set (then nowhere else); this folder, where a wheel puts it; `build/` of
the source tree. A library of another ABI version is an error, never a reason to look further.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatrain.errors import NativeLibraryMissing
from megatrain.geometry import WIDTHS

ABI_VERSION = 4
"""Equal to MT_ABI_VERSION in csrc/megatrain.h."""

FILE_NAME = "libmegatrain.so"
PATH_VARIABLE = "MEGATRAIN_NATIVE"
AT_FDCWD = -100
RENAME_EXCHANGE = 2

_HOW_TO_BUILD = (
    "Build it in the source tree with `cmake -S . -B build && cmake --build build` (or `make native`), "
    "or reinstall the megatrain wheel."
)


def touch(address: int, nbytes: int, threads: int) -> None:
    """Fault in every page of a range for writing, in parallel, leaving its contents as they are.

    Nobody else may write to the range meanwhile. `threads` is capped by the CPUs this process may use.
    """
    check(load().mt_touch(address, _size(nbytes), threads), f"touching {nbytes} bytes")


def trim() -> None:
    """Give freed memory that the C library keeps back to the system, where it can (glibc)."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


def prepare_protect() -> None:
    """Look up what `protect` calls: right after a fork the loader's locks may be held by threads that are gone."""
    _mprotect()


def protect(address: int, nbytes: int) -> None:
    """Make whole pages of this process's memory read-only; a write to them is a segmentation fault."""
    if _mprotect()(address, _size(nbytes), mmap.PROT_READ) != 0:
        check(ctypes.get_errno(), f"protecting {nbytes} bytes")


@functools.cache
def _mprotect() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mprotect
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def exchange(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> None:
    """Let two names change places in one step. OSError where the kernel or the file system cannot do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, "the C library has no renameat2", os.fspath(first))
    rename.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    if rename(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(first), None, os.fspath(second))


def copy(dst: int, src: int, nbytes: int, threads: int) -> None:
    """Copy between two ranges of host memory that do not overlap, in parallel."""
    check(load().mt_copy(dst, src, _size(nbytes), threads), f"copying {nbytes} bytes")


def cpu_quota(root: str = "") -> int:
    """CPUs that this process's cgroup quota pays for, rounded up; 0: no quota. `root` is put before /proc and /sys."""
    return int(load().mt_cpu_quota(root.encode()))


class _Update(ctypes.Structure):
    """`struct mt_update` in csrc/megatrain.h."""

    _fields_ = [
        ("rule", ctypes.c_int32),
        ("weight_kind", ctypes.c_int32),
        ("gradient_kind", ctypes.c_int32),
        ("state_kind", ctypes.c_int32),
        ("weight", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("moments", ctypes.c_void_p * 2),
        ("scales", ctypes.c_void_p * 2),
        ("count", ctypes.c_uint64),
        ("first", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("scalars", ctypes.c_float * 12),
    ]


_ADDRESS, _SIZE, _NUMBER = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_SIZE_OUT = ctypes.POINTER(ctypes.c_size_t)
_ARGUMENTS: dict[str, list[Any]] = {
    "mt_touch": [_ADDRESS, _SIZE, _NUMBER],
    "mt_copy": [_ADDRESS, _ADDRESS, _SIZE, _NUMBER],
    "mt_cpu_quota": [ctypes.c_char_p],
    "mt_update": [ctypes.POINTER(_Update), _NUMBER],
    "mt_touch_streams": [ctypes.POINTER(_Update), _NUMBER],
    "mt_square_sums": [_ADDRESS, _NUMBER, _SIZE, _SIZE, _ADDRESS, _NUMBER],
    "mt_isa_count": [],
    "mt_isa_name": [_NUMBER],
    "mt_isa_use": [_NUMBER],
    "mt_lossless_bound": [_SIZE, _NUMBER, _SIZE_OUT],
    "mt_lossless_encode": [_ADDRESS, _SIZE, _NUMBER, _ADDRESS, _SIZE, _SIZE_OUT, _NUMBER],
    "mt_lossless_decode": [_ADDRESS, _SIZE, _ADDRESS, _SIZE, _NUMBER, _NUMBER, _SIZE_OUT],
}
"""Of csrc/megatrain.h and csrc/lossless.h."""


def update(
    *,
    rule: int,
    scalars: Sequence[float],
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    gradient: torch.Tensor,
    rounded: bool,
    width: str,
    moments: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor | None],
    seed: int,
    first: int,
    threads: int,
    arithmetic: bool = True,
) -> None:
    """One optimizer step on flat tensors in host memory, in one pass. See `mt_update` in csrc/megatrain.h.

    Without `arithmetic` all streams are read and written back as they were: what an update could reach at best.
    """
    weight_kind = 0 if weight.dtype == torch.float32 else (2 if residual is None else 1)
    gradient_kind = 1 if gradient.dtype == torch.bfloat16 else (2 if rounded else 0)
    packed = _Update(
        rule=rule,
        weight_kind=weight_kind,
        gradient_kind=gradient_kind,
        state_kind=[*WIDTHS].index(width),
        weight=weight.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        gradient=gradient.data_ptr(),
        count=weight.numel(),
        first=first,
        seed=seed,
    )
    packed.scalars[: len(scalars)] = list(scalars)
    for number, (payload, scale) in enumerate(zip(moments, scales, strict=True)):
        packed.moments[number] = payload.data_ptr()
        packed.scales[number] = None if scale is None else scale.data_ptr()
    function = load().mt_update if arithmetic else load().mt_touch_streams
    check(function(ctypes.byref(packed), threads), f"updating {weight.numel()} parameters")


def square_sums(values: torch.Tensor, partials: torch.Tensor, *, chunk: int, rounded: bool, threads: int) -> None:
    """Sums of squares of every `chunk` elements in host memory, into the first of `partials`: one FP64 tree for each.

    `rounded` counts FP32 values as rounded to BF16. See `mt_square_sums` in csrc/megatrain.h.
    """
    for tensor, dtypes in ((values, (torch.float32, torch.bfloat16)), (partials, (torch.float64,))):
        if tensor.dtype not in dtypes or tensor.device.type != "cpu" or not tensor.is_contiguous():
            strided = "" if tensor.is_contiguous() else "strided "
            raise ValueError(
                "only contiguous FP32 or BF16 tensors in host memory can be summed, and only into FP64, "
                f"not a {strided}{tensor.dtype} tensor on {tensor.device}"
            )
    if chunk < 1 or partials.numel() < -(-values.numel() // chunk):
        raise ValueError(f"{values.numel()} elements in chunks of {chunk} do not fit in {partials.numel()} sums")
    kind = 1 if values.dtype == torch.bfloat16 else (2 if rounded else 0)
    code = load().mt_square_sums(values.data_ptr(), kind, values.numel(), chunk, partials.data_ptr(), threads)
    check(code, f"adding the squares of {values.numel()} elements")


def isas() -> list[str]:
    """Instruction sets that the update was compiled for and this CPU has, the best last: the one in use by default."""
    library = load()
    return [library.mt_isa_name(number).decode() for number in range(library.mt_isa_count())]


def use_isa(name: str) -> None:
    """Make later updates use one of `isas()`. All of them give the same bits; for tests and benchmarks."""
    check(load().mt_isa_use(isas().index(name)), f"choosing {name}")


@functools.cache
def load() -> ctypes.CDLL:
    """The library with its signatures declared; calls into it release the GIL."""
    path = find()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeLibraryMissing(f"The native library {path} cannot be loaded: {error}. {_HOW_TO_BUILD}") from error
    try:
        found = library.mt_abi_version()
    except AttributeError as error:
        raise NativeLibraryMissing(f"{path} is not MegaTrain's native library. {_HOW_TO_BUILD}") from error
    if found != ABI_VERSION:
        why = f"The native library {path} has ABI version {found}, but MegaTrain needs {ABI_VERSION}."
        raise NativeLibraryMissing(f"{why} {_HOW_TO_BUILD}")
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    library.mt_isa_name.restype = ctypes.c_char_p
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
    if explicit := os.environ.get(PATH_VARIABLE):
        return [Path(explicit)]
    here = Path(__file__).resolve().parent
    paths = [here / FILE_NAME]
    source_tree = here.parents[2]
    if (source_tree / "csrc" / "megatrain.h").is_file():
        paths.append(source_tree / "build" / FILE_NAME)
    return paths


def _size(nbytes: int) -> int:
    # ctypes would wrap a negative number around to almost 2**64.
    if nbytes < 0:
        raise ValueError(f"a size cannot be negative, and this one is {nbytes}")
    return nbytes


def check(code: int, doing: str) -> None:
    """Raise the OSError of an error code; 0 is none."""
    if code != 0:
        raise OSError(code, f"{os.strerror(code)} while {doing}")
