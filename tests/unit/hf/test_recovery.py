"""A step that runs out of GPU memory is undone and repeated bitwise. If RAM runs out, the run is saved and stopped."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from tests import small

import megatrain as mt
from megatrain.errors import OutOfRam
from megatrain.hardware.ram_monitor import SHORT
from megatrain.hf.checkpoint_list import last_complete


class OomInBlock:
    """Raises CUDA's out-of-memory error in a block, at the given calls of its MLP or in their backward.

    With policy `store` the calls are the forwards. With other policies each recompute is a call too.
    """

    def __init__(self, model: Any, calls: set[int], where: str, layer: int = 1) -> None:
        self.calls, self.seen, self.where = calls, 0, where
        block = model.model.layers[layer] if hasattr(model, "model") else model.transformer.h[layer]
        block.mlp.register_forward_hook(self._forward)

    def _forward(self, module: Any, args: Any, output: Any) -> None:
        self.seen += 1
        if self.seen not in self.calls:
            return
        if self.where == "forward":
            self._raise()
        if output.requires_grad:
            output.register_hook(lambda _: self._raise())

    @staticmethod
    def _raise() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity")


def trained(
    directory: Path,
    fails: Callable[[Any], OomInBlock] | None = None,
    model: Any = None,
    policy: Any = "store",
    callbacks: Any = (),
    **changes: Any,
) -> Any:
    mt.init(policy=policy)
    model = small.gpt2() if model is None else model
    trainer = mt.Trainer(
        model=model,
        args=small.arguments(directory, max_steps=3, **changes),
        train_dataset=small.rows(24),
        callbacks=[*callbacks],
    )
    if fails is not None:
        fails(model)
    trainer.train()
    return trainer


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("policy", ["store", "recompute"])
@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_a_step_that_ran_out_of_memory_is_repeated_bitwise(
    tmp_path: Path,
    announced: pytest.LogCaptureFixture,
    where: str,
    accumulation: int,
    policy: str,
    max_grad_norm: float,
) -> None:
    """GPT-2 with dropout, so random number generators that are not restored are detected."""
    changes = {"gradient_accumulation_steps": accumulation, "max_grad_norm": max_grad_norm, "policy": policy}
    expected = trained(tmp_path / "a", **changes)
    failing: list[OomInBlock] = []
    # The call is in the first step: its last forward or, with recompute, the first recompute.
    call = accumulation + (where == "backward" and policy == "recompute")
    repeated = trained(
        tmp_path / "b", lambda model: failing.append(OomInBlock(model, {call}, where)) or failing[0], **changes
    )
    assert failing[0].seen > call
    assert any("the step was undone" in line for line in announced.messages)
    assert small.losses(repeated) == small.losses(expected)
    assert small.same(small.snapshot(repeated.model), small.snapshot(expected.model))


def test_half_as_many_graphs_are_stored_afterwards(tmp_path: Path) -> None:
    trainer = trained(
        tmp_path, lambda model: OomInBlock(model, {2}, "forward"), model=small.llama(num_hidden_layers=4),
        policy={"model.layers.*": "store"},
    )  # fmt: skip
    policies = [trainer.engine.memory_limit.policies[f"model.layers.{i}"] for i in range(4)]
    assert policies == ["store", "store", "recompute", "recompute"]


def test_without_graphs_inputs_are_offloaded(tmp_path: Path) -> None:
    trainer = trained(tmp_path, lambda model: OomInBlock(model, {2}, "forward"), policy="recompute")
    assert trainer.engine.memory_limit.policies["transformer.h.0"] == "offload"
    assert trainer.engine.memory_limit.exhausted


def test_a_step_is_repeated_only_once(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        trained(tmp_path, lambda model: OomInBlock(model, {2, 3}, "forward"))


def test_an_error_without_memory_to_free_says_so(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError) as error:
        trained(tmp_path, lambda model: OomInBlock(model, {2}, "forward"), policy="offload")
    assert any("blocks already keep nothing on the GPU" in note for note in error.value.__notes__)


def test_a_step_whose_updates_have_started_cannot_be_undone(tmp_path: Path) -> None:
    """Without clipping and with a size known to fit, later blocks are already updated when the backward fails."""
    with pytest.raises(torch.OutOfMemoryError) as error:
        trained(tmp_path, lambda model: OomInBlock(model, {2}, "backward", layer=0), max_grad_norm=0.0)
    assert any("updates had started in its backward" in note for note in error.value.__notes__)


def test_a_changed_buffer_cannot_be_undone(tmp_path: Path) -> None:
    model = small.llama()
    model.register_buffer("seen", torch.zeros(()))
    model.model.layers[0].register_forward_pre_hook(lambda *_: model.seen.add_(1) and None)
    with pytest.raises(torch.OutOfMemoryError) as error:
        trained(tmp_path, lambda model: OomInBlock(model, {1}, "forward"), model=model)
    assert any("buffer seen" in note for note in error.value.__notes__)


def test_a_replaced_buffer_cannot_be_undone(tmp_path: Path) -> None:
    model = small.llama()
    model.register_buffer("seen", torch.zeros(()))
    model.model.layers[0].register_forward_pre_hook(lambda *_: setattr(model, "seen", model.seen + 1))
    with pytest.raises(torch.OutOfMemoryError) as error:
        trained(tmp_path, lambda model: OomInBlock(model, {1}, "forward"), model=model)
    assert any("buffer seen" in note for note in error.value.__notes__)


@pytest.mark.parametrize("front", [True, False], ids=["MegaMixin in front", "in front of MegaMixin"])
@pytest.mark.parametrize("method", ["training_step", "_prepare_inputs", "compute_loss"])
def test_an_overridden_method_is_not_called_again(tmp_path: Path, method: str, front: bool) -> None:
    class Counting:
        calls = 0

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return getattr(super(Counting, self), method)(*args, **kwargs)

    setattr(Counting, method, count)
    mt.init(policy="store")
    model = small.llama()
    bases = (mt.MegaMixin, Counting, transformers.Trainer) if front else (Counting, mt.Trainer)
    trainer = type("Mixed", bases, {})(model=model, args=small.arguments(tmp_path), train_dataset=small.rows())
    OomInBlock(model, {2}, "forward")
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert trainer.calls == 2


def test_a_size_that_fitted_only_with_less_memory_is_not_known_to_fit(tmp_path: Path) -> None:
    """Later steps use more memory again, and without clipping they could not be undone."""
    trainer = trained(
        tmp_path, lambda model: OomInBlock(model, {1, 4}, "backward", layer=0), max_grad_norm=0.0,
        model=small.llama(num_hidden_layers=8),
    )  # fmt: skip
    assert trainer.state.global_step == 3


def test_python_and_numpy_generators_are_restored(tmp_path: Path) -> None:
    drawn: list[tuple[float, float]] = []

    class Drawing(mt.Trainer):  # type: ignore[misc]
        micro_batches_are_independent = True

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            drawn.append((random.random(), numpy.random.rand()))
            return super().compute_loss(*args, **kwargs)

    mt.init(policy="store")
    model = small.llama()
    trainer = Drawing(model=model, args=small.arguments(tmp_path, max_steps=2), train_dataset=small.rows())
    OomInBlock(model, {1}, "forward")
    trainer.train()
    assert len(drawn) == 3
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_new_size_does_not_update_in_its_backward(tmp_path: Path) -> None:
    """Without clipping, updates could start in the backward, and the step could not be undone."""
    data = [{"input_ids": row["input_ids"][:4]} for row in small.rows(4)] + small.rows(4)
    mt.init(policy="store")
    model = small.llama()
    trainer = mt.Trainer(
        model=model,
        args=small.arguments(tmp_path, max_steps=4, max_grad_norm=0.0, train_sampling_strategy="sequential"),
        train_dataset=[{"input_ids": row["input_ids"]} for row in data],
    )
    # Updates may start early in the second of two short steps. The third step is longer and fails in its backward.
    fails = OomInBlock(model, {3}, "backward", layer=0)
    trainer.train()
    assert fails.seen == 3 + 2 + 1, "expected a repeated third step with recomputes, and a fourth step"
    assert trainer.state.global_step == 4


class Reads(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_a_norm_that_ran_out_of_memory_is_computed_again(
    tmp_path: Path,
    announced: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    accumulation: int,
    max_grad_norm: float,
) -> None:
    """No weight has changed between the backward and the step. The norm is computed between them if a callback may read
    clipped gradients there."""
    changes = {"gradient_accumulation_steps": accumulation, "max_grad_norm": max_grad_norm, "callbacks": [Reads()]}
    expected = trained(tmp_path / "a", **changes)
    calls = []
    norm = mt.Engine.grad_norm

    def failing(engine: mt.Engine) -> float:
        calls.append(engine)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity")
        return norm(engine)

    monkeypatch.setattr(mt.Engine, "grad_norm", failing)
    repeated = trained(tmp_path / "b", **changes)
    assert len(calls) == 3 + 1
    assert any("the gradient norm is computed again" in line for line in announced.messages)
    assert small.losses(repeated) == small.losses(expected)
    assert small.same(small.snapshot(repeated.model), small.snapshot(expected.model))


def test_a_norm_is_computed_at_most_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mt.Engine, "grad_norm", lambda engine: OomInBlock._raise())
    with pytest.raises(torch.OutOfMemoryError):
        trained(tmp_path, callbacks=[Reads()])


def test_longer_text_with_an_image_of_constant_size_is_a_new_size(tmp_path: Path) -> None:
    """The largest tensor of a batch does not determine the sizes of the others."""

    class Seeing(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *args: Any, pixel_values: Any = None, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        ids = torch.stack([row["input_ids"] for row in rows])
        return {"input_ids": ids, "labels": ids, "pixel_values": torch.zeros(len(rows), 1000)}

    mt.init(policy="store")
    model = Seeing(small.llama().config)
    trainer = mt.Trainer(
        model=model,
        args=small.arguments(
            tmp_path, max_steps=4, max_grad_norm=0.0, train_sampling_strategy="sequential", remove_unused_columns=False
        ),
        train_dataset=[{"input_ids": row["input_ids"][:4]} for row in small.rows(4)] + small.rows(4),
        data_collator=collate,
    )
    OomInBlock(model, {3}, "backward", layer=0)
    trainer.train()
    assert trainer.state.global_step == 4


# ---- in a training loop


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("policy", ["store", "recompute", "offload"])
@pytest.mark.parametrize("window", [False, True])
def test_a_training_loop_can_continue_after_zero_grad(where: str, policy: str, window: bool) -> None:
    def run(failing: bool) -> Any:
        model = small.llama()
        engine = mt.Engine(model, device="cpu", policy=policy)
        optimizer = engine.optimizer(lr=1e-2, max_grad_norm=1.0)
        fails = OomInBlock(model, set(), where)

        def step(seed: int) -> None:
            if window:
                tasks = [lambda k=k: model(**small.batch(2, seed=2 * seed + k)).loss.backward() for k in range(2)]
                engine.window(tasks, full_step=True)
            else:
                model(**small.batch(2, seed=seed)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step(0)
        if failing:
            # With recompute, the first call after all forwards.
            again = where == "backward" and policy != "store"
            fails.calls = {fails.seen + 1 + (2 if window else 1) * again}
            with pytest.raises(torch.OutOfMemoryError) as error:
                step(1)
            assert any("zero_grad()" in note for note in error.value.__notes__)
            optimizer.zero_grad()
        step(1)
        step(2)
        return small.snapshot(model)

    assert small.same(run(True), run(False))


# ---- RAM


def test_a_run_short_of_ram_is_saved_and_resumes_bitwise(
    tmp_path: Path,
) -> None:
    free = [1 << 40]
    trainer = mt.Trainer(model=small.llama(), args=small.arguments(tmp_path, max_steps=4), train_dataset=small.rows())
    trainer.engine.ram._left = lambda: free[0]

    class LowersFreeRam(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            free[0] = int(SHORT[1] * trainer.engine.ram._limit) - 1 if state.global_step == 1 else 1 << 40
            free[0] = min(free[0], SHORT[0] - 1) if state.global_step == 1 else free[0]

    trainer.add_callback(LowersFreeRam())
    with pytest.raises(OutOfRam, match=r"stopped after step 2 and saved in .*checkpoint-2"):
        trainer.train()
    assert (tmp_path / "checkpoint-2" / "model.safetensors").exists()

    uninterrupted = mt.Trainer(
        model=small.llama(), args=small.arguments(tmp_path / "b", max_steps=4), train_dataset=small.rows()
    )
    uninterrupted.train()
    resumed = mt.Trainer(model=small.llama(), args=small.arguments(tmp_path, max_steps=4), train_dataset=small.rows())
    resumed.train(resume_from_checkpoint=True)
    assert small.same(small.snapshot(resumed.model), small.snapshot(uninterrupted.model))


def run_short_after(trainer: Any, steps: int) -> None:
    """Make RAM run short after the given number of steps."""
    free = [1 << 40]
    trainer.engine.ram._left = lambda: free[0]
    low = min(int(SHORT[1] * trainer.engine.ram._limit), SHORT[0]) - 1

    class LowersFreeRam(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            free[0] = low if state.global_step == steps - 1 else free[0]

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            free[0] = 1 << 40

    trainer.add_callback(LowersFreeRam())


BEST = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "greater_is_better": True}
"""The loss falls, so the first step stays the best."""


@pytest.mark.parametrize(
    "changes",
    [
        BEST | {"save_strategy": "best"},
        BEST | {"save_strategy": "best", "eval_steps": 3},
        {"save_only_model": True},
        BEST | {"save_strategy": "best", "save_only_model": True},
        BEST | {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "load_best_model_at_end": True},
        {"save_strategy": "epoch"},
        {"save_strategy": "no", "save_total_limit": 1},
    ],
    ids=["best", "best, no evaluation", "only model", "best, only model", "limit", "epoch", "no"],
)
@pytest.mark.parametrize("stale", [False, True])
def test_the_checkpoint_of_a_run_short_of_ram_can_be_resumed(
    tmp_path: Path, changes: dict[str, Any], stale: bool
) -> None:
    def new_trainer(directory: Path, seed: int = 0) -> Any:
        return mt.Trainer(
            model=small.llama(seed),
            args=small.arguments(directory, max_steps=4, **changes),
            train_dataset=small.rows(),
            eval_dataset=small.rows(4),
        )

    if stale:
        # Another run has left a complete checkpoint of the same step in this directory.
        old = mt.Trainer(
            model=small.llama(3),
            args=small.arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2),
            train_dataset=small.rows(),
        )
        old.train()
        old.engine.close()
    trainer = new_trainer(tmp_path)
    run_short_after(trainer, 2)
    with pytest.raises(OutOfRam, match=r"stopped after step 2 and saved in .*checkpoint-2; ") as error:
        trainer.train()
    assert f"resume_from_checkpoint={str(tmp_path / 'checkpoint-2')!r}" in str(error.value)
    assert trainer.args.save_only_model == changes.get("save_only_model", False)
    assert trainer.args.save_total_limit == changes.get("save_total_limit")
    uninterrupted = new_trainer(tmp_path / "whole")
    uninterrupted.train()
    resumed = new_trainer(tmp_path, seed=5)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4
    if "load_best_model_at_end" not in changes:
        assert small.same(small.snapshot(resumed.model), small.snapshot(uninterrupted.model))


def test_a_run_short_of_ram_in_its_last_step_ends_normally(tmp_path: Path) -> None:
    trainer = mt.Trainer(model=small.llama(), args=small.arguments(tmp_path, max_steps=2), train_dataset=small.rows())
    run_short_after(trainer, 2)
    assert trainer.train().global_step == 2


def test_an_evaluation_that_runs_out_of_ram_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = mt.Trainer(
        model=small.llama(), args=small.arguments(tmp_path, max_steps=4, **BEST | {"eval_steps": 2}),
        train_dataset=small.rows(), eval_dataset=small.rows(4),
    )  # fmt: skip
    run_short_after(trainer, 2)

    def evaluate(*args: Any, **kwargs: Any) -> None:
        raise OutOfRam("none left")

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    with pytest.raises(OutOfRam, match="none left"):
        trainer.train()
    assert last_complete(str(tmp_path)).endswith("checkpoint-2")


class SavesElsewhere(mt.Trainer):
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Saves no checkpoint in the output directory."""


