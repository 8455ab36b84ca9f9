"""A made-up drive: it takes its time, completes out of order, returns old bytes until a write is complete, and fills
buffers with garbage until a read is complete, and after a write of a gradient. Training on it gives the bits of
training in RAM.
"""

from __future__ import annotations

import ctypes
import random
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forked
from tests.races.test_delays import MissingWait, is_detected, tampered
from tests.tiny import Stack, differences, engine_of, gradients, inputs, roles

from megatrain.native import disk as native
from megatrain.stream.disk_transfer import DiskTransfers
from megatrain.stream.lanes import Lanes, SyncLanes, ThreadLanes

ON_DISK: dict[str, Any] = {"on_disk": ("*",), "allow_tmpfs": True}
MORE: dict[str, Any] = {
    **ON_DISK, "weights_on_disk": ("entry", "layers.*"), "gradients_on_disk": ("*",), "held_weights": ("layers.4",),
}  # fmt: skip
INPUTS: dict[str, Any] = {"inputs_on_disk": ("*",), "allow_tmpfs": True}


class SlowTransfer:
    """One transfer of the made-up drive, on a thread of its own."""

    def __init__(self, drive: SlowDrive, pieces: Any, address: int, write: bool, delay: float, keep: object) -> None:
        self._drive, self._pieces, self._address, self._write, self._delay = drive, pieces, address, write, delay
        if not write:
            ctypes.memset(address, 0xAA, sum(piece.length for piece in pieces))
        self._keep = keep
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        time.sleep(self._delay)
        at = self._address
        for piece in self._pieces:
            key = piece.file, piece.offset
            if self._write:
                # What the buffer holds now, not what it held when the write was submitted.
                self._drive.stored[key] = ctypes.string_at(at, piece.length)
                piece.written = 1
            else:
                stored = self._drive.stored.get(key, b"") if piece.written else b""
                ctypes.memmove(at, stored.ljust(piece.length, b"\0"), piece.length)
            at += piece.length

    def wait(self, seconds: float) -> int:
        self._thread.join()
        return sum(piece.length for piece in self._pieces)


class SlowDrive:
    """Takes the place of `native.Pool`."""

    longest = 2e-3

    def __init__(self, depth: int, backend: str) -> None:
        self.stored: dict[tuple[int, int], bytes] = {}
        self._source = random.Random(depth)

    def submit(self, pieces: Any, first: int, count: int, address: int, *, write: bool, keep: object) -> Any:
        delay = self._source.uniform(0, self.longest)
        return SlowTransfer(self, pieces[first : first + count], address, write, delay, (pieces, keep))

    def stop(self) -> bool:
        return True


def use_slow_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """All I/O is by made-up drives. After a write of a gradient its staging buffer holds garbage, as if it were used
    again at once. (Those of states and inputs keep what was written, so that it need not be read.)"""
    move = DiskTransfers.move

    def move_and_reuse(transfers: DiskTransfers, lane: str, job: str, name: str, copies: Any, *more: Any) -> None:
        move(transfers, lane, job, name, copies, *more)
        for memory, _ in copies if job == "write gradient" else ():
            memory.fill_(0xAA)

    monkeypatch.setattr(native, "Pool", SlowDrive)
    monkeypatch.setattr(DiskTransfers, "move", move_and_reuse)


