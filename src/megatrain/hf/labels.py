"""Counts rows whose labels are all ignored, which add nothing to the loss. If all rows are like that, training stops.

Such rows are trained on as in a stock Trainer. A custom loss may use labels in another way, so it is not checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import TrainerCallback

from megatrain.errors import DataError
from megatrain.hf.data import IGNORED, is_stream
from megatrain.hf.planning import sampled
from megatrain.telemetry.notices import warn

LOOKED_AT = 64
"""A run is refused if this many rows, or all rows of a smaller dataset, have no label."""


class LabelCount(TrainerCallback):
    """Counts the rows of a run without a label."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._rows = self._without = self._said = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._rows = self._without = self._said = 0

    def add(self, batches: Sequence[Any]) -> None:
        """Count the micro-batches of a step, before they run."""
        if self._trainer._subclass.own_loss:
            return
        rows, without = self._count(batches)
        self._rows, self._without = self._rows + rows, self._without + without
        if self._without == 0:
            return
        if self._without == self._rows:
            self._look_further()
        if self._said == 0:
            self._say(f"the first {self._rows}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._without and self._without == self._rows and is_stream(self._trainer.train_dataset):
            raise _nothing(self._rows)
        if self._without > self._said:
            self._say(f"all {self._rows}")

    def _say(self, rows: str) -> None:
        self._said = self._without
        warn(
            f"{self._without} of {rows} rows have no label to train on (all labels are {IGNORED}, or there is only one "
            "token): they add nothing to the loss; shorten prompts, or leave such rows out"
        )

    def _look_further(self) -> None:
        """Called while no row has had a label: raise if a sample of the dataset has none either."""
        looked = self._rows
        if is_stream(self._trainer.train_dataset):
            if looked < LOOKED_AT:
                return
        elif self._said:
            return  # some of the others have one
        else:
            with sampled(self._trainer, LOOKED_AT) as (rows, collate):
                looked, without = self._count([collate([row]) for row in rows])
            if without < looked:
                return
        raise _nothing(looked)

    def _count(self, batches: Sequence[Any]) -> tuple[int, int]:
        """How many rows have labels, and in how many of them all are ignored."""
        found = [labels for labels in map(self._labels, batches) if labels is not None]
        rows = sum(len(labels) for labels in found)
        return rows, rows - sum(int((labels != IGNORED).flatten(1).any(1).sum()) for labels in found)

    def _labels(self, batch: Any) -> torch.Tensor | None:
        """The labels that the loss uses, one row per sequence; None if they cannot be counted."""
        if not isinstance(batch, Mapping):
            return None
        labels = batch["shift_labels"] if "shift_labels" in batch else batch.get("labels")
        # Reading from the GPU would synchronize.
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.is_cuda or labels.ndim == 0:
            return None
        shifts = self._trainer._loss_shifts_labels and "shift_labels" not in batch and labels.ndim > 1
        return labels[..., 1:] if shifts else labels.reshape(len(labels), -1)


def _nothing(looked: int) -> DataError:
    return DataError(
        f"none of the first {looked} rows has a label to train on: all labels are {IGNORED}, or there is only one "
        "token. Check the labels that the dataset or the collator makes; if prompts fill the rows, shorten "
        "them."
    )
