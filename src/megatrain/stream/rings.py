"""Buffers for data in transit, allocated at first use, and rings of slots shared by slabs of similar size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Generic, TypeVar

import torch

from megatrain.geometry import disk_staging_slots, slot_rings, staging_bytes, staging_slots
from megatrain.store.layout import Layout
from megatrain.store.memory import Buffer, Memory
from megatrain.store.slab import Slab
from megatrain.store.ticket import Order
from megatrain.store.vram import allocate_persistent
from megatrain.stream.transfer import Link

Slot = TypeVar("Slot")


class DeviceBuffers:
    """A device buffer that is allocated on demand and grows."""

    def __init__(self, name: str, link: Link) -> None:
        self.order = Order(name)
        self.bytes = torch.empty(0, dtype=torch.uint8, device=link.device)
        self._link = link

    def allocate(self, nbytes: int) -> torch.Tensor:
        """The buffer, of at least `nbytes`."""
        if self.bytes.numel() < nbytes:
            self.order.until_writable()
            self.bytes = allocate_persistent(nbytes, self._link.device)
            # Compute submitted so far may still use these bytes for freed tensors.
            self.order.read(self._link.lanes.mark())
        return self.bytes

    def free(self) -> None:
        self.order.until_writable()
        self.bytes = self.bytes.new_empty(0)


class HostBuffers:
    """A host buffer that is allocated on demand and grows."""

    def __init__(self, name: str) -> None:
        self.order = Order(name)
        self.buffer: Buffer | None = None

    def allocate(self, nbytes: int, memory: Memory, *, transferred: bool = True) -> Buffer:
        """The buffer, of at least `nbytes`."""
        if self.buffer is None or self.buffer.nbytes < nbytes:
            self.free(memory)
            self.buffer = memory.allocate(nbytes, transferred=transferred)
        return self.buffer

    def free(self, memory: Memory) -> None:
        if self.buffer is not None:
            self.order.until_writable()
            memory.free(self.buffer)
            self.buffer = None


class Rings(Generic[Slot]):
    """Slots by slab. Slabs of similar size share a ring; `make` creates a slot for a ring's slabs."""

    def __init__(
        self,
        slabs: Iterable[Slab],
        make: Callable[[Sequence[Slab]], Slot],
        slots: Callable[[int], int] = staging_slots,
        size: Callable[[Slab], int] = lambda slab: slab.layout.nbytes,
    ) -> None:
        slabs = [*slabs]
        self.nbytes = partial(staging_bytes, slabs, slots, size)
        """Bytes of all slots, from a function of the bytes that each slab needs."""
        self.all: list[Slot] = []
        self._of: dict[int, deque[Slot]] = {}
        for members, number in slot_rings(slabs, slots, size):
            ring = deque(make(members) for _ in range(number))
            self.all += ring
            self._of |= {slab.index: ring for slab in members}

    def of(self, slab: Slab) -> Sequence[Slot]:
        return self._of.get(slab.index, ())

    def next(self, slab: Slab) -> Slot:
        """The slot of the slab's ring that was not used for longest."""
        return self.use(slab, self._of[slab.index][0])

    def use(self, slab: Slab, slot: Slot) -> Slot:
        """Mark a slot of the slab's ring as the last one used."""
        ring = self._of[slab.index]
        ring.remove(slot)
        ring.append(slot)
        return slot


class Staging(HostBuffers):
    """A buffer in RAM for what one slab of a ring has on disk."""

    def __init__(
        self, name: str, members: Sequence[Slab], nbytes: Callable[[Slab], int], ram: Memory, transferred: bool
    ) -> None:
        super().__init__(name)
        self._members, self._nbytes, self._ram, self._transferred = members, nbytes, ram, transferred
        self.content: tuple[int, int] | None = None
        """The slab, and the version of it, whose state is or will be in the buffer."""

    def whole(self) -> Buffer:
        """The buffer, of as many bytes as the slab that needs most."""
        nbytes = max(map(self._nbytes, self._members))
        if self.buffer is None or self.buffer.nbytes < nbytes:
            self.content = None
        return self.allocate(nbytes, self._ram, transferred=self._transferred)

    def view(self, layout: Layout) -> torch.Tensor:
        """The start of the buffer, as values of that layout."""
        return self.whole().bytes[: layout.nbytes].view(layout.dtype)


class StagingRings(Rings[Staging]):
    """Staging buffers for what some slabs have on disk."""

    def __init__(
        self,
        name: str,
        slabs: Iterable[Slab],
        nbytes: Callable[[Slab], int],
        ram: Memory,
        transferred: bool = True,
    ) -> None:
        """`nbytes`: what a slab needs."""
        super().__init__(slabs, lambda members: Staging(name, members, nbytes, ram, transferred), disk_staging_slots)

    def allocate(self, slab: Slab) -> None:
        """Allocate the slab's ring. It may fail, so call it before anything of a step is submitted."""
        for staging in self.of(slab):
            staging.whole()

    def holding(self, slab: Slab) -> Staging | None:
        """The buffer with the slab's current version."""
        return next((each for each in self.of(slab) if each.content == (slab.index, slab.version)), None)
