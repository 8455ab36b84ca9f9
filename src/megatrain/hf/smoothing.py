"""Label smoothing of a Trainer, computed in chunks of tokens as a model's own loss is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.trainer_pt_utils import LabelSmoother

from megatrain.engine.session import Engine


class ChunkedSmoother(LabelSmoother):
    """transformers' smoother. Logits that are still lazy are computed in chunks, and their loss in FP32."""

    def __init__(self, smoother: LabelSmoother, engine: Callable[[], Engine]) -> None:
        super().__init__(smoother.epsilon, smoother.ignore_index)
        self._engine = engine

    def __call__(
        self, model_output: Any, labels: torch.Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = self._engine().smoothed_loss(
            model_output["logits"] if isinstance(model_output, dict) else model_output[0], labels,
            items=num_items_in_batch, ignore_index=self.ignore_index, smoothing=self.epsilon, shift=shift_labels,
        )  # fmt: skip
        return super().__call__(model_output, labels, shift_labels, num_items_in_batch) if loss is None else loss


def in_chunks(smoother: Any, engine: Callable[[], Engine]) -> Any:
    """A smoother with the same results, in chunks if it is transformers' own."""
    return ChunkedSmoother(smoother, engine) if type(smoother) is LabelSmoother else smoother
