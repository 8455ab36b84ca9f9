"""An FP32 master weight in two halves: a BF16 weight that compute reads, and an int16 residual.

`bits = (hi << 16) + lo` modulo 2^32, exact except that NaN is canonicalised. Ties round away from zero; this is the
only difference between `hi` and `.bfloat16()`.
"""

from __future__ import annotations

import torch

_NAN = 0x7FC00000


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 → (bfloat16 high half, int16 residual)."""
    bits = master.contiguous().view(torch.int32)
    bits = torch.where(master.isnan(), torch.tensor(_NAN, dtype=torch.int32, device=bits.device), bits)
    high = ((bits + 0x8000) >> 16).to(torch.int16)
    low = (bits - (high.to(torch.int32) << 16)).to(torch.int16)
    return high.view(torch.bfloat16), low


def join(weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """(bfloat16 high half, int16 residual) → FP32."""
    bits = (weight.view(torch.int16).to(torch.int32) << 16) + residual.to(torch.int32)
    return bits.view(torch.float32)
