"""A Trainer plans before it attaches, from its data and arguments and the free memory of the machine."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
from tests import small
from torch.utils.data import IterableDataset
from transformers import BatchEncoding, DataCollatorWithFlattening, default_data_collator
from transformers.trainer_pt_utils import LabelSmoother

import megatrain as mt
from megatrain import planner
from megatrain.errors import NotEnoughMemory, SettingsError
from megatrain.hardware.machine import Machine
from megatrain.hf import planning
from megatrain.model.shapes import describe
from megatrain.planner.api import dense_shape
from megatrain.planner.decision import Decision
from megatrain.planner.run import Run
from megatrain.planner.search import Search, make_plan
from megatrain.settings import Settings

MACHINE = "h200-128gb"
"""A described machine with a GPU. On the CPU its memory tiers are emulated."""


def new_trainer(directory: Path, data: Any = None, settings: dict[str, Any] | None = None, **changes: Any) -> Any:
    mt.init(**({"machine": MACHINE} | (settings or {})))
    trainer_arguments = ("data_collator", "eval_dataset", "compute_metrics", "compute_loss_func", "model")
    extra = {name: changes.pop(name) for name in trainer_arguments if name in changes}
    return changes.pop("kind", mt.Trainer)(
        model=extra.pop("model", None) or small.llama(),
        args=small.arguments(directory, **changes),
        train_dataset=small.rows() if data is None else data,
        **extra,
    )


def shape(trainer: Any) -> tuple[int, int, int]:
    run = trainer.engine.settings.plan.run
    return run.micro_batch, run.length, run.accumulation


def test_the_plan_describes_the_run_and_is_printed(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    trainer = new_trainer(tmp_path, gradient_accumulation_steps=3, max_grad_norm=0.0, optim="lion_8bit", bf16=True)
    run = trainer.engine.settings.plan.run
    assert shape(trainer) == (2, small.LENGTH, 3)
    assert (run.kind, run.moment_width, run.precision, run.clipping) == ("lion", "8bit", "bf16", False)
    assert any("blocks resident" in line and "tokens/s" in line for line in announced.messages)
    assert all(slab.on_device for slab in trainer.engine.slabs), "this small model fits in the memory of an H200"


def test_micro_batches_that_run_one_at_a_time_are_planned_so(tmp_path: Path) -> None:
    class Counting(mt.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    together, one_at_a_time = (
        new_trainer(tmp_path, kind=kind, gradient_accumulation_steps=4, bf16=True).engine.settings.plan
        for kind in (mt.Trainer, Counting)
    )
    assert (together.run.together, one_at_a_time.run.together) == (True, False)
    assert one_at_a_time.window == 1


class Declared(mt.Trainer):
    micro_batches_are_independent = True


def test_classes_that_are_declared_are_planned_so(tmp_path: Path) -> None:
    plans = [new_trainer(tmp_path, kind=kind).engine.settings.plan for kind in (mt.Trainer, Declared)]
    assert [plan.run.tried_in_turn for plan in plans] == [False, True]


@pytest.mark.parametrize("kind", [mt.Trainer, Declared])
def test_the_first_step_stays_within_its_plan(kind: Any, tmp_path: Path) -> None:
    """In the first step of a declared class micro-batches run one after the other, and keep FP32 sums in RAM."""
    model = small.llama().to(torch.bfloat16)
    run = Run(micro_batch=2, length=small.LENGTH, accumulation=4, tried_in_turn=kind is Declared)
    search = Search(describe(model), Machine.load(MACHINE), run)
    decision = Decision(window=4)
    plan = make_plan(search, decision, search.simulator.step(decision))
    trainer = new_trainer(
        tmp_path, model=model, kind=kind, settings={"plan": plan, "machine": None}, gradient_accumulation_steps=4,
        bf16=True, max_steps=1,
    )  # fmt: skip
    trainer.train()
    planned = sum(plan.memory["ram"][role] for role in ("weights", "residuals", "moments", "gradients"))
    assert 0.9 * planned < trainer.engine._placement.ram.allocated_bytes <= planned


def test_a_plan_is_bitwise_neutral(tmp_path: Path) -> None:
    runs = []
    for plan in ("auto", None):
        trainer = new_trainer(tmp_path, settings={"plan": plan}, gradient_accumulation_steps=2, bf16=True)
        trainer.train()
        runs.append(trainer)
    assert runs[0].engine.settings.plan is not None
    assert runs[1].engine.settings.plan is None
    assert small.losses(runs[0]) == small.losses(runs[1])
    assert small.same(small.snapshot(runs[0].model), small.snapshot(runs[1].model))


def test_the_plan_is_for_the_longest_rows(tmp_path: Path) -> None:
    ids = [row["input_ids"] for row in small.rows(40, length=24)]
    rows = [{"input_ids": row[: 3 + index % 7]} for index, row in enumerate(ids)]
    rows[17] = {"input_ids": ids[17][:21]}
    assert shape(new_trainer(tmp_path, rows)) == (2, 21, 1)
    arrow = datasets.Dataset.from_list([{"input_ids": r["input_ids"].tolist(), "extra": "x" * 99} for r in rows])
    assert shape(new_trainer(tmp_path, arrow)) == (2, 21, 1)


def test_attention_masks_are_planned(tmp_path: Path) -> None:
    def padded(rows: Any, **changes: Any) -> bool:
        planned: bool = new_trainer(tmp_path, rows, **changes).engine.settings.plan.run.padded
        return planned

    equal = small.rows(8)
    shorter = [*equal, {name: column[:3] for name, column in equal[0].items()}]
    assert not padded(equal)
    assert padded(shorter)
    assert not padded(shorter, per_device_train_batch_size=1), "a batch of one row needs no padding"
    filled = torch.ones(small.LENGTH, dtype=torch.long)
    ready = [row | {"attention_mask": filled} for row in equal]
    ready[5] = ready[5] | {"attention_mask": filled * (torch.arange(small.LENGTH) < 3)}
    for size in (1, 2):
        assert padded(ready, per_device_train_batch_size=size), "the tokenizer has padded the rows to one length"
    packed = [row | {"position_ids": torch.arange(small.LENGTH) % 5} for row in equal]
    assert padded(packed), "packed documents need a mask"
    assert not padded([row | {"position_ids": torch.arange(small.LENGTH)} for row in equal])
    assert padded(shorter, settings={"length": 64})
    assert not padded(equal, settings={"length": 64})
    assert padded(Stream(), settings={"length": 64}, max_steps=2), "a stream is not read, and its collator can pad"
    stacked = {"data_collator": default_data_collator}
    assert not padded(Stream(), settings={"length": 64}, max_steps=2, **stacked)
    assert not padded(shorter, **stacked), "this collator cannot batch rows of different lengths"


@pytest.mark.parametrize("length", [None, 64])
def test_flattened_documents_are_planned_as_one_row(tmp_path: Path, length: int | None) -> None:
    rows = [{"input_ids": row["input_ids"].tolist()} for row in small.rows(8)]
    joined = {"data_collator": DataCollatorWithFlattening(), "remove_unused_columns": False}
    run = new_trainer(tmp_path, rows, settings={"length": length}, **joined).engine.settings.plan.run
    assert (run.micro_batch, run.length) == (1, 2 * (length or small.LENGTH))
    assert run.padded


def test_losses_that_read_logits_are_planned(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    def chunk(**changes: Any) -> int | None:
        planned: int | None = new_trainer(tmp_path, **changes).engine.settings.plan.run.head_chunk
        return planned

    assert chunk() is None
    assert chunk(settings={"head_chunk": 16}) == 16
    assert chunk(settings={"head_chunk": 0}) == 0
    assert chunk(label_smoothing_factor=0.1) is None
    assert chunk(kind=OwnSmoother) == 0
    assert chunk(compute_loss_func=lambda outputs, labels, num_items_in_batch=None: outputs.logits.mean()) == 0
    assert chunk(kind=OwnLoss) == 0
    assert not any("does not read logits" in line for line in announced.messages)
    # The logits would take 2 GiB in FP32, but this loss does not read them, so the run must not be refused.
    wide = small.llama(vocab_size=1 << 14, max_position_embeddings=1 << 14)
    assert chunk(kind=OwnLoss, model=wide, settings={"length": 1 << 14, "max_vram_gb": 6.0}) is None
    assert any("does not read logits" in line for line in announced.messages)


def test_losses_that_read_logits_are_planned_with_a_disk_if_ram_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, announced: pytest.LogCaptureFixture
) -> None:
    def short_of_ram(*given: Any, **options: Any) -> Any:
        if "offload_dir" not in options:
            raise NotEnoughMemory("short of RAM")
        return make(*given, **options)

    make = planning.plan_for_trainer
    monkeypatch.setattr(planning, "plan_for_trainer", short_of_ram)
    settings = {"machine": MACHINE, "offload_dir": tmp_path / "scratch"}
    trainer = new_trainer(tmp_path, settings=settings, compute_loss_func=lambda outputs, labels, **_: outputs.loss)
    assert trainer.engine.settings.plan.run.head_chunk == 0
    assert not [line for line in announced.messages if "does not read logits" in line]


def test_a_sample_of_a_large_dataset_is_read(tmp_path: Path) -> None:
    class Counting(torch.utils.data.Dataset):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seen: set[int] = set()

        def __len__(self) -> int:
            return 100_000

        def __getitem__(self, index: int) -> dict[str, list[int]]:
            self.seen.add(index)
            return {"input_ids": [1] * (4 + (index > 50_000))}

    data = Counting()
    assert shape(new_trainer(tmp_path, data)) == (2, 5, 1)
    assert len(data.seen) <= planning.ROWS + 1
    assert max(data.seen) > 99_000


def test_planning_draws_no_random_numbers(tmp_path: Path) -> None:
    """The rows are random. A planned run reads the same rows as an unplanned one."""

    class Noisy(torch.utils.data.Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"input_ids": torch.randint(1, small.VOCAB, (small.LENGTH,))}

    runs = []
    for plan in ("auto", None):
        torch.manual_seed(3)
        trainer = new_trainer(tmp_path, Noisy(), settings={"plan": plan})
        trainer.train()
        runs.append(small.losses(trainer))
    assert runs[0] == runs[1]


class Stream(IterableDataset):  # type: ignore[misc]
    def __init__(self) -> None:
        self.started = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self.started += 1
        yield from small.rows(16)


def test_a_stream_is_not_started_and_needs_a_length(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    data = Stream()
    assert new_trainer(tmp_path, data).engine.settings.plan is None
    assert any("megatrain.init(length=...)" in line for line in announced.messages)
    assert shape(new_trainer(tmp_path, data, settings={"length": 128})) == (2, 128, 1)
    assert data.started == 0


def test_placement_settings_switch_planning_off(tmp_path: Path) -> None:
    for override in ({"policy": "store"}, {"resident": ("model.layers.0",)}, {"window": 1}):
        trainer = new_trainer(tmp_path, settings=override)
        assert trainer.engine.settings.plan is None


def test_a_given_plan_is_followed(tmp_path: Path) -> None:
    plan = mt.plan(small.llama(), machine=MACHINE, batch=2, length=8, max_vram_gb=3)
    assert new_trainer(tmp_path, settings={"plan": plan}).engine.settings.plan is plan


def test_without_a_gpu_the_machine_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.engine.planning.probe", lambda **_: pytest.fail("the machine was measured"))
    assert new_trainer(tmp_path, settings={"machine": None}).engine.settings.plan is None


def test_a_refusal_has_suggestions_and_names_plan_none(tmp_path: Path) -> None:
    with pytest.raises(
        NotEnoughMemory, match=r"short by .* GiB; any one of these makes it fit: max_ram_gb="
    ) as refusal:
        new_trainer(tmp_path, settings={"max_ram_gb": 0.5, "max_vram_gb": 3})
    assert any("plan=None" in note for note in refusal.value.__notes__)
    # Each suggestion makes the run fit.
    for suggestion in refusal.value.suggestions:
        limits = {"max_ram_gb": 0.5, "max_vram_gb": 3} | suggestion.changes
        if suggestion.changes.keys() <= {"max_ram_gb", "max_vram_gb"}:
            assert new_trainer(tmp_path, settings=limits).engine.settings.plan is not None


def test_memory_of_other_processes_is_not_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.hardware.inventory.available_ram", lambda: 1 << 20)
    with pytest.raises(NotEnoughMemory, match="GiB of ram and may use"):
        new_trainer(tmp_path)


class OwnLoss(mt.Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class Smoothed(transformers.Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.label_smoother = type("Smoother", (LabelSmoother,), {})()


class OwnSmoother(mt.MegaMixin, Smoothed):
    pass


class OwnStep(mt.Trainer):
    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**inputs).loss, None, None


@pytest.mark.parametrize(
    ("all_logits", "changes"),
    [
        (False, {}),
        (True, {"compute_metrics": lambda seen: {}}),
        (False, {"compute_metrics": lambda seen: {}, "prediction_loss_only": True}),
        (False, {"label_smoothing_factor": 0.1}),
        (True, {"kind": OwnSmoother}),
        (True, {"settings": {"head_chunk": 0}}),
        (True, {"compute_loss_func": lambda outputs, labels, **_: outputs.logits.sum()}),
        (True, {"kind": OwnLoss}),
        (True, {"kind": OwnStep}),
    ],
)
def test_logits_of_an_evaluation_are_planned(tmp_path: Path, all_logits: bool, changes: dict[str, Any]) -> None:
    plain = new_trainer(tmp_path).engine.settings.plan
    evaluated = new_trainer(
        tmp_path, eval_dataset=small.rows(4), eval_strategy="steps", eval_steps=2,
        per_device_eval_batch_size=1 << 20, **changes,
    ).engine.settings.plan  # fmt: skip
    assert evaluated.run.predictions == all_logits
    more = evaluated.total("vram") - plain.total("vram")
    # All logits in three forms and the residual stream, or one layer for all tokens (gate, up, product and residual
    # stream), in FP32.
    logits, layer = (per_token * (1 << 20) * small.LENGTH for per_token in (small.VOCAB * 12 + 512, 7 * 32 * 4))
    assert more > 0.95 * logits if all_logits else 0.95 * layer < more < 0.8 * logits


@pytest.mark.parametrize("adapted", ["q_proj", "lm_head"])
def test_a_head_with_an_adapter_computes_all_logits(tmp_path: Path, adapted: str) -> None:
    mt.init(machine=MACHINE)
    model = peft.get_peft_model(small.llama(), peft.LoraConfig(target_modules=[adapted], task_type="CAUSAL_LM"))
    trainer = mt.Trainer(
        model=model, args=small.arguments(tmp_path, eval_strategy="steps", eval_steps=2),
        train_dataset=small.rows(), eval_dataset=small.rows(4),
    )  # fmt: skip
    assert trainer.engine.settings.plan.run.predictions == (trainer.engine._step.head is None) == (adapted == "lm_head")


def test_a_second_trainer_on_a_closed_engines_model(tmp_path: Path) -> None:
    evaluated = {"eval_dataset": small.rows(4), "eval_strategy": "steps", "eval_steps": 2}
    first = new_trainer(tmp_path, **evaluated)
    first.engine.close()
    second = mt.Trainer(
        model=first.model, args=small.arguments(tmp_path, eval_strategy="steps", eval_steps=2),
        train_dataset=small.rows(), eval_dataset=small.rows(4),
    )  # fmt: skip
    assert not first.engine.settings.plan.run.predictions
    assert not second.engine.settings.plan.run.predictions
    assert second.engine._step.head is not None


def test_data_that_cannot_be_collated_is_not_planned(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    def broken(rows: Any) -> Any:
        raise KeyError("pixel_values")

    assert new_trainer(tmp_path, data_collator=broken).engine.settings.plan is None
    assert any(
        "the first batch of the dataset could not be built" in line and "pixel_values" in line
        for line in announced.messages
    )


def test_batch_encodings_are_measured(tmp_path: Path) -> None:
    ids = [row["input_ids"] for row in small.rows(8, length=24)]
    rows = [BatchEncoding({"input_ids": row[:4], "attention_mask": torch.ones(4)}) for row in ids]
    rows[5] = BatchEncoding({"input_ids": ids[5][:21], "attention_mask": torch.ones(21)})
    assert shape(new_trainer(tmp_path, rows)) == (2, 21, 1)


class Masking:
    """A collator with two random number generators, one of which is created at first use."""

    def __init__(self) -> None:
        self.first = torch.Generator().manual_seed(1)
        self.later: torch.Generator | None = None

    def __call__(self, rows: list[Any]) -> dict[str, torch.Tensor]:
        self.later = self.later or torch.Generator().manual_seed(2)
        ids = torch.stack([row["input_ids"] for row in rows])
        for generator in (self.first, self.later):
            ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.2, 1, ids)
        return {"input_ids": ids, "labels": ids}


def test_planning_does_not_use_the_collators_random_numbers(tmp_path: Path) -> None:
    runs = []
    for plan in ("auto", None):
        trainer = new_trainer(tmp_path, settings={"plan": plan}, data_collator=Masking())
        assert trainer.data_collator.later is None
        trainer.train()
        runs.append(small.losses(trainer))
    assert runs[0] == runs[1]


def test_a_parameter_outside_blocks_does_not_prevent_planning(tmp_path: Path) -> None:
    mt.init(machine=MACHINE)
    model = small.llama()
    model.register_parameter("gain", torch.nn.Parameter(torch.ones(4)))
    trainer = mt.Trainer(model=model, args=small.arguments(tmp_path), train_dataset=small.rows())
    assert trainer.engine.settings.plan is not None
    trainer.train()


def test_without_an_eval_strategy_no_evaluation_is_planned(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path, eval_dataset=small.rows(4), per_device_eval_batch_size=1 << 20)
    assert trainer.engine.settings.plan.run.evaluation == 0


def test_a_refused_evaluation_names_its_batch(tmp_path: Path) -> None:
    with pytest.raises(NotEnoughMemory, match="evaluation=") as refusal:
        new_trainer(
            tmp_path, settings={"machine": "rtx4090-64gb"}, eval_dataset=small.rows(4), eval_strategy="steps",
            per_device_eval_batch_size=1 << 24,
        )  # fmt: skip
    assert any("per_device_eval_batch_size" in note for note in refusal.value.__notes__)


def test_model_init_plans_again_and_frees_the_first_model(tmp_path: Path) -> None:
    mt.init(machine=MACHINE)
    trainer = mt.Trainer(model_init=lambda: small.llama(), args=small.arguments(tmp_path), train_dataset=small.rows())
    first, model = weakref.ref(trainer.engine), weakref.ref(trainer.model)
    trainer.train()
    assert trainer.engine.settings.plan is not None
    gc.collect()
    assert first() is None
    assert model() is None


def test_a_trainer_plans_with_a_disk_only_if_nothing_else_fits(tmp_path: Path) -> None:
    model, folder = dense_shape(64, 64), tmp_path / "new"
    settings = Settings(offload_dir=folder)
    fits = planning._with_disk(
        partial(planner.plan, model, machine="h200-1.5tb", optimizer_compression="8bit"), settings
    )
    assert fits.on_disk == ()
    assert not folder.exists()
    short = partial(planner.plan, model, machine="h100-512gb")
    with pytest.raises(NotEnoughMemory):
        planning._with_disk(short, Settings())
    assert planning._with_disk(short, settings).on_disk
    assert folder.is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"offload_dir=.*file' cannot be used: File exists"):
        planning._with_disk(short, Settings(offload_dir=tmp_path / "file"))
