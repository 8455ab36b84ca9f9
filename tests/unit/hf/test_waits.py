"""What a Trainer does to keep the host ahead of the GPU gives the numbers of a stock Trainer."""

from __future__ import annotations

import copy
import math
import pickle
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests import small
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

import megatrain as mt
from megatrain.optim.pending import PendingNorm

KINDS = (mt.Trainer, transformers.Trainer)


def infinite_at(steps: tuple[int, ...], base: type) -> type:
    """A Trainer whose loss, but not its gradient, is infinite or NaN in some steps."""

    class Infinite(base):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            step = self.state.global_step
            return loss + (math.nan if step % 2 else math.inf) if step in steps else loss

    return Infinite


class Watches(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_step_begin(self, args: Any, *_: Any, **__: Any) -> None:
        self.seen.append(args.logging_nan_inf_filter)

    on_step_end = on_log = on_substep_end = on_step_begin


def trained(kind: type, directory: Path, *callbacks: Any, **changes: Any) -> Any:
    arguments = small.arguments(directory, train_sampling_strategy="sequential", **changes)
    trainer = kind(model=small.llama(), args=arguments, train_dataset=small.rows(), callbacks=[*callbacks])
    trainer.train()
    return trainer


@pytest.mark.parametrize("filtered", [True, False])
def test_losses_that_are_not_finite_are_logged_as_by_transformers(tmp_path: Path, filtered: bool) -> None:
    options: dict[str, Any] = {"max_steps": 7, "logging_steps": 3, "logging_nan_inf_filter": filtered}
    ours, stock = (small.losses(trained(infinite_at((1, 2, 4), kind), tmp_path, **options)) for kind in KINDS)
    assert ours == pytest.approx(stock, abs=small.LOSSES, nan_ok=True)
    assert all(map(math.isfinite, ours)) == filtered


@pytest.mark.parametrize("filtered", [True, False])
def test_the_filter_in_the_arguments_stays_as_it_was(tmp_path: Path, filtered: bool) -> None:
    watches = Watches()
    trainer = trained(mt.Trainer, tmp_path, watches, logging_nan_inf_filter=filtered, gradient_accumulation_steps=2)
    assert {*watches.seen, trainer.args.logging_nan_inf_filter} == {filtered}


def test_the_filter_is_on_again_after_a_failed_run(tmp_path: Path) -> None:
    class Fails(mt.Trainer):
        def floating_point_ops(self, inputs: Any) -> int:
            raise RuntimeError("stop")

    trainer = Fails(model=small.llama(), args=small.arguments(tmp_path), train_dataset=small.rows())
    with pytest.raises(RuntimeError, match="stop"):
        trainer.train()
    assert trainer.args.logging_nan_inf_filter


def test_an_overridden_step_sees_the_loss_as_it_is(tmp_path: Path) -> None:
    losses = []

    class Sees(infinite_at((1,), mt.Trainer)):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            losses.append(super().training_step(*args, **kwargs))
            return losses[-1]

    logged = small.losses(trained(Sees, tmp_path))
    assert [math.isfinite(loss) for loss in losses] == [True, False, True, True]
    assert all(map(math.isfinite, logged))


@pytest.mark.parametrize("limit", [0.0, 0.05])
def test_norms_are_those_of_transformers(tmp_path: Path, limit: float) -> None:
    runs = [trained(kind, tmp_path, max_grad_norm=limit) for kind in KINDS]
    ours, stock = ([line["grad_norm"] for line in run.state.log_history if "grad_norm" in line] for run in runs)
    assert ours == pytest.approx(stock, rel=1e-4)
    assert {type(norm) for norm in ours} == {float}
    assert small.drift(*[small.snapshot(run.model) for run in runs]) <= small.WEIGHTS


def pending(values: list[float]) -> PendingNorm:
    return PendingNorm(lambda: bool(values), lambda: values[0])


def test_a_pending_norm_is_read_when_it_is_used() -> None:
    values: list[float] = []
    norm = pending(values)
    assert not norm.known
    values.append(2.5)
    assert norm.known
    assert [float(norm), norm.item(), f"{norm:.1f}", (norm * 2).item()] == [2.5, 2.5, "2.5", 5.0]
    assert torch.stack([norm, norm]).tolist() == [2.5, 2.5]
    assert bool(norm > 2)
    assert type(copy.deepcopy(norm)) is type(pickle.loads(pickle.dumps(norm))) is torch.Tensor
    values[0] = 3.5
    assert norm.to(torch.float32) == 3.5


def test_clipping_in_the_step_equals_clipping_before_it() -> None:
    engines = [mt.Engine(small.llama()) for _ in range(3)]
    norms = []
    for number, engine in enumerate(engines):
        optimizer = engine.optimizer(lr=1e-2, max_grad_norm=0.01 if number == 0 else None)
        for seed in range(3):
            engine.model(**small.batch(seed=seed)).loss.backward()
            norm: Any = None
            if number == 1:
                norm = optimizer.clip_next_step(0.01)
            elif number == 2:
                norm = engine.grad_norm()
                optimizer.scale_gradients(min(1.0, 0.01 / (norm + 1e-6)))
            optimizer.step()
            optimizer.zero_grad()
            norms.append(float(optimizer.grad_norm if norm is None else norm))
    assert norms[:3] == norms[3:6] == norms[6:]
    assert small.same(small.snapshot(engines[0].model), small.snapshot(engines[1].model))
    assert small.same(small.snapshot(engines[0].model), small.snapshot(engines[2].model))


def test_a_limit_for_the_next_step_holds_for_that_step_alone() -> None:
    engine = mt.Engine(small.llama())
    optimizer = engine.optimizer(lr=1e-2)
    engine.model(**small.batch()).loss.backward()
    norm = optimizer.clip_next_step(1e-3)
    before = engine.grad_norm()
    assert float(norm) == before, "before the step it is the norm of the gradients so far"
    optimizer.zero_grad()
    start = small.snapshot(engine.model)
    engine.model(**small.batch()).loss.backward()
    optimizer.step()
    moved = small.snapshot(engine.model)
    other = mt.Engine(small.llama())
    plain = other.optimizer(lr=1e-2)
    other.model(**small.batch()).loss.backward()
    plain.step()
    assert small.same(moved, small.snapshot(other.model))
    assert not small.same(moved, start)


READS = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal)
ON_THE_HOST = {"host_copies.py", "generators.py", "norm.py", "record.py"}
"""What these read is in host memory if the model is on a GPU too."""
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "gemma2": {"sliding_window": 4, "head_dim": 16},
    "mistral": {"sliding_window": 4},
}


