"""The tree of stream/norm.py on the GPU: the same additions in the same order, in one pass and a short second one.

A chunk of 65536 squares is viewed as 64 rows of 1024. Halving it six times adds row k + 32 to row k, then k + 16 to k,
and so on. The functions below do that depth first, one per level, so that seven rows at a time are enough. Ten more
halvings leave one number per chunk, and one program adds those. Squares are exact in FP64, so fusing them with an
addition changes nothing.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 65536


@triton.jit
def _square(source, offset, numel, ROUNDED: tl.constexpr):
    value = tl.load(source + offset, mask=offset < numel, other=0.0)
    if ROUNDED and source.dtype.element_ty == tl.float32:
        # To BF16, nearest even, as optim/update_triton.py rounds a gradient.
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + (0x7FFF + ((bits >> 16) & 1))) & -0x10000
        value = tl.where(value != value, value, bits.to(tl.float32, bitcast=True))
    value = value.to(tl.float64)
    return value * value


@triton.jit
def _rows_32(source, offset, numel, ROUNDED: tl.constexpr):
    return _square(source, offset, numel, ROUNDED) + _square(source, offset + 32 * 1024, numel, ROUNDED)


@triton.jit
def _rows_16(source, offset, numel, ROUNDED: tl.constexpr):
    return _rows_32(source, offset, numel, ROUNDED) + _rows_32(source, offset + 16 * 1024, numel, ROUNDED)


@triton.jit
def _rows_8(source, offset, numel, ROUNDED: tl.constexpr):
    return _rows_16(source, offset, numel, ROUNDED) + _rows_16(source, offset + 8 * 1024, numel, ROUNDED)


@triton.jit
def _rows_4(source, offset, numel, ROUNDED: tl.constexpr):
    return _rows_8(source, offset, numel, ROUNDED) + _rows_8(source, offset + 4 * 1024, numel, ROUNDED)


@triton.jit
def _rows_2(source, offset, numel, ROUNDED: tl.constexpr):
    return _rows_4(source, offset, numel, ROUNDED) + _rows_4(source, offset + 2 * 1024, numel, ROUNDED)


@triton.jit
def _halved(values, LENGTH: tl.constexpr):
    """The second half added to the first."""
    return tl.sum(tl.reshape(values, (2, LENGTH)), axis=0)


@triton.jit
def _chunks(source, partials, numel, ROUNDED: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64)
    first = chunk * 65536 + tl.arange(0, 1024)
    total = _rows_2(source, first, numel, ROUNDED) + _rows_2(source, first + 1024, numel, ROUNDED)
    total = _halved(total, 512)
    total = _halved(total, 256)
    total = _halved(total, 128)
    total = _halved(total, 64)
    total = _halved(total, 32)
    total = _halved(total, 16)
    total = _halved(total, 8)
    total = _halved(total, 4)
    total = _halved(total, 2)
    tl.store(partials + chunk, tl.sum(total, axis=0))


@triton.jit
def _tree(partials, count):
    """As `combine` in stream/norm.py: add the second half to the first; the middle one of an odd number stays."""
    lanes = tl.arange(0, 1024)
    while count > 1:
        half = (count + 1) // 2
        start = 0
        while start < count - half:
            index = start + lanes
            mask = index + half < count
            left = tl.load(partials + index, mask=mask, other=0.0)
            right = tl.load(partials + half + index, mask=mask, other=0.0)
            tl.store(partials + index, left + right, mask=mask)
            start += 1024
        # The next level reads what other threads wrote.
        tl.debug_barrier()
        count = half


def fused_square_sum(flat: torch.Tensor, rounded: bool = False, per_chunk: bool = False) -> torch.Tensor:
    """FP64 scalar: the sum of squares of values as they are or rounded to BF16. With `per_chunk`, one sum per chunk,
    for a tree over more than `flat`."""
    chunks = triton.cdiv(flat.numel(), CHUNK)
    partials = torch.empty(chunks, dtype=torch.float64, device=flat.device)
    with torch.cuda.device(flat.device):
        _chunks[(chunks,)](flat, partials, flat.numel(), ROUNDED=rounded, num_warps=8)
        if per_chunk:
            return partials
        if chunks > 1:
            _tree[(1,)](partials, chunks, num_warps=8)
    return partials[0]
