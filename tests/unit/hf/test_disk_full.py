"""A disk that is full or broken: the run goes on, tries again, and ends with an error if its last save is missing."""

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


def made(directory: Path, **changes: Any) -> Any:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    return mt.Trainer(
        model=small.llama(), args=small.arguments(directory, **options | changes), train_dataset=small.rows()
    )


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != "run.jsonl")


def failing(steps: set[int], where: str, code: int) -> Callable[[str, Path], None]:
    """An operation on a checkpoint of one of these steps fails."""

    def observe(operation: str, path: Path) -> None:
        step = next((part.split("-")[1] for part in path.parts if part.startswith("checkpoint-")), "0")
        if operation == where and int(step) in steps:
            raise OSError(code, os.strerror(code), str(path))

    return observe


@pytest.mark.parametrize(
    ("where", "code"),
    [
        ("write", errno.ENOSPC), ("write", errno.EDQUOT), ("sync", errno.EIO), ("sync_directory", errno.EIO),
        ("rename", errno.ENOSPC), ("make", errno.EDQUOT),
    ],
)  # fmt: skip
def test_the_run_goes_on_and_the_next_save_is_whole(
    tmp_path: Path, said: pytest.LogCaptureFixture, where: str, code: int
) -> None:
    trainer = made(tmp_path, max_steps=4, save_total_limit=1)
    saves: list[int] = []

    class Counts(transformers.TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saves.append(state.global_step)
            assert (Path(args.output_dir) / f"checkpoint-{state.global_step}").is_dir()

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                # Nothing was deleted for the sake of saves that failed, and nothing of them is left.
                assert [name for name in names(tmp_path) if name.startswith("checkpoint")] == ["checkpoint-1"]
                assert not list(tmp_path.glob(".checkpoint*"))

    trainer.add_callback(Counts())
    with files.observing(failing({2, 3}, where, code)):
        trainer.train()
    assert saves == [1, 4]
    failed = [line for line in said.messages if "could not be saved" in line]
    assert len(failed) == 2
    assert all(
        os.strerror(code) in line and "training goes on, and the next save tries again" in line for line in failed
    )
    assert names(tmp_path) == ["checkpoint-4"]
    manifest.verify(tmp_path / "checkpoint-4")
    expected = made(tmp_path / "other", save_strategy="no")
    expected.train()
    assert small.same(small.snapshot(trainer.model), small.snapshot(expected.model))


def test_a_last_save_that_fails_is_an_error_after_everything_else(tmp_path: Path) -> None:
    trainer = made(tmp_path)
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
    # The next run of the same Trainer starts afresh.
    trainer.args.max_steps = 1
    trainer.train()


def test_a_checkpoint_of_that_step_that_was_there_before_stays(tmp_path: Path) -> None:
    made(tmp_path, max_steps=2, save_steps=2).train()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*/**/*") if path.is_file()}
    trainer = made(tmp_path, max_steps=2, save_steps=2)
    with (
        files.observing(failing({2}, "sync", errno.EIO)),
        pytest.raises(CheckpointError, match="checkpoint-2 could not"),
    ):
        trainer.train()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*/**/*") if path.is_file()} == before
    manifest.verify(tmp_path / "checkpoint-2")


def test_the_best_model_is_not_one_that_was_not_saved(tmp_path: Path) -> None:
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
    assert losses[2] < losses[1], "the third would be the best"
    assert (trainer.state.best_global_step, trainer.state.best_metric) == (2, losses[1])
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert names(tmp_path) == ["checkpoint-2"]


def test_too_little_room_is_seen_before_anything_is_written(
    tmp_path: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = made(tmp_path, max_steps=2)
    room = [1 << 40]
    monkeypatch.setattr(files, "free_bytes", lambda path: room[0])
    written: list[Path] = []

    class Fills(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            room[0] = 5000 if state.global_step == 1 else 1 << 40

    trainer.add_callback(Fills())
    with files.observing(lambda operation, path: written.append(path) if "checkpoint-1" in path.parts else None):
        trainer.train()
    assert written == []
    [line] = [line for line in said.messages if "could not be saved" in line]
    assert "it needs about 0.00" in line
    assert "but 5e-06 GB are free" in line
    assert names(tmp_path) == ["checkpoint-2"]


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"optimizer_compression": "8bit"}], ids=str)
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "adapters"])
def test_what_a_checkpoint_takes_is_known_before(tmp_path: Path, settings: dict[str, Any], adapters: bool) -> None:
    model: Any = small.llama(hidden_size=128, intermediate_size=512, num_hidden_layers=4)
    if adapters:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=64, target_modules="all-linear"))
    engine = mt.Engine(model, device="cpu", **settings)
    optimizer = engine.optimizer()
    engine.save(tmp_path, optimizer)
    taken = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    planned = space.needed(model, engine.host_state_dict(), optimizer)
    assert taken <= planned <= taken * 1.01 + space.SLACK


