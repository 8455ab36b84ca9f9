"""How much of the GPU may be taken, what blocks keep there for their backward, and less of it once it has run out.

Nothing here changes bits: `store`, `recompute` and `offload` give the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch

import torch

from megatrain import process
from megatrain.compute.interrupts import DeferInterrupts
from megatrain.errors import NotEnoughMemory
from megatrain.hardware import inventory
from megatrain.hardware.machine import cuda_bytes
from megatrain.planner import Plan
from megatrain.settings import Settings
from megatrain.store.slab import Slab
from megatrain.stream.fetch import Fetcher
from megatrain.stream.states import StateStream
from megatrain.stream.sums_out import SumsOut

SMALLER_POLICY = {"store": "recompute", "recompute": "offload", "offload": "offload"}
"""Policy → the next one, which takes less of the device."""
GRANULARITY = 32 << 20
"""The allocator takes memory from the driver in pieces of 2 or 20 MiB; what is taken beforehand stops short of one."""
WARMUP_STEPS = 2
"""Steps after which all streams have what they keep."""


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
        """Blocks that keep their graph."""
        return [name for name, policy in self._by_block.items() if policy == "store"]

    @property
    def is_smallest(self) -> bool:
        """Whether no block could keep less."""
        return all(policy == SMALLER_POLICY[policy] for policy in self._by_block.values())

    @contextmanager
    def reduced(self) -> Iterator[None]:
        """No graph is kept inside (no input either, if none was); afterwards half as many as before."""
        stored = self.stored
        leaner = {
            name: SMALLER_POLICY[policy] for name, policy in self._by_block.items() if policy == "store" or not stored
        }
        before, self._by_block = self._by_block, self._by_block | leaner
        yield
        # The first half goes on as before: a backward frees the last ones first, so those are worth least.
        self._by_block |= {name: before[name] for name in stored[: len(stored) // 2]}


class HeldState:
    """What the GPU holds for longer than one use, of slabs whose states are in RAM."""

    def __init__(self, slabs: Sequence[Slab], fetcher: Fetcher, sums_out: SumsOut, states: StateStream) -> None:
        self._slabs, self._fetcher, self._sums_out, self._states = slabs, fetcher, sums_out, states

    def __bool__(self) -> bool:
        return self._fetcher.holding or any(slab.held_sum for slab in self._slabs)

    def stop_holding(self) -> None:
        """Weights and sums stream from now on; gradients that there are now are dropped."""
        with self._fetcher.lock, DeferInterrupts():
            sums = [slab for slab in self._slabs if slab.held_sum]
            for slab in sums:
                slab.grad.clear()
                slab.grad.free_unused()
                slab.homes.sums = slab.homes.states
            self._sums_out.stop_holding(sums)
            self._states.stop_holding(sums)
            self._fetcher.stop_holding()


class MemoryLimit:
    """The limits of an engine's GPU memory, and what gives way when they are reached."""

    policies: Policies
    held_state: HeldState

    def __init__(
        self, settings: Settings, device: torch.device, model: torch.nn.Module, pinned: Callable[[], int] = lambda: 0
    ) -> None:
        self._device = device
        self._pinned = pinned
        """Bytes of host memory that the GPU can reach now."""
        self._owner: object | None = object()
        """Stands for this engine among those that limit the GPU; None once it has ended."""
        plan: Plan | None = settings.plan if device.type == "cuda" else None
        # Settings that override the plan change how much memory is taken.
        self._plan = plan if plan is not None and not settings.differing(plan.settings()) else None
        self._other_bytes = inventory.vram_held_beside(device, model)
        """Held by this process for something else: a reference model, another engine."""
        self._limit = inventory.vram_limit(device, settings.max_vram_gb, self._other_bytes)
        self._plan_lifted = self._expandable = False
        self._planned: int | None = None
        """What PyTorch's allocator may have by the plan."""
        self._window = 1
        """Most micro-batches that have passed a block together."""
        if self._plan is not None:
            self._planned = self._plan.total("vram") - self._plan.outside_allocator
            self._window = self._plan.largest_window

    def apply(self, held: bool = True) -> None:
        """Whether a plan's figure limits GPU memory, or `max_vram_gb` alone, as evaluation and generation may need."""
        if self._device.type == "cpu" or self._owner is None:
            return
        if self._plan is not None or self._limit is not None:
            self._expandable = process.use_expandable_segments(self._owner)
        cap = None if self._limit is None else self._limit - cuda_bytes(self._pinned(), self._window)
        planned = self._planned if held and not self._plan_lifted else None
        process.vram_fraction(self._device).request(self._owner, process.VramLimit(cap, planned, self._other_bytes))

    def set_window_size(self, window: int) -> None:
        """So many micro-batches pass a block together, each in a thread of its own: what those take is inside a cap."""
        if window > self._window:
            self._window = window
            self.apply()

    def release(self) -> None:
        """The engine is closed: its limits are nobody else's."""
        if self._device.type == "cpu" or self._owner is None:
            return
        process.release(self._owner)
        self._owner = None
        if self._plan is not None:
            # What was taken ahead; a GPU that has failed has raised already what the user should see.
            with suppress(RuntimeError):
                torch.cuda.empty_cache()

    def reserve(self, wait_for_lanes: Callable[[], None]) -> None:
        """Allocate the rest of the plan's GPU memory and free it to PyTorch's allocator, which keeps it reserved.

        A run that cannot get the memory fails here instead of hours later. `wait_for_lanes` must block until all lanes
        are idle: their allocations would fail while this method holds the memory.
        """
        if self._plan is None and self._limit is None:
            return
        # Host memory is pinned now, which takes some of the GPU's.
        self.apply()
        wait_for_lanes()
        # What was cached before there was a limit, the driver counts as well.
        torch.cuda.empty_cache()
        if self._plan is None or self._plan_lifted:
            return
        try:
            self._reserve_missing()
        except torch.OutOfMemoryError as error:
            wanted, free = self._missing_bytes(), inventory.free_memory(self._device)
            raise NotEnoughMemory(
                f"the plan has {wanted / inventory.GIB:.2f} GiB more of GPU memory (moments, gradients, activations, "
                f"workspace), but only {free / inventory.GIB:.2f} GiB are free; end what else runs on the GPU, or plan "
                "again."
            ) from error

    def after_step(self, steps: int, wait_for_lanes: Callable[[], None]) -> None:
        """After a step. What other streams keep came in the first ones, for which the allocator gave back what had
        been taken; then it is taken again, once."""
        if steps != WARMUP_STEPS:
            return
        # Buffers of gradients are pinned as well by now.
        self.apply()
        if self._expandable and self._plan is not None and not self._plan_lifted:
            wait_for_lanes()
            with suppress(torch.OutOfMemoryError):
                self._reserve_missing()

    def _reserve_missing(self) -> None:
        held: list[torch.Tensor] = []
        # What is asked for may lie in memory that is there already: then it is still missing, and asked for again.
        while (missing := self._missing_bytes()) > GRANULARITY:
            held.append(torch.empty(missing, dtype=torch.uint8, device=self._device))
            if not self._expandable:
                break

    def _missing_bytes(self) -> int:
        """Bytes of the plan that the allocator could take from the driver, as far as it may."""
        assert self._plan is not None
        assert self._planned is not None
        total = torch.cuda.get_device_properties(self._device).total_memory
        allowed = int(torch.cuda.get_per_process_memory_fraction(self._device) * total)
        wanted = min(self._planned + self._other_bytes, allowed)
        missing = wanted - torch.cuda.memory_reserved(self._device) - GRANULARITY
        if self._expandable:
            return missing
        # A segment that does not grow is one stream's for good, and what stays on the GPU is another's.
        roles = self._plan.memory["vram"]
        return min(missing, roles["activations"] + roles["workspace"] - self._plan.outside_allocator)

    @property
    def exhausted(self) -> bool:
        """Whether `lean` has nothing left to give."""
        return self.policies.is_smallest and not self.held_state and (self._plan_lifted or self._plan is None)

    @contextmanager
    def with_less_memory(self) -> Iterator[None]:
        """For a step that ran out of memory, done again inside: blocks keep less for their backward.

        Inside no block keeps its graph, and afterwards half as many as before do. If none did, weights and sums that
        are held stream from now on, and the next time inputs go to RAM. A plan's figure is no limit any more,
        `max_vram_gb` still is.
        """
        self._plan_lifted = True
        self.apply(False)
        if not self.policies.stored and self.held_state:
            self.held_state.stop_holding()
            yield
            return
        with self.policies.reduced():
            yield
