"""A Trainer subclass with state gets its micro-batches in the order of transformers, one per call."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests import small
from torch.utils.data import DataLoader
from transformers import TrainerCallback

import megatrain as mt

ACCUMULATION = 4


def trainer_of(kind: type, directory: Path, model: Any = None, data: Any = None, **changes: Any) -> Any:
    extra = {name: changes.pop(name) for name in ("compute_loss_func", "callbacks") if name in changes}
    options = {"gradient_accumulation_steps": ACCUMULATION, "per_device_train_batch_size": 1, "max_steps": 3} | changes
    return kind(
        model=small.llama() if model is None else model,
        args=small.arguments(directory, **options),
        train_dataset=small.rows() if data is None else data,
        **extra,
    )


def trained(kind: type, directory: Path, **options: Any) -> Any:
    trainer = trainer_of(kind, directory, **options)
    trainer.train()
    return trainer


def window_sizes(trainer: Any) -> list[int]:
    """A list that collects the sizes of the windows which the engine opens from now on."""
    sizes: list[int] = []
    original_window = trainer.engine.window

    def window(tasks: Any, **options_of_window: Any) -> Any:
        sizes.append(len(tasks))
        return original_window(tasks, **options_of_window)

    trainer.engine.window = window
    return sizes


def assert_equal_runs(ours: Any, stock: Any) -> None:
    # The counting losses are larger, and LOSSES is the bound for losses between 4 and 8.
    assert small.losses(ours) == pytest.approx(small.losses(stock), abs=small.LOSSES, rel=small.LOSSES / 4)
    assert small.drift(small.snapshot(ours.model), small.snapshot(stock.model)) < small.WEIGHTS


def trainer_classes(methods: dict[str, Any]) -> tuple[type, type, type]:
    """A transformers Trainer with these methods, MegaMixin in front of it, and `mt.Trainer` with these methods."""
    stock = type("Theirs", (transformers.Trainer,), methods)
    return stock, type("Mixed", (mt.MegaMixin, stock), {}), type("Derived", (mt.Trainer,), methods)


class Counting:
    """Counts calls of one method. The loss depends on the count."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.n = 0
        self.seen: list[int] = []
        super().__init__(*args, **kwargs)


def counting_class(base: type, counted_method: str) -> type:
    class Counted(Counting, base):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            result = super().training_step(*args, **kwargs)
            self.n += counted_method == "training_step"
            return result

        def _prepare_inputs(self, inputs: Any) -> Any:
            self.n += counted_method == "_prepare_inputs"
            return super()._prepare_inputs(inputs)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.seen.append(self.n)
            result = super().compute_loss(*args, **kwargs)
            self.n += counted_method == "compute_loss"
            return result * (1 + self.seen[-1])

    return Counted


@pytest.mark.parametrize("counted_method", ["training_step", "_prepare_inputs", "compute_loss"])
def test_a_counting_subclass_counts_as_in_transformers(
    tmp_path: Path, counted_method: str, announced: pytest.LogCaptureFixture
) -> None:
    behind = counting_class(transformers.Trainer, counted_method)
    stock = trained(behind, tmp_path)
    first = counted_method == "_prepare_inputs"
    assert stock.seen == list(range(first, 3 * ACCUMULATION + first))
    for kind in (type("Mixed", (mt.MegaMixin, behind), {}), counting_class(mt.Trainer, counted_method)):
        announced.clear()
        ours = trained(kind, tmp_path)
        assert ours.seen == stock.seen
        assert_equal_runs(ours, stock)
        lines = [line for line in announced.messages if "micro_batches_are_independent = True" in line]
        assert len(lines) == 1
        assert "Counted overrides" in lines[0]