class NotesReads(TorchDispatchMode):
    """Notes the files that read values of tensors: the innermost outside PyTorch that do more than pass a call on."""

    def __init__(self, files: list[str]) -> None:
        super().__init__()
        self._files = files

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket in READS:
            frames = [frame for frame in traceback.extract_stack()[:-1] if frame.name != "__torch_function__"]
            files = [Path(frame.filename) for frame in reversed(frames)]
            self._files.append(next(file.name for file in files if "torch" not in file.parts))
        return function(*args, **(kwargs or {}))


class Noted(TrainerCallback):
    """Notes what the user's thread reads in a step, from the second step on: the first compares two losses."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self._step = ExitStack()

    def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step:
            self._step.enter_context(NotesReads(self.files))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._step.close()


class NotedForwards(mt.Trainer):
    """Notes what is read in forwards, which run in threads of their own in windows."""

    micro_batches_are_independent = True
    noted: list[str]

    def compute_loss_context_manager(self) -> ExitStack:
        stack = super().compute_loss_context_manager()
        if self.state.global_step:
            stack.enter_context(NotesReads(self.noted))
        return stack


class AsInTransformers(mt.Trainer):
    """What the model reads on the host comes from the device."""

    def compute_loss_context_manager(self) -> ExitStack:
        return transformers.Trainer.compute_loss_context_manager(self)


def masked(kind: str) -> list[dict[str, torch.Tensor]]:
    """Rows, some of them padded or packed."""
    rows = small.rows()
    for number, row in enumerate(rows):
        mask = torch.ones_like(row["input_ids"])
        if number % 3:
            mask[: number % 5] = 0
        if kind == "packed":
            row["position_ids"] = torch.arange(small.LENGTH) % (number % 3 * 3 + 2)
        elif kind != "plain":
            row["attention_mask"] = {"full": torch.ones_like(mask), "left": mask, "right": mask.flip(0)}[kind]
    return rows


def masked_run(base: type, directory: Path, architecture: str, rows: str, *callbacks: Any, **changes: Any) -> Any:
    shape = {"vocab_size": small.VOCAB, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0}
    config = AutoConfig.for_model(architecture, **(shape | heads | ARCHITECTURES[architecture]))
    torch.manual_seed(0)
    return base(
        model=AutoModelForCausalLM.from_config(config),
        args=small.arguments(directory, **changes),
        train_dataset=masked(rows),
        data_collator=transformers.default_data_collator,
        callbacks=[*callbacks],
    )


@pytest.mark.parametrize("rows", ["plain", "full", "left", "right", "packed"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_step_reads_no_value_from_the_device(tmp_path: Path, architecture: str, rows: str) -> None:
    noted = Noted()
    trainer = masked_run(mt.Trainer, tmp_path, architecture, rows, noted, logging_steps=4)
    trainer.train()
    assert {*noted.files} <= ON_THE_HOST
    assert "norm.py" in noted.files


@pytest.mark.parametrize("rows", ["plain", "full"])
def test_micro_batches_of_a_window_read_no_value_from_the_device(tmp_path: Path, rows: str) -> None:
    trainer = masked_run(NotedForwards, tmp_path, "llama", rows, gradient_accumulation_steps=2)
    trainer.noted = []
    trainer.train()
    assert {*trainer.noted} - {"generators.py"} == {"host_copies.py"}


@pytest.mark.parametrize("rows", ["plain", "full", "left", "right", "packed"])
def test_reading_copies_changes_no_bit(tmp_path: Path, rows: str) -> None:
    runs = [masked_run(base, tmp_path, "mistral", rows, max_steps=3) for base in (mt.Trainer, AsInTransformers)]
    for run in runs:
        run.train()
    assert small.losses(runs[0]) == small.losses(runs[1])
    assert small.same(*[small.snapshot(run.model) for run in runs])
