"""Turns rows of text or token ids into batches for a causal language model.

`prepare` is used by a Trainer without a collator. The first line that matches a row applies:

| columns | becomes |
|---|---|
| `input_ids` (+ `labels`, `attention_mask`, any column with one number per token) | itself |
| `messages` | the tokenizer's chat template; every token is trained on |
| `prompt`, `completion` (both text or both messages) | one sequence; the prompt's labels are -100 |
| `text` | the tokenizer's ids, cut to the longest sequence the model takes; whole ones end with its EOS |

Other rows with tensors (embeddings, images, preference pairs) go to transformers' own collator. Rows are encoded when
they are read, so nothing is copied and a stream stays a stream.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from megatrain.errors import DataError
from megatrain.model.transformers_api import config_of

log = logging.getLogger(__name__)

IGNORED = -100  # the label that cross-entropy skips
PER_TOKEN = ("labels", "attention_mask", "position_ids", "token_type_ids")
UNDERSTOOD = "`input_ids`, `text`, `messages`, or `prompt` with `completion`"


def prepare(dataset: Any, model: nn.Module, tokenizer: Any) -> tuple[Any, CausalCollator | None]:
    """The dataset with encoded rows, and the collator for them.

    A dict of datasets is prepared entry by entry. `(dataset, None)`: the rows are not ours to touch. A map-style
    dataset is judged by its first row, at once; an iterable one is not started here (it may be a one-shot
    stream, or shuffle by a generator that is seeded later), so it is judged as it is read.
    """
    if dataset is None:
        return None, None
    if isinstance(dataset, dict):
        parts = {name: prepare(part, model, tokenizer) for name, part in dataset.items()}
        collators = (collator for _, collator in parts.values() if collator is not None)
        return {name: part for name, (part, _) in parts.items()}, next(collators, None)

    encode = RowEncoder(model, tokenizer)
    wrapped: Rows | StreamedRows
    if is_stream(dataset):
        columns = getattr(dataset, "column_names", None)  # datasets.IterableDataset, if it knows them
        kind = _kind(dict.fromkeys(columns or (), ""))
        wrapped = StreamedRows(dataset, encode)
    else:
        if len(dataset) == 0:
            raise DataError(
                "the dataset is empty: there is no row to train or evaluate on; check the split and the filters that "
                "made it."
            )
        kind = encode.kind(0, dataset[0])
        if kind is None:
            return dataset, None
        wrapped = Rows(dataset, encode)
    if kind and kind != "input_ids":
        encode.need_tokenizer(kind)  # a missing one is reported now, not at the first batch
    return wrapped, CausalCollator(encode.pad_token_id, encode.tokenizer, encode.takes_mask)


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be iterated."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def load_tokenizer(name: str, column: str = "text") -> Any:
    """The tokenizer saved with a model, from disk or cache. Nothing is downloaded."""
    from transformers import AutoTokenizer

    remedy = f"column `{column}` needs a tokenizer: pass `processing_class=tokenizer` to the Trainer"
    if not name:
        raise DataError(f"{remedy} (the model was not loaded from a directory or name that could hold one).")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise DataError(f"{remedy} (none could be loaded from {name!r}).") from error
    # Some classes (GPT-2's) load without their files, and then encode all text to nothing.
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):
        raise DataError(f"{remedy} (the one in {name!r} has no vocabulary).")
    return tokenizer


class _Encoded:
    """Wraps a dataset and forwards its public attributes, such as `set_epoch`."""

    def __init__(self, source: Any, encode: RowEncoder) -> None:
        self.source, self.encode = source, encode

    def __len__(self) -> int:
        return len(self.source)  # TypeError where the source has none, which is what DataLoader expects

    def __getattr__(self, name: str) -> Any:
        # Not `__getitems__`, which would bypass the encoder, and nothing before unpickling has set `source`.
        if name.startswith("_") or name in ("source", "encode"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.source, name)


class Rows(_Encoded, Dataset[dict[str, Any]]):
    """A map-style dataset whose rows are encoded when they are read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.encode(index, self.source[index])


