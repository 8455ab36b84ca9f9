"""FP32 sums of gradients on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from megatrain.native.kernels import triton_kernel
from megatrain.store.layout import Layout

MIN_KERNEL_ELEMENTS = 1 << 16
"""Elements from which the fused kernel is faster."""


def add_to(total: torch.Tensor, values: torch.Tensor) -> None:
    """`total += values`, with the fused kernel where it applies."""
    if _can_use_kernel(total, values) and (kernel := _fused_kernel()) is not None:
        kernel(total, values)
    else:
        total.add_(values)


def add_each(
    layout: Layout, total: torch.Tensor, gradients: Mapping[int, torch.Tensor], known: AbstractSet[int]
) -> None:
    """Add gradients, by segment, to a flat sum. Those not in `known` are copied, which preserves a negative zero."""
    adding = {index: layout.view(total, index) for index in gradients if index in known}
    for index in [i for i in adding if _can_use_kernel(adding[i], gradients[i])]:
        add_to(adding.pop(index), gradients[index])
    # The rest in one call: a dozen launches per layer would take the host longer than the GPU.
    if adding:
        torch._foreach_add_([*adding.values()], [gradients[i] for i in adding])
    fresh = [index for index in gradients if index not in known]
    if fresh:
        torch._foreach_copy_([layout.view(total, i) for i in fresh], [gradients[i] for i in fresh])


def _can_use_kernel(total: torch.Tensor, values: torch.Tensor) -> bool:
    return (
        total.is_cuda
        and total.numel() >= MIN_KERNEL_ELEMENTS
        and (total.dtype, values.dtype) == (torch.float32, torch.bfloat16)
        and total.is_contiguous()
        and values.is_contiguous()
    )


@functools.cache
def _fused_kernel() -> Callable[[torch.Tensor, torch.Tensor], None] | None:
    """None where Triton does not work; PyTorch's addition gives the same bits, more slowly."""

    def try_out(kernel: Any) -> None:
        total = torch.zeros(MIN_KERNEL_ELEMENTS, device="cuda")
        kernel(total, total.bfloat16())

    return triton_kernel("megatrain.stream.add_triton", "fused_add", try_out, "sums of gradients take longer")
