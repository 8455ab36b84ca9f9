"""Real faults of a real file system during training. A run stops with one sentence and a non-zero exit status, its last
checkpoint can be resumed bit for bit, and nothing is left behind.

Each test has an ext4 of its own on a loop device. Needs root; skipped elsewhere.
"""

from __future__ import annotations

import errno
import gc
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests import small
from tests.faults.drive import MIB, Drive, mounted, waiting_threads
from tests.tiny import Stack, backward, differences, engine_of, inputs, roles
from transformers import TrainerCallback

import megatrain as mt
from megatrain.errors import DiskFailed, DiskFull, LaneFailed, MegaTrainError
from megatrain.hf.checkpoint_list import last_complete
from megatrain.native import disk as native
from megatrain.store import disk
from megatrain.store.disk import aligned
from megatrain.store.scratch import open_scratch
from megatrain.stream import lanes

Fault = Callable[[Drive, Any], None]


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Drive]:
    with mounted(tmp_path) as found:
        yield found


# ---- faults: what happens to the drive while `memory` (a DiskMemory) uses it


def read_only(drive: Drive, memory: Any) -> None:
    drive.abort()


def gone(drive: Drive, memory: Any) -> None:
    drive.shut_down()


def unreadable(drive: Drive, memory: Any) -> None:
    drive.lose_data()


def flipped_bit(drive: Drive, memory: Any) -> None:
    """In every piece that was written, on the device: nothing but reading it again can notice."""
    for file in memory.files:
        with open(f"/proc/self/fd/{file.descriptor}", "rb") as scratch:
            while content := scratch.read(4096):
                if content.strip(b"\0"):
                    drive.flip_bit(content)