def test_one_overridden_method_is_enough(tmp_path: Path) -> None:
    """Each method alone makes micro-batches run one after the other."""
    for method in ("_prepare_inputs", "compute_loss_context_manager"):
        calls: list[Any] = []

        def record(self: Any, *args: Any, method: str = method, calls: Any = calls, **kwargs: Any) -> Any:
            calls.append(sum(p.grad is not None for p in self.model.parameters()))
            return getattr(transformers.Trainer, method)(self, *args, **kwargs)

        for kind in trainer_classes({method: record}):
            trained(kind, tmp_path, max_steps=1)
        total = len(list(small.llama().parameters()))
        assert calls == ([0] + [total] * (ACCUMULATION - 1)) * 3, method


def test_random_numbers_of_a_subclass_match_transformers(tmp_path: Path) -> None:
    """No generator is reseeded between micro-batches, so a subclass draws the same numbers."""
    drawn: list[float] = []

    def prepare(self: Any, inputs: Any) -> Any:
        drawn.append(float(torch.rand(())))
        return transformers.Trainer._prepare_inputs(self, inputs)

    runs = [trained(kind, tmp_path, model=small.gpt2()) for kind in trainer_classes({"_prepare_inputs": prepare})]
    third = len(drawn) // 3
    assert drawn[:third] == drawn[third : 2 * third] == drawn[2 * third :]
    assert small.losses(runs[1]) == small.losses(runs[2]) == pytest.approx(small.losses(runs[0]), abs=small.LOSSES)


# ---- classes whose micro-batches are independent


def test_unchanged_trainers_use_the_window(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    sequences = type("Sequences", (mt.MegaMixin, transformers.Seq2SeqTrainer), {})
    trainer = trainer_of(mt.Trainer, tmp_path)
    sizes = window_sizes(trainer)
    trainer.train()
    assert sizes == [ACCUMULATION] * 3
    args = transformers.Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), gradient_accumulation_steps=4, per_device_train_batch_size=1, max_steps=1,
        use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = sequences(model=small.llama(), args=args, train_dataset=small.rows())
    sizes = window_sizes(trainer)
    trainer.train()
    assert sizes == [4]
    assert not any("one after the other" in line for line in announced.messages)