def train(lanes: Lanes, directory: Path, **settings: Any) -> list[Any]:
    """Steps with clipping and without, and whatever users do in between."""
    model = Stack(depth=5)
    engine = engine_of(model, lanes=lanes, precision="bf16", **settings)
    seen: list[Any] = []
    for number, clip in enumerate((0.5, None)):
        optimizer = engine.optimizer(lr=0.1, max_grad_norm=clip)
        for step in range(5):
            with optimizer.final_backward():
                model(inputs(10 * number + step), skip=(1,) if step == 2 else ()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                with torch.no_grad():
                    seen.append(model(inputs(99)))
            if step == 1:
                state = optimizer.state_dict()["state"]
                seen.append([{role: view + 0 for role, view in entry.items()} for entry in state.values()])
            if step == 2:
                model.layers[2].scale.data = torch.linspace(-1, 1, 8)
            if step == 3:
                engine.save(directory / str(number), optimizer)
                seen.append(forked.run(lambda: float(model.gain.sum())).value)
    engine.load(directory / "1", optimizer)
    model(inputs(7)).square().mean().backward()
    optimizer.step()
    seen.append(roles(engine))
    engine.close()
    return seen


def offloaded(lanes: Lanes, **settings: Any) -> list[Any]:
    """Inputs of more layers than there are staging buffers, longer and shorter; abandoned and overtaken graphs."""
    model = Stack(depth=7)
    engine = engine_of(model, lanes=lanes, policy="offload", **settings)
    seen: list[Any] = []
    for seed, rows in enumerate((64, 200, 40, 200)):
        model(inputs(50 + seed, rows))
        losses = [model(inputs(10 * seed + k, rows + 8 * k)).square().mean() for k in range(2)]
        for loss in losses[:: 1 if seed == 1 else -1]:
            loss.backward()
        seen += [*map(torch.Tensor.detach, losses), gradients(model)]
    engine.close()
    return seen


@pytest.fixture(scope="module")
def offloaded_to_ram() -> list[Any]:
    return offloaded(SyncLanes())


@pytest.mark.parametrize("seed", range(4))
def test_a_slow_drive_changes_no_input(
    seed: int, offloaded_to_ram: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_slow_drive(monkeypatch)
    lanes = ThreadLanes(seed=seed, max_delay=3e-4)
    assert differences(offloaded(lanes, offload_dir=tmp_path, **INPUTS), offloaded_to_ram) == []


@pytest.mark.parametrize("seed", range(2))
def test_a_real_drive_changes_no_input(seed: int, backend: str, offloaded_to_ram: list[Any], tmp_path: Path) -> None:
    lanes = ThreadLanes(seed=seed, max_delay=3e-4)
    got = offloaded(lanes, offload_dir=tmp_path, disk_io=backend, **INPUTS)
    assert differences(got, offloaded_to_ram) == []


@pytest.mark.parametrize(
    "missing",
    [
        ("disk_inputs", "write input", "staged input written", "d2h"),
        ("disk_inputs", "read input", "staged input read", "h2d"),
        ("h2d", "restore", "staged input written", "disk_inputs"),
    ],
    ids=lambda missing: f"{missing[0]}: {missing[2]}",
)
def test_a_missing_wait_of_an_input_is_detected(
    missing: tuple[str, str, str, str], offloaded_to_ram: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_slow_drive(monkeypatch)
    wait = MissingWait(*missing, offloaded, lag=5e-3)  # type: ignore[arg-type]

    def run(seed: int) -> list[Any]:
        return offloaded(tampered(wait, seed), offload_dir=tmp_path, **INPUTS)

    assert is_detected(run, offloaded_to_ram, seeds=3)


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with tempfile.TemporaryDirectory() as directory:
        return train(SyncLanes(), Path(directory))


@pytest.mark.parametrize(("seed", "what"), [(0, ON_DISK), (1, MORE), (2, ON_DISK), (3, MORE)])
def test_a_slow_drive_changes_nothing(
    seed: int, what: dict[str, Any], expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_slow_drive(monkeypatch)
    lanes = ThreadLanes(seed=seed, max_delay=3e-4)
    assert differences(train(lanes, tmp_path, offload_dir=tmp_path, **what), expected) == []


@pytest.mark.parametrize("seed", range(2))
def test_a_real_drive_changes_nothing(seed: int, backend: str, expected: list[Any], tmp_path: Path) -> None:
    lanes = ThreadLanes(seed=seed, max_delay=3e-4)
    assert differences(train(lanes, tmp_path, offload_dir=tmp_path, disk_io=backend, **ON_DISK), expected) == []


@pytest.mark.parametrize(
    "missing",
    [
        ("disk_in", "read states", "staged states read", "disk_out"),
        ("disk_update", "update", "staged states written", "disk_in"),
        ("disk_out", "write states", "staged states written", "disk_update"),
        ("disk_weights", "read weight", "weight written", "disk_out"),
        ("h2d", "fetch", "staged weight written", "disk_weights"),
        ("refresh", "fetch", "staged weight written", "disk_weights"),
        ("disk_out", "write gradient", "staged gradient written", "d2h"),
        ("disk_in", "read gradient", "gradient written", "disk_out"),
        ("disk_update", "update", "staged gradient written", "disk_in"),
    ],
    ids=lambda missing: f"{missing[0]}: {missing[2]}",
)
def test_a_missing_wait_is_detected(
    missing: tuple[str, str, str, str], expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_slow_drive(monkeypatch)
    wait = MissingWait(*missing, train, lag=5e-3)  # type: ignore[arg-type]

    def run(seed: int) -> list[Any]:
        return train(tampered(wait, seed), tmp_path / str(seed), offload_dir=tmp_path, **MORE)

    assert is_detected(run, expected, seeds=3)


def test_a_transfer_that_is_not_waited_for_is_detected(
    expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_slow_drive(monkeypatch)
    monkeypatch.setattr(SlowTransfer, "wait", lambda transfer, seconds: 0)

    def run(seed: int) -> list[Any]:
        lanes = ThreadLanes(seed=seed, max_delay=3e-4)
        return train(lanes, tmp_path / str(seed), offload_dir=tmp_path, **ON_DISK)

    assert is_detected(run, expected, seeds=3)


class Wide(torch.nn.Module):
    """Its weight takes several pieces, so that a write of it takes a while."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale = torch.nn.Parameter(torch.randn(3_000_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale.mean()


@pytest.mark.parametrize("lanes", ["auto", "threads"])
def test_a_weight_may_be_read_while_it_is_written(tmp_path: Path, lanes: str, backend: str) -> None:
    """By a user and by an evaluation in other threads, as with weights in RAM."""
    model = Stack(layer=Wide)
    engine = engine_of(model, lanes=lanes, disk_io=backend, offload_dir=tmp_path, weights_on_disk=("*",), **ON_DISK)
    parameter: Any = model.layers[1].scale
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            parameter.detach().cpu()

    @torch.no_grad()
    def evaluate() -> None:
        while not done.is_set():
            model(inputs(0))

    with ThreadPoolExecutor(2) as threads:
        others = [threads.submit(work) for work in (read, evaluate)]
        try:
            for value in range(20):
                parameter.data = torch.full_like(parameter, value)
        finally:
            done.set()
    assert [other.result() for other in others] == [None, None]
    assert (parameter.detach().cpu() == 19).all()
    engine.close()
