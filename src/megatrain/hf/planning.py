"""Makes the plan of a Trainer's run, from its arguments, its data and the memory that is free.

The length comes from the data: the longest rows are read and collated as in training. A stream is not read; its length
is `megatrain.init(length=...)` or the Trainer's `max_length`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy
import torch

from megatrain import files, generators
from megatrain.engine.planning import plan_for_trainer
from megatrain.errors import NotEnoughMemory, NothingToStream, SettingsError
from megatrain.geometry import PLANNED_DEBUG_SETTINGS, PLANNED_SETTINGS
from megatrain.hardware import inventory
from megatrain.hardware.compilers import compiles
from megatrain.hardware.validation import folders
from megatrain.hf.data import is_stream
from megatrain.model.shapes import describe
from megatrain.planner import Plan
from megatrain.settings import Settings
from megatrain.telemetry.notices import announce
from megatrain.telemetry.progress import progress

ROWS = 512
"""Rows that are read to find the longest: all of a smaller dataset, else evenly spaced ones."""
FEW_ROWS = 32
"""The same if the length is known, and only padding is not."""
PADS = ("tokenizer", "processing_class", "processor", "pad_token_id")
"""Attributes of collators that pad."""
LENGTHS = ("max_length", "max_seq_length")
"""Names of the longest sequence in the arguments of Trainers."""
AS_ASKED = ("machine", "max_vram_gb", "max_ram_gb", "optimizer_compression", "precision")
"""Settings that are passed on to the plan."""
Collate = Callable[[list[Any]], Any]


def plan_of(trainer: Any, settings: Settings, kind: str, device: torch.device) -> Plan | None:
    """The plan for a Trainer's run: the given one, or a new one; None if none is needed or the length is unknown."""
    if settings.plan != "auto":
        return settings.plan  # type: ignore[no-any-return]
    decided = (settings.given | settings.debug.given) & {*PLANNED_SETTINGS, *PLANNED_DEBUG_SETTINGS}
    # Without a GPU there is only RAM, and nothing to plan.
    one_tier = device.type != "cuda" and settings.machine is None
    if trainer.train_dataset is None or decided or one_tier:
        return None
    args, compiled = trainer.args, compiles(settings.compile, device.type)
    shape = _batch_shape(trainer, settings)
    if shape is None:
        return None
    batch, length, padded = shape
    try:
        model = describe(trainer.model)
    except NothingToStream:
        return None
    evaluates = trainer.eval_dataset is not None and args.eval_strategy != "no"
    known = partial(
        plan_for_trainer,
        model,
        batch=batch,
        length=length,
        accumulation=args.gradient_accumulation_steps,
        together=args.gradient_accumulation_steps == 1 or trainer._subclass.why_in_turn is None,
        tried_in_turn=bool(trainer._subclass.declared),
        optimizer=kind,
        clipping=bool(args.max_grad_norm),
        evaluation=args.per_device_eval_batch_size * length if evaluates else 0,
        predictions=trainer._subclass.evaluates_logits or settings.head_chunk == 0 or model.logits == "whole",
        trainer=True,
        padded=padded,
        compile=compiled,
        available=inventory.available_memory(device, trainer.model, compiled),
        **{name: getattr(settings, name) for name in AS_ASKED},
    )
    whole = settings.head_chunk == 0 or trainer._subclass.smooths_logits
    try:
        if trainer._subclass.looks_at_logits and not whole and model.logits == "chunked":
            with suppress(NotEnoughMemory):
                return _with_disk(partial(known, head_chunk=0), settings)
            announce(
                "the plan assumes that this Trainer's loss does not read logits: computed whole, they would not fit"
            )
        return _with_disk(partial(known, head_chunk=0 if whole else settings.head_chunk), settings)
    except NotEnoughMemory as refusal:
        refusal.add_note(
            "megatrain: `batch` is per_device_train_batch_size, `evaluation` per_device_eval_batch_size × length; "
            "megatrain.init(plan=None) starts without a plan, and streams every block."
        )
        raise


def _with_disk(known: Callable[..., Plan], settings: Settings) -> Plan:
    """The plan without a disk or, if nothing fits, with state in `offload_dir`. Only then is the disk measured."""
    try:
        return known()
    except NotEnoughMemory:
        if settings.offload_dir is None:
            raise
    for folder in folders(settings.offload_dir):
        try:
            files.make_directory(folder)
        except OSError as error:
            raise SettingsError(f"offload_dir={folder!r} cannot be used: {error.strerror or error}.") from error
    return known(offload_dir=settings.offload_dir)