def test_errors_that_mean_the_disk() -> None:
    assert space.fault_of(OSError(errno.ENOSPC, "No space left on device", "x")) == "No space left on device: x"
    assert space.fault_of(RuntimeError("shapes differ")) is None
    assert space.fault_of(SafetensorError("invalid header")) is None
    assert space.fault_of(ValueError("No space left on device")) is None


def test_another_error_in_a_save_is_raised(tmp_path: Path) -> None:
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


def test_called_directly_it_raises(tmp_path: Path) -> None:
    trainer = made(tmp_path, max_steps=1, save_strategy="no")
    trainer.train()
    with files.observing(failing({1}, "sync", errno.EIO)), pytest.raises(SaveFailed, match="checkpoint-1 could not"):
        trainer._save_checkpoint(trainer.model, None)


# ---- a file system that is really full


@pytest.fixture
def little(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small file system."""
    place = tmp_path / "little"
    place.mkdir()

    def mount(size: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("mounting is not permitted here")
        return place

    yield mount
    subprocess.run(["umount", str(place)], capture_output=True, check=False)


@pytest.mark.parametrize("room", range(8, 200, 48))
def test_full_at_any_point(
    little: Callable[[str], Path], said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """What is checked before knows nothing of it: a file of somebody else grows meanwhile."""
    place = little("2m")
    trainer = made(place, max_steps=3)
    monkeypatch.setattr(space, "SLACK", -(1 << 30))
    filler = place / "filler"

    class Fills(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                filler.write_bytes(bytes(files.free_bytes(place) - (room << 10)))
            elif filler.exists():
                filler.unlink()

    trainer.add_callback(Fills())
    trainer.train()
    assert [line for line in said.messages if "checkpoint-2 could not be saved" in line]
    assert names(place) == ["checkpoint-1", "checkpoint-3"]
    manifest.verify(place / "checkpoint-3")


@pytest.mark.parametrize("seen", [True, False], ids=["before", "while it is written"])
def test_an_engines_save(little: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, seen: bool) -> None:
    place = little("2m")
    engine = mt.Engine(small.llama(), device="cpu")
    optimizer = engine.optimizer()
    engine.save(place / "kept", optimizer)
    if not seen:
        monkeypatch.setattr(space, "SLACK", -(1 << 30))
    (place / "filler").write_bytes(bytes(files.free_bytes(place) - (32 << 10)))
    with pytest.raises(CheckpointError, match=r"kept could not be saved: .*its previous content is unchanged"):
        engine.save(place / "kept", optimizer)
    assert names(place) == ["filler", "kept"]
    engine.load(place / "kept", optimizer)


def test_full_for_good(little: Callable[[str], Path], said: pytest.LogCaptureFixture) -> None:
    place = little("1m")
    trainer = made(place, max_steps=2)
    filler = place / "filler"
    filler.write_bytes(bytes(files.free_bytes(place) - (64 << 10)))
    with pytest.raises(CheckpointError, match="last checkpoint is missing"):
        trainer.train()
    assert names(place) == ["filler"]
    filler.unlink()
    trainer.save_model(str(place / "weights"))
