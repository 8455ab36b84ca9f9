"""Runs with states on disk, killed with SIGKILL at random moments and started again on the same directories.

After every kill the scratch directory is empty and its space is free, and the next start resumes from the last complete
checkpoint. In the end everything is bitwise what a run without kills gives.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from tests import small
from tests.endurance.test_kills import run_and_kill
from tests.faults.drive import mounted

import megatrain as mt
from megatrain.errors import CheckpointError
from megatrain.hf.checkpoint_list import last_complete


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_kills_leave_nothing_behind_and_change_nothing(tmp_path: Path, kills: int) -> None:
    def trainer(out: Path, steps: int, **options: Any) -> Any:
        model = small.llama(num_hidden_layers=6)
        args = small.arguments(out, max_steps=steps, lr_scheduler_type="constant", save_total_limit=2, **options)
        return mt.Trainer(model=model, args=args, train_dataset=small.rows(4))

    def worker(steps: int = 10_000) -> Any:
        mt.init(device="cpu", offload_dir=drive.path / "scratch", on_disk=["*"], debug=mt.Debug(disk_io="threads"))
        run = trainer(out, steps, save_strategy="steps", save_steps=3)
        run.train(resume_from_checkpoint=resumable())
        return run

    def resumable() -> bool:
        try:
            last_complete(str(out))
        except CheckpointError:
            return False
        return True

    out = tmp_path / "out"
    draw = random.Random(0)
    trainer(tmp_path / "warm", 1).train()
    with mounted(tmp_path) as drive:
        (drive.path / "scratch").mkdir()
        free, reached = drive.free, 0
        for number in range(kills):
            # Some kills hit a save, which is about 25 operations; others training, after a longer delay.
            run_and_kill(lambda: worker() and None, draw.randint(1 if reached else 30, 60), draw.random() * 0.3)
            assert os.listdir(drive.path / "scratch") == [], number
            assert drive.free == free, number
            name = Path(last_complete(str(out))).name.strip(".").split(".")[0]
            assert int(name.removeprefix("checkpoint-")) >= reached, number
            reached = int(name.removeprefix("checkpoint-"))
        run = worker(reached + 5)
        assert run.state.global_step == reached + 5
        assert not list(out.glob("rescue-*"))
    mt.init(device="cpu")
    uninterrupted = trainer(tmp_path / "uninterrupted", reached + 5)
    uninterrupted.train()
    assert small.same(small.snapshot(run.model), small.snapshot(uninterrupted.model))
