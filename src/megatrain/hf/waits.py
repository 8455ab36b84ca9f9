"""Where transformers' Trainer makes the host wait for the GPU in every step, and what is done instead.

A host that never waits queues the next step while the GPU works on this one, so the GPU never waits for the host. The
results are those of transformers. A step that is logged still waits once, for the loss. The norm: hf/optimizers.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from megatrain.hf.optimizers import Optimizing
from megatrain.host_copies import HostCopies

MOST_BYTES = 16 << 20
"""Larger tensors are copied as transformers does, which waits. Their copies in pinned memory would take RAM."""


class WithoutWaits(Optimizing):
    """The part of `MegaMixin` that keeps the host ahead of the GPU."""

    _filters_losses = False
    """Whether the filter in TrainingArguments is off because the last loss was filtered on the GPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._host_copies = HostCopies()
        super().__init__(*args, **kwargs)

    def _prepare_input(self, data: Any) -> Any:
        """Copy a batch to the GPU. The copy is queued; what it reads is ours, so the batch can be reused at once."""
        if not isinstance(data, torch.Tensor) or data.device.type != "cpu":
            return super()._prepare_input(data)
        if data.layout is not torch.strided or data.nbytes > MOST_BYTES:
            return super()._prepare_input(data)
        device = self.args.device
        on_gpu = device.type == "cuda"
        copy = torch.empty(data.shape, dtype=data.dtype, device="cpu", pin_memory=on_gpu).copy_(data)
        moved = copy.to(device, non_blocking=True) if on_gpu else super()._prepare_input(data)
        self._host_copies.add(moved, copy)
        return moved

    def compute_loss_context_manager(self) -> ExitStack:
        """In training, what the model reads of a batch on the host comes from the host: padding, packed sequences."""
        stack: ExitStack = super().compute_loss_context_manager()
        if self.model.training and self.engine.blocks:
            stack.enter_context(self._host_copies)
        return stack

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Count labels where they are, and copy the number as `_prepare_input` does."""
        labels = [batch.get("labels") for batch in batch_samples if isinstance(batch, Mapping)]
        if not all(isinstance(each, torch.Tensor) and each.device.type == "cpu" for each in labels):
            return super()._get_num_items_in_batch(batch_samples, device)
        count = super()._get_num_items_in_batch(batch_samples, torch.device("cpu"))
        return self._prepare_input(count) if isinstance(count, torch.Tensor) and device.type == "cuda" else count

    def _filtered(self, loss: torch.Tensor) -> torch.Tensor:
        """What transformers adds to its running loss for this one: the mean since the last log if it is not finite.

        transformers asks the host, which waits for the whole backward. Here the GPU chooses. Its own filter is off
        until `floating_point_ops`, which is called next.
        """
        total = vars(self).get("_tr_loss")
        self._restore_filter()
        if not self.args.logging_nan_inf_filter or self._subclass.own_step:
            return loss
        if total is None or total.device != loss.device:
            return loss  # transformers refuses a loss on another device
        self.args.logging_nan_inf_filter, self._filters_losses = False, True
        mean = total / (1 + self.state.global_step - self._globalstep_last_logged)
        return torch.where(loss.isfinite(), loss, mean)

    def floating_point_ops(self, inputs: Any) -> int:
        self._restore_filter()
        return int(super().floating_point_ops(inputs))

    def _restore_filter(self) -> None:
        if self._filters_losses:
            self.args.logging_nan_inf_filter, self._filters_losses = True, False