class StreamedRows(_Encoded, IterableDataset[dict[str, Any]]):
    """An iterable dataset whose rows are encoded as they come."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        index = -1
        for index, row in enumerate(self.source):
            yield self.encode(index, row)
        if index < 0 and get_worker_info() is None:  # a worker's share may well be empty
            raise DataError(
                "the dataset gave no rows: it is empty, or a one-shot stream that was read before; pass one that can "
                "be read again."
            )


class RowEncoder:
    """Turns one row into the tensors of one sequence. Does not keep a reference to the model."""

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        self.tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor holds its tokenizer
        named = getattr(getattr(model, "config", None), "_name_or_path", None)
        self.model_name: str = named or getattr(model, "name_or_path", None) or ""
        forward = inspect.signature(model.forward).parameters
        self.inputs = frozenset(forward)
        self.takes_mask = "attention_mask" in forward or any(p.kind is p.VAR_KEYWORD for p in forward.values())
        config = config_of(model)
        text = None if config is None else config.get_text_config()
        self.max_positions: int | None = getattr(text, "max_position_embeddings", None)
        self.vocab_size: int | None = getattr(text, "vocab_size", None)
        eos = getattr(text, "eos_token_id", None)
        candidates = (getattr(text, "pad_token_id", None), eos[0] if isinstance(eos, list) else eos)
        valid = (i for i in candidates if i is not None and 0 <= i < (self.vocab_size or i + 1))
        self.spare_pad_id = next(valid, 0)
        """Used if the tokenizer has no pad token. Padding is masked, so any id of the vocabulary works."""
        self.said_cut = False

    @property
    def pad_token_id(self) -> int:
        own = getattr(self.tokenizer, "pad_token_id", None)
        return self.spare_pad_id if own is None or own >= (self.vocab_size or own + 1) else int(own)

    @property
    def limit(self) -> int | None:
        """The length at which text is truncated. A tokenizer without a limit reports 10^30."""
        both = (getattr(self.tokenizer, "model_max_length", None), self.max_positions)
        return min((n for n in both if n and n < 10**9), default=None)

    def need_tokenizer(self, column: str) -> Any:
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(self.model_name, column)
        return self.tokenizer

    def kind(self, index: int, row: Any) -> str | None:
        """The column that the row is encoded from, or None to leave the row unchanged."""
        if not isinstance(row, Mapping):
            raise DataError(f"row {index} is a {type(row).__name__}, not a dict with {UNDERSTOOD}.")
        kind = _kind(row)
        held = {name: length_of(value) for name, value in row.items() if value is not None}
        inputs = self.inputs & held.keys()
        if kind == "input_ids" and held[kind] is not None:
            # Only if every other input is per token too: no images, no 4-D masks.
            others = (n for n in inputs if held[n] is None or (n not in PER_TOKEN and held[n] != held[kind]))
            return None if any(name != kind for name in others) else kind
        has_text = any(isinstance(value, str) for value in row.values())
        if kind is None and (has_text or not held) and not inputs - {"labels", "attention_mask"}:
            found = ", ".join(f"`{name}`" for name in row) or "none"
            raise DataError(f"row {index} has no usable column: found {found}; MegaTrain reads {UNDERSTOOD}.")
        return kind

    def __call__(self, index: int, row: Any) -> dict[str, Any]:
        kind = self.kind(index, row)
        if kind == "input_ids":
            return self._checked(index, row)
        if kind is None:
            if row.get("input_ids") is not None:
                raise DataError(f"row {index} has inputs that are not one number per token; pass a data_collator.")
            return dict(row)
        tokenizer, value = self.need_tokenizer(kind), row[kind]
        if kind == "prompt":
            return self._checked(index, self._completed(index, value, row["completion"]))
        if kind == "messages":
            ids = self._cut(kind, self._chat(index, value))
        elif isinstance(value, str):
            ids = tokenizer(value, truncation=self.limit is not None, max_length=self.limit)["input_ids"]
            ids = self._cut(kind, ids)
            # A truncated text gets no EOS.
            ids = ids if len(ids) == self.limit else self._ended(ids)
        else:
            raise DataError(f"row {index}: column `text` holds a {type(value).__name__}, not a string.")
        return self._checked(index, {"input_ids": ids})

    def _ended(self, ids: list[int]) -> list[int]:
        """Append EOS, so that the model learns to stop."""
        eos = self.tokenizer.eos_token_id
        return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]

    def _cut(self, column: str, ids: list[int]) -> list[int]:
        if self.limit is not None and len(ids) >= self.limit and not self.said_cut:
            log.warning("rows of `%s` are cut to %d tokens, the longest the model takes", column, self.limit)
            self.said_cut = True
        return ids[: self.limit]

    def _completed(self, index: int, prompt: Any, completion: Any) -> dict[str, list[int]]:
        if isinstance(prompt, str) and isinstance(completion, str):
            start = self.tokenizer(prompt, verbose=False)["input_ids"]
            ids = self._ended(self.tokenizer(prompt + completion, verbose=False)["input_ids"])
        elif isinstance(prompt, list) and isinstance(completion, list):
            start = self._chat(index, prompt, add_generation_prompt=True)
            ids = self._chat(index, prompt + completion)
        else:
            kinds = f"{type(prompt).__name__} and {type(completion).__name__}"
            raise DataError(f"row {index}: `prompt` and `completion` are {kinds}, not both text or both messages.")
        # A token may span prompt and completion, so the prompt is the common prefix of both encodings.
        masked = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(start, ids, strict=False)))
        ids = self._cut("completion", ids)
        # If the prompt fills the row, nothing is trained on; hf/labels.py counts such rows.
        return {"input_ids": ids, "labels": ([IGNORED] * masked + ids[masked:])[: len(ids)]}

    def _chat(self, index: int, messages: Any, **options: bool) -> list[int]:
        if not isinstance(messages, list):
            raise DataError(f"row {index}: messages must be a list of dicts, not a {type(messages).__name__}.")
        if not self.tokenizer.chat_template:
            raise DataError(
                f"row {index} has messages, but the tokenizer has no chat template; set tokenizer.chat_template."
            )
        return list(self.tokenizer.apply_chat_template(messages, return_dict=False, **options))

    def _checked(self, index: int, row: Mapping[str, Any]) -> dict[str, Any]:
        columns = columns_of(f"row {index}", row)
        length, size = len(columns["input_ids"]), self.vocab_size
        if self.max_positions is not None and length > self.max_positions:
            raise DataError(
                f"row {index} has {length} tokens, but the model takes at most {self.max_positions}; shorten it."
            )
        labels = columns.get("labels", columns["input_ids"])
        for ids in (columns["input_ids"], labels[labels != IGNORED]):
            low, high = (int(x) for x in torch.aminmax(ids)) if len(ids) else (0, 0)
            if size is not None and (low < 0 or high >= size):
                wrong = low if low < 0 else high
                raise DataError(
                    f"row {index}: token id {wrong} is outside the vocabulary (vocab_size {size}); use the model's own "
                    "tokenizer, or resize its embeddings before attaching."
                )
        return columns


def _kind(row: Mapping[str, Any]) -> str | None:
    present = {name for name, value in row.items() if value is not None}
    known = [name for name in ("input_ids", "messages", "prompt", "text") if name in present]
    return next((name for name in known if name != "prompt" or "completion" in present), None)


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
        """False for a model whose forward takes no `attention_mask`. A row's own mask is still passed on."""
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
            raise DataError(f"{where}: `{name}` does not have one number for each of the {length} tokens.")
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
