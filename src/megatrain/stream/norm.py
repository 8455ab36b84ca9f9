"""Sum of squares of a flat gradient, in a fixed tree: the same bits on every device and for any thread count."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from megatrain.native import library as native
from megatrain.native.kernels import triton_kernel
from megatrain.store.gradient import Apart, Snapshot, sum_of_parts

CHUNK = 1 << 16
_BATCH = 256
"""Chunks handled at once: bounds the FP64 temporary to 128 MiB."""
_PIECE = 64 * CHUNK
"""Elements that are summed at once of a gradient that does not lie ready: 16 MiB in FP32."""
_NATIVE = (torch.float32, torch.bfloat16)
"""What the native library sums in host memory."""
_THREADS = 8
"""Of that sum, capped by the CPUs that this process may use: it does little but read memory."""


def square_sum(flat: torch.Tensor) -> torch.Tensor:
    """FP64 scalar on the device of `flat`. Squares are exact in FP64; chunks are halved pairwise, then their sums."""
    if flat.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=flat.device)
    if flat.is_cuda and flat.numel() >= CHUNK and (kernel := _fused_kernel()) is not None:
        return kernel(flat)
    if _is_native(flat):
        return _native_square_sum(flat, flat.numel(), rounded=False)
    return reference_square_sum(flat)


def reference_square_sum(flat: torch.Tensor) -> torch.Tensor:
    """The same tree in PyTorch's own operations, of at least one element of any dtype on any device."""
    chunk = _chunk_of(flat.numel())
    partials = [_tree(piece, chunk) for piece in flat.split(chunk * _BATCH)]
    return combine(torch.cat(partials))


def combine(partials: torch.Tensor) -> torch.Tensor:
    """Add FP64 partial sums pairwise, in a tree that depends on their number alone."""
    while partials.numel() > 1:
        if partials.numel() % 2:
            partials = torch.cat([partials, partials.new_zeros(1)])
        half = partials.numel() // 2
        partials = partials[:half] + partials[half:]
    return partials.reshape(())


def snapshot_square_sum(gradient: Snapshot | Apart) -> float:
    """Of a slab's rounded gradient: as computed where it was made, else on the host, absent parameters as zeros."""
    if isinstance(gradient, Snapshot) and gradient.square_sum is not None:
        return float(gradient.square_sum)
    return float(gradient_square_sum(gradient))


def gradient_square_sum(gradient: Snapshot | Apart) -> torch.Tensor:
    """The same as a tensor, computed where the gradient lies."""
    if isinstance(gradient, Apart) or len(gradient.present) < len(gradient.layout.segments):
        return _piecewise(gradient)
    if gradient.flat.is_cuda and gradient.flat.numel() >= CHUNK and (kernel := _fused_kernel()):
        # As it lies, padding (zeros) included: a rounded copy would take as much memory as the gradient, or more.
        return kernel(gradient.flat, gradient.dtype == torch.bfloat16)
    if _is_native(gradient.flat) and gradient.dtype in _NATIVE:
        # Without a copy here too.
        end = gradient.layout.segments[-1].end
        return _native_square_sum(gradient.flat[:end], gradient.layout.numel, gradient.dtype == torch.bfloat16)
    return _piecewise(gradient)


def _piecewise(gradient: Snapshot | Apart) -> torch.Tensor:
    """Of parts that are apart or absent: some whole chunks at a time, since there may be no room for a copy of all."""
    numel = gradient.layout.numel
    if numel == 0:
        return torch.zeros((), dtype=torch.float64, device=gradient.parts[0][0].device)
    room = torch.empty(min(_PIECE, numel), dtype=torch.float32, device=gradient.parts[0][0].device)
    sums = []
    for start in range(0, numel, _PIECE):
        piece = room[: numel - start]
        sum_of_parts(gradient, piece, start)
        sums.append(_chunk_sums(piece, _chunk_of(numel), gradient.dtype))
    return combine(torch.cat(sums))


def _chunk_sums(piece: torch.Tensor, chunk: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum of squares of every chunk of FP32 values, rounded to `dtype`."""
    if dtype in _NATIVE and piece.is_cuda and chunk == CHUNK and (kernel := _fused_kernel()) is not None:
        return kernel(piece, dtype == torch.bfloat16, apart=True)
    if dtype in _NATIVE and _is_native(piece):
        return _native_sums(piece, piece.numel(), chunk, dtype == torch.bfloat16)
    return _tree(piece.to(dtype).float(), chunk)


def total(square_sums: Iterable[float]) -> float:
    """The global norm from the slabs' sums, added in FP64 in slab order."""
    result = 0.0
    for value in square_sums:
        result += value
    return float(result**0.5) if result == result else result


def _chunk_of(numel: int) -> int:
    """Short slabs are padded to a power of two only; the tree still depends on the length alone."""
    return min(CHUNK, 1 << (numel - 1).bit_length())


def _is_native(flat: torch.Tensor) -> bool:
    return flat.device.type == "cpu" and flat.dtype in _NATIVE and flat.is_contiguous() and flat.numel() > 0


def _native_square_sum(flat: torch.Tensor, numel: int, rounded: bool) -> torch.Tensor:
    """The tree of `numel` elements, of which those behind `flat` are zeros."""
    return combine(_native_sums(flat, numel, _chunk_of(numel), rounded))


def _native_sums(flat: torch.Tensor, numel: int, chunk: int, rounded: bool) -> torch.Tensor:
    sums = torch.zeros(-(-numel // chunk), dtype=torch.float64)
    native.square_sums(flat, sums, chunk=chunk, rounded=rounded, threads=_THREADS)
    return sums


def _tree(piece: torch.Tensor, chunk: int) -> torch.Tensor:
    chunks = -(-piece.numel() // chunk)
    if piece.numel() != chunks * chunk:
        piece = torch.cat([piece, piece.new_zeros(chunks * chunk - piece.numel())])
    values = piece.view(chunks, chunk).double()
    return _halve(values.mul_(values))


def _halve(values: torch.Tensor) -> torch.Tensor:
    """Add the second half of every row to the first until one value is left."""
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        values = values[:, :half] + values[:, half:]
    return values.reshape(-1)


@functools.cache
def _fused_kernel() -> Callable[..., torch.Tensor] | None:
    """Two kernels instead of forty, where Triton works; PyTorch's own operations give the same bits, more slowly."""

    def try_out(kernel: Any) -> None:
        kernel(torch.zeros(3 * CHUNK, device="cuda"))

    return triton_kernel("megatrain.stream.norm_triton", "fused_square_sum", try_out, "gradient norms take longer")
