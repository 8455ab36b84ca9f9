"""Faults of the drive during training: the run stops with one sentence that has file, lane and what was updated."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import small
from tests.tiny import Stack, backward, engine_of
from transformers import TrainerCallback

import megatrain as mt
from megatrain.errors import DiskFailed, LaneFailed, MegaTrainError
from megatrain.store.disk import DiskMemory
from megatrain.stream.lanes import ThreadLanes


@contextmanager
def flipped_bit(file: int) -> Iterator[None]:
    with open(f"/proc/self/fd/{file}", "r+b", buffering=0) as scratch:
        for at in range(0, os.fstat(file).st_size, 4096):
            byte = os.pread(scratch.fileno(), 1, at)
            os.pwrite(scratch.fileno(), bytes([byte[0] ^ 1]), at)
    yield


@contextmanager
def replaced(file: int, path: str, mode: str) -> Iterator[None]:
    with open(path, mode, buffering=0) as other:
        os.dup2(other.fileno(), file)
    yield


@contextmanager
def no_space(file: int) -> Iterator[None]:
    with replaced(file, "/dev/full", "r+b"):
        yield


@contextmanager
def device_error(file: int) -> Iterator[None]:
    # Address 0 of a process cannot be read, which the kernel reports as EIO.
    with replaced(file, "/proc/self/mem", "rb"):
        yield


@contextmanager
def truncated(file: int) -> Iterator[None]:
    os.ftruncate(file, 0)
    yield


@contextmanager
def size_limit(file: int) -> Iterator[None]:
    """Writes end within a block, after a short write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096 + 100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("lanes", ["sync", "threads"])
@pytest.mark.parametrize(
    ("fault", "said", "lane"),
    [
        (flipped_bit, "not what was written there", "disk_in"),
        (no_space, "No space left on device|not what was written there", "disk_(in|out)"),
        (device_error, r"Input/output error \(errno 5\)|Bad file descriptor", "disk_(in|out)"),
        (truncated, "the file was truncated", "disk_in"),
        (size_limit, "File too large|Input/output error", "disk_out"),
    ],
    ids=["flipped bit", "no space", "I/O error", "truncated", "short write"],
)
def test_training_stops_with_one_sentence(
    tmp_path: Path, fault: Callable[[int], Any], said: str, lane: str, lanes: str, backend: str
) -> None:
    model = Stack(depth=5)
    engine = engine_of(
        model, lanes=ThreadLanes() if lanes == "threads" else "sync", offload_dir=tmp_path, on_disk=["*"],
        allow_tmpfs=True, disk_io=backend,
    )  # fmt: skip
    optimizer = engine.optimizer(lr=0.1, max_grad_norm=1.0)

    def step(seed: int) -> None:
        backward(model, seed)
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    engine.synchronize()
    assert engine._placement.disk is not None

    def steps() -> None:
        for seed in range(1, 5):
            step(seed)
            engine.synchronize()

    with fault(engine._placement.disk.files[0].descriptor), pytest.raises((DiskFailed, LaneFailed)) as caught:
        steps()
    error = caught.value
    assert caught.match(said)
    assert caught.match(rf"the states of \S+ could not be (read|written) \(lane {lane}\)")
    assert caught.match(rf"the scratch file in {tmp_path}, at offset [\d,]+")
    assert caught.match(r"\d of 7 parts of the model had taken the step")
    assert "\n" not in str(error)
    # Neither damaged states nor half a step are ever saved.
    for _ in range(2):
        with pytest.raises(MegaTrainError):
            engine.save(tmp_path / "checkpoint", optimizer)
        with pytest.raises(MegaTrainError):
            step(9)
    with suppress(MegaTrainError):
        engine.close()
    assert not (tmp_path / "checkpoint" / "megatrain" / "manifest.json").exists()


def test_a_trainer_stops_and_its_last_checkpoint_is_intact(tmp_path: Path) -> None:
    scratch, out = tmp_path / "scratch", tmp_path / "out"
    mt.init(device="cpu", offload_dir=scratch, on_disk=["*"], debug=mt.Debug(allow_tmpfs=True))
    args = small.arguments(out, max_steps=6, save_strategy="steps", save_steps=2, max_grad_norm=0.5)

    class Fault(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                with no_space(trainer.engine._placement.disk.files[0].descriptor):
                    pass

    trainer = mt.Trainer(model=small.llama(), args=args, train_dataset=small.rows(), callbacks=[Fault()])
    with pytest.raises((DiskFailed, LaneFailed), match="No space left on device"):
        trainer.train()
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-2"]
    again = mt.Trainer(model=small.llama(1), args=args, train_dataset=small.rows())
    assert again.train(resume_from_checkpoint=True).global_step == 6
    mt.init(device="cpu")
    expected = mt.Trainer(model=small.llama(), args=small.arguments(tmp_path / "ram", max_steps=6, max_grad_norm=0.5),
                          train_dataset=small.rows())  # fmt: skip
    expected.train()
    assert small.same(small.snapshot(again.model), small.snapshot(expected.model))


def test_a_directory_that_vanishes_does_not_matter(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    model = Stack()
    engine = engine_of(model, offload_dir=scratch, on_disk=["*"], allow_tmpfs=True)
    optimizer = engine.optimizer(lr=0.1)
    scratch.rmdir()
    for seed in range(2):
        backward(model, seed)
        optimizer.step()
        optimizer.zero_grad()
    engine.close()


def test_a_killed_process_leaves_nothing_behind(tmp_path: Path) -> None:
    """Killed while it writes, 50 times, each with a new start in the same directory."""
    for _ in range(50):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            memory = DiskMemory([tmp_path], allow_tmpfs=True)
            buffer = memory.allocate(1 << 20, transferred=False)
            os.write(writer, b"1")
            while True:
                with buffer.changing(0, buffer.nbytes) as held:
                    held += 1
        assert os.read(reader, 1) == b"1"
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for end in (reader, writer):
            os.close(end)
        assert list(tmp_path.iterdir()) == []


def test_a_full_drive_is_noticed_before_training(tmp_path: Path) -> None:
    model = Stack()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    engine = engine_of(model, offload_dir=tmp_path, on_disk=["*"], allow_tmpfs=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(mt.errors.DiskFull, match=r"could not be reserved .*File too large"):
            engine.optimizer(lr=0.1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    # With more room it works.
    optimizer = engine.optimizer(lr=0.1)
    backward(model, 0)
    optimizer.step()
    engine.close()
    assert torch.isfinite(model.gain).all()
