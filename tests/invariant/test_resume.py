"""N steps, a stop, and N more steps with a new model and a new Trainer equal 2N steps bitwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import small

import megatrain as mt
from megatrain.store.parameter import states_of

HALF = 3


def trainer(build: Callable[..., Any], directory: Path, seed: int = 0, **changes: Any) -> mt.Trainer:
    options: dict[str, Any] = {"max_steps": 2 * HALF, "save_strategy": "steps", "save_steps": HALF}
    options |= {"weight_decay": 0.1, "warmup_steps": 2, "lr_scheduler_type": "cosine", "max_grad_norm": 0.5}
    args = small.arguments(directory, **(options | changes))
    return mt.Trainer(model=build(seed), args=args, train_dataset=small.rows())


def everything(run: mt.Trainer) -> dict[str, torch.Tensor]:
    """Weights, residuals, moments and step counts."""
    run.engine.synchronize()
    named: dict[str, Any] = dict(run.model.named_parameters())
    found = small.snapshot(run.model)
    for name, parameter in named.items():
        found |= {f"{name}/{role}": view.clone() for role, view in states_of(parameter).items()}
        found[f"{name}/step"] = torch.tensor(parameter.slab.steps[parameter.segment])
    return found


def logged(run: mt.Trainer) -> list[tuple[Any, ...]]:
    entries = [entry for entry in run.state.log_history if "loss" in entry]
    return [(e["step"], e["loss"], e["grad_norm"], e["learning_rate"]) for e in entries]


def assert_resumes(build: Callable[..., Any], directory: Path, resume: Any, **changes: Any) -> None:
    uninterrupted = trainer(build, directory, **changes)
    uninterrupted.train()
    for later in directory.glob(f"checkpoint-{2 * HALF}"):
        later.rename(directory / "the-end")
    # The new model has other initial weights, so that equality in the end is due to the checkpoint.
    assert not small.same(small.snapshot(build(1)), small.snapshot(build(0)))
    again = trainer(build, directory, seed=1, **changes)
    again.train(resume_from_checkpoint=True if resume is True else str(directory / resume))
    assert logged(again) == logged(uninterrupted)
    assert len(logged(again)) == 2 * HALF
    left, right = everything(uninterrupted), everything(again)
    assert small.same(left, right), [name for name in left if not torch.equal(left[name], right[name])]
    assert any(name.endswith("/exp_avg") and view.any() for name, view in left.items())


@pytest.mark.parametrize("resume", ["checkpoint-3", True], ids=["path", "True"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_n_plus_n_steps_equal_2n(tmp_path: Path, resume: Any, bf16: bool) -> None:
    assert_resumes(small.llama, tmp_path, resume, bf16=bf16)


def test_a_split_master_is_restored_to_its_last_bit(tmp_path: Path) -> None:
    """Otherwise the BF16 test above could not fail: residuals are not all zero, and they matter."""
    uninterrupted = trainer(small.llama, tmp_path, bf16=True)
    uninterrupted.train()
    residuals = [view for name, view in everything(uninterrupted).items() if name.endswith("/residual")]
    assert len(residuals) == len(list(uninterrupted.model.parameters()))
    assert all(view.any() for view in residuals)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_dropout_and_tied_weights(tmp_path: Path, bf16: bool) -> None:
    assert_resumes(small.gpt2, tmp_path, "checkpoint-3", bf16=bf16)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_accumulation(tmp_path: Path, bf16: bool) -> None:
    changes = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1, "bf16": bf16}
    assert_resumes(small.gpt2, tmp_path, "checkpoint-3", **changes)


@pytest.mark.parametrize("build", [small.mixtral, small.qwen3_moe], ids=["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_experts_with_other_names_on_disk(tmp_path: Path, build: Callable[..., Any], bf16: bool) -> None:
    assert_resumes(build, tmp_path, "checkpoint-3", bf16=bf16)


def test_frozen_parameters(tmp_path: Path) -> None:
    def half_frozen(seed: int) -> Any:
        model = small.llama(seed)
        model.model.layers[0].requires_grad_(False)
        model.model.embed_tokens.requires_grad_(False)
        return model

    assert_resumes(half_frozen, tmp_path, True)


def test_in_the_middle_of_an_epoch_and_shuffled(tmp_path: Path) -> None:
    """Sixteen rows in batches of two: step 11 is in the second epoch, which is shuffled anew."""
    changes = {"max_steps": 14, "save_steps": 11}
    uninterrupted = trainer(small.gpt2, tmp_path, **changes)
    uninterrupted.train()
    again = trainer(small.gpt2, tmp_path, seed=1, **changes)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-11"))
    assert logged(again) == logged(uninterrupted)
    assert small.same(everything(uninterrupted), everything(again))


def test_resumed_twice(tmp_path: Path) -> None:
    uninterrupted = trainer(small.gpt2, tmp_path, save_steps=2)
    uninterrupted.train()
    for stop in ("checkpoint-2", "checkpoint-4"):
        again = trainer(small.gpt2, tmp_path, seed=1, save_steps=2)
        again.train(resume_from_checkpoint=str(tmp_path / stop))
        assert small.same(everything(uninterrupted), everything(again))


def test_the_same_trainer_may_resume(tmp_path: Path) -> None:
    """Moments of undone steps must be dropped."""
    run = trainer(small.llama, tmp_path)
    run.train()
    end = everything(run)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert small.same(end, everything(run))


def test_threaded_lanes_save_what_is_pending(tmp_path: Path) -> None:
    """Saves right after a step, while its updates are pending."""
    uninterrupted = trainer(small.llama, tmp_path / "sync")
    uninterrupted.train()
    mt.init(debug=mt.Debug(lanes="threads"))
    assert_resumes(small.llama, tmp_path / "threads", "checkpoint-3")
    threaded = trainer(small.llama, tmp_path / "threads", seed=1)
    threaded.train(resume_from_checkpoint=str(tmp_path / "threads" / "checkpoint-3"))
    assert small.same(everything(uninterrupted), everything(threaded))
