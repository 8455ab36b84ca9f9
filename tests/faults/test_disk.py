"""Faults of the drive during training: the run stops with one sentence that has file, lane and what was updated."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from tests import small
from tests.tiny import Stack, backward, engine_of
from transformers import TrainerCallback

import megatrain as mt
from megatrain.errors import DiskFailed, LaneFailed, MegaTrainError
from megatrain.store.disk import DiskMemory
from megatrain.store.split import split
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


class Gated(ThreadLanes):
    """Lanes whose writes of one slab wait while the gate is closed."""

    def __init__(self, name: str) -> None:
        self.name, self.gate = name, threading.Event()
        self.gate.set()
        super().__init__()

    def submit(self, lane: str, job: str, work: Callable[[], None], **options: Any) -> Any:
        def gated() -> None:
            self.gate.wait()
            work()

        held = job == "write states" and options["label"] == self.name
        return super().submit(lane, job, gated if held else work, **options)


def test_a_late_write_names_the_parts_of_its_own_step(tmp_path: Path) -> None:
    """It fails when all other parts of the model have taken the next step."""
    model, lanes = Stack(), Gated("layers.1")
    engine = engine_of(model, lanes=lanes, offload_dir=tmp_path, on_disk=["layers.1"], allow_tmpfs=True)
    optimizer = engine.optimizer(lr=0.1, max_grad_norm=1.0)

    def step(seed: int) -> None:
        backward(model, seed)
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    engine.synchronize()
    lanes.gate.clear()
    step(1)
    step(2)
    others = [slab for slab in engine.slabs if slab.name != "layers.1"]
    for slab in others:
        slab.settle()
    assert {slab.name: slab.steps[0] for slab in engine.slabs} == {s.name: 3 for s in others} | {"layers.1": 2}
    assert engine._placement.disk is not None
    with no_space(engine._placement.disk.files[0].descriptor):
        lanes.gate.set()
        with pytest.raises((DiskFailed, LaneFailed)) as caught:
            engine.synchronize()
    assert caught.match(r"the states of layers\.1 could not be written \(lane disk_out\): No space left on device")
    assert caught.match(r" 5 of 5 parts of the model had taken the step \([^()]*\), and 4 of them the next one \(")
    named = re.findall(r"\(([^()]*)\)", str(caught.value).partition("5 of 5")[2])
    assert ["layers.1" in names.split(", ") for names in named[:2]] == [True, False]
    with suppress(MegaTrainError):
        engine.close()


def test_parts_that_do_not_take_the_step_are_not_counted(tmp_path: Path) -> None:
    """Frozen ones, and those without a gradient."""
    model = Stack(depth=5)
    model.layers[0].requires_grad_(False)
    model.layers[1].requires_grad_(False)
    engine = engine_of(model, lanes="sync", offload_dir=tmp_path, on_disk=["*"], allow_tmpfs=True)
    optimizer = engine.optimizer(lr=0.1, max_grad_norm=1.0)
    assert engine._placement.disk is not None
    file = engine._placement.disk.files[0].descriptor
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 1, skip=(2,))
    said = r" \d of 4 parts of the model had taken the step"
    with truncated(file), pytest.raises((DiskFailed, LaneFailed), match=said):
        optimizer.step()
    with suppress(MegaTrainError):
        engine.close()


@contextmanager
def damaged_residual(trainer: Any) -> Iterator[None]:
    """One page of a residual that is read in every step; everything else can be read."""
    (slab,) = (slab for slab in trainer.engine.slabs if slab.name.endswith("layers.4"))
    piece = slab.state_buffers()[0]._pieces[0]
    with open(f"/proc/self/fd/{piece.file}", "r+b", buffering=0) as scratch:
        byte = os.pread(scratch.fileno(), 1, piece.offset)
        os.pwrite(scratch.fileno(), bytes([byte[0] ^ 1]), piece.offset)
    yield


@contextmanager
def dead_drive(trainer: Any) -> Iterator[None]:
    with no_space(trainer.engine._placement.disk.files[0].descriptor):
        yield


@pytest.mark.parametrize("weights", ["in RAM", "on disk"])
@pytest.mark.parametrize("fault", [damaged_residual, dead_drive])
def test_a_rescue_is_exact_where_it_can_be_and_says_where_it_is_not(
    tmp_path: Path, fault: Callable[[Any], Any], weights: str, announced: pytest.LogCaptureFixture
) -> None:
    """BF16 weights with residuals on disk: the FP32 master is saved where both halves can be read."""
    masters: list[dict[str, torch.Tensor]] = []

    class Keep(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            masters.append({name: p.master() for name, p in expected.model.named_parameters()})

    class Fault(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                trainer.engine.synchronize()
                with fault(trainer):
                    pass

    def run(out: Path, callback: TrainerCallback) -> Any:
        args = small.arguments(out, max_steps=5, max_grad_norm=0.5)
        model = small.llama(num_hidden_layers=6)
        return mt.Trainer(model=model, args=args, train_dataset=small.rows(), callbacks=[callback])

    mt.init(device="cpu", precision="bf16")
    expected = run(tmp_path / "ram", Keep())
    expected.train()
    mt.init(device="cpu", precision="bf16", offload_dir=tmp_path / "scratch", on_disk=["*"],
            weights_on_disk=["*"] if weights == "on disk" else [], debug=mt.Debug(allow_tmpfs=True))  # fmt: skip
    trainer = run(tmp_path / "out", Fault())
    with pytest.raises((DiskFailed, LaneFailed)) as caught:
        trainer.train()
    folders = list((tmp_path / "out").glob("rescue-*"))
    if weights == "on disk" and fault is dead_drive:
        (note,) = caught.value.__notes__
        assert re.search(
            r"no weights were saved, since those of \d parts of the model \(.*model\.layers\..*\) are", note
        )
        assert folders == []
        return
    (folder,) = folders
    report = json.loads((folder / "rescue.json").read_text())
    assert report["error"] == str(caught.value)
    loaded = load_file(folder / "model.safetensors")
    rounded = set(report["rounded_to_bf16"])
    for name, parameter in trainer.model.named_parameters():
        slab = parameter.slab
        exact = masters[report["optimizer_steps"][slab.name] - 1][name]
        assert loaded[name].dtype == torch.float32
        assert torch.equal(loaded[name], split(exact)[0].float() if slab.name in rounded else exact), name
        assert not torch.equal(split(exact)[0].float(), exact), "rounding would not be seen"
    said = next(message for message in announced.messages if message.startswith("the weights in memory were saved in"))
    if fault is damaged_residual:
        assert len(rounded) == 1
    assert f"weights of {len(rounded)} parts" in said
    assert "are rounded to BF16" in said


def test_adapters_are_rescued_if_the_base_model_cannot_be_read(tmp_path: Path) -> None:
    class Fault(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                trainer.engine.synchronize()
                faults.enter_context(no_space(trainer.engine._placement.disk.files[0].descriptor))

    model = peft.get_peft_model(small.llama(num_hidden_layers=6), peft.LoraConfig(target_modules=["q_proj"]))
    mt.init(
        device="cpu", offload_dir=tmp_path / "scratch", weights_on_disk=["*layers*"], debug=mt.Debug(allow_tmpfs=True)
    )
    args = small.arguments(tmp_path / "out", max_steps=5)
    trainer = mt.Trainer(model=model, args=args, train_dataset=small.rows(), callbacks=[Fault()])
    with ExitStack() as faults, pytest.raises((DiskFailed, LaneFailed)):
        trainer.train()
    (folder,) = (tmp_path / "out").glob("rescue-*")
    loaded = load_file(folder / "adapter_model.safetensors")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(loaded) == len(trained)
    for name, p in trained.items():
        assert torch.equal(loaded[name.replace(".default", "")], p.slab.layout.view(p.slab.weight, p.segment)), name


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
