"""On a full or broken disk the run continues and tries to save again. It raises if the last save failed."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors import SafetensorError
from tests import small

import megatrain as mt
from megatrain import files
from megatrain.checkpoint import manifest, space
from megatrain.errors import CheckpointError
from megatrain.hf.checkpoint_list import last_complete
from megatrain.hf.checkpoints import SaveFailed


def new_trainer(directory: Path, **changes: Any) -> Any:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    return mt.Trainer(
        model=small.llama(), args=small.arguments(directory, **options | changes), train_dataset=small.rows()
    )


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != "run.jsonl")


def failing(steps: set[int], failing_operation: str, code: int) -> Callable[[str, Path], None]:
    """Fail one operation on the checkpoints of these steps."""

    def observe(operation: str, path: Path) -> None:
        step = next((part.split("-")[1] for part in path.parts if part.startswith("checkpoint-")), "0")
        if operation == failing_operation and int(step) in steps:
            raise OSError(code, os.strerror(code), str(path))

    return observe


@pytest.mark.parametrize(
    ("failing_operation", "code"),
    [
        ("write", errno.ENOSPC), ("write", errno.EDQUOT), ("sync", errno.EIO), ("sync_directory", errno.EIO),
        ("rename", errno.ENOSPC), ("make", errno.EDQUOT),
    ],
)  # fmt: skip
def test_the_run_continues_and_the_next_save_is_complete(
    tmp_path: Path, announced: pytest.LogCaptureFixture, failing_operation: str, code: int
) -> None:
    trainer = new_trainer(tmp_path, max_steps=4, save_total_limit=1)
    saves: list[int] = []

    class Counts(transformers.TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saves.append(state.global_step)
            assert (Path(args.output_dir) / f"checkpoint-{state.global_step}").is_dir()

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                # Failed saves deleted no old checkpoint and left no files.
                assert [name for name in names(tmp_path) if name.startswith("checkpoint")] == ["checkpoint-1"]
                assert not list(tmp_path.glob(".checkpoint*"))

    trainer.add_callback(Counts())
    with files.observing(failing({2, 3}, failing_operation, code)):
        trainer.train()
    assert saves == [1, 4]
    failed = [line for line in announced.messages if "could not be saved" in line]
    assert len(failed) == 2
    assert all(
        os.strerror(code) in line and "training goes on, and the next save tries again" in line for line in failed
    )
    assert names(tmp_path) == ["checkpoint-4"]
    manifest.verify(tmp_path / "checkpoint-4")
    expected = new_trainer(tmp_path / "other", save_strategy="no")
    expected.train()
    assert small.same(small.snapshot(trainer.model), small.snapshot(expected.model))


def test_a_failed_last_save_raises_at_the_end_of_training(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path)
    with (
        files.observing(failing({4}, "write", errno.ENOSPC)),
        pytest.raises(
            CheckpointError, match=r"ended after step 4, but its last checkpoint is missing: .*No space left"
        ),
    ):
        trainer.train()
    assert trainer.state.global_step == 4
    assert "train_runtime" in trainer.state.log_history[-1]
    assert last_complete(str(tmp_path)).endswith("checkpoint-3")
    # The next run of the same Trainer does not repeat the error.
    trainer.args.max_steps = 1
    trainer.train()


def test_a_failed_save_keeps_an_earlier_checkpoint_of_the_same_step(tmp_path: Path) -> None:
    new_trainer(tmp_path, max_steps=2, save_steps=2).train()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*/**/*") if path.is_file()}
    trainer = new_trainer(tmp_path, max_steps=2, save_steps=2)
    with (
        files.observing(failing({2}, "sync", errno.EIO)),
        pytest.raises(CheckpointError, match="checkpoint-2 could not"),
    ):
        trainer.train()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*/**/*") if path.is_file()} == before
    manifest.verify(tmp_path / "checkpoint-2")


def test_the_best_model_is_one_that_was_saved(tmp_path: Path) -> None:
    options = {
        "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "greater_is_better": False,
        "load_best_model_at_end": True, "save_total_limit": 1, "max_steps": 3,
    }  # fmt: skip
    trainer = mt.Trainer(
        model=small.llama(), args=small.arguments(tmp_path, save_strategy="steps", save_steps=1, **options),
        train_dataset=small.rows(2), eval_dataset=small.rows(2),
    )  # fmt: skip
    with files.observing(failing({3}, "sync", errno.ENOSPC)), pytest.raises(CheckpointError, match="last checkpoint"):
        trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses[2] < losses[1], "the checkpoint that could not be saved must have the best loss"
    assert (trainer.state.best_global_step, trainer.state.best_metric) == (2, losses[1])
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert names(tmp_path) == ["checkpoint-2"]


def test_too_little_disk_space_is_detected_before_writing(
    tmp_path: Path, announced: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = new_trainer(tmp_path, max_steps=2)
    free = [1 << 40]
    monkeypatch.setattr(files, "free_bytes", lambda path: free[0])
    written: list[Path] = []

    class Fills(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            free[0] = 5000 if state.global_step == 1 else 1 << 40

    trainer.add_callback(Fills())
    with files.observing(lambda operation, path: written.append(path) if "checkpoint-1" in path.parts else None):
        trainer.train()
    assert written == []
    [line] = [line for line in announced.messages if "could not be saved" in line]
    assert "it needs about 0.00" in line
    assert "but 5e-06 GB are free" in line
    assert names(tmp_path) == ["checkpoint-2"]


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"optimizer_compression": "8bit"}], ids=str)
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "adapters"])
def test_the_size_of_a_checkpoint_is_estimated(tmp_path: Path, settings: dict[str, Any], adapters: bool) -> None:
    model: Any = small.llama(hidden_size=128, intermediate_size=512, num_hidden_layers=4)
    if adapters:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=64, target_modules="all-linear"))
    engine = mt.Engine(model, device="cpu", **settings)
    optimizer = engine.optimizer()
    engine.save(tmp_path, optimizer)
    saved_bytes = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    planned = space.needed(model, engine.host_state_dict(), optimizer)
    assert saved_bytes <= planned <= saved_bytes * 1.01 + space.SLACK


def test_disk_errors_are_recognized() -> None:
    assert space.fault_of(OSError(errno.ENOSPC, "No space left on device", "x")) == "No space left on device: x"
    assert space.fault_of(RuntimeError("shapes differ")) is None
    assert space.fault_of(SafetensorError("invalid header")) is None
    assert space.fault_of(ValueError("No space left on device")) is None


def test_other_errors_in_a_save_are_raised(tmp_path: Path) -> None:
    class Wrong(mt.Trainer):  # type: ignore[misc]
        def _save_rng_state(self, output_dir: str) -> None:
            raise RuntimeError("wrong")

    trainer = Wrong(
        model=small.llama(), args=small.arguments(tmp_path, save_strategy="steps", save_steps=1),
        train_dataset=small.rows(),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="wrong"):
        trainer.train()
    assert names(tmp_path) == []


def test_save_checkpoint_called_directly_raises(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path, max_steps=1, save_strategy="no")
    trainer.train()
    with files.observing(failing({1}, "sync", errno.EIO)), pytest.raises(SaveFailed, match="checkpoint-1 could not"):
        trainer._save_checkpoint(trainer.model, None)


# ---- a full file system


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small file system and returns its path."""
    disk = tmp_path / "little"
    disk.mkdir()

    def mount(size: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("mounting is not permitted here")
        return disk

    yield mount
    subprocess.run(["umount", str(disk)], capture_output=True, check=False)


@pytest.mark.parametrize("free", range(8, 200, 48))
def test_the_disk_fills_up_during_a_save(
    small_disk: Callable[[str], Path], announced: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """The check before the save passes, and then a file of another program fills the disk."""
    disk = small_disk("2m")
    trainer = new_trainer(disk, max_steps=3)
    monkeypatch.setattr(space, "SLACK", -(1 << 30))
    filler = disk / "filler"

    class Fills(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                filler.write_bytes(bytes(files.free_bytes(disk) - (free << 10)))
            elif filler.exists():
                filler.unlink()

    trainer.add_callback(Fills())
    trainer.train()
    assert [line for line in announced.messages if "checkpoint-2 could not be saved" in line]
    assert names(disk) == ["checkpoint-1", "checkpoint-3"]
    manifest.verify(disk / "checkpoint-3")


@pytest.mark.parametrize("checked", [True, False], ids=["before", "while it is written"])
def test_engine_save_on_a_full_disk(
    small_disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    disk = small_disk("2m")
    engine = mt.Engine(small.llama(), device="cpu")
    optimizer = engine.optimizer()
    engine.save(disk / "kept", optimizer)
    if not checked:
        monkeypatch.setattr(space, "SLACK", -(1 << 30))
    (disk / "filler").write_bytes(bytes(files.free_bytes(disk) - (32 << 10)))
    with pytest.raises(CheckpointError, match=r"kept could not be saved: .*its previous content is unchanged"):
        engine.save(disk / "kept", optimizer)
    assert names(disk) == ["filler", "kept"]
    engine.load(disk / "kept", optimizer)


def test_a_disk_that_stays_full(small_disk: Callable[[str], Path], announced: pytest.LogCaptureFixture) -> None:
    disk = small_disk("1m")
    trainer = new_trainer(disk, max_steps=2)
    filler = disk / "filler"
    filler.write_bytes(bytes(files.free_bytes(disk) - (64 << 10)))
    with pytest.raises(CheckpointError, match="last checkpoint is missing"):
        trainer.train()
    assert names(disk) == ["filler"]
    filler.unlink()
    trainer.save_model(str(disk / "weights"))
