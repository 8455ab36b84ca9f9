"""One flipped bit in a checkpoint: the checkpoint is skipped by name, or loads bitwise the same."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import small

import megatrain as mt
from megatrain import files
from megatrain.checkpoint import manifest
from megatrain.errors import CheckpointError
from megatrain.hf.checkpoint_list import last_complete

FILES = [
    "config.json",
    "megatrain/manifest.json",
    "megatrain/optimizer-00001-of-00001.safetensors",
    "model.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
]
FOREIGN = "notes.txt"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    args = small.arguments(directory, max_steps=4, save_strategy="steps", save_steps=2)
    mt.Trainer(model=small.llama(), args=args, train_dataset=small.rows()).train()
    (directory / "checkpoint-4" / FOREIGN).write_text("mine")
    return directory


@pytest.fixture
def out(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "out")
    return tmp_path / "out"


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def test_the_manifest_lists_every_file(saved: Path) -> None:
    found = [
        path.relative_to(saved / "checkpoint-4").as_posix() for path in files.regular_files(saved / "checkpoint-4")
    ]
    assert set(FILES) <= set(found)
    listed = manifest.read(saved / "checkpoint-4")["files"].keys()
    assert set(found) - listed == {manifest.FILE, FOREIGN}


@pytest.mark.parametrize("flips", [20, pytest.param(5_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_a_flipped_bit_in_any_file_is_noticed(out: Path, flips: int, announced: pytest.LogCaptureFixture) -> None:
    checkpoint, draw = out / "checkpoint-4", random.Random(0)
    for path in files.regular_files(checkpoint):
        name, bits = path.relative_to(checkpoint).as_posix(), path.stat().st_size * 8
        for bit in {0, 7, bits - 8, bits - 1, *(draw.randrange(bits) for _ in range(flips))}:
            flip(path, bit)
            announced.clear()
            found = last_complete(str(out))
            flip(path, bit)
            if name == FOREIGN:
                assert Path(found).name == "checkpoint-4"
                continue
            assert Path(found).name == "checkpoint-2", (name, bit)
            assert any("checkpoint-4 was skipped" in line and name in line for line in announced.messages), (name, bit)
    assert Path(last_complete(str(out))).name == "checkpoint-4"


def resumed(out: Path, checkpoint: Any = True) -> tuple[dict[str, torch.Tensor], int]:
    trainer = mt.Trainer(model=small.llama(1), args=small.arguments(out, max_steps=5), train_dataset=small.rows())
    trainer.train(resume_from_checkpoint=checkpoint)
    return small.snapshot(trainer.model), trainer.state.global_step


SOME = ["megatrain/manifest.json", "rng_state.pth", "model.safetensors"]


@pytest.mark.parametrize("name", [*SOME, *(pytest.param(n, marks=pytest.mark.slow) for n in FILES if n not in SOME)])
def test_the_trainer_resumes_from_an_intact_checkpoint(out: Path, name: str) -> None:
    """One bit in the middle of the file is flipped."""
    path = out / "checkpoint-4" / name
    flip(path, path.stat().st_size * 4)
    with pytest.raises(CheckpointError, match=name):
        resumed(out, str(out / "checkpoint-4"))
    assert resumed(out)[1] == 5


def test_files_of_the_user_are_ignored(out: Path) -> None:
    before, _ = resumed(out)
    flip(out / "checkpoint-4" / FOREIGN, 0)
    after, _ = resumed(out)
    assert small.same(before, after)
