"""The first levels of the norm's tree on the GPU, in one pass over the gradient: same additions, same order, same bits.

A chunk of 65536 squares is seen as 64 rows of 1024. Halving it six times adds row k to row k + 32, then k to k + 16,
and so on. The functions below do that depth first, one per level, so that seven rows at a time are enough. The
remaining ten levels are small. Squares are exact in FP64, so fusing them with an addition changes nothing.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 65536
LANES = 1024


@triton.jit
def _square(source, offset, numel):
    value = tl.load(source + offset, mask=offset < numel, other=0.0).to(tl.float64)
    return value * value


@triton.jit
def _rows_32(source, offset, numel):
    return _square(source, offset, numel) + _square(source, offset + 32 * 1024, numel)


@triton.jit
def _rows_16(source, offset, numel):
    return _rows_32(source, offset, numel) + _rows_32(source, offset + 16 * 1024, numel)


@triton.jit
def _rows_8(source, offset, numel):
    return _rows_16(source, offset, numel) + _rows_16(source, offset + 8 * 1024, numel)


@triton.jit
def _rows_4(source, offset, numel):
    return _rows_8(source, offset, numel) + _rows_8(source, offset + 4 * 1024, numel)


@triton.jit
def _rows_2(source, offset, numel):
    return _rows_4(source, offset, numel) + _rows_4(source, offset + 2 * 1024, numel)


@triton.jit
def _kernel(source, partials, numel):
    chunk = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, 1024)
    first = chunk * 65536 + lanes
    total = _rows_2(source, first, numel) + _rows_2(source, first + 1024, numel)
    tl.store(partials + chunk * 1024 + lanes, total)


def chunk_rows(flat: torch.Tensor) -> torch.Tensor:
    """FP64 [chunks, 1024]: every chunk of 65536 elements after six halvings."""
    chunks = triton.cdiv(flat.numel(), CHUNK)
    partials = torch.empty((chunks, LANES), dtype=torch.float64, device=flat.device)
    _kernel[(chunks,)](flat, partials, flat.numel(), num_warps=8)
    return partials
