"""Work on the gpu_update lane waits for compute's stream, checked without a GPU: it must name a recent enough mark.

On CUDA, what the user's thread does to a resident slab (filling it with zeros, writing a gradient) is only *queued* on
compute's stream when the call returns. Work on the gpu_update lane that touches the same bytes must name a later mark.
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
    """A ticket of the gpu_update lane, ordered after the same marks as its work."""


class RecordingLanes(SyncLanes):
    """Counts the work queued on compute, and records up to where each job of the gpu_update lane waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0
        self.lane_time = 0
        self.jobs: list[tuple[str, int]] = []
        plain = self["gpu_update"].submit

        def submit(work: Any, after: Any = (), label: str = "", job: str = "") -> Any:
            # A stream runs in order, so it stays ordered after everything it has waited for.
            self.lane_time = max([self.lane_time, *(getattr(wait.ticket, "time", 0) for wait in after)])
            self.jobs.append((label, self.lane_time))
            plain(work, after, label)
            return Done(self.lane_time)

        self["gpu_update"].submit = submit  # type: ignore[method-assign]

    def mark(self) -> Any:
        return Mark(self.time)

    def queue_compute(self) -> int:
        """Count one more piece of work queued on compute."""
        self.time += 1
        return self.time


def test_update_of_a_resident_slab_waits_for_a_gradient_that_the_user_wrote() -> None:
    lanes = RecordingLanes()
    model = Stack()
    engine = engine_of(model, lanes=lanes, resident=("*",))
    optimizer = engine.optimizer(lr=0.1, max_grad_norm=1.0)
    model(inputs(0)).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    written = lanes.queue_compute()
    lanes.jobs.clear()
    optimizer.step()
    late = [job for job in lanes.jobs if job[1] < written]
    assert not late, f"not ordered after the user's write: {late}"


def test_update_of_a_resident_slab_waits_for_a_weight_that_the_user_wrote() -> None:
    lanes = RecordingLanes()
    model = Stack()
    engine = engine_of(model, lanes=lanes, resident=("*",))
    optimizer = engine.optimizer(lr=0.1)
    model(inputs(0)).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    written = lanes.queue_compute()
    lanes.jobs.clear()
    optimizer.step()
    late = [job for job in lanes.jobs if job[1] < written]
    assert not late, f"not ordered after the user's write: {late}"


def _check_sums_wait_for_zeros(monkeypatch: Any, train: Any) -> None:
    lanes = RecordingLanes()
    filled: list[int] = []
    plain = DeviceMemory.allocate

    def allocate(self: Any, nbytes: int, *, transferred: bool) -> Any:
        buffer = plain(self, nbytes, transferred=transferred)
        filled.append(lanes.queue_compute())  # torch.zeros runs as a kernel on compute's stream
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
    """Accumulation outside a window: `Drain._add` allocates the FP32 sum after taking its mark."""

    def train(lanes: Any) -> None:
        model = Stack()
        engine_of(model, lanes=lanes, resident=("*",), precision="bf16")
        for seed in range(2):
            model(inputs(seed)).square().mean().backward()

    _check_sums_wait_for_zeros(monkeypatch, train)


def test_a_merge_in_gpu_memory_waits_for_the_zeros_of_its_buffer(monkeypatch: Any) -> None:
    """A tied embedding: `Drain.merge` allocates the FP32 sum without naming a mark."""

    def train(lanes: Any) -> None:
        model = small.llama(tie_word_embeddings=True)
        engine = engine_of(model, lanes=lanes, resident=("*",), precision="bf16")
        optimizer = engine.optimizer(lr=0.1, max_grad_norm=1.0)
        model(**small.batch(2)).loss.backward()
        optimizer.step()

    _check_sums_wait_for_zeros(monkeypatch, train)
