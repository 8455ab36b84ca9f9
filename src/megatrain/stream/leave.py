"""Held gradient sums on their way to the update: rounded on the device, copied to RAM, in the order of the updates.

They pass a ring, so that neither tier needs a second gradient for every block. The copies have a lane of their own,
where one that waits for an update to free its place holds up no other copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from megatrain.geometry import PASSING, by_size
from megatrain.store.gradient import Snapshot
from megatrain.store.memory import Buffer, Memory
from megatrain.store.slab import Slab
from megatrain.store.ticket import Order
from megatrain.store.vram import lasting
from megatrain.stream.lanes import Lanes
from megatrain.stream.transfer import Transfer
from megatrain.telemetry.counters import Counters


class _Way:
    """Room for one gradient, rounded, on both sides; made at first use."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.order = Order("leaving")
        self._nbytes, self._device = nbytes, device
        self._slot: torch.Tensor | None = None
        self._buffer: Buffer | None = None

    def slot(self, slab: Slab) -> torch.Tensor:
        if self._slot is None:
            self._slot = lasting(self._nbytes, self._device)
        return self._slot[: slab.owned.nbytes].view(slab.owned.dtype)

    def buffer(self, slab: Slab) -> tuple[torch.Tensor, bool]:
        """In RAM, and whether it is pinned."""
        if self._buffer is None:
            self._buffer = slab.homes.states.allocate(self._nbytes, transferred=True)
        return self._buffer.bytes[: slab.owned.nbytes].view(slab.owned.dtype), self._buffer.pinned

    def let_go(self, memory: Memory) -> None:
        self.order.until_writable()
        if self._buffer is not None:
            memory.free(self._buffer)
        self._slot = self._buffer = None


class Leaving:
    """Brings gradients to the tier of their slab's states."""

    def __init__(
        self, slabs: Sequence[Slab], device: torch.device, lanes: Lanes, transfer: Transfer, counters: Counters
    ) -> None:
        self._lanes, self._transfer, self._counters = lanes, transfer, counters
        self._rings: dict[int, list[_Way]] = {}
        """By slab; whose turn it is comes first."""
        for members in by_size([s for s in slabs if not s.on_device], lambda slab: slab.owned.nbytes):
            ring = [_Way(members[0].owned.nbytes, device) for _ in range(min(PASSING, len(members)))]
            self._rings |= {slab.index: ring for slab in members}

    def make_room(self, slab: Slab, gradient: Snapshot) -> None:
        """Take what `bring` needs. It may not be there, so this comes before anything of a step is submitted."""
        for way in self._rings[slab.index] if slab.held_sum else ():
            way.buffer(slab)
            if gradient.flat.dtype != slab.owned.dtype:
                way.slot(slab)

    def let_go(self, slabs: Iterable[Slab]) -> None:
        """Give back the room of slabs whose sums are no longer held."""
        for slab in slabs:
            for way in self._rings[slab.index]:
                way.let_go(slab.homes.states)

    def bring(self, slab: Slab, gradient: Snapshot) -> Snapshot:
        """The gradient where the slab is updated; submitted, if it has to travel."""
        if not slab.held_sum:
            return gradient
        slab.require_owner()
        ring = self._rings[slab.index]
        way = ring.pop(0)
        ring.append(way)
        target, pinned = way.buffer(slab)
        # A sum is rounded first; what is in the gradient dtype goes as it lies.
        slot = None if gradient.flat.dtype == slab.owned.dtype else way.slot(slab)

        def leave() -> None:
            source = gradient.flat if slot is None else slot.copy_(gradient.flat)
            self._transfer.to_host(target, source, pinned)

        self._lanes.submit("leave", "leave", leave, reads=[gradient.order], writes=[way.order], label=slab.name)
        self._counters.drains += 1
        self._counters.bytes_d2h += slab.owned.nbytes
        return replace(gradient, flat=target, order=way.order)