def size_limit(drive: Drive, memory: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture(autouse=True)
def file_sizes() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


FAULTS = pytest.mark.parametrize(
    ("fault", "said"),
    [
        (read_only, "Read-only file system|Input/output error"),
        (gone, "Input/output error"),
        # A write makes the device longer again; what was there reads as zeros.
        (unreadable, "Input/output error|not what was written there"),
        (flipped_bit, "not what was written there"),
        (size_limit, "File too large"),
    ],
    ids=["read-only", "gone", "unreadable", "flipped bit", "size limit"],
)


def check_sentence(
    error: BaseException, said: str, drive: Drive, parts: int, place: str = r", at offset [\d,]+"
) -> None:
    for expected in (
        said,
        r"the (states|weights) of \S+ could not be (read|written) \(lane disk_(in|out|weights)\)",
        rf"the scratch file in {drive.path}{place}",
        rf"\d of {parts} parts of the model had taken the step",
    ):
        assert re.search(expected, str(error)), (expected, str(error))
    assert "\n" not in str(error)


def check_nothing_is_left(drive: Drive) -> None:
    """No file is open, so that it can be unmounted, and no name is there."""
    gc.collect()
    drive.unmount()
    assert list(drive.path.iterdir()) == []


@FAULTS
def test_an_engine_stops_with_one_sentence(drive: Drive, tmp_path: Path, fault: Fault, said: str, backend: str) -> None:
    model = Stack(depth=5)
    engine = engine_of(model, offload_dir=drive.path, on_disk=["*"], disk_io=backend)
    optimizer = engine.optimizer(lr=0.1, max_grad_norm=1.0)

    def steps(*seeds: int) -> None:
        for seed in seeds:
            backward(model, seed)
            optimizer.step()
            optimizer.zero_grad()
            engine.synchronize()

    steps(0)
    fault(drive, engine._placement.disk)
    with pytest.raises((DiskFailed, LaneFailed)) as caught:
        steps(1, 2, 3, 4)
    check_sentence(caught.value, said, drive, 7)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with pytest.raises(MegaTrainError):
        engine.save(tmp_path / "saved", optimizer)
    assert not (tmp_path / "saved").exists()
    with suppress(MegaTrainError):
        engine.close()
    with suppress(MegaTrainError):
        engine.release()
    check_nothing_is_left(drive)


@FAULTS
def test_inputs_that_cannot_be_moved_leave_the_model_as_it_is(
    drive: Drive, tmp_path: Path, fault: Fault, said: str, backend: str
) -> None:
    """The error comes from a forward or a backward, and again from every later one. The model can be saved."""
    model = Stack(depth=6)
    engine = engine_of(
        model, offload_dir=drive.path, policy="offload", inputs_on_disk=["*"], disk_io=backend, lanes="threads"
    )
    optimizer = engine.optimizer(lr=0.1, max_grad_norm=1.0)

    def forward(seed: int) -> torch.Tensor:
        return model(inputs(seed, 64)).square().mean()

    def micro_batches(first: torch.Tensor) -> None:
        first.backward()
        for seed in range(3):
            forward(seed).backward()

    # Several graphs at once, so that none after the fault needs more space.
    for loss in [forward(seed) for seed in range(3)]:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    before = roles(engine)
    loss = forward(7)
    engine.quiesce()
    fault(drive, engine._placement.disk)
    message = ""
    for _ in range(3):
        with pytest.raises((DiskFailed, LaneFailed)) as caught:
            micro_batches(loss)
        assert message in ("", str(caught.value)), "always the first failure"
        message = str(caught.value)
        with suppress(LaneFailed):
            optimizer.zero_grad()
        loss = model.gain.sum() * 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for part in (
        said,
        r"the input of (entry|layers\.\d) could not be (read|written) \(lane disk_inputs\)",
        rf"the scratch file in {drive.path}, at offset [\d,]+",
        r"No weight or state was changed by this",
    ):
        assert re.search(part, message), (part, message)
    assert "\n" not in message
    assert differences(roles(engine), before) == []
    engine.save(tmp_path / "saved", optimizer)
    again = Stack(depth=6, seed=1)
    with engine_of(again) as restored:
        restored.load(tmp_path / "saved", restored.optimizer(lr=0.1))
        assert differences(roles(restored), before) == []
    with suppress(MegaTrainError):
        engine.release()
    del loss, caught
    check_nothing_is_left(drive)


def test_inputs_for_which_there_is_no_space_are_refused_with_numbers(drive: Drive) -> None:
    """Space is freed, and the same engine goes on."""
    model = Stack(depth=4)
    engine = engine_of(model, offload_dir=drive.path, policy="offload", inputs_on_disk=["*"], disk_io="threads")
    optimizer = engine.optimizer(lr=0.1)
    model(inputs(0, 64)).square().mean().backward()
    drive.fill(keep=66 * MIB)
    with pytest.raises(DiskFull, match=rf"^inputs of blocks need \S+ GB in {drive.path}, but only .* must stay free"):
        model(inputs(0, 1 << 18))
    (drive.path / "somebody-else").unlink()
    optimizer.zero_grad()
    model(inputs(0, 1 << 18)).square().mean().backward()
    optimizer.step()
    engine.quiesce()  # the last inputs of the forward are still being written, and nobody waits for them
    drive.abort()
    with pytest.raises(DiskFailed, match=rf"for inputs of blocks could not be reserved in {drive.path} \(Read-only"):
        model(inputs(0, 1 << 19))
    engine.release()


def llama(seed: int = 0) -> Any:
    """More layers than staging buffers, so that states are read in every step."""
    return small.llama(seed, num_hidden_layers=6)


def arguments(out: Path, **changes: Any) -> Any:
    options: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.5}
    return small.arguments(out, **(options | changes))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The weights of a run without faults, in RAM."""
    folder = tmp_path_factory.mktemp("expected")
    trainer = mt.Trainer(model=llama(), args=arguments(folder), train_dataset=small.rows())
    trainer.train()
    return small.snapshot(trainer.model)


class AfterStep(TrainerCallback):  # type: ignore[misc]
    def __init__(self, number: int, action: Callable[[], None]) -> None:
        self.number, self.action = number, action

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.number:
            self.action()


@FAULTS
def test_a_trainer_stops_and_resumes(
    drive: Drive, tmp_path: Path, fault: Fault, said: str, expected: dict[str, Any], announced: Any
) -> None:
    mt.init(device="cpu", offload_dir=drive.path, on_disk=["*"], debug=mt.Debug(disk_io="threads"))
    out = tmp_path / "out"

    def break_it() -> None:
        trainer.engine.synchronize()
        fault(drive, trainer.engine._placement.disk)

    trainer = mt.Trainer(
        model=llama(), args=arguments(out), train_dataset=small.rows(), callbacks=[AfterStep(3, break_it)]
    )
    with pytest.raises((DiskFailed, LaneFailed)) as caught:
        trainer.train()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    check_sentence(caught.value, said, drive, 9)
    found = sorted(path.name for path in out.iterdir() if path.is_dir())
    if fault is size_limit:
        # It holds for these weights too. The note says that; the error is still that of the drive.
        assert found == ["checkpoint-2"]
        assert "could not be saved in" in caught.value.__notes__[0]
    else:
        step = trainer.state.global_step
        assert found == ["checkpoint-2", f"rescue-{step}"]
        check_rescue(trainer, out / f"rescue-{step}", announced.messages)
    with suppress(MegaTrainError):
        trainer.engine.release()
    healthy = tmp_path / "healthy"
    mt.init(device="cpu", offload_dir=healthy, on_disk=["*"], debug=mt.Debug(allow_tmpfs=True))
    again = mt.Trainer(model=llama(1), args=arguments(out), train_dataset=small.rows())
    assert again.train(resume_from_checkpoint=True).global_step == 6
    assert small.same(small.snapshot(again.model), expected)


def check_rescue(trainer: Any, folder: Path, messages: list[str]) -> None:
    """It has exactly the weights in memory, and the message says what it is."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, parameter in trainer.model.named_parameters():
        slab = parameter.slab
        assert torch.equal(loaded[name], slab.layout.view(slab.weight, parameter.segment)), name
    assert not list(folder.glob("megatrain*"))
    said = next(message for message in messages if message.startswith("the weights in memory were saved in"))
    steps = {slab.name: max(slab.steps) for slab in trainer.engine.slabs}
    ahead = [name for name, count in steps.items() if count == max(steps.values())]
    assert f"{len(ahead)} of 9 parts" in said or len(ahead) == 9
    assert all((name in said) == (name not in ahead) for name in steps), (said, steps)


