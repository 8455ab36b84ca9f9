"""BF16 values added to an FP32 tensor on the GPU in one pass, at the speed of its memory.

PyTorch's own addition of two dtypes converts element by element and reaches 60% of it (H200: 0.9 ms for a layer of
233M parameters, of 0.57). One addition in FP32 per element: the same bits.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _add(total, values, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < numel
    before = tl.load(total + at, mask=there, other=0.0)
    more = tl.load(values + at, mask=there, other=0.0)
    tl.store(total + at, before + more.to(tl.float32), mask=there)


def fused_add(total: torch.Tensor, values: torch.Tensor) -> None:
    """`total += values`; both contiguous and of one length."""
    with torch.cuda.device(total.device):
        _add[(triton.cdiv(total.numel(), BLOCK),)](total, values, total.numel(), BLOCK=BLOCK, num_warps=8)
