"""Finds, loads and calls libmegatrain.

If MEGATRAIN_NATIVE is set, it names the file. Otherwise it is the file in this folder, where a wheel puts it, or in
`build/` of the source tree. A library of another ABI version is an error; the search does not continue.
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

ABI_VERSION = 7
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
    """Fault in every page of a range for writing, in parallel, without changing its contents.

    The range must not be written meanwhile. `threads` is capped by the usable CPUs.
    """
    check(load().mt_touch(address, _size(nbytes), threads), f"touching {nbytes} bytes")


def trim() -> None:
    """Return freed memory that the C library keeps to the operating system (glibc only)."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def prepare_protect() -> None:
    """Resolve what `protect` calls: in a forked child, threads that no longer exist may hold the loader's locks."""
    _mprotect()


def protect(address: int, nbytes: int) -> None:
    """Make pages of this process's memory read-only; writing to them is a segmentation fault."""
    if _mprotect()(address, _size(nbytes), mmap.PROT_READ) != 0:
        check(ctypes.get_errno(), f"protecting {nbytes} bytes")


@functools.cache
def _mprotect() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mprotect
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def exchange(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> None:
    """Atomically exchange two file names. OSError if the kernel or the file system does not support it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, "the C library has no renameat2", os.fspath(first))
    rename.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    if rename(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(first), None, os.fspath(second))


def copy(dst: int, src: int, nbytes: int, threads: int) -> None:
    """Copy between non-overlapping ranges of host memory, in parallel."""
    check(load().mt_copy(dst, src, _size(nbytes), threads), f"copying {nbytes} bytes")


def cpu_quota(root: str = "") -> int:
    """The cgroup's CPU quota in CPUs, rounded up; 0: no quota. `root` is prepended to /proc and /sys."""
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
    "mt_disk_describe": [_NUMBER, _ADDRESS],
    "mt_disk_uring": [],
    "mt_disk_start": [_NUMBER, _NUMBER, _ADDRESS],
    "mt_disk_stop": [_ADDRESS, _NUMBER],
    "mt_disk_submit": [_ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _NUMBER, _ADDRESS],
    "mt_disk_wait": [_ADDRESS, _NUMBER, _ADDRESS],
    "mt_disk_checksum": [_ADDRESS, _SIZE],
}
"""Signatures of csrc/megatrain.h, csrc/lossless.h and csrc/disk.h."""


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

    Without `arithmetic`, streams are only read and written back, which measures the memory bandwidth limit.
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
    """Write the sum of squares of every `chunk` elements in host memory to `partials`, each by one FP64 tree.

    `rounded`: FP32 values are rounded to BF16 first. See `mt_square_sums` in csrc/megatrain.h.
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
    """Instruction sets that were compiled in and that this CPU supports, best last; the best is the default."""
    library = load()
    return [library.mt_isa_name(number).decode() for number in range(library.mt_isa_count())]


def use_isa(name: str) -> None:
    """Use one of `isas()` for later updates, in tests and benchmarks. All give the same bits."""
    check(load().mt_isa_use(isas().index(name)), f"choosing {name}")


@functools.cache
def load() -> ctypes.CDLL:
    """The library, with signatures declared. Calls release the GIL."""
    path = find()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeLibraryMissing(f"The native library {path} cannot be loaded: {error}. {_HOW_TO_BUILD}") from error
    try:
        version = library.mt_abi_version()
    except AttributeError as error:
        raise NativeLibraryMissing(f"{path} is not MegaTrain's native library. {_HOW_TO_BUILD}") from error
    if version != ABI_VERSION:
        why = f"The native library {path} has ABI version {version}, but MegaTrain needs {ABI_VERSION}."
        raise NativeLibraryMissing(f"{why} {_HOW_TO_BUILD}")
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    library.mt_isa_name.restype = ctypes.c_char_p
    library.mt_disk_checksum.restype = ctypes.c_uint64
    return library


def find() -> Path:
    """The library file that `load` opens."""
    candidates = search_paths()
    for path in candidates:
        if path.is_file():
            return path
    searched = ", ".join(str(path) for path in candidates)
    raise NativeLibraryMissing(f"The native library is missing (searched: {searched}). {_HOW_TO_BUILD}")


def search_paths() -> list[Path]:
    if explicit := os.environ.get(PATH_VARIABLE):
        return [Path(explicit)]
    here = Path(__file__).resolve().parent
    paths = [here / FILE_NAME]
    source_tree = here.parents[2]
    if (source_tree / "csrc" / "megatrain.h").is_file():
        paths.append(source_tree / "build" / FILE_NAME)
    return paths


def _size(nbytes: int) -> int:
    # ctypes would wrap a negative number around.
    if nbytes < 0:
        raise ValueError(f"a size cannot be negative, and this one is {nbytes}")
    return nbytes


def check(code: int, doing: str) -> None:
    """Raise OSError for an error code other than 0."""
    if code != 0:
        raise OSError(code, f"{os.strerror(code)} while {doing}")
