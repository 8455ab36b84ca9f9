"""Cross-entropy on the GPU, one program per token. Logits are read in their own dtype and never copied to FP32.

Forward and backward move 6 bytes per BF16 logit; PyTorch's operations move 78.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 8192


@triton.jit
def _losses(logits, targets, losses, norms, vocabulary, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * vocabulary
    # Running maximum, and per lane the sum of exponentials relative to it.
    largest = tl.full((), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(row + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        above = tl.maximum(largest, tl.max(values))
        # Avoid inf - inf while all logits so far are minus infinity.
        base = tl.where(above == float("-inf"), 0.0, above)
        sums = sums * tl.exp(largest - base) + tl.exp(values - base)
        largest = above
    norm = tl.log(tl.sum(sums)) + largest
    target = tl.load(targets + token)
    chosen = tl.load(row + tl.maximum(target, 0)).to(tl.float32)
    tl.store(losses + token, tl.where(target < 0, 0.0, norm - chosen))
    tl.store(norms + token, norm)


@triton.jit
def _gradient(logits, targets, norms, scales, gradient, vocabulary, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocabulary
    target = tl.load(targets + token)
    norm, scale = tl.load(norms + token), tl.load(scales + token)
    values = tl.load(logits + token * vocabulary + at, mask=inside, other=0.0).to(tl.float32)
    result = (tl.exp(values - norm) - tl.where(at == target, 1.0, 0.0)) * scale
    result = tl.where(target < 0, 0.0, result)
    tl.store(gradient + token * vocabulary + at, result.to(gradient.dtype.element_ty), mask=inside)


class Kernels:
    """Kernels for contiguous logits of shape (tokens, vocabulary). Targets below zero are ignored."""

    @staticmethod
    def losses(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss and the log-sum-exp of every token, in FP32."""
        tokens, vocabulary = logits.shape
        losses, norms = (torch.empty(tokens, device=logits.device) for _ in range(2))
        with torch.cuda.device(logits.device):
            _losses[(tokens,)](logits, targets, losses, norms, vocabulary, BLOCK=BLOCK, num_warps=16)
        return losses, norms

    @staticmethod
    def gradient(
        logits: torch.Tensor,
        targets: torch.Tensor,
        norms: torch.Tensor,
        scales: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The gradient of `losses * scales`, in the logits' dtype; `out` may be the logits themselves."""
        tokens, vocabulary = logits.shape
        gradient = torch.empty_like(logits) if out is None else out
        grid = (tokens, triton.cdiv(vocabulary, BLOCK))
        with torch.cuda.device(logits.device):
            _gradient[grid](logits, targets, norms, scales.contiguous(), gradient, vocabulary, BLOCK=BLOCK, num_warps=8)
        return gradient
