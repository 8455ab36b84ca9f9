"""On SIGTERM a Trainer finishes its step, saves a checkpoint and exits."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from tests import small

import megatrain as mt
from megatrain import files
from megatrain.errors import CheckpointError
from megatrain.hf.checkpoint_list import last_complete
from megatrain.hf.sigterm import EXIT


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def new_trainer(directory: Path, seed: int = 0, **changes: Any) -> Any:
    return mt.Trainer(
        model=small.llama(seed),
        args=small.arguments(directory, **{"max_steps": 4} | changes),
        train_dataset=small.rows(),
        eval_dataset=small.rows(8),
    )


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class At(transformers.TrainerCallback):  # type: ignore[misc]
    """Calls a function at one event of one step."""

    def __init__(self, event: str, step: int, work: Callable[[], Any] = terminate) -> None:
        def act(args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step:
                work()

        setattr(self, event, act)


BEST = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "greater_is_better": True}


EVERY_STEP = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}


@pytest.mark.parametrize(
    ("changes", "event"),
    [
        ({"save_strategy": "no"}, "on_step_begin"),
        ({"save_strategy": "no"}, "on_optimizer_step"),
        (EVERY_STEP, "on_step_end"),
        ({"save_strategy": "epoch", "save_only_model": True}, "on_step_begin"),
        (BEST | {"save_strategy": "best"}, "on_step_end"),
        (BEST | EVERY_STEP | {"load_best_model_at_end": True}, "on_step_begin"),
    ],
    ids=["no", "no, late", "steps", "only model", "best", "best at end"],
)
def test_the_checkpoint_resumes_bitwise(tmp_path: Path, changes: dict[str, Any], event: str) -> None:
    trainer = new_trainer(tmp_path, **changes)
    trainer.add_callback(At(event, 2 if event == "on_step_end" else 1))
    with pytest.raises(SystemExit) as exit_info:
        trainer.train()
    assert exit_info.value.code == EXIT == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert trainer.state.global_step == 2
    assert "train_runtime" in trainer.state.log_history[-1]
    uninterrupted = new_trainer(tmp_path / "whole", **changes | {"load_best_model_at_end": False})
    uninterrupted.train()
    resumed = new_trainer(tmp_path, seed=1, **changes | {"load_best_model_at_end": False})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert small.same(small.snapshot(resumed.model), small.snapshot(uninterrupted.model))


def test_sigterm_stops_an_evaluation_early(tmp_path: Path) -> None:
    seen: list[int] = []
    trainer = new_trainer(tmp_path, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=1)
    trainer.add_callback(At("on_prediction_step", 2, lambda: (seen.append(1), terminate())))
    with pytest.raises(SystemExit):
        trainer.train()
    assert seen == [1], "the evaluation must stop after the first of eight batches"
    assert trainer.state.global_step == 2
    assert last_complete(str(tmp_path)).endswith("checkpoint-2")


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_no_evaluation_starts_after_sigterm(tmp_path: Path, strategy: str) -> None:
    trainer = new_trainer(tmp_path, eval_strategy=strategy, eval_steps=1)
    trainer.add_callback(At("on_step_begin", 0))
    with pytest.raises(SystemExit):
        trainer.train()
    assert not any("eval_loss" in entry for entry in trainer.state.log_history)


def test_sigterm_during_a_save_starts_no_further_step(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path, save_strategy="steps", save_steps=2)
    trainer.add_callback(At("on_save", 2))
    with pytest.raises(SystemExit):
        trainer.train()
    assert trainer.state.global_step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "run.jsonl"]


def test_an_evaluation_outside_training_is_not_stopped(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path)
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    trainer.add_callback(At("on_step_end", 4))
    trainer.train()
    assert received == [signal.SIGTERM]
    assert trainer.evaluate()["eval_loss"] > 0


def test_an_earlier_handler_is_called_after_the_checkpoint(tmp_path: Path) -> None:
    received: list[str] = []

    def earlier(number: int, frame: Any) -> None:
        received.append(last_complete(str(tmp_path)))

    signal.signal(signal.SIGTERM, earlier)
    trainer = new_trainer(tmp_path)
    trainer.add_callback(At("on_step_begin", 0))
    result = trainer.train()
    assert result.global_step == 1
    assert received == [str(tmp_path / "checkpoint-1")]
    # The Trainer can train again.
    trainer.remove_callback(At)
    trainer.args.max_steps = 2
    assert trainer.train().global_step == 2
    assert signal.getsignal(signal.SIGTERM) is earlier


def test_a_second_sigterm_calls_the_earlier_handler_at_once(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def earlier(number: int, frame: Any) -> None:
        raise Stop

    signal.signal(signal.SIGTERM, earlier)
    trainer = new_trainer(tmp_path)
    trainer.add_callback(At("on_step_begin", 1, lambda: (terminate(), terminate())))
    with pytest.raises(Stop):
        trainer.train()
    assert trainer.state.global_step == 1
    assert signal.getsignal(signal.SIGTERM) is earlier


def test_a_process_that_ignores_sigterm_continues(tmp_path: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    trainer = new_trainer(tmp_path)
    trainer.add_callback(At("on_step_begin", 1))
    assert trainer.train().global_step == 4
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_another_thread_trains_without_a_handler(tmp_path: Path) -> None:
    seen: list[Any] = []
    trainer = new_trainer(tmp_path, max_steps=1)
    trainer.add_callback(At("on_step_begin", 0, lambda: seen.append(signal.getsignal(signal.SIGTERM))))
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]


def test_an_error_restores_the_earlier_handler(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("wrong")

    trainer = new_trainer(tmp_path)
    trainer.add_callback(At("on_step_begin", 1, fail))
    with pytest.raises(RuntimeError, match="wrong"):
        trainer.train()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_ends_a_forked_child(tmp_path: Path) -> None:
    """Process pools and data loaders stop their workers with SIGTERM."""
    codes: list[int | None] = []

    def fork() -> None:
        child = multiprocessing.get_context("fork").Process(target=signal.pause)
        child.start()
        child.terminate()
        child.join(300)
        codes.append(child.exitcode)

    trainer = new_trainer(tmp_path, max_steps=2)
    trainer.add_callback(At("on_step_begin", 1, fork))
    assert trainer.train().global_step == 2
    assert codes == [-signal.SIGTERM]


def test_a_trainer_inside_a_trainer(tmp_path: Path) -> None:
    """The inner Trainer stops first, then the outer one. Each saves a checkpoint."""
    inner = new_trainer(tmp_path / "inner", seed=1)
    inner.add_callback(At("on_step_begin", 1))
    outer = new_trainer(tmp_path / "outer")
    outer.add_callback(At("on_step_begin", 1, inner.train))
    with pytest.raises(SystemExit):
        outer.train()
    assert last_complete(str(tmp_path / "inner")).endswith("checkpoint-2")
    assert last_complete(str(tmp_path / "outer")).endswith("checkpoint-2")


def test_sigterm_on_a_full_disk(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    def raise_disk_full(operation: str, path: Path) -> None:
        if operation == "sync" and "checkpoint-2" in path.parts:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    trainer = new_trainer(tmp_path)
    trainer.add_callback(At("on_step_begin", 1))
    with files.observing(raise_disk_full), pytest.raises(SystemExit) as exit_info:
        trainer.train()
    assert exit_info.value.code == EXIT
    assert sum("checkpoint-2 could not be saved: No space left" in line for line in announced.messages) == 1
    with pytest.raises(CheckpointError, match="No valid checkpoint"):
        last_complete(str(tmp_path))


def test_sigterm_in_a_process(tmp_path: Path) -> None:
    script = f"""
import atexit, sys, torch
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests import small
import megatrain as mt, transformers
torch.set_num_threads(1)
atexit.register(lambda: print("at exit", flush=True))

class Says(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        print("step", state.global_step, flush=True)

args = small.arguments({str(tmp_path)!r}, max_steps=100000, dataloader_num_workers=1)
trainer = mt.Trainer(model=small.llama(), args=args, train_dataset=small.rows())
trainer.add_callback(Says())
trainer.train()
print("not reached")
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    next(line for line in process.stdout if line.startswith("step 2"))
    process.terminate()
    rest = process.stdout.read()
    assert process.wait() == EXIT
    assert "at exit" in rest
    assert "not reached" not in rest
    steps = [int(line.split()[1]) for line in rest.splitlines() if line.startswith("step ")]
    assert last_complete(str(tmp_path)).endswith(f"checkpoint-{steps[-1] if steps else 2}")
