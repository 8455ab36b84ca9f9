"""Token sequences of different lengths become one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatrain.errors import DataError

IGNORED = -100  # the label that cross-entropy skips
PER_TOKEN = ("labels", "attention_mask", "position_ids", "token_type_ids")


class CausalCollator:
    """Pads rows of token ids into one batch. All columns come out as int64 tensors.

    - `input_ids`: padded on the right with `pad_token_id`, to the longest row.
    - `attention_mask`: the row's own, else ones; 0 on padding. Rows of equal length get a full mask.
    - `labels`: the row's own, else its `input_ids`, with -100 where its own mask is 0; -100 on padding. The
      model shifts them.
    - Other columns with one number per token, `position_ids` say, are padded with 0 and kept if every row has
      them. Fractions stay float32.

    Rows with `position_ids` and no `attention_mask` may be packed documents, which transformers keeps apart
    only when there is no mask: none is made then (causal attention does not see padding on the right anyway).
    A row without tokens becomes one pad token with label -100. Rows without `input_ids` go to transformers'
    own collator. `tokenizer` is only held: the Trainer saves it beside the model if the user gave none.
    """

    def __init__(self, pad_token_id: int, tokenizer: Any = None, makes_mask: bool = True) -> None:
        self.pad_token_id = pad_token_id
        self.makes_mask = makes_mask
        """False for a model whose forward takes no `attention_mask`: only a row's own is then passed on."""
        self.tokenizer = tokenizer

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        if not all("input_ids" in row for row in rows):
            from transformers import default_data_collator

            batch: dict[str, Tensor] = default_data_collator([dict(row) for row in rows])
            return batch
        complete = [self._complete(columns_of(f"row {i} of the batch", row)) for i, row in enumerate(rows)]
        width = max(len(row["input_ids"]) for row in complete)
        filler = {"input_ids": self.pad_token_id, "labels": IGNORED}
        batch = {}
        for name in complete[0]:
            if all(name in row for row in complete):
                dtype = reduce(torch.promote_types, (row[name].dtype for row in complete))
                padded = torch.full((len(rows), width), filler.get(name, 0), dtype=dtype)
                for line, row in zip(padded, complete, strict=True):
                    line[: len(row[name])] = row[name]
                batch[name] = padded
        unmasked = all(row.get("attention_mask") is None for row in rows)
        if unmasked and ("position_ids" in batch or not self.makes_mask):
            del batch["attention_mask"]
        return batch

    def _complete(self, row: dict[str, Tensor]) -> dict[str, Tensor]:
        if not len(row["input_ids"]):
            row = {name: torch.zeros(1, dtype=column.dtype) for name, column in row.items()}
            row |= {"input_ids": torch.tensor([self.pad_token_id]), "labels": torch.tensor([IGNORED])}
            row["attention_mask"] = torch.ones(1, dtype=torch.int64)  # attention over nothing would be NaN
        mask = row.setdefault("attention_mask", torch.ones_like(row["input_ids"]))
        row.setdefault("labels", row["input_ids"].masked_fill(mask == 0, IGNORED))
        return row


def columns_of(where: str, row: Mapping[str, Any]) -> dict[str, Tensor]:
    """The columns with one number per token, as tensors."""
    length = length_of(row["input_ids"])
    ids = _tensor(row["input_ids"]) if length is not None else None
    if ids is None or ids.is_floating_point():
        raise DataError(f"{where}: `input_ids` must be one flat list of integers.")
    for name in PER_TOKEN:
        if row.get(name) is not None and length_of(row[name]) != length:
            raise DataError(f"{where}: `{name}` does not have one number for each of its {length} tokens.")
    return {name: _tensor(value) for name, value in row.items() if length_of(value) == length}


def length_of(value: Any) -> int | None:
    """The entries of a flat list or 1-D tensor of numbers; None for anything else."""
    if isinstance(value, Tensor):
        return len(value) if value.ndim == 1 else None
    items = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(items, (list, tuple)):
        return None
    return len(items) if not items or isinstance(items[0], (int, float, np.number)) else None


def _tensor(value: Any) -> Tensor:
    found = value if isinstance(value, Tensor) else torch.tensor(value)
    return found.float() if found.is_floating_point() and len(found) else found.long()
