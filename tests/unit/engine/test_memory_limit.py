"""The GPU memory of a plan is reserved in advance, within the limit and only once. The allocator is simulated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests import small

from megatrain import process
from megatrain.engine.memory_limit import GRANULARITY, WARMUP_STEPS, MemoryLimit
from megatrain.errors import NotEnoughMemory
from megatrain.geometry import GIB
from megatrain.hardware.machine import THREAD_BYTES, Machine, cuda_bytes
from megatrain.planner import plan
from megatrain.settings import Settings

GPU = torch.device("cuda", 0)
TOTAL = 140 * GIB


class Allocator:
    """A model of PyTorch's allocator: reserves memory from the driver, holds it in tensors, caches and frees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int = TOTAL) -> None:
        self.share, self.free = 1.0, free
        self.reserved = self.held = self.peak = self.requests = self.quieted = 0
        monkeypatch.setattr(process, "_vram_fractions", {})
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        for name, stand_in in {
            "get_device_properties": lambda _: SimpleNamespace(total_memory=TOTAL),
            "get_per_process_memory_fraction": lambda _: self.share,
            "set_per_process_memory_fraction": lambda value, _: setattr(self, "share", value),
            "memory_reserved": lambda _: self.reserved,
            "memory_allocated": lambda _: self.held,
            "mem_get_info": lambda _: (self.free - self.reserved, TOTAL),
            "empty_cache": self.empty_cache,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        real = torch.empty

        def empty(*args: Any, **extra: Any) -> Any:
            return self.empty(*args) if extra.get("device") == GPU else real(*args, **extra)

        monkeypatch.setattr(torch, "empty", empty)

    def quiet(self) -> None:
        assert self.held == 0, "lanes must be idle before memory is reserved"
        self.quieted += 1

    def empty_cache(self) -> None:
        self.reserved = self.held

    def empty(self, nbytes: int) -> Any:
        self.requests += 1
        extra = max(0, self.held + nbytes - self.reserved)
        if self.reserved + extra > min(self.share * TOTAL, self.free):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.reserved, self.held = self.reserved + extra, self.held + nbytes
        self.peak = max(self.peak, self.reserved)
        return Block(self, nbytes)


class Block:
    def __init__(self, owner: Allocator, nbytes: int) -> None:
        self._owner, self._nbytes = owner, nbytes

    def __del__(self) -> None:
        self._owner.held -= self._nbytes


def memory_limit_of(**settings: Any) -> tuple[MemoryLimit, int]:
    """A memory limit for the plan of a small model, and the bytes that the allocator may reserve."""
    chosen = plan(small.llama(), machine=Machine.load("h200-1.5tb"), batch=64, length=8192)
    followed = Settings(plan=chosen, **chosen.settings(), **settings)
    memory_limit = MemoryLimit(followed, GPU, small.llama())
    memory_limit.apply()
    return memory_limit, chosen.total("vram") - chosen.outside_allocator


def test_all_planned_memory_is_reserved_and_left_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    memory_limit, planned = memory_limit_of()
    memory_limit.reserve(allocator.quiet)
    assert (allocator.held, allocator.quieted) == (0, 1)
    assert planned - 2 * GRANULARITY <= allocator.reserved <= planned


def test_memory_is_reserved_once_more_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    memory_limit, planned = memory_limit_of()
    for steps in range(1, 6):
        # A tenth of the planned memory has been returned to the driver.
        allocator.reserved = planned - planned // 10
        memory_limit.after_step(steps, allocator.quiet)
        is_reserved = planned - 2 * GRANULARITY <= allocator.reserved <= planned
        assert is_reserved == (steps == WARMUP_STEPS)
        assert allocator.quieted == (steps >= WARMUP_STEPS), "memory must be reserved once, while lanes are idle"
    assert allocator.peak <= planned


def test_a_memory_fraction_set_by_the_user_limits_the_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    _, planned = memory_limit_of()
    allocator.share = planned / 2 / TOTAL
    memory_limit, _ = memory_limit_of()
    memory_limit.reserve(allocator.quiet)
    assert planned // 2 - 2 * GRANULARITY <= allocator.reserved <= planned // 2


def test_a_full_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch, free=GIB)
    memory_limit, _ = memory_limit_of()
    with pytest.raises(NotEnoughMemory, match=r"but only 1\.00 GiB are free; stop other processes"):
        memory_limit.reserve(allocator.quiet)
    memory_limit.after_step(WARMUP_STEPS, allocator.quiet)


