"""A process is killed with SIGKILL at random moments of saving, repeatedly. Every checkpoint found is complete, and no
saved step is lost.

Each worker is a fork that continues from the last checkpoint. It reports every file operation through a pipe, and is
killed after a random operation and a random delay. In the end everything must be bitwise what a run without kills
gives.
"""

from __future__ import annotations

import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import small
from tqdm import auto, tqdm

import megatrain as mt
from megatrain import files
from megatrain.checkpoint import manifest, replace
from megatrain.errors import CheckpointError
from megatrain.hf.checkpoint_list import last_complete
from megatrain.store.parameter import states_of

KILLS = [3, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
PATIENCE = 300.0
"""A worker without file operations for this many seconds counts as hanging."""


def everything(model: Any) -> dict[str, torch.Tensor]:
    found = small.snapshot(model)
    for name, parameter in model.named_parameters():
        found |= {f"{name}/{role}": view.clone() for role, view in states_of(parameter).items()}
    return found


def run_and_kill(worker: Callable[[], None], operations: int, delay: float) -> None:
    """Fork `worker`, and kill it `delay` seconds after it has started `operations` file operations."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        code = 1
        # Forks share the lock of progress bars. A worker killed while holding it would block all later ones.
        for bar in (tqdm, auto.tqdm):
            bar.set_lock(threading.RLock())
        try:
            with files.observing(lambda operation, path: os.write(writer, b".") and None):
                worker()
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    try:
        while operations > 0 and select.select([reader], [], [], PATIENCE)[0]:
            progress = os.read(reader, operations)
            assert progress, f"the worker ended by itself: {os.waitpid(child, 0)[1]}"
            operations -= len(progress)
        assert operations <= 0, "the worker hangs"
        time.sleep(delay)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("kills", KILLS)
def test_a_killed_trainer_keeps_a_complete_checkpoint(
    tmp_path: Path, kills: int, capfd: pytest.CaptureFixture[str]
) -> None:
    def trainer(directory: Path, steps: int, **options: Any) -> Any:
        args = small.arguments(
            directory, max_steps=steps, lr_scheduler_type="constant", save_total_limit=2, max_grad_norm=0.0, **options
        )
        return mt.Trainer(model=small.gpt2(), args=args, train_dataset=small.rows(4))

    def worker() -> None:
        saving = {"save_strategy": "steps", "save_steps": 1}
        trainer(tmp_path / "out", 10_000, **saving).train(resume_from_checkpoint=len(steps) > 0)

    # Imported modules are shared with the workers.
    trainer(tmp_path / "warm", 1).train()
    draw = random.Random(0)
    steps: list[int] = []
    for number in range(kills):
        # A checkpoint is about 25 operations.
        run_and_kill(worker, draw.randint(1 if steps else 30, 75), draw.random() * 0.01)
        found = Path(last_complete(str(tmp_path / "out")))
        steps.append(int(found.name.strip(".").split(".")[0].removeprefix("checkpoint-")))
        assert steps[-1] >= max(steps), number
    capfd.readouterr()
    uninterrupted = trainer(tmp_path / "uninterrupted", steps[-1])
    uninterrupted.train()
    model = small.gpt2(1)
    engine = mt.Engine(model, device="cpu")
    optimizer = engine.optimizer(groups_for(uninterrupted, model))
    engine.load(found, optimizer)
    assert small.same(everything(model), everything(uninterrupted.model))


def groups_for(trainer: Any, model: Any) -> list[dict[str, Any]]:
    named, names = dict(model.named_parameters()), {id(p): name for name, p in trainer.model.named_parameters()}
    return [{"params": [named[names[id(p)]] for p in g["params"]]} for g in trainer._own_optimizer().param_groups]


@pytest.mark.parametrize("kills", KILLS)
def test_a_killed_save_into_the_same_directory_keeps_a_complete_checkpoint(tmp_path: Path, kills: int) -> None:
    target = tmp_path / "target"

    def made() -> tuple[Any, Any, Any]:
        model = small.gpt2(0)
        model.eval()
        engine = mt.Engine(model, device="cpu")
        return model, engine, engine.optimizer(lr=1e-2)

    def step(model: Any, optimizer: Any, number: int) -> None:
        model(**small.batch(seed=number)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def steps_of(optimizer: Any) -> int:
        parameter = optimizer.param_groups[0]["params"][0]
        return int(parameter.slab.steps[parameter.segment])

    def worker() -> None:
        model, engine, optimizer = made()
        if counted:
            engine.load(target, optimizer)
        for _ in range(10_000):
            step(model, optimizer, steps_of(optimizer))
            engine.save(target, optimizer)

    draw = random.Random(0)
    counted: list[int] = []
    for number in range(kills):
        # A save is about 20 operations.
        run_and_kill(worker, draw.randint(1 if counted else 25, 60), draw.random() * 0.01)
        model, engine, optimizer = made()
        engine.load(target, optimizer)
        counted.append(steps_of(optimizer))
        assert counted[-1] >= max(counted), number
    engine.save(target, optimizer)
    assert os.listdir(tmp_path) == ["target"], "leftovers of killed workers are removed"
    other, _, another = made()
    for number in range(counted[-1]):
        step(other, another, number)
    assert small.same(everything(model), everything(other))


@pytest.mark.parametrize("kills", KILLS)
def test_a_killed_save_of_weights_alone_keeps_complete_weights(tmp_path: Path, kills: int) -> None:
    """All weights of a save are one number, which increases with every save."""
    target = tmp_path / "target"

    def value(model: Any) -> float:
        values = torch.cat([parameter.detach().flatten() for parameter in model.state_dict().values()]).unique()
        assert len(values) == 1, "a mixture of two saves"
        return float(values)

    def worker() -> None:
        model = small.llama()
        engine = mt.Engine(model, device="cpu")
        count = 0.0
        if counted:
            engine.load(target)
            count = value(model)
        while True:
            count += 1
            for parameter in model.parameters():
                parameter.data.fill_(count)
            engine.save(target)

    draw = random.Random(0)
    counted: list[float] = []
    model = small.llama(1)
    engine = mt.Engine(model, device="cpu")
    for number in range(kills):
        run_and_kill(worker, draw.randint(1 if counted else 25, 50), draw.random() * 0.01)
        engine.load(target)
        counted.append(value(model))
        assert counted[-1] >= max(counted), number
    engine.save(target)
    assert os.listdir(tmp_path) == ["target"]


def test_a_killed_first_save_leaves_no_checkpoint(tmp_path: Path) -> None:
    """Nothing can be mistaken for a checkpoint."""

    def worker() -> None:
        engine = mt.Engine(small.llama(), device="cpu")
        engine.save(tmp_path / "target", engine.optimizer())

    for operations in (3, 6, 9):
        run_and_kill(worker, operations, 0.0)
        assert not (tmp_path / "target").exists()
        with pytest.raises(CheckpointError, match="incomplete"):
            manifest.verify(replace.find(tmp_path / "target"))
    worker()
    assert os.listdir(tmp_path) == ["target"]
