"""Cross-entropy of a chunk of logits, summed over the targets that are not ignored."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional

from megatrain.native.kernels import triton_kernel


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int, fused: bool, smoothing: float = 0.0
) -> torch.Tensor:
    """The sum in FP32. `fused` uses a Triton kernel on the GPU that makes no FP32 copy of the logits, unless labels are
    smoothed; its result may differ in the last bits."""
    fused = fused and not smoothing and logits.is_cuda and logits.is_contiguous()
    if fused and (kernels := _fused_kernels()) is not None:
        rows: torch.Tensor = _Rows.apply(logits, targets, ignore_index, kernels)  # type: ignore[no-untyped-call]
        return rows.sum()
    return functional.cross_entropy(
        logits.float(), targets, ignore_index=ignore_index, reduction="sum", label_smoothing=smoothing
    )


class LinearLoss:
    """Loss and gradients of a chunk of tokens, for a head that is one matrix of BF16 or FP16 on a GPU.

    The gradient of the logits takes their place in memory, and that of the matrix is summed in FP32 by the product
    itself: no copy of it in BF16 is made, read and added for every chunk.
    """

    def __init__(self, weight: torch.Tensor, ignore_index: int) -> None:
        self._weight, self._ignore_index, self._kernels = weight, ignore_index, _fused_kernels()
        self.by_weight: torch.Tensor | None = None
        """The gradient of the matrix, summed over the chunks so far."""

    @staticmethod
    def supports(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
        same = hidden.dtype == weight.dtype and weight.dtype in (torch.bfloat16, torch.float16)
        casts = torch.is_autocast_enabled("cuda")
        return weight.is_cuda and same and not casts and _fused_kernels() is not None

    def add(
        self, hidden: torch.Tensor, targets: torch.Tensor, divisor: Any, by_hidden: torch.Tensor | None, trains: bool
    ) -> torch.Tensor:
        """The sum of the losses over `divisor`. Writes the gradient of `hidden`, and adds that of the matrix."""
        assert self._kernels is not None
        logits = functional.linear(hidden, self._weight)
        targets = _marked(targets, self._ignore_index, logits.shape[-1])
        losses, norms = self._kernels.losses(logits, targets)
        self._kernels.gradient(logits, targets, norms, torch.ones_like(losses) / divisor, out=logits)
        if by_hidden is not None:
            torch.mm(logits, self._weight, out=by_hidden)
        total = self.by_weight
        if trains and total is None:
            self.by_weight = torch.mm(logits.t(), hidden, out_dtype=torch.float32)
        elif trains and total is not None:
            torch.addmm(total, logits.t(), hidden, out_dtype=torch.float32, out=total)
        result: torch.Tensor = losses.sum() / divisor
        return result


def _marked(targets: torch.Tensor, ignore_index: int, vocabulary: int) -> torch.Tensor:
    """Targets with -1 for those that are ignored."""
    targets = targets.long()
    counts = targets != ignore_index
    # An assertion on the device, as in PyTorch: the host does not wait for it.
    inside = (targets >= 0) & (targets < vocabulary)
    torch._assert_async((inside | ~counts).all(), "a label is neither a token of the vocabulary nor ignore_index")
    return targets.where(counts, -1)


class _Rows(torch.autograd.Function):
    """The loss of every token. Reads the logits once in the forward and once in the backward."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, ignore_index: int, kernels: Any) -> torch.Tensor:
        targets = _marked(targets, ignore_index, logits.shape[-1])
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