# ---- no space


def test_a_full_drive_is_refused_with_numbers(drive: Drive, tmp_path: Path) -> None:
    drive.fill(keep=32 * MIB)
    said = rf"states need \S+ GB in {drive.path}, but only 0.03\d+ GB are free, of which 0.067 must stay free"
    model = Stack()
    engine = engine_of(model, offload_dir=drive.path, on_disk=["*"], disk_io="threads")
    with pytest.raises(DiskFull, match=said):
        engine.optimizer(lr=0.1)
    engine.release()
    mt.init(device="cpu", offload_dir=drive.path, on_disk=["*"], debug=mt.Debug(disk_io="threads"))
    trainer = mt.Trainer(model=llama(), args=arguments(tmp_path / "out"), train_dataset=small.rows())
    with pytest.raises(DiskFull, match=said):
        trainer.train()
    assert not list((tmp_path / "out").glob("rescue-*"))
    assert [path.name for path in drive.path.iterdir() if path.is_file()] == ["somebody-else"]


def test_reserved_space_cannot_be_taken(drive: Drive, tmp_path: Path, expected: dict[str, Any]) -> None:
    """Another program fills the file system in the middle of a run: nothing happens to the run."""
    mt.init(device="cpu", offload_dir=drive.path, on_disk=["*"], debug=mt.Debug(disk_io="threads"))
    trainer = mt.Trainer(
        model=llama(), args=arguments(tmp_path / "out"), train_dataset=small.rows(),
        callbacks=[AfterStep(1, drive.fill)],
    )  # fmt: skip
    trainer.train()
    assert drive.free == 0
    assert small.same(small.snapshot(trainer.model), expected)


