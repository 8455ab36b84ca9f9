"""Memory that something of a slab passes through: taken at first use, in rings by size, whose slots take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import torch

from megatrain.geometry import STAGING_SLOTS, group_by_size
from megatrain.store.memory import Buffer, Memory
from megatrain.store.slab import Slab
from megatrain.store.ticket import Order
from megatrain.store.vram import allocate_persistent
from megatrain.stream.transfer import Link

Slot = TypeVar("Slot")


class DeviceBuffers:
    """Bytes on the device, taken when they are needed, and again when more are."""

    def __init__(self, name: str, link: Link) -> None:
        self.order = Order(name)
        self.bytes = torch.empty(0, dtype=torch.uint8, device=link.device)
        self._link = link

    def take(self, nbytes: int) -> torch.Tensor:
        if self.bytes.numel() < nbytes:
            self.order.until_writable()
            self.bytes = allocate_persistent(nbytes, self._link.device)
            # Compute so far may have used these bytes for something that is gone.
            self.order.read(self._link.lanes.mark())
        return self.bytes

    def give_back(self) -> None:
        self.order.until_writable()
        self.bytes = self.bytes.new_empty(0)


class HostBuffers:
    """The same in host memory."""

    def __init__(self, name: str) -> None:
        self.order = Order(name)
        self.buffer: Buffer | None = None

    def take(self, nbytes: int, memory: Memory) -> Buffer:
        if self.buffer is None or self.buffer.nbytes < nbytes:
            self.give_back(memory)
            self.buffer = memory.allocate(nbytes, transferred=True)
        return self.buffer

    def give_back(self, memory: Memory) -> None:
        if self.buffer is not None:
            self.order.until_writable()
            memory.free(self.buffer)
            self.buffer = None


class Rings(Generic[Slot]):
    """Slots by slab. Slabs of like size share a ring, whose slots `make` gives, for any of them."""

    def __init__(
        self,
        slabs: Iterable[Slab],
        make: Callable[[Sequence[Slab]], Slot],
        slots: Callable[[int], int] = lambda slabs: min(STAGING_SLOTS, slabs),
        size: Callable[[Slab], int] = lambda slab: slab.layout.nbytes,
    ) -> None:
        self.all: list[Slot] = []
        self._of: dict[int, deque[Slot]] = {}
        for members in group_by_size(slabs, size):
            ring = deque(make(members) for _ in range(slots(len(members))))
            self.all += ring
            self._of |= {slab.index: ring for slab in members}

    def of(self, slab: Slab) -> Sequence[Slot]:
        return self._of.get(slab.index, ())

    def next(self, slab: Slab) -> Slot:
        """The slot of its ring whose turn it is."""
        ring = self._of[slab.index]
        ring.rotate(-1)
        return ring[-1]
