"""Inputs on disk: any tensor comes back, staging buffers and space on disk are reused, and reads run ahead."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny import same_bits

from megatrain.errors import DiskFailed, DiskFull, LaneFailed
from megatrain.geometry import INPUT_STAGING_SLOTS
from megatrain.store import scratch
from megatrain.store.disk import PIECE_BYTES, DiskMemory
from megatrain.store.ram import HostMemory
from megatrain.stream.activations import Activations
from megatrain.stream.disk_inputs import DiskInputs
from megatrain.stream.disk_transfer import DiskTransfers
from megatrain.stream.lanes import Lanes, SyncLanes, ThreadLanes
from megatrain.stream.offloaded import OffloadedTensor
from megatrain.stream.transfer import Link
from megatrain.telemetry.counters import Counters


class Parts:
    """What an engine builds for blocks named "disk…" to be on disk and others in RAM."""

    def __init__(self, directories: list[Path], lanes: Lanes) -> None:
        self.lanes, self.counters = lanes, Counters()
        self.jobs: list[tuple[str, str]] = []
        self.disk = DiskMemory(directories, allow_tmpfs=True)
        self.ram = HostMemory(pin=False, threads=1)
        self.inputs = DiskInputs(["disk*"], self.disk, self.ram, lanes, DiskTransfers(self.counters))
        link = Link(torch.device("cpu"), lanes, self.counters, 1)
        self.activations = Activations(link, self.ram, self.inputs)
        submit = lanes.submit

        def recorded(lane: str, job: str, *more: Any, **options: Any) -> Any:
            self.jobs.append((job, options["label"]))
            return submit(lane, job, *more, **options)

        lanes.submit = recorded  # type: ignore[method-assign]

    def offload(self, tensor: torch.Tensor, block: str = "disk") -> OffloadedTensor:
        self.activations.wait_for_room(1, block)
        return self.activations.offload([tensor.clone()], block)[0]

    def restore(self, offloaded: OffloadedTensor) -> torch.Tensor:
        self.activations.start([offloaded])
        return self.activations.take(offloaded)

    def reads(self) -> list[str]:
        return [block for job, block in self.jobs if job == "read input"]


@pytest.fixture(params=["sync", "threads"])
def parts(request: Any, tmp_path: Path) -> Iterator[Parts]:
    lanes = SyncLanes() if request.param == "sync" else ThreadLanes(seed=1, max_delay=3e-4)
    made = Parts([tmp_path / "a", tmp_path / "b"], lanes)
    yield made
    lanes.close(1.0)
    made.disk.close()


TENSORS = [
    torch.randn(3, 5, 7),
    torch.randn(1023).bfloat16(),
    torch.arange(-5, 5).view(2, 5),
    torch.rand(77) < 0.5,
    torch.tensor(2.5, dtype=torch.float64),
    torch.empty(0),
    torch.empty(3, 0, 2, dtype=torch.int32),
    torch.randn(9, 4).t(),
    torch.randn(11, dtype=torch.complex64),
    torch.randint(0, 255, (PIECE_BYTES + 4097,), dtype=torch.uint8),
    torch.randint(0, 255, (2, PIECE_BYTES), dtype=torch.uint8),
]


@pytest.mark.parametrize("block", ["disk", "ram"])
def test_every_shape_and_dtype_comes_back(parts: Parts, block: str) -> None:
    for _ in range(2):
        offloaded = [parts.offload(tensor, block) for tensor in TENSORS]
        for tensor, one in reversed([*zip(TENSORS, offloaded, strict=True)]):
            assert same_bits(parts.restore(one), tensor)


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_calls_gives_what_was_offloaded(parts: Parts, seed: int) -> None:
    """Tensors of blocks on disk and in RAM are offloaded, dropped and restored in any order, some abandoned halfway."""
    source = random.Random(seed)
    live: list[tuple[OffloadedTensor, torch.Tensor]] = []
    for number in range(150):
        action = source.random()
        if action < 0.5 or not live:
            tensor = torch.full((source.choice([1, 300, 2000, 5000]),), float(number))
            live.append((parts.offload(tensor, source.choice(["disk.a", "disk.b", "ram"])), tensor))
        elif action < 0.85:
            offloaded, tensor = live.pop(-1 if source.random() < 0.7 else source.randrange(len(live)))
            assert torch.equal(parts.restore(offloaded), tensor)
        elif action < 0.93:
            live.pop(source.randrange(len(live)))
        else:
            parts.activations.drop_all()


def backward(parts: Parts, count: int, nbytes: int = 4096) -> None:
    offloaded = [parts.offload(torch.full((nbytes // 4,), float(k)), f"disk.{k}") for k in range(count)]
    for number in reversed(range(count)):
        assert parts.restore(offloaded.pop())[0] == number


def test_the_last_inputs_need_no_read_and_the_others_are_read_ahead(parts: Parts) -> None:
    count = 3 * INPUT_STAGING_SLOTS
    offloaded = [parts.offload(torch.full((16,), float(k)), f"disk.{k}") for k in range(count)]
    first_read = count - INPUT_STAGING_SLOTS - 1
    for number in reversed(range(count)):
        before = len(parts.reads())
        assert parts.restore(offloaded.pop())[0] == number
        # The copy of the one before was started, and those before that fill the staging buffers.
        ahead = max(0, number - 1 - INPUT_STAGING_SLOTS)
        assert parts.reads() == [f"disk.{k}" for k in range(first_read, ahead - 1, -1)]
        assert len(parts.reads()) - before <= 2
    assert len(set(parts.reads())) == len(parts.reads()) == count - INPUT_STAGING_SLOTS


def test_ram_holds_the_staging_buffers_only(parts: Parts) -> None:
    backward(parts, 20, 1 << 16)
    assert parts.ram.allocated_bytes == INPUT_STAGING_SLOTS << 16
    assert parts.disk.allocated_bytes == 20 << 16


def test_space_on_disk_is_reused_and_grows_with_the_longest_batch(parts: Parts) -> None:
    def used() -> int:
        return sum(file.end for file in parts.disk.files)

    for _ in range(3):
        backward(parts, 6, 40_000)
        assert used() == 6 * 40_960
    for nbytes in (4, 100, 39_000, 40_000):
        backward(parts, 6, nbytes)
    assert used() == 6 * 40_960
    backward(parts, 6, 2 * PIECE_BYTES + 4096)
    largest = used()
    assert largest <= 6 * (2 * PIECE_BYTES + 4096 + 40_960)
    for nbytes in (PIECE_BYTES, 40_000, 2 * PIECE_BYTES + 4096):
        backward(parts, 6, nbytes)
    assert used() == largest


def test_transfers_are_counted(parts: Parts) -> None:
    backward(parts, 10, 8192)
    backward(parts, 10, 100)
    parts.lanes.quiesce()
    # The second time, a page of each buffer would do, but a piece has one checksum.
    assert parts.counters.bytes_disk_out == parts.disk.written_bytes == parts.disk.input_bytes == 20 * 8192
    assert parts.counters.bytes_disk_in == len(parts.reads()) * 8192
    assert parts.disk.step_bytes == parts.disk.covered_bytes == 0, "a step does not change them"


def test_a_shorter_batch_writes_only_what_it_needs(parts: Parts) -> None:
    backward(parts, 2, 3 * PIECE_BYTES)
    written = parts.disk.written_bytes
    backward(parts, 2, PIECE_BYTES + 4)
    assert parts.disk.written_bytes - written == 2 * 2 * PIECE_BYTES


def test_a_full_drive_is_refused_before_anything_is_submitted(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    backward(parts, 5)
    kept = parts.offload(torch.ones(10))
    monkeypatch.setattr(scratch, "KEPT_FREE", 1 << 62)
    jobs = len(parts.jobs)
    with pytest.raises(DiskFull, match=r"^inputs of blocks need \S+ GB in .*, but only .* GB are free, of which"):
        parts.offload(torch.ones(1 << 20))
    assert len(parts.jobs) == jobs
    monkeypatch.undo()
    assert torch.equal(parts.restore(kept), torch.ones(10))
    backward(parts, 5, 1 << 20)


def test_what_was_not_written_is_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Space that is used again holds an older input, with a checksum that is right."""
    parts = Parts([tmp_path], ThreadLanes())
    backward(parts, 6)
    move = DiskTransfers.move

    def failing(transfers: DiskTransfers, lane: str, job: str, name: str, *more: Any) -> None:
        if (job, name) == ("write input", "disk.0"):
            raise DiskFailed("this write fails.")
        move(transfers, lane, job, name, *more)

    monkeypatch.setattr(DiskTransfers, "move", failing)
    first = parts.offload(torch.ones(1024), "disk.0")
    parts.lanes.quiesce()
    # Its staging buffer is used for others.
    parts.inputs._ring[-1].release()
    with pytest.raises(LaneFailed, match=r"'disk.0' failed on the disk_inputs lane \(DiskFailed: this write fails"):
        parts.restore(first)
    parts.lanes.close(1.0)
    parts.disk.close()


def test_an_abandoned_backward_leaves_nothing_behind(parts: Parts) -> None:
    for count in (12, 7, 12):
        offloaded = [parts.offload(torch.full((64,), float(k)), f"disk.{k}") for k in range(count)]
        for _ in range(count // 2):
            parts.restore(offloaded.pop())
        del offloaded
        gc.collect()
        parts.activations.drop_all()
        assert len(parts.activations._free) == 12
        assert all(place.target is None for place in parts.activations._free)
        assert all(staging.content() is None for staging in parts.inputs._ring)
