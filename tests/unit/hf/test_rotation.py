"""Old checkpoints are deleted in the order they were saved, not by file times. The last saved is resumed."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests import small

import megatrain as mt
from megatrain.checkpoint import manifest
from megatrain.errors import CheckpointError
from megatrain.hf.checkpoint_list import last_complete

FUTURE = time.time() + 1e8


def new_trainer(directory: Path, kind: Any = mt.Trainer, seed: int = 0, **changes: Any) -> Any:
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    return kind(
        model=small.llama(seed, num_hidden_layers=1),
        args=small.arguments(directory, **options | changes),
        train_dataset=small.rows(),
        eval_dataset=small.rows(4),
    )


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != "run.jsonl")


def set_times(directory: Path, when: float) -> None:
    """Set all file times, as a restored backup or a changed clock does."""
    for path in [directory, *directory.rglob("*")]:
        os.utime(path, (when, when))


@pytest.mark.parametrize("when", [FUTURE, 0.0], ids=["in the future", "long ago"])
def test_file_times_are_ignored(tmp_path: Path, when: float) -> None:
    first = new_trainer(tmp_path, max_steps=2)
    first.train()
    for name in names(tmp_path):
        set_times(tmp_path / name, when)
    again = new_trainer(tmp_path, max_steps=4, save_total_limit=2)
    again.train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4"]
    assert last_complete(str(tmp_path)).endswith("checkpoint-4")


def test_a_new_run_in_a_directory_with_higher_steps(tmp_path: Path) -> None:
    """The new checkpoints have lower numbers, but the one just saved is never deleted."""
    new_trainer(tmp_path, max_steps=8, save_steps=4).train()
    new_trainer(tmp_path, max_steps=2, save_total_limit=1).train()
    assert names(tmp_path) == ["checkpoint-2"]


def test_a_restored_backup_keeps_its_age(tmp_path: Path) -> None:
    new_trainer(tmp_path, max_steps=1).train()
    shutil.copytree(tmp_path / "checkpoint-1", tmp_path / "kept")
    new_trainer(tmp_path, max_steps=3, save_total_limit=2).train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3", "kept"]
    shutil.move(tmp_path / "kept", tmp_path / "checkpoint-1")
    set_times(tmp_path / "checkpoint-1", FUTURE)
    new_trainer(tmp_path, max_steps=4, save_total_limit=2).train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4"]


@pytest.mark.parametrize("only_model", [False, True], ids=["whole", "only the model"])
def test_the_best_checkpoint_is_kept(tmp_path: Path, only_model: bool) -> None:
    options = {
        "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "greater_is_better": True,
        "load_best_model_at_end": True, "save_total_limit": 2, "max_steps": 4, "save_only_model": only_model,
    }  # fmt: skip
    trainer = new_trainer(tmp_path, **options)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1"), "the first loss must be the best"
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-4"]


def test_incomplete_checkpoints_are_neither_counted_nor_deleted(tmp_path: Path) -> None:
    new_trainer(tmp_path, max_steps=2).train()
    (tmp_path / "checkpoint-2" / manifest.FILE).unlink()
    (tmp_path / "checkpoint-notes").mkdir()
    new_trainer(tmp_path, max_steps=4, save_total_limit=2, save_steps=4).train()
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-4", "checkpoint-notes"]
    new_trainer(tmp_path, max_steps=5, save_total_limit=2, save_steps=5).train()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-5", "checkpoint-notes"]


def test_checkpoints_of_transformers_count_as_older(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    new_trainer(tmp_path, transformers.Trainer, max_steps=4, save_steps=2).train()
    for name in names(tmp_path):
        set_times(tmp_path / name, FUTURE)
    new_trainer(tmp_path, max_steps=6, save_steps=2, save_total_limit=2).train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-6"]
    assert [line for line in announced.messages if "which a stock Trainer wrote, was deleted" in line]
    assert last_complete(str(tmp_path)).endswith("checkpoint-6")
    # transformers' Trainer continues from our checkpoint, and its own checkpoint is then the newest.
    new_trainer(tmp_path, transformers.Trainer, max_steps=8, save_steps=2).train(resume_from_checkpoint=True)
    assert last_complete(str(tmp_path)).endswith("checkpoint-8")


def test_the_newest_checkpoint_is_the_last_saved(tmp_path: Path) -> None:
    """After a restart from step 1, checkpoints of the first run have higher numbers."""
    new_trainer(tmp_path, max_steps=4).train()
    new_trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert last_complete(str(tmp_path)).endswith("checkpoint-2")


# ---- checkpoints with NaN or infinite values


def spoil(trainer: Any, at: int, role: str, value: float) -> None:
    """Make one value of a weight or a moment not finite after the given step."""

    class Spoils(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == at:
                parameter: Any = trainer.model.model.layers[0].mlp.up_proj.weight
                slab = parameter.slab
                slab.before_write()
                if role == "weight":
                    slab.weight[slab.layout.segments[parameter.segment].offset + 3] = value
                else:
                    values = slab.moments[role].read(parameter.segment)
                    values.view(-1)[3] = value
                    slab.moments[role].write(parameter.segment, values)

    trainer.add_callback(Spoils())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("role", ["weight", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_a_checkpoint_that_is_not_finite_is_marked_and_skipped(
    tmp_path: Path, announced: pytest.LogCaptureFixture, role: str, value: float, bf16: bool
) -> None:
    trainer = new_trainer(tmp_path, bf16=bf16, save_total_limit=1, max_steps=3)
    spoil(trainer, 3, role, value)
    trainer.train()
    name = "model.layers.0.mlp.up_proj.weight" + ("" if role == "weight" else f"/{role}")
    assert manifest.read(tmp_path / "checkpoint-3")["nonfinite"] == [name]
    assert "nonfinite" not in manifest.read(tmp_path / "checkpoint-2")
    assert sum(f"NaN or infinite values in {name}" in line for line in announced.messages) == 1
    assert last_complete(str(tmp_path)).endswith("checkpoint-2"), "a marked checkpoint must not replace a finite one"
    assert any(f"checkpoint-3 was skipped: it holds NaN or infinite values in {name}" in x for x in announced.messages)
    announced.clear()
    # A checkpoint requested by name is loaded with a warning.
    again = new_trainer(tmp_path, bf16=bf16, seed=1)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert any("as requested" in line for line in announced.messages)


@pytest.mark.parametrize("width", ["bf16", "8bit", "4bit"])
@pytest.mark.parametrize("role", ["exp_avg", "exp_avg_sq"])
def test_moments_of_every_width_are_checked(tmp_path: Path, width: str, role: str) -> None:
    mt.init(optimizer_compression=width)
    trainer = mt.Trainer(
        model=small.llama(num_hidden_layers=1, hidden_size=64, intermediate_size=64),
        args=small.arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=1),
        train_dataset=small.rows(),
    )
    spoil(trainer, 2, role, float("inf"))
    trainer.train()
    assert "nonfinite" not in manifest.read(tmp_path / "checkpoint-1")
    assert manifest.read(tmp_path / "checkpoint-2")["nonfinite"] == [f"model.layers.0.mlp.up_proj.weight/{role}"]


def test_marked_checkpoints_have_their_own_limit(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    trainer = new_trainer(tmp_path, max_steps=6, save_total_limit=2)
    spoil(trainer, 3, "exp_avg_sq", float("inf"))
    trainer.train()
    assert names(tmp_path) == [f"checkpoint-{step}" for step in (1, 2, 5, 6)]
    assert sum("NaN or infinite values in" in line for line in announced.messages) == 1, (
        "the notice must be printed once"
    )


def test_infinite_buffers_and_frozen_weights_are_allowed(tmp_path: Path) -> None:
    model = small.llama(num_hidden_layers=1)
    model.register_buffer("mask", torch.full((4,), -float("inf")))
    with torch.no_grad():
        # The row of a token that does not occur in the data.
        model.model.embed_tokens.weight.requires_grad_(False)[0] = -float("inf")
    trainer = mt.Trainer(
        model=model, args=small.arguments(tmp_path, max_steps=1, save_strategy="steps"), train_dataset=small.rows()
    )
    trainer.train()
    assert "nonfinite" not in manifest.read(tmp_path / "checkpoint-1")


def test_a_nan_learning_rate_marks_the_checkpoint(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path, max_steps=3, save_total_limit=1)

    class Spoils(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                trainer.optimizer.param_groups[0]["lr"] = float("nan")

    trainer.add_callback(Spoils())
    with pytest.raises(mt.errors.SettingsError, match="parameter group 0 has lr=nan"):
        trainer.train()
    assert last_complete(str(tmp_path)).endswith("checkpoint-1")
    with pytest.raises(CheckpointError, match="lr=nan"):
        new_trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_engine_save_marks_and_announces_values_that_are_not_finite(
    tmp_path: Path, announced: pytest.LogCaptureFixture
) -> None:
    model = small.llama(num_hidden_layers=1)
    engine = mt.Engine(model, device="cpu")
    optimizer = engine.optimizer()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    engine.save(tmp_path, optimizer)
    assert manifest.read(tmp_path)["nonfinite"] == ["lm_head.weight"]
    announced.clear()
    engine.load(tmp_path, optimizer)
    assert any("NaN or infinite values in lm_head.weight" in line for line in announced.messages)


# ---- directories that cannot be resumed


def test_errors_say_what_the_directory_holds(tmp_path: Path) -> None:
    new_trainer(tmp_path, max_steps=2, save_only_model=True).train()
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("")
    small.llama().save_pretrained(tmp_path / "model")
    trainer = new_trainer(tmp_path, seed=1)
    before = small.snapshot(trainer.model)
    with pytest.raises(CheckpointError, match="has weights but no optimizer state"):
        trainer.engine.load(tmp_path / "checkpoint-2", trainer.create_optimizer())
    cases = {
        "nowhere": "does not exist",
        "file": "it is a file, not a directory",
        "empty": "it is empty",
        "notes": "it holds a.txt",
        "model": "it is a saved model, or an incomplete checkpoint",
        "checkpoint-2": "was saved with save_only_model=True: it has weights but no optimizer state",
    }
    for name, message in cases.items():
        with pytest.raises(CheckpointError, match=message):
            trainer.train(resume_from_checkpoint=str(tmp_path / name))
    with pytest.raises(ValueError, match=r"No valid checkpoint found in output directory.*which holds 2 that cannot"):
        trainer.train(resume_from_checkpoint=True)
    assert small.same(before, small.snapshot(trainer.model))


def test_a_weights_only_checkpoint_of_transformers(tmp_path: Path) -> None:
    new_trainer(tmp_path, transformers.Trainer, max_steps=1, save_only_model=True).train()
    with pytest.raises(CheckpointError, match="it has weights but no optimizer state"):
        new_trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_deleted_best_model_is_announced(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    options = {
        "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "greater_is_better": True,
        "load_best_model_at_end": True,
    }  # fmt: skip
    trainer = new_trainer(tmp_path, **options)

    class Deletes(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                shutil.rmtree(tmp_path / "checkpoint-1")

    trainer.add_callback(Deletes())
    trainer.train()
    assert any("which no longer exists" in line for line in announced.messages)


def test_optimizer_files_of_another_run_are_removed(tmp_path: Path) -> None:
    new_trainer(tmp_path, max_steps=1).train()
    assert (tmp_path / "checkpoint-1" / "optimizer.pt").is_file()
    (tmp_path / "checkpoint-1" / "notes.txt").write_text("mine")
    new_trainer(tmp_path, max_steps=1, optim="adamw_8bit").train()
    assert not (tmp_path / "checkpoint-1" / "optimizer.pt").exists()
    assert (tmp_path / "checkpoint-1" / "notes.txt").read_text() == "mine"
    manifest.verify(tmp_path / "checkpoint-1")
