"""A Trainer records its run in the output directory: the exact loss of every step and why the run ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import small
from tests.tiny import differences, roles
from transformers import TrainerCallback

import megatrain as mt
from megatrain.hf.checkpoint_list import last_complete


def recorded_lines(directory: Path, event: str | None = None) -> list[dict[str, Any]]:
    all_lines = [json.loads(line) for line in (directory / "run.jsonl").read_text().splitlines()]
    return [line for line in all_lines if event in (None, line["event"])]


def new_trainer(directory: Path, kind: Any = None, model: Any = None, **changes: Any) -> Any:
    extra = {name: changes.pop(name) for name in ("callbacks", "eval_dataset") if name in changes}
    return (kind or mt.Trainer)(
        model=model or small.llama(), args=small.arguments(directory, **changes), train_dataset=small.rows(32), **extra
    )


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_every_loss_is_exact(tmp_path: Path, accumulation: int, max_grad_norm: float) -> None:
    options = {"gradient_accumulation_steps": accumulation, "max_grad_norm": max_grad_norm}
    trainer = new_trainer(tmp_path / "each", **options)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    new_trainer(tmp_path / "rare", logging_steps=500, **options).train()
    for directory in (tmp_path / "each", tmp_path / "rare"):
        steps = recorded_lines(directory, "step")
        for name in ("step", "loss", "grad_norm", "learning_rate"):
            assert [step[name] for step in steps] == [entry[name] for entry in logged]
        assert {step["tokens"] for step in steps} == {2 * small.LENGTH * accumulation}


def test_recording_is_bitwise_neutral_and_can_be_turned_off(tmp_path: Path) -> None:
    states = []
    for record in (True, False):
        mt.init(record=record)
        trainer = new_trainer(tmp_path / str(record), gradient_accumulation_steps=2)
        trainer.train()
        states.append(roles(trainer.engine))
    assert not differences(*states)
    assert (tmp_path / "True" / "run.jsonl").exists()
    assert not (tmp_path / "False" / "run.jsonl").exists()


def test_arguments_evaluations_saves_and_notices_are_recorded(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer = new_trainer(tmp_path, eval_dataset=small.rows(4), hub_token="hf_very_secret", run_name="mine", **options)
    trainer.train()
    start = recorded_lines(tmp_path, "start")[0]
    assert start["arguments"]["run_name"] == "mine"
    assert start["arguments"]["eval_steps"] == 2
    assert start["settings"]["record"] is True
    assert start["plan"] is None
    assert "hf_very_secret" not in (tmp_path / "run.jsonl").read_text()
    assert [line["step"] for line in recorded_lines(tmp_path, "evaluation")] == [2, 4]
    assert all(line["eval_loss"] > 0 for line in recorded_lines(tmp_path, "evaluation"))
    saves = recorded_lines(tmp_path, "save")
    assert [Path(line["path"]).name for line in saves] == ["checkpoint-2", "checkpoint-4"]
    assert any("checkpoint-4 written" in line["text"] for line in recorded_lines(tmp_path, "notice"))
    assert not any("step 1/4" in line["text"] for line in recorded_lines(tmp_path, "notice"))
    assert recorded_lines(tmp_path)[-1]["reason"] == "finished"
    trainer.evaluate()
    assert recorded_lines(tmp_path)[-1]["event"] == "end"


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "lr_scheduler_type": "constant"}
    new_trainer(tmp_path, max_steps=2, **options).train()
    assert last_complete(str(tmp_path)) == str(tmp_path / "checkpoint-2")
    new_trainer(tmp_path, max_steps=4, **options).train(resume_from_checkpoint=True)
    new_trainer(tmp_path / "whole", max_steps=4, lr_scheduler_type="constant").train()
    assert [line["resumed_from_step"] for line in recorded_lines(tmp_path, "start")] == [None, 2]
    losses = [(line["step"], line["loss"]) for line in recorded_lines(tmp_path, "step")]
    assert losses == [(line["step"], line["loss"]) for line in recorded_lines(tmp_path / "whole", "step")]


def test_one_trainer_evaluates_and_trains_twice(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path, max_steps=2, dataloader_num_workers=1)
    trainer.evaluate(small.rows(4))
    assert not (tmp_path / "run.jsonl").exists()
    trainer.train()
    trainer.train()
    kinds = [line["event"] for line in recorded_lines(tmp_path)]
    assert kinds == ["start", "step", "step", "end"] * 2
    assert [line["step"] for line in recorded_lines(tmp_path, "step")] == [1, 2, 1, 2]


class At(TrainerCallback):
    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.act()


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "reason"), [(KeyboardInterrupt(), "interrupted"), (RuntimeError("bad luck"), "failed")]
)
def test_the_reason_of_the_end_is_recorded(tmp_path: Path, error: BaseException, reason: str) -> None:
    with pytest.raises(type(error)):
        new_trainer(tmp_path, callbacks=[At(2, lambda: fail(error))]).train()
    *_, step, end = recorded_lines(tmp_path)
    assert (step["event"], step["step"]) == ("step", 2)
    assert end["reason"] == reason
    assert end["error"].startswith(type(error).__name__)


def test_sigterm_is_recorded_as_the_reason(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        new_trainer(tmp_path, callbacks=[At(2, lambda: os.kill(os.getpid(), signal.SIGTERM))]).train()
    assert recorded_lines(tmp_path)[-1]["reason"] == "sigterm"


class NanLoss(mt.Trainer):
    """A subclass whose loss is NaN in one step."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss * float("nan") if self.state.global_step == 1 else loss


def test_a_nan_loss_of_a_subclass(tmp_path: Path) -> None:
    new_trainer(tmp_path, kind=NanLoss, max_steps=3, gradient_accumulation_steps=2).train()
    steps = recorded_lines(tmp_path, "step")
    assert [step["loss"] is None for step in steps] == [False, True, False]
    assert steps[1]["not_finite"] == {"loss": "nan", "grad_norm": "nan"}
    assert steps[1]["skipped"] is True


def test_an_unwritable_record_does_not_stop_the_run(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run.jsonl").mkdir()
    (tmp_path / "run.jsonl" / "run.jsonl").symlink_to("/dev/full")
    trainer = new_trainer(tmp_path)
    assert trainer.train().global_step == 4
    assert sum("cannot be written" in line for line in announced.messages) == 1


def test_a_read_only_directory(announced: pytest.LogCaptureFixture) -> None:
    assert new_trainer(Path("/proc")).train().global_step == 4
    assert sum("/proc/run.jsonl cannot be written" in line for line in announced.messages) == 1


def test_a_directory_that_vanishes(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "out"
    trainer = new_trainer(out, callbacks=[At(2, lambda: shutil.rmtree(out))], save_strategy="steps", save_steps=3)
    assert trainer.train().global_step == 4
    assert (out / "checkpoint-4" / "model.safetensors").exists()
    assert sum("run.jsonl cannot be written (it was deleted)" in line for line in announced.messages) == 1


def test_the_record_keeps_no_graph(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path, max_steps=2)
    losses_of_record: list[Any] = []
    add = trainer.run_record.add
    trainer.run_record.add = lambda loss: (add(loss), losses_of_record.append(trainer.run_record._loss))
    trainer.train()
    assert losses_of_record
    assert all(isinstance(loss, torch.Tensor) and not loss.requires_grad for loss in losses_of_record)