def test_without_expandable_segments_only_compute_memory_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.8")
    memory_limit, planned = memory_limit_of()
    memory_limit.reserve(allocator.quiet)
    assert allocator.requests == 1
    roles = memory_limit._plan.memory["vram"]  # type: ignore[union-attr]
    assert allocator.reserved == min(
        planned - GRANULARITY,
        roles["activations"] + roles["workspace"] - memory_limit._plan.outside_allocator,  # type: ignore[union-attr]
    )
    allocator.empty_cache()
    memory_limit.after_step(WARMUP_STEPS, allocator.quiet)
    assert allocator.requests == 1


def test_a_cap_frees_memory_cached_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    allocator.reserved = 3 * GIB
    MemoryLimit(Settings(plan=None), GPU, small.llama()).reserve(allocator.quiet)
    assert allocator.reserved == 3 * GIB, "without a cap the cache must not be emptied"
    MemoryLimit(Settings(plan=None, max_vram_gb=2.0), GPU, small.llama()).reserve(allocator.quiet)
    assert allocator.reserved == 0


def test_memory_of_other_tensors_adds_to_the_plan_and_counts_against_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    allocator.reserved = allocator.held = 5 * GIB
    _, planned = memory_limit_of()
    assert allocator.share * TOTAL == pytest.approx(planned + 5 * GIB)
    with pytest.raises(NotEnoughMemory, match=r"the 5\.00 GiB that this process holds on the GPU already"):
        memory_limit_of(max_vram_gb=5.5)


def test_gpu_memory_used_by_pinning_counts_against_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, pinned = Allocator(monkeypatch), [0]
    memory_limit = MemoryLimit(Settings(plan=None, max_vram_gb=20.0), GPU, small.llama(), pinned=lambda: pinned[0])
    memory_limit.apply()
    for step, nbytes in enumerate((0, 256 * GIB, 512 * GIB)):
        pinned[0] = nbytes
        memory_limit.reserve(allocator.quiet) if step < WARMUP_STEPS else memory_limit.after_step(step, allocator.quiet)
        assert allocator.share * TOTAL == pytest.approx(20 * GIB - cuda_bytes(nbytes))
    assert cuda_bytes(512 * GIB) - cuda_bytes(0) == GIB
    for window in (16, 8):
        memory_limit.set_window_size(window)
        assert allocator.share * TOTAL == pytest.approx(20 * GIB - cuda_bytes(512 * GIB, 16)), (
            "a smaller window keeps the threads of a larger one"
        )
    assert cuda_bytes(0, 16) - cuda_bytes(0) == 14 * THREAD_BYTES
    memory_limit.release()
    memory_limit.release()
    assert allocator.share == 1.0
    memory_limit.apply()
    assert allocator.share == 1.0, "apply after release must change nothing"


def test_pinning_can_use_up_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    MemoryLimit(Settings(plan=None, max_vram_gb=2.0), GPU, small.llama(), pinned=lambda: 1 << 40).apply()
    assert allocator.share == 0.0


def test_release_returns_the_memory_and_the_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    memory_limit, planned = memory_limit_of()
    memory_limit.reserve(allocator.quiet)
    assert allocator.share == pytest.approx(planned / TOTAL)
    memory_limit.release()
    assert (allocator.reserved, allocator.share) == (0, 1.0)


def test_after_running_out_of_memory_nothing_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    memory_limit, _ = memory_limit_of()
    memory_limit.policies = SimpleNamespace(reduced=torch.no_grad, stored=["layers.0"])  # type: ignore[assignment]
    with memory_limit.with_less_memory():
        pass
    memory_limit.reserve(allocator.quiet)
    memory_limit.after_step(WARMUP_STEPS, allocator.quiet)
    assert allocator.reserved == 0
