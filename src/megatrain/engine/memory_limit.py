"""GPU memory: the limit of PyTorch's allocator, the policy of each block, and what to give up when memory runs out.

All policies give bitwise equal gradients, so a retry with less memory gives the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch

import torch

from megatrain import process
from megatrain.compute.interrupts import DeferInterrupts
from megatrain.errors import NotEnoughMemory
from megatrain.geometry import GIB
from megatrain.hardware import inventory
from megatrain.hardware.machine import cuda_bytes
from megatrain.planner import Plan
from megatrain.settings import Settings
from megatrain.store.slab import Slab
from megatrain.stream.fetch import Fetcher
from megatrain.stream.states import StateStream
from megatrain.stream.sums_out import SumsOut

SMALLER_POLICY = {"store": "recompute", "recompute": "offload", "offload": "offload"}
"""Policy → the next one, which needs less GPU memory."""
GRANULARITY = 32 << 20
"""Bytes to leave unreserved: the allocator requests segments of 2 or 20 MiB from the driver."""
WARMUP_STEPS = 2
"""Steps after which every stream has allocated its caches."""


class Policies:
    """The policy of every block."""

    def __init__(self, chosen: str | Mapping[str, str], blocks: Sequence[str]) -> None:
        patterns = {"*": chosen} if isinstance(chosen, str) else chosen
        self._by_block = {
            name: next((policy for pattern, policy in patterns.items() if fnmatch(name, pattern)), "recompute")
            for name in blocks
        }

    def __getitem__(self, block: str) -> str:
        return self._by_block[block]

    @property
    def stored(self) -> list[str]:
        """Names of blocks with policy `store`."""
        return [name for name, policy in self._by_block.items() if policy == "store"]

    @property
    def is_smallest(self) -> bool:
        """Whether no block can be switched to a smaller policy."""
        return all(policy == SMALLER_POLICY[policy] for policy in self._by_block.values())

    @contextmanager
    def reduced(self) -> Iterator[None]:
        """Inside, no block stores its graph; afterwards half as many as before do. If none did, offload inputs."""
        stored = self.stored
        smaller = {
            name: SMALLER_POLICY[policy] for name, policy in self._by_block.items() if policy == "store" or not stored
        }
        before, self._by_block = self._by_block, self._by_block | smaller
        yield
        # Keep the first half: the backward frees the graphs of the last blocks first, so they save the least memory.
        self._by_block |= {name: before[name] for name in stored[: len(stored) // 2]}


class HeldState:
    """Weights and gradient sums that stay on the GPU although the optimizer states are in RAM."""

    def __init__(self, slabs: Sequence[Slab], fetcher: Fetcher, sums_out: SumsOut, states: StateStream) -> None:
        self._slabs, self._fetcher, self._sums_out, self._states = slabs, fetcher, sums_out, states

    def __bool__(self) -> bool:
        return self._fetcher.holding or any(slab.held_sum for slab in self._slabs)

    def stop_holding(self) -> None:
        """Stream all weights and sums from now on. Drops the current gradients."""
        with self._fetcher.lock, DeferInterrupts():
            sums = [slab for slab in self._slabs if slab.held_sum]
            for slab in sums:
                slab.grad.clear()
                slab.grad.free_unused()
                slab.homes.sums = slab.homes.transit
            self._sums_out.stop_holding(sums)
            self._states.stop_holding(sums)
            self._fetcher.stop_holding()


class MemoryLimit:
    """The GPU memory limit of one engine, and what it gives up when the limit is reached."""

    policies: Policies
    held_state: HeldState

    def __init__(
        self, settings: Settings, device: torch.device, model: torch.nn.Module, pinned: Callable[[], int] = lambda: 0
    ) -> None:
        self._device = device
        self._pinned = pinned
        """Returns the bytes of pinned host memory."""
        self._owner: object | None = object()
        """Identifies this engine among those that limit the GPU; None once released."""
        plan: Plan | None = settings.plan if device.type == "cuda" else None
        # Settings that override the plan change how much memory is needed.
        self._plan = plan if plan is not None and not settings.differing(plan.settings()) else None
        self._other_bytes = inventory.vram_held_beside(device, model)
        """GPU memory that this process uses for something else: a reference model, another engine."""
        self._limit = inventory.vram_limit(device, settings.max_vram_gb, self._other_bytes)
        self._plan_lifted = self._expandable = False
        self._planned: int | None = None
        """Bytes that the plan allows PyTorch's allocator."""
        self._window = 1
        """The largest window so far, in micro-batches."""
        if self._plan is not None:
            self._planned = self._plan.total("vram") - self._plan.outside_allocator
            self._window = self._plan.largest_window

    def apply(self, to_plan: bool = True) -> None:
        """Limit the allocator to the plan's total, or to `max_vram_gb` alone: evaluation may need more than planned."""
        if self._device.type == "cpu" or self._owner is None:
            return
        if self._plan is not None or self._limit is not None:
            self._expandable = process.use_expandable_segments(self._owner)
        cap = None if self._limit is None else self._limit - cuda_bytes(self._pinned(), self._window)
        planned = self._planned if to_plan and not self._plan_lifted else None
        process.vram_fraction(self._device).request(self._owner, process.VramLimit(cap, planned, self._other_bytes))

    def set_window_size(self, window: int) -> None:
        """Count the GPU memory of the threads of a window of this size against the limit."""
        if window > self._window:
            self._window = window
            self.apply()

    def release(self) -> None:
        """Remove this engine's limit."""
        if self._device.type == "cpu" or self._owner is None:
            return
        process.release(self._owner)
        self._owner = None
        if self._plan is not None:
            # Frees what `reserve` allocated. A GPU that has failed raised its error before.
            with suppress(RuntimeError):
                torch.cuda.empty_cache()

    def reserve(self, wait_for_lanes: Callable[[], None]) -> None:
        """Allocate the rest of the plan's GPU memory and free it to PyTorch's allocator, which keeps it reserved.

        A run that cannot get the memory fails here instead of hours later. `wait_for_lanes` must block until all lanes
        are idle: their allocations would fail while this method holds the memory.
        """
        if self._plan is None and self._limit is None:
            return
        # Pinned host memory takes some GPU memory too, and it is allocated now.
        self.apply()
        wait_for_lanes()
        # The driver counts memory that was cached before the limit was set.
        torch.cuda.empty_cache()
        if self._plan is None or self._plan_lifted:
            return
        try:
            self._reserve_missing()
        except torch.OutOfMemoryError as error:
            wanted, free = self._missing_bytes(), inventory.free_memory(self._device)
            raise NotEnoughMemory(
                f"the plan needs {wanted / GIB:.2f} GiB more GPU memory (moments, gradients, activations, "
                f"workspace), but only {free / GIB:.2f} GiB are free; stop other processes on the GPU, "
                "or make the plan again."
            ) from error

    def after_step(self, steps: int, wait_for_lanes: Callable[[], None]) -> None:
        """Reserve once more after the first steps, in which the allocator returned memory to make room for caches."""
        if steps != WARMUP_STEPS:
            return
        # Gradient buffers are pinned by now.
        self.apply()
        if self._expandable and self._plan is not None and not self._plan_lifted:
            wait_for_lanes()
            with suppress(torch.OutOfMemoryError):
                self._reserve_missing()

    def _reserve_missing(self) -> None:
        held: list[torch.Tensor] = []
        # An allocation may be served from cached memory, so repeat until the reserved total is reached.
        while (missing := self._missing_bytes()) > GRANULARITY:
            held.append(torch.empty(missing, dtype=torch.uint8, device=self._device))
            if not self._expandable:
                break

    def _missing_bytes(self) -> int:
        """Bytes of the plan that are not reserved yet, within the allocator's limit."""
        assert self._plan is not None
        assert self._planned is not None
        total = torch.cuda.get_device_properties(self._device).total_memory
        allowed = int(torch.cuda.get_per_process_memory_fraction(self._device) * total)
        wanted = min(self._planned + self._other_bytes, allowed)
        missing = wanted - torch.cuda.memory_reserved(self._device) - GRANULARITY
        if self._expandable:
            return missing
        # A fixed segment belongs to one stream for good, and persistent data is allocated on another one.
        roles = self._plan.memory["vram"]
        return min(missing, roles["activations"] + roles["workspace"] - self._plan.outside_allocator)

    @property
    def exhausted(self) -> bool:
        """Whether `with_less_memory` has nothing left to give up."""
        return self.policies.is_smallest and not self.held_state and (self._plan_lifted or self._plan is None)

    @contextmanager
    def with_less_memory(self) -> Iterator[None]:
        """Retry a step that ran out of GPU memory inside this context.

        Inside, no block stores its graph; afterwards half as many as before do. If no block stored its graph, held
        weights and sums are streamed from now on; if none are held, inputs of blocks are offloaded. The plan's total no
        longer limits the allocator, but `max_vram_gb` does.
        """
        self._plan_lifted = True
        self.apply(False)
        if not self.policies.stored and self.held_state:
            self.held_state.stop_holding()
            yield
            return
        with self.policies.reduced():
            yield