def _batch_shape(trainer: Any, settings: Settings) -> tuple[int, int, bool] | None:
    """Rows and columns of the largest micro-batch in a sample of the data, and whether rows are padded."""
    size, length = trainer.args.per_device_train_batch_size, settings.length
    # If the data cannot be read, assume that a collator that can pad does.
    may_pad = size > 1 and any(hasattr(trainer.data_collator, name) for name in PADS)
    if is_stream(trainer.train_dataset):
        named = (length, *(getattr(trainer.args, name, None) for name in LENGTHS))
        length = next((value for value in named if isinstance(value, int)), None)
        if length is not None:
            return size, length, may_pad
        announce(
            "no plan is made: the dataset is a stream, so its lengths are unknown; set the longest with "
            "megatrain.init(length=...)"
        )
        return None
    try:
        with sampled(trainer, ROWS if length is None else FEW_ROWS) as (rows, collate):
            ids, padded = _collated(rows, collate, size)
    except Exception as error:  # whatever is wrong with the data, training meets it again and says it better
        if length is not None:
            return size, length, may_pad
        announce(f"no plan is made: the first batch of the dataset could not be built ({error!r:.200})")
        return None
    if length is not None:
        # A collator may pack all rows into one.
        joined = isinstance(ids, torch.Tensor) and ids.ndim == 2 and ids.shape[0] < size
        return (ids.shape[0], size * length // ids.shape[0], padded) if joined else (size, length, padded)
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        announce("no plan is made: batches of this dataset have no two-dimensional `input_ids`")
        return None
    return ids.shape[0], ids.shape[1], padded


def _collated(rows: list[Any], collate: Collate, size: int) -> tuple[Any, bool]:
    """The `input_ids` of a micro-batch of the longest rows, and whether attention gets a mask."""
    rows = sorted(rows, key=_extent, reverse=True)
    longest = rows[:size]
    batch = collate(longest + longest[:1] * (size - len(longest)))
    if not hasattr(batch, "get"):
        return None, False
    padded = _hides(batch)
    if not padded:
        # Skip rows that the collator cannot batch together.
        with suppress(Exception):
            padded = _hides(collate([*longest[: size - 1], min(rows, key=_tokens)]))
    return batch.get("input_ids"), padded


def planned_batch(trainer: Any, plan: Plan) -> dict[str, Any]:
    """A micro-batch of the dataset in the planned size."""
    with sampled(trainer, FEW_ROWS) as (rows, collate):
        longest = sorted(rows, key=_extent, reverse=True)[: plan.run.micro_batch]
        batch = dict(collate(longest + longest[:1] * (plan.run.micro_batch - len(longest))))
    shape = batch["input_ids"].shape
    columns = torch.arange(plan.run.length) % shape[1]
    return {name: value[:, columns] if value.shape == shape else value for name, value in batch.items()}


def _hides(batch: Any) -> bool:
    """Whether some earlier tokens are masked: padding, or another document (positions restart)."""
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if isinstance(mask, torch.Tensor):
        return not bool(mask.all())
    return isinstance(positions, torch.Tensor) and bool((positions.diff(dim=-1) != 1).any())


def _tokens(row: Any) -> int:
    """The number of tokens in a row that its mask does not hide."""
    mask = row.get("attention_mask") if isinstance(row, Mapping) else None
    return _extent(row) if mask is None else int(torch.as_tensor(mask).sum())


def _extent(row: Any) -> int:
    """The length of the longest value in a row."""
    values = row.values() if isinstance(row, Mapping) else [row]
    arrays = (torch.Tensor, numpy.ndarray)
    sized = [value for value in values if hasattr(value, "__len__")]
    return max((max(v.shape, default=0) if isinstance(v, arrays) else len(v) for v in sized), default=0)


@contextmanager
def sampled(trainer: Any, most: int) -> Iterator[tuple[list[Any], Collate]]:
    """Evenly spaced rows of the dataset, and the collator, as in training.

    Both may draw random numbers, also from a generator of their own; training must draw the same.
    """
    dataset, collate = trainer.train_dataset, trainer.data_collator
    attributes = [(vars(owner), dict(vars(owner))) for owner in (collate, dataset) if hasattr(owner, "__dict__")]
    own: list[Callable[[], Any]] = []
    for value in (value for _, before in attributes for value in before.values()):
        if isinstance(value, torch.Generator):
            own.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            own.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, numpy.random.Generator):
            own.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
    try:
        with generators.preserved(torch.device("cpu")):
            if type(dataset).__module__.split(".")[0] == "datasets":
                dataset = trainer._remove_unused_columns(dataset, description="training")
            else:
                collate = trainer._get_collator_with_removed_columns(collate, description="training")
            count = len(dataset)
            most = min(most, count)
            rows = []
            with progress(most, "row", "Reading and tokenising rows") as advance:
                for index in range(most):
                    rows.append(dataset[index * count // most])
                    advance()
            yield rows, collate
    finally:
        for take_back in own:
            take_back()
        for now, before in attributes:
            now.update(before)  # a generator that is made at first use is made again
