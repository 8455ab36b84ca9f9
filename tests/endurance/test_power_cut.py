"""Power cuts at every file operation of a run: after the first complete checkpoint, one is always found."""

from __future__ import annotations

import errno
import random
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import small
from tests.endurance.disk import Disk
from transformers import TrainerCallback

import megatrain as mt
from megatrain import files
from megatrain.checkpoint import manifest, replace
from megatrain.errors import CheckpointError
from megatrain.hf.checkpoint_list import last_complete

DRAWS = 1
"""Random outcomes of unsynced data per operation, in addition to losing all of it."""


def tiny(seed: int = 0) -> Any:
    return small.llama(seed, num_hidden_layers=1, hidden_size=8, intermediate_size=8)


class Sealed(TrainerCallback):
    step = 0

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step = state.global_step


def remaining(disk: Disk, scratch: Path, number: int, draws: int) -> Any:
    """Builds one directory after another as the power cut may leave it, and yields its number."""
    for attempt in range(draws + 1):
        shutil.rmtree(scratch, ignore_errors=True)
        disk.build(scratch, random.Random(1000 * number + attempt) if attempt else None)
        yield attempt


@pytest.mark.parametrize("draws", [DRAWS, pytest.param(40, marks=pytest.mark.slow)])
def test_a_trainer_keeps_a_complete_checkpoint(tmp_path: Path, draws: int) -> None:
    out = tmp_path / "disk" / "out"
    out.mkdir(parents=True)
    sealed = Sealed()
    found: list[str] = []

    def crashed(number: int) -> None:
        for attempt in remaining(disk, tmp_path / "remaining", number, draws):
            try:
                name = Path(last_complete(str(tmp_path / "remaining" / "out"))).name
            except CheckpointError:
                name = ""
                assert sealed.step == 0, (number, attempt)
            step = int(name.strip(".").split(".")[0].removeprefix("checkpoint-") or 0)
            assert step >= sealed.step, (number, attempt, name)
            found.append(name)

    disk = Disk(tmp_path / "disk", crashed)
    options: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    args = small.arguments(out, num_train_epochs=1, **options)
    trainer = mt.Trainer(model=tiny(), args=args, train_dataset=small.rows(), callbacks=[sealed])
    with files.observing(disk.observe):
        trainer.train()
        # Save the same checkpoint again.
        trainer._save_checkpoint(trainer.model, None)
    disk.close()
    assert disk.operations > 50
    assert {"", "checkpoint-1", "checkpoint-2", ".checkpoint-2.megatrain-before"} <= set(found)


def no_exchange(operation: str, path: Path) -> None:
    if operation == "exchange":
        raise OSError(errno.EINVAL, "Invalid argument")


def must_stay(operation: str, path: Path) -> None:
    if operation == "exchange":
        raise OSError(errno.EBUSY, "Device or resource busy")


@pytest.mark.parametrize("way", ["exchange", "two renames", "stays"])
@pytest.mark.parametrize("exact", [True, False], ids=["with optimizer", "weights alone"])
@pytest.mark.parametrize("draws", [DRAWS, pytest.param(40, marks=pytest.mark.slow)])
def test_saving_into_the_same_directory_keeps_a_complete_version(
    tmp_path: Path, exact: bool, way: str, draws: int
) -> None:
    target = tmp_path / "disk" / "target"
    target.mkdir(parents=True)
    (target / "notes.txt").write_text("mine")
    model = tiny()
    engine = mt.Engine(model, device="cpu")
    optimizer = engine.optimizer() if exact else None
    versions: list[bytes] = []
    saved: list[bool] = []
    seen = set()

    def crashed(number: int) -> None:
        if not saved:
            return
        for attempt in remaining(disk, tmp_path / "remaining", number, draws):
            found = replace.find(tmp_path / "remaining" / "target")
            weights = (found / "model.safetensors").read_bytes()
            if exact:
                manifest.verify(found)
            assert weights in versions, (number, attempt)
            assert (found / "notes.txt").read_text() == "mine"
            assert versions.index(weights) >= len(saved) - 1
            seen.add(versions.index(weights))

    disk = Disk(tmp_path / "disk", crashed)
    with ExitStack() as stack:
        stack.enter_context(files.observing(disk.observe))
        if way != "exchange":
            stack.enter_context(files.observing(no_exchange if way == "two renames" else must_stay))
        for value in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(value)
            versions.append(weights_of(engine, tmp_path / "reference"))
            engine.save(target, optimizer)
            saved.append(True)
        files.before("write", target)
    disk.close()
    assert seen == {0, 1}


def weights_of(engine: Any, scratch: Path) -> bytes:
    engine.model.save_pretrained(scratch)
    return (scratch / "model.safetensors").read_bytes()


def test_the_simulation_detects_unsynced_data(tmp_path: Path) -> None:
    """If the data is not synced, the manifest is valid but the files it names are empty."""
    out = tmp_path / "disk" / "out"
    out.mkdir(parents=True)
    lost = []

    def crashed(number: int) -> None:
        for _ in remaining(disk, tmp_path / "remaining", number, 0):
            try:
                last_complete(str(tmp_path / "remaining" / "out"))
            except CheckpointError:
                lost.append(number)

    disk = Disk(tmp_path / "disk", crashed)

    def without_data(operation: str, path: Path) -> None:
        if operation != "sync" or "manifest" in path.name:
            disk.observe(operation, path)

    args = small.arguments(out, max_steps=2, save_strategy="steps", save_steps=1, save_total_limit=1)
    trainer = mt.Trainer(model=tiny(), args=args, train_dataset=small.rows())
    with files.observing(without_data):
        trainer.train()
    disk.close()
    assert lost[-1] == disk.operations
