"""The power fails at every file operation of a run: from the first seal on, a complete checkpoint is always found."""

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
"""Ways in which what was not synced may be left, per operation, beside nothing at all."""


def tiny(seed: int = 0) -> Any:
    return small.llama(seed, num_hidden_layers=1, hidden_size=8, intermediate_size=8)


class Sealed(TrainerCallback):
    step = 0

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step = state.global_step


def left(disk: Disk, scratch: Path, number: int, draws: int) -> Any:
    """Directories as the power cut may leave them, one after the other."""
    for attempt in range(draws + 1):
        shutil.rmtree(scratch, ignore_errors=True)
        disk.build(scratch, random.Random(1000 * number + attempt) if attempt else None)
        yield attempt


@pytest.mark.parametrize("draws", [DRAWS, pytest.param(40, marks=pytest.mark.slow)])
def test_a_trainer_that_rotates(tmp_path: Path, draws: int) -> None:
    out = tmp_path / "disk" / "out"
    out.mkdir(parents=True)
    sealed = Sealed()
    found: list[str] = []

    def crashed(number: int) -> None:
        for attempt in left(disk, tmp_path / "left", number, draws):
            try:
                name = Path(last_complete(str(tmp_path / "left" / "out"))).name
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
        # The same checkpoint once more.
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
def test_saving_into_the_same_directory(tmp_path: Path, exact: bool, way: str, draws: int) -> None:
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
        for attempt in left(disk, tmp_path / "left", number, draws):
            found = replace.find(tmp_path / "left" / "target")
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


def test_the_simulation_finds_what_is_not_synced(tmp_path: Path) -> None:
    """Without syncing the data, the manifest is valid and what it names is empty."""
    out = tmp_path / "disk" / "out"
    out.mkdir(parents=True)
    lost = []

    def crashed(number: int) -> None:
        for _ in left(disk, tmp_path / "left", number, 0):
            try:
                last_complete(str(tmp_path / "left" / "out"))
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