def test_a_drive_that_promised_too_much(tmp_path: Path) -> None:
    """A thin volume without space: the file system reserves, and the device below cannot write."""
    with mounted(tmp_path, 64, name="pool") as pool, mounted(pool.path, 256) as drive:
        model = Stack(depth=5)
        engine = engine_of(model, offload_dir=drive.path, on_disk=["*"], disk_io="threads")
        optimizer = engine.optimizer(lr=0.1)
        pool.fill()

        def steps() -> None:
            for seed in range(4):
                backward(model, seed)
                optimizer.step()
                optimizer.zero_grad()
                engine.synchronize()

        with pytest.raises((DiskFailed, LaneFailed)) as caught:
            steps()
        check_sentence(caught.value, "Input/output error|No space left|not what was written there", drive, 7)
        with suppress(MegaTrainError):
            engine.release()


# ---- faults that do not matter: the file is open


def removed(drive: Drive) -> None:
    (drive.path / "scratch").rmdir()


def unmounted(drive: Drive) -> None:
    drive.unmount("-l")


@pytest.mark.parametrize("event", [removed, unmounted])
def test_a_directory_that_vanishes_does_not_matter(
    drive: Drive, tmp_path: Path, event: Callable[[Drive], None], expected: dict[str, Any]
) -> None:
    mt.init(device="cpu", offload_dir=drive.path / "scratch", on_disk=["*"], debug=mt.Debug(disk_io="threads"))
    trainer = mt.Trainer(
        model=llama(), args=arguments(tmp_path / "out"), train_dataset=small.rows(),
        callbacks=[AfterStep(3, lambda: event(drive))],
    )  # fmt: skip
    assert trainer.train().global_step == 6
    assert small.same(small.snapshot(trainer.model), expected)


# ---- a drive that does not respond