def loss_of(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    return transformers.Trainer.compute_loss(self, model, inputs, *args, **kwargs)


def test_a_class_that_declares_independence_uses_the_window(tmp_path: Path) -> None:
    stock, *ours = trainer_classes({"compute_loss": loss_of, "micro_batches_are_independent": True})
    expected = trained(stock, tmp_path)
    for kind in ours:
        trainer = trainer_of(kind, tmp_path)
        sizes = window_sizes(trainer)
        trainer.train()
        assert sizes == [1] * ACCUMULATION + [ACCUMULATION] * 2, "the first step must run without a window"
        assert_equal_runs(trainer, expected)


def test_a_declaration_does_not_apply_to_subclasses(tmp_path: Path) -> None:
    declared = type("Declared", (mt.Trainer,), {"compute_loss": loss_of, "micro_batches_are_independent": True})
    for kind in (
        type("Further", (declared,), {"compute_loss": loss_of}),
        type("Not", (declared,), {"micro_batches_are_independent": False}),
    ):
        trainer = trainer_of(kind, tmp_path, max_steps=1)
        sizes = window_sizes(trainer)
        trainer.train()
        assert sizes == []
    trainer = trainer_of(kind, tmp_path, max_steps=1)
    trainer.micro_batches_are_independent = True
    sizes = window_sizes(trainer)
    trainer.train()
    assert sum(sizes) == ACCUMULATION


def test_a_method_set_on_the_object_is_an_override(tmp_path: Path) -> None:
    trainer = trainer_of(mt.Trainer, tmp_path, max_steps=1)
    trainer.compute_loss = types.MethodType(loss_of, trainer)
    sizes = window_sizes(trainer)
    trainer.train()
    assert sizes == []


def test_a_patched_method_of_transformers_is_an_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = transformers.Trainer.compute_loss
    monkeypatch.setattr(transformers.Trainer, "compute_loss", lambda *args, **kwargs: original(*args, **kwargs))
    trainer = trainer_of(mt.Trainer, tmp_path, max_steps=1)
    sizes = window_sizes(trainer)
    trainer.train()
    assert sizes == []


class Loss:
    """Weights each micro-batch by the number of calls so far."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        self.calls += 1
        logits = outputs.logits[:, :-1].flatten(0, 1)
        return self.calls * torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten()) / ACCUMULATION


def test_compute_loss_func_runs_one_micro_batch_at_a_time(tmp_path: Path) -> None:
    stock = trained(transformers.Trainer, tmp_path, compute_loss_func=Loss())
    ours = trainer_of(mt.Trainer, tmp_path, compute_loss_func=Loss())
    sizes = window_sizes(ours)
    ours.train()
    assert sizes == []
    assert_equal_runs(ours, stock)


# ---- between micro-batches


class Between(TrainerCallback):
    """Records the norm of one gradient after each micro-batch except the last."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.norms.append(float(model.lm_head.weight.grad.norm()))


def test_gradients_between_micro_batches(tmp_path: Path) -> None:
    callbacks_of_runs = [Between(), Between()]
    stock, ours = (
        trained(kind, tmp_path, callbacks=[callback])
        for kind, callback in zip((transformers.Trainer, mt.Trainer), callbacks_of_runs, strict=True)
    )
    assert callbacks_of_runs[1].norms == pytest.approx(callbacks_of_runs[0].norms, rel=1e-4)
    assert len(set(callbacks_of_runs[0].norms)) == 3 * (ACCUMULATION - 1)
    assert_equal_runs(ours, stock)


class StopsEpoch(TrainerCallback):
    """Ends the epoch in the middle of a step. The partial sum of gradients stays for the next step."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = state.global_step == 1


def test_an_epoch_that_ends_in_the_middle_of_a_step(tmp_path: Path) -> None:
    stock, ours = (trained(kind, tmp_path, callbacks=[StopsEpoch()]) for kind in (transformers.Trainer, mt.Trainer))
    assert ours.state.global_step == stock.state.global_step
    assert_equal_runs(ours, stock)


def test_a_loader_that_returns_the_same_object_every_time(tmp_path: Path) -> None:
    batch = small.batch(1)

    def loader(self: Any) -> DataLoader[Any]:
        return DataLoader(range(12), batch_size=1, collate_fn=lambda rows: batch)  # type: ignore[arg-type]

    runs = [
        trained(
            type("Loading", (kind,), {"get_train_dataloader": loader}), tmp_path,
            optim="sgd", learning_rate=0.1, max_grad_norm=0.0,
        )
        for kind in (transformers.Trainer, mt.Trainer)
    ]  # fmt: skip
    assert_equal_runs(runs[1], runs[0])


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_one_micro_batch_at_a_time_equals_the_window_bitwise(tmp_path: Path, max_grad_norm: float) -> None:
    """Without dropout, with and without updates that start in the last backward."""
    together = trained(mt.Trainer, tmp_path, max_grad_norm=max_grad_norm, max_steps=4)
    in_turn = type("InTurn", (mt.Trainer,), {"compute_loss": loss_of})
    result = trained(in_turn, tmp_path, max_grad_norm=max_grad_norm, max_steps=4)
    assert small.losses(result) == small.losses(together)
    assert small.same(small.snapshot(result.model), small.snapshot(together.model))


def test_a_direct_call_of_training_step_needs_no_optimizer(tmp_path: Path) -> None:
    result = []
    for kind in (transformers.Trainer, mt.Trainer):
        trainer = trainer_of(kind, tmp_path)
        loss = trainer.training_step(trainer.model, small.batch(2), torch.tensor(14))
        result.append((float(loss), float(trainer.model.lm_head.weight.grad.norm())))
    assert result[1] == pytest.approx(result[0], rel=1e-5)
