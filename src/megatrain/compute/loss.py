"""Cross-entropy of a chunk of logits, summed over the targets that are not ignored."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional

from megatrain.native.kernels import triton_kernel


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, ignore_index: int, fused: bool) -> torch.Tensor:
    """The sum in FP32. `fused` uses a Triton kernel on the GPU that makes no FP32 copy of the logits; its result may
    differ in the last bits."""
    if fused and logits.is_cuda and logits.is_contiguous() and (kernels := _fused_kernels()) is not None:
        rows: torch.Tensor = _Rows.apply(logits, targets, ignore_index, kernels)  # type: ignore[no-untyped-call]
        return rows.sum()
    return functional.cross_entropy(logits.float(), targets, ignore_index=ignore_index, reduction="sum")


class _Rows(torch.autograd.Function):
    """The loss of every token. Reads the logits once in the forward and once in the backward."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, ignore_index: int, kernels: Any) -> torch.Tensor:
        targets = targets.long()
        counts = targets != ignore_index
        # An assertion on the device, as in PyTorch: the host does not wait for it.
        inside = (targets >= 0) & (targets < logits.shape[-1])
        torch._assert_async((inside | ~counts).all(), "a label is neither a token of the vocabulary nor ignore_index")
        targets = targets.where(counts, -1)
        losses, norms = kernels.losses(logits, targets)
        ctx.kernels = kernels
        ctx.save_for_backward(logits, targets, norms)
        result: torch.Tensor = losses
        return result

    @staticmethod
    def backward(ctx: Any, scales: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, targets, norms = ctx.saved_tensors
        return ctx.kernels.gradient(logits, targets, norms, scales), None, None, None


@functools.cache
def _fused_kernels() -> Any | None:
    def try_out(kernels: Any) -> None:
        logits = torch.zeros(1, 8, device="cuda", dtype=torch.bfloat16)
        targets = torch.zeros(1, device="cuda", dtype=torch.int64)
        losses, norms = kernels.losses(logits, targets)
        kernels.gradient(logits, targets, norms, losses)

    return triton_kernel("megatrain.compute.loss_triton", "Kernels", try_out, "the loss takes longer, and more memory,")