def test_a_run_short_of_ram_with_an_overridden_save(tmp_path: Path) -> None:
    trainer = SavesElsewhere(model=small.llama(), args=small.arguments(tmp_path), train_dataset=small.rows())
    run_short_after(trainer, 1)
    with pytest.raises(OutOfRam, match="no checkpoint was saved"):
        trainer.train()


@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("block", [0, 7])
def test_running_out_of_ram_in_a_step_saves_the_steps_before_it(tmp_path: Path, block: int, clip: float) -> None:
    """RAM runs out in the third step, at its first block or in its backward, where updates start without clipping."""
    options = {"max_steps": 4, "max_grad_norm": clip, "lr_scheduler_type": "constant"}
    uninterrupted = mt.Trainer(
        model=small.llama(), args=small.arguments(tmp_path / "whole", **options), train_dataset=small.rows()
    )
    uninterrupted.train()
    trainer = mt.Trainer(
        model=small.llama(), args=small.arguments(tmp_path / "out", **options), train_dataset=small.rows()
    )
    original_check, checks = trainer.engine.ram.check, []

    def fails() -> None:
        checks.append(trainer.state.global_step)
        if checks.count(2) == block + 1:
            raise OutOfRam("RAM is running out; stopped")
        original_check()

    trainer.engine.ram.check = fails
    moved = block > 0 and not clip
    with pytest.raises(OutOfRam) as error:
        trainer.train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    assert checkpoint.exists() == (not moved)
    if moved:
        assert "updates of the step after it had started" in error.value.__notes__[0]
        return
    assert f"stopped after step 2 and saved in {checkpoint}" in str(error.value)
    resumed = mt.Trainer(
        model=small.llama(seed=1), args=small.arguments(tmp_path / "out", **options), train_dataset=small.rows()
    )
    resumed.train(resume_from_checkpoint=True)
    assert small.same(small.snapshot(resumed.model), small.snapshot(uninterrupted.model))
