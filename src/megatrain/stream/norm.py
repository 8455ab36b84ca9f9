"""Sum of squares of a flat gradient in a fixed tree: the same bits on every device and for any thread count."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable

import torch

from megatrain.native import library as native
from megatrain.native.kernels import triton_kernel
from megatrain.store.gradient import Snapshot, sum_of_parts

CHUNK = 1 << 16
_CHUNKS_AT_ONCE = 256
"""Bounds the FP64 temporary to 128 MiB."""
_PIECE_ELEMENTS = 64 * CHUNK
"""Elements of a gradient in several parts that are summed at once: 16 MiB in FP32."""
_KERNEL_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes that the kernel and the native library support."""
_THREADS = 8
"""Threads of the native sum, which is bound by memory bandwidth; capped by the usable CPUs."""


def square_sum(flat: torch.Tensor) -> torch.Tensor:
    """An FP64 scalar on the device of `flat`. Squares are exact; chunks are halved pairwise, then their sums."""
    if flat.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=flat.device)
    result = _kernel_square_sum(flat, flat.dtype, flat.numel())
    return reference_square_sum(flat) if result is None else result


def reference_square_sum(flat: torch.Tensor) -> torch.Tensor:
    """The same tree in PyTorch operations, for at least one element of any dtype on any device."""
    chunk = _chunk_of(flat.numel())
    partials = [_tree(piece, chunk) for piece in flat.split(chunk * _CHUNKS_AT_ONCE)]
    return combine(torch.cat(partials))


def combine(partials: torch.Tensor) -> torch.Tensor:
    """Add FP64 partial sums pairwise, in a tree that depends only on their number."""
    while partials.numel() > 1:
        if partials.numel() % 2:
            partials = torch.cat([partials, partials.new_zeros(1)])
        half = partials.numel() // 2
        partials = partials[:half] + partials[half:]
    return partials.reshape(())


def snapshot_square_sum(gradient: Snapshot) -> float:
    """The sum of squares of a slab's rounded gradient, absent parameters as zeros; computed now if not known."""
    if gradient.square_sum is not None:
        return float(gradient.square_sum)
    return float(gradient_square_sum(gradient))


def gradient_square_sum(gradient: Snapshot) -> torch.Tensor:
    """The same as a tensor, computed on the gradient's device."""
    if len(gradient.parts) == 1 and len(gradient.present) == len(gradient.layout.segments):
        # In place: a rounded copy would take as much memory as the gradient. Padding is zeros on the device.
        flat = gradient.flat if gradient.flat.is_cuda else gradient.flat[: gradient.layout.segments[-1].end]
        result = _kernel_square_sum(flat, gradient.dtype, gradient.layout.numel)
        if result is not None:
            return result
    return _piecewise(gradient)


def _piecewise(gradient: Snapshot) -> torch.Tensor:
    """Of several or incomplete parts: some whole chunks at a time, since a copy of everything may not fit."""
    numel, device = gradient.layout.numel, gradient.parts[0][0].device
    if numel == 0:
        return torch.zeros((), dtype=torch.float64, device=device)
    buffer = torch.empty(min(_PIECE_ELEMENTS, numel), dtype=torch.float32, device=device)
    chunk = _chunk_of(numel)
    sums = []
    for start in range(0, numel, _PIECE_ELEMENTS):
        piece = buffer[: numel - start]
        sum_of_parts(gradient, piece, start)
        result = _kernel_square_sum(piece, gradient.dtype, piece.numel(), chunk)
        sums.append(_tree(piece.to(gradient.dtype).float(), chunk) if result is None else result)
    return combine(torch.cat(sums))


def global_norm(square_sums: Iterable[float]) -> float:
    """The global norm from the slabs' sums of squares, added in FP64 in slab order."""
    return float(functools.reduce(operator.add, square_sums, 0.0) ** 0.5)


def _chunk_of(numel: int) -> int:
    """Short slabs are padded to a power of two; the tree depends only on the length."""
    return min(CHUNK, 1 << (numel - 1).bit_length())


def _kernel_square_sum(flat: torch.Tensor, dtype: torch.dtype, numel: int, chunk: int = 0) -> torch.Tensor | None:
    """The sum of `numel` values rounded to `dtype`; those beyond `flat` are zeros. With `chunk`, the sums of all chunks
    of that length. None if neither the kernel nor the native library supports it."""
    if dtype not in _KERNEL_DTYPES or flat.dtype not in _KERNEL_DTYPES or not flat.is_contiguous() or flat.numel() == 0:
        return None
    rounded, per_chunk = dtype == torch.bfloat16, chunk > 0
    chunk = chunk or _chunk_of(numel)
    if flat.is_cuda:
        kernel = _fused_kernel() if chunk == CHUNK else None
        return None if kernel is None else kernel(flat, rounded, per_chunk)
    sums = torch.zeros(-(-numel // chunk), dtype=torch.float64)
    native.square_sums(flat, sums, chunk=chunk, rounded=rounded, threads=_THREADS)
    return sums if per_chunk else combine(sums)


def _tree(piece: torch.Tensor, chunk: int) -> torch.Tensor:
    """The sum of squares of every chunk: the second half is added to the first until one value is left."""
    chunks = -(-piece.numel() // chunk)
    if piece.numel() != chunks * chunk:
        piece = torch.cat([piece, piece.new_zeros(chunks * chunk - piece.numel())])
    values = piece.view(chunks, chunk).double()
    values = values.mul_(values)
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        values = values[:, :half] + values[:, half:]
    return values.reshape(-1)


@functools.cache
def _fused_kernel() -> Callable[..., torch.Tensor] | None:
    """None where Triton does not work; PyTorch's operations give the same bits with forty kernels instead of two."""
    return triton_kernel(
        "megatrain.stream.norm_triton",
        "fused_square_sum",
        lambda kernel: kernel(torch.zeros(3 * CHUNK, device="cuda")),
        "gradient norms take longer",
    )
