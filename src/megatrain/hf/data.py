"""Rows of text or token ids become batches that a causal language model trains on.

`prepare` serves a Trainer that was given no collator. The first line that fits a row is used:

| columns | becomes |
|---|---|
| `input_ids` (+ `labels`, `attention_mask`, any column with one number per token) | itself |
| `messages` | the tokenizer's chat template; every token is trained on |
| `prompt`, `completion` (both text or both messages) | one sequence; the prompt's labels are -100 |
| `text` | the tokenizer's ids, cut to the longest sequence the model takes; whole ones end with its EOS |

Anything else that holds tensors (embeddings, images, preference pairs) is left to transformers' own collator.
Rows are encoded when they are read, so nothing is copied and a stream stays a stream.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from megatrain.errors import DataError
from megatrain.hf.collate import IGNORED, PER_TOKEN, CausalCollator, columns_of, length_of
from megatrain.model.skeleton import config_of

log = logging.getLogger(__name__)

UNDERSTOOD = "`input_ids`, `text`, `messages`, or `prompt` with `completion`"


def prepare(dataset: Any, model: nn.Module, tokenizer: Any) -> tuple[Any, CausalCollator | None]:
    """The dataset with rows a causal language model takes, and the collator for them.

    A dict of datasets is prepared entry by entry. `(dataset, None)`: the rows are not ours to touch. A map-style
    dataset is judged by its first row, at once; an iterable one is not started here (it may be a one-shot
    stream, or shuffle by a generator that is seeded later), so it is judged as it is read.
    """
    if dataset is None:
        return None, None
    if isinstance(dataset, dict):
        parts = {name: prepare(part, model, tokenizer) for name, part in dataset.items()}
        collators = [collator for _, collator in parts.values() if collator is not None]
        return {name: part for name, (part, _) in parts.items()}, collators[0] if collators else None

    encode = RowEncoder.of(model, tokenizer)
    wrapped: Rows | StreamedRows
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        columns = getattr(dataset, "column_names", None)  # datasets.IterableDataset, if it knows them
        kind = _kind(dict.fromkeys(columns or (), ""))
        wrapped = StreamedRows(dataset, encode)
    else:
        if len(dataset) == 0:
            raise DataError("the dataset is empty: there is no row to train or evaluate on.")
        kind = encode.kind(0, dataset[0])
        if kind is None:
            return dataset, None
        wrapped = Rows(dataset, encode)
    if kind not in (None, "input_ids"):
        encode.need_tokenizer(kind)  # a missing one is reported now, not at the first batch
    return wrapped, CausalCollator(encode.pad_token_id, encode.tokenizer, encode.takes_mask)


def load_tokenizer(model: nn.Module | str, column: str = "text") -> Any:
    """The tokenizer saved with the model (or under this name), from disk or cache; nothing is downloaded."""
    from transformers import AutoTokenizer

    name = model if isinstance(model, str) else _model_name(model)
    remedy = f"column `{column}` needs a tokenizer: pass `processing_class=tokenizer` to the Trainer"
    if not name:
        raise DataError(f"{remedy} (the model was not loaded from a directory or name that could hold one).")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise DataError(f"{remedy} (none could be loaded from {name!r}).") from error
    # GPT-2's class, for one, comes up even without its files, and then encodes all text to nothing.
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):
        raise DataError(f"{remedy} (the one in {name!r} has no vocabulary).")
    return tokenizer


class _Encoded:
    """A dataset in front of another one, whose public attributes it shows as its own."""

    source: Any
    encode: RowEncoder

    def __init__(self, source: Any, encode: RowEncoder) -> None:
        self.source, self.encode = source, encode

    def __getattr__(self, name: str) -> Any:
        # Not `__getitems__`, which would read rows past the encoder; not what is missing while this is unpickled.
        if name.startswith("_") or name in ("source", "encode"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.source, name)


class Rows(_Encoded, Dataset[dict[str, Any]]):
    """A map-style dataset whose rows are encoded when they are read."""

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.encode(index, self.source[index])


class StreamedRows(_Encoded, IterableDataset[dict[str, Any]]):
    """An iterable dataset whose rows are encoded as they come."""

    def __len__(self) -> int:
        return len(self.source)  # TypeError where the source has none, which is what DataLoader expects

    def __iter__(self) -> Iterator[dict[str, Any]]:
        index = -1
        for index, row in enumerate(self.source):
            yield self.encode(index, row)
        if index < 0 and get_worker_info() is None:  # a worker's share may well be empty
            raise DataError("the dataset gave no rows: it is empty, or a one-shot stream that was read before.")

    def set_epoch(self, epoch: int) -> None:
        """Passed on, so that a source that reshuffles by epoch still does."""
        forward = getattr(self.source, "set_epoch", None)
        if forward is not None:
            forward(epoch)


@dataclass
class RowEncoder:
    """Turns one row into the tensors of one sequence. Holds what it needs of the model, not the model."""

    tokenizer: Any
    model_name: str
    max_positions: int | None
    vocab_size: int | None
    inputs: frozenset[str]
    """The arguments of the model's forward."""
    takes_mask: bool
    spare_pad_id: int
    """For when the tokenizer has no pad token. Padding is masked, so any id of the vocabulary would do."""
    said_cut: bool = False

    @classmethod
    def of(cls, model: nn.Module, tokenizer: Any) -> RowEncoder:
        forward = inspect.signature(model.forward).parameters
        config = config_of(model)
        text = None if config is None else config.get_text_config()
        eos = getattr(text, "eos_token_id", None)
        vocab_size = getattr(text, "vocab_size", None)
        candidates = (getattr(text, "pad_token_id", None), eos[0] if isinstance(eos, list) else eos)
        valid = [i for i in candidates if i is not None and 0 <= i < (vocab_size or i + 1)]
        return cls(
            tokenizer=getattr(tokenizer, "tokenizer", tokenizer),  # a processor holds its tokenizer
            model_name=_model_name(model),
            max_positions=getattr(text, "max_position_embeddings", None),
            vocab_size=vocab_size,
            inputs=frozenset(forward),
            takes_mask="attention_mask" in forward or any(p.kind is p.VAR_KEYWORD for p in forward.values()),
            spare_pad_id=valid[0] if valid else 0,
        )

    @property
    def pad_token_id(self) -> int:
        own = getattr(self.tokenizer, "pad_token_id", None)
        return self.spare_pad_id if own is None or own >= (self.vocab_size or own + 1) else int(own)

    @property
    def limit(self) -> int | None:
        """Where text is cut. A tokenizer that knows no limit claims 10^30."""
        both = (getattr(self.tokenizer, "model_max_length", None), self.max_positions)
        return min((n for n in both if n and n < 10**9), default=None)

    def need_tokenizer(self, column: str | None) -> Any:
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(self.model_name, column or "text")
        return self.tokenizer

    def kind(self, index: int, row: Any) -> str | None:
        """The column that the row is made from, or None to leave the row alone."""
        if not isinstance(row, Mapping):
            raise DataError(f"row {index} is a {type(row).__name__}, not a dict with {UNDERSTOOD}.")
        kind = _kind(row)
        held = {name: length_of(value) for name, value in row.items() if value is not None}
        inputs = self.inputs & held.keys()
        if (
            kind == "input_ids" and held[kind] is not None
        ):  # ours only if every other input is per token too: no images, no 4-D masks
            others = (n for n in inputs if held[n] is None or (n not in PER_TOKEN and held[n] != held[kind]))
            return None if any(name != kind for name in others) else kind
        has_text = any(isinstance(value, str) for value in row.values())
        if kind is None and (has_text or not held) and not inputs - {"labels", "attention_mask"}:
            found = ", ".join(f"`{name}`" for name in row) or "none"
            raise DataError(f"row {index} has no usable column: found {found}; understood are {UNDERSTOOD}.")
        return kind

    def __call__(self, index: int, row: Any) -> dict[str, Any]:
        kind = self.kind(index, row)
        if kind == "input_ids":
            return self._checked(index, row)
        if kind is None:
            if row.get("input_ids") is not None:
                raise DataError(f"row {index} has inputs that are not one number per token: pass a data_collator.")
            return dict(row)
        tokenizer, value = self.need_tokenizer(kind), row[kind]
        if kind == "prompt":
            return self._checked(index, self._completed(index, value, row["completion"]))
        if kind == "messages":
            ids = self._cut(kind, self._chat(index, value))
        elif isinstance(value, str):
            ids = tokenizer(value, truncation=self.limit is not None, max_length=self.limit)["input_ids"]
            ids = self._cut(kind, ids)
            # What was cut does not end here.
            ids = ids if len(ids) == self.limit else self._ended(ids)
        else:
            raise DataError(f"row {index}: column `text` holds a {type(value).__name__}, not a string.")
        return self._checked(index, {"input_ids": ids})

    def _ended(self, ids: list[int]) -> list[int]:
        """With the EOS at its end, or the model never learns to stop."""
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
        # A token may straddle the seam, so the prompt is what both encodings begin with.
        masked = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(start, ids, strict=False)))
        ids = self._cut("completion", ids)
        # A prompt may fill the whole row: nothing is trained on then, which hf/labels.py counts.
        return {"input_ids": ids, "labels": ([IGNORED] * masked + ids[masked:])[: len(ids)]}

    def _chat(self, index: int, messages: Any, **options: bool) -> list[int]:
        if not isinstance(messages, list):
            raise DataError(f"row {index}: messages must be a list of dicts, not a {type(messages).__name__}.")
        if not self.tokenizer.chat_template:
            raise DataError(f"row {index} holds messages and the tokenizer no chat template: set one on it.")
        return list(self.tokenizer.apply_chat_template(messages, return_dict=False, **options))

    def _checked(self, index: int, row: Mapping[str, Any]) -> dict[str, Any]:
        columns = columns_of(f"row {index}", row)
        length, size = len(columns["input_ids"]), self.vocab_size
        if self.max_positions is not None and length > self.max_positions:
            raise DataError(f"row {index} has {length} tokens; the model takes at most {self.max_positions}.")
        labels = columns.get("labels", columns["input_ids"])
        for ids in (columns["input_ids"], labels[labels != IGNORED]):
            low, high = (int(x) for x in torch.aminmax(ids)) if len(ids) else (0, 0)
            if size is not None and (low < 0 or high >= size):
                wrong = low if low < 0 else high
                raise DataError(f"row {index}: token id {wrong} is outside the vocabulary (vocab_size {size}).")
        return columns


def _kind(row: Mapping[str, Any]) -> str | None:
    present = {name for name, value in row.items() if value is not None}
    known = [name for name in ("input_ids", "messages", "prompt", "text") if name in present]
    return next((name for name in known if name != "prompt" or "completion" in present), None)


def _model_name(model: nn.Module) -> str:
    config = getattr(model, "config", None)
    return getattr(config, "_name_or_path", None) or getattr(model, "name_or_path", None) or ""
