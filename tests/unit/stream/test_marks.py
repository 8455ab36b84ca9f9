"""Order between compute's stream and the vram lane's, seen without a GPU: who names a mark that is new enough.

On CUDA, what the user's thread does to a resident slab (fill it with zeros, write to a gradient) is only *queued* on
compute's stream when the call returns. Work on the vram lane that touches the same bytes must name a later mark.
"""

from typing import Any

import torch
from tests import small
from tests.tiny import Stack, engine_of, inputs

from megatrain.store.vram import DeviceMemory
from megatrain.stream.lanes import SyncLanes


class Mark:
    lane = queue = "compute"
    done = False

    def __init__(self, time: int) -> None:
        self.time = time

    def wait(self) -> None: ...
    def order_stream(self) -> None: ...


class Done(Mark):
    """A ticket of the vram lane, which is behind the marks its work was behind."""


class Watched(SyncLanes):
    """Counts what compute was given; remembers how much of it each piece of work on the vram lane is behind."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0
        self.vram_time = 0
        self.jobs: list[tuple[str, int]] = []
        plain = self["gpu_update"].submit

        def submit(work: Any, after: Any = (), label: str = "", job: str = "") -> Any:
            # A stream is in order: what it was behind once, it stays behind.
            self.vram_time = max([self.vram_time, *(getattr(wait.ticket, "time", 0) for wait in after)])
            self.jobs.append((label, self.vram_time))
            plain(work, after, label)
            return Done(self.vram_time)

        self["gpu_update"].submit = submit  # type: ignore[method-assign]

    def mark(self) -> Any:
        return Mark(self.time)

    def given(self) -> int:
        """Compute is given something."""
        self.time += 1
        return self.time


def test_update_of_a_resident_slab_waits_for_a_gradient_that_the_user_wrote() -> None:
    lanes = Watched()
    model = Stack()
    engine = engine_of(model, lanes=lanes, resident=("*",))
    optimizer = engine.optimizer(lr=0.1, max_grad_norm=1.0)
    model(inputs(0)).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    written = lanes.given()
    lanes.jobs.clear()
    optimizer.step()
    late = [job for job in lanes.jobs if job[1] < written]
    assert not late, f"not behind what the user wrote: {late}"


def test_update_of_a_resident_slab_waits_for_a_weight_that_the_user_wrote() -> None:
    lanes = Watched()
    model = Stack()
    engine = engine_of(model, lanes=lanes, resident=("*",))
    optimizer = engine.optimizer(lr=0.1)
    model(inputs(0)).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    written = lanes.given()
    lanes.jobs.clear()
    optimizer.step()
    late = [job for job in lanes.jobs if job[1] < written]
    assert not late, f"not behind what the user wrote: {late}"


def _sums_behind_their_zeros(monkeypatch: Any, train: Any) -> None:
    lanes = Watched()
    filled: list[int] = []
    plain = DeviceMemory.allocate

    def allocate(self: Any, nbytes: int, *, transferred: bool) -> Any:
        buffer = plain(self, nbytes, transferred=transferred)
        filled.append(lanes.given())  # torch.zeros: a kernel on compute's stream
        return buffer

    monkeypatch.setattr(DeviceMemory, "allocate", allocate)
    submit = lanes["gpu_update"].submit
    late: list[str] = []

    def checked(work: Any, after: Any = (), label: str = "", job: str = "") -> Any:
        ticket = submit(work, after, label)
        if filled and lanes.jobs[-1][1] < filled[-1]:
            late.append(f"{label}: behind {lanes.jobs[-1][1]}, its buffer is filled at {filled[-1]}")
        return ticket

    lanes["gpu_update"].submit = checked  # type: ignore[method-assign]
    train(lanes)
    assert not late, late


def test_a_sum_in_gpu_memory_waits_for_the_zeros_of_its_buffer(monkeypatch: Any) -> None:
    """Accumulation outside a window: `Drain._add` allocates the FP32 sum after its mark."""

    def train(lanes: Any) -> None:
        model = Stack()
        engine_of(model, lanes=lanes, resident=("*",), precision="bf16")
        for seed in range(2):
            model(inputs(seed)).square().mean().backward()

    _sums_behind_their_zeros(monkeypatch, train)


def test_a_merge_in_gpu_memory_waits_for_the_zeros_of_its_buffer(monkeypatch: Any) -> None:
    """A tied embedding: `Drain.merge` allocates the FP32 sum and names no mark."""

    def train(lanes: Any) -> None:
        model = small.llama(tie_word_embeddings=True)
        engine = engine_of(model, lanes=lanes, resident=("*",), precision="bf16")
        optimizer = engine.optimizer(lr=0.1, max_grad_norm=1.0)
        model(**small.batch(2)).loss.backward()
        optimizer.step()

    _sums_behind_their_zeros(monkeypatch, train)
