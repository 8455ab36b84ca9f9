"""Find libmegatrain, load it once at first use, and call it.

The library is looked for in three places, and the first file that exists is the one used:
the path in MEGATRAIN_NATIVE, if set (then nowhere else); this folder, where a wheel puts it; `build/` of
the source tree. A library of another ABI version is an error, never a reason to look further.
"""

from __future__ import annotations

import ctypes
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

_HOW_TO_BUILD = (
    "Build it in the source tree with `cmake -S . -B build && cmake --build build` (or `make native`), "
    "or reinstall the megatrain wheel."
)


def touch(address: int, nbytes: int, threads: int) -> None:
    """Fault in every page of a range for writing, in parallel, leaving its contents as they are.

    Nobody else may write to the range meanwhile. `threads` is capped by the CPUs this process may use.
    """
    _check(load().mt_touch(address, _size(nbytes), threads), f"touching {nbytes} bytes")


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
        _check(ctypes.get_errno(), f"protecting {nbytes} bytes")


@functools.cache
def _mprotect() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mprotect
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function


def copy(dst: int, src: int, nbytes: int, threads: int) -> None:
    """Copy between two ranges of host memory that do not overlap, in parallel."""
    _check(load().mt_copy(dst, src, _size(nbytes), threads), f"copying {nbytes} bytes")


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
    _check(function(ctypes.byref(packed), threads), f"updating {weight.numel()} parameters")


def square_sums(values: torch.Tensor, partials: torch.Tensor, *, chunk: int, rounded: bool, threads: int) -> None:
    """Sums of squares of every `chunk` elements in host memory, into the first of `partials`: one FP64 tree for each.

    `rounded` counts FP32 values as rounded to BF16. See `mt_square_sums` in csrc/megatrain.h.
    """
    for tensor, dtypes in ((values, (torch.float32, torch.bfloat16)), (partials, (torch.float64,))):
        if tensor.dtype not in dtypes or tensor.device.type != "cpu" or not tensor.is_contiguous():
            strided = "" if tensor.is_contiguous() else "strided "
            raise ValueError(
                "only contiguous FP32 or BF16 in host memory can be summed, and only into FP64, "
                f"not a {strided}{tensor.dtype} tensor on {tensor.device}"
            )
    if chunk < 1 or partials.numel() < -(-values.numel() // chunk):
        raise ValueError(f"{partials.numel()} sums are no room for {values.numel()} elements in chunks of {chunk}")
    kind = 1 if values.dtype == torch.bfloat16 else (2 if rounded else 0)
    code = load().mt_square_sums(values.data_ptr(), kind, values.numel(), chunk, partials.data_ptr(), threads)
    _check(code, f"adding the squares of {values.numel()} elements")


def isas() -> list[str]:
    """Instruction sets that the update was compiled for and this CPU has, the best last: the one in use by default."""
    library = load()
    return [library.mt_isa_name(number).decode() for number in range(library.mt_isa_count())]


def use_isa(name: str) -> None:
    """Make later updates use one of `isas()`. All of them give the same bits; for tests and benchmarks."""
    _check(load().mt_isa_use(isas().index(name)), f"choosing {name}")


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
    library.mt_cpu_quota.argtypes = [ctypes.c_char_p]
    library.mt_cpu_quota.restype = ctypes.c_int
    library.mt_update.argtypes = [ctypes.POINTER(_Update), ctypes.c_int]
    library.mt_update.restype = ctypes.c_int
    library.mt_touch_streams.argtypes = [ctypes.POINTER(_Update), ctypes.c_int]
    library.mt_touch_streams.restype = ctypes.c_int
    library.mt_square_sums.argtypes = [
        ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    ]  # fmt: skip
    library.mt_square_sums.restype = ctypes.c_int
    library.mt_isa_count.argtypes = []
    library.mt_isa_count.restype = ctypes.c_int
    library.mt_isa_name.argtypes = [ctypes.c_int]
    library.mt_isa_name.restype = ctypes.c_char_p
    library.mt_isa_use.argtypes = [ctypes.c_int]
    library.mt_isa_use.restype = ctypes.c_int
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