STALLED = """
import sys, time
import megatrain as mt
from tests import small
from transformers import TrainerCallback

class Tell(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        print("step", state.global_step, flush=True)
        if state.global_step == 3:
            trainer.engine.synchronize()
            print("ready", flush=True)
            sys.stdin.readline()

mt.init(device="cpu", offload_dir=sys.argv[1], on_disk=["*"], debug=mt.Debug(disk_io=sys.argv[3]))
args = small.arguments(sys.argv[2], max_steps=10_000, save_strategy="steps", save_steps=2)
trainer = mt.Trainer(model=small.llama(num_hidden_layers=6), args=args, train_dataset=small.rows(), callbacks=[Tell()])
try:
    trainer.train()
finally:
    began = time.monotonic()
    print("stopped", flush=True)
    with trainer.engine:
        raise SystemExit(f"closed after {time.monotonic() - began:.1f} s")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_stalled_drive_can_be_interrupted(drive: Drive, tmp_path: Path, number: signal.Signals, backend: str) -> None:
    """The kernel ends a process only after its system calls, so it is gone when the drive responds again."""
    child = subprocess.Popen(
        [sys.executable, "-c", STALLED, str(drive.path), str(tmp_path / "out"), backend], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stderr is not None
    closed = ""
    try:
        while (line := child.stdout.readline()) != "ready\n":
            assert line, child.communicate()
        drive.freeze()
        child.stdin.write("\n")
        child.stdin.flush()
        while not waiting_threads(child.pid):
            assert child.poll() is None
            time.sleep(0.05)
        time.sleep(1)  # until the main thread waits too
        child.send_signal(number)
        if number == signal.SIGINT:
            # All of this while the drive does not respond.
            while (line := child.stdout.readline()) != "stopped\n":
                assert line
            while "closed after" not in closed:
                line = child.stderr.readline()
                assert line, closed
                closed += line
        else:
            # A second one ends it. Two that come before the handler runs count as one.
            while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.5)
                child.send_signal(number)
    finally:
        drive.thaw()
        said, errors = child.communicate()
    assert child.returncode not in (0, None), (said, errors)
    assert [path.name for path in (tmp_path / "out").glob("rescue-*")] == []
    check_nothing_is_left(drive)
    assert Path(last_complete(str(tmp_path / "out"))).name == "checkpoint-2"


@pytest.mark.parametrize("weights", ["in RAM", "on disk"])
def test_a_stalled_drive_fails_at_last(
    drive: Drive, tmp_path: Path, backend: str, weights: str, expected: dict[str, Any], announced: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With the sentence of other faults; weights are saved if they can be read without waiting for the drive again."""
    assert disk.STALLED_SECONDS < lanes.FAIL_AFTER_SECONDS
    monkeypatch.setattr(disk, "STALLED_SECONDS", 1.0)
    out, on_disk = tmp_path / "out", ["*"] if weights == "on disk" else []
    mt.init(device="cpu", offload_dir=drive.path, on_disk=["*"], weights_on_disk=on_disk,
            debug=mt.Debug(disk_io=backend))  # fmt: skip

    def stall() -> None:
        trainer.engine.synchronize()
        drive.freeze()

    trainer = mt.Trainer(
        model=llama(), args=arguments(out), train_dataset=small.rows(), callbacks=[AfterStep(3, stall)]
    )
    try:
        with pytest.raises((DiskFailed, LaneFailed)) as caught:
            trainer.train()
        check_sentence(caught.value, rf"no answer for 1 s from the scratch file in {drive.path}: check", drive, 9, "")
        assert not any("makes no progress" in message for message in announced.messages)
        # What was read before can still be in a buffer, so some weights of a stalled drive may be left.
        assert list(out.glob("rescue-*")) or weights == "on disk"
    finally:
        drive.thaw()
    with suppress(MegaTrainError):
        trainer.engine.release()
    mt.init(device="cpu")
    again = mt.Trainer(model=llama(1), args=arguments(out), train_dataset=small.rows())
    assert again.train(resume_from_checkpoint=True).global_step == 6
    assert small.same(small.snapshot(again.model), expected)


def test_a_pool_with_stalled_writes_stops_when_they_end(
    drive: Drive, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "STOP_MS", 100)
    file = open_scratch(drive.path)
    pool, memory = native.Pool(4, backend), aligned(12 * MIB)
    memory.view(torch.int64).random_()
    pieces: Any = (native.Piece * 12)()
    for piece in pieces:
        piece.file, piece.length, piece.offset = file.descriptor, MIB, file.place(MIB)
    file.reserve()
    drive.freeze()
    try:
        transfer = pool.submit(pieces, 0, 12, memory.data_ptr(), write=True, keep=memory)
        # With io_uring, the kernel may write one after the other.
        while waiting_threads() < (4 if backend == "threads" else 1):
            time.sleep(0.05)
        time.sleep(0.5)
        assert not pool.stop()
        assert not pool.stop()
    finally:
        drive.thaw()
    # Four were under way and are written; the others were never begun.
    with pytest.raises(native.TransferFailed) as caught:
        transfer.wait()
    assert caught.value.errno == errno.ECANCELED
    monkeypatch.setattr(native, "STOP_MS", 30_000)
    assert pool.stop()
    found = aligned(12 * MIB)
    assert os.preadv(file.descriptor, [memoryview(found.numpy())], 0) == 12 * MIB
    assert [piece.written for piece in pieces] == [1] * 4 + [0] * 8
    assert torch.equal(found[: 4 * MIB], memory[: 4 * MIB])
    assert not found[4 * MIB :].any()
    file.close()
    drive.unmount()
