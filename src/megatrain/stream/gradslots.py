"""Device buffers that gradients pass through, in rings by size like the weights' slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain.geometry import by_size, grad_slots
from megatrain.store.slab import Slab
from megatrain.store.ticket import Order
from megatrain.store.vram import lasting


class GradSlot:
    """A device buffer for one slab's gradient, and its sum of squares beside it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self.square_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.order = Order("gradient slot")

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    def bytes(self, room: int) -> torch.Tensor:
        """The buffer, grown to `room` bytes at first use. Call when compute may write to it."""
        if self._buffer.numel() < room:
            # Compute is behind the last copy by now, so the allocator may hand the old buffer to compute again.
            self._buffer = lasting(room, self._device)
        return self._buffer


class GradRings:
    """Slots by size of slab; made when the first gradient comes."""

    def __init__(self, slabs: Sequence[Slab], slots: int, device: torch.device) -> None:
        self._rings: dict[int, tuple[list[GradSlot], int]] = {}
        self._turns: dict[int, int] = {}
        self._trained: list[tuple[list[GradSlot], int]] = []
        # Frozen slabs have rings of their own, without memory until one is unfrozen: the plan counts the others. What
        # is updated on the device is summed there as well, and passes none.
        passing = [s for s in slabs if not s.on_device]
        groups = [
            members
            for trains in (True, False)
            for members in by_size([s for s in passing if s.trains == trains], lambda slab: slab.layout.nbytes)
        ]
        for members in groups:
            ring = [GradSlot(device) for _ in range(grad_slots(slots, len(members)))]
            largest = max(slab.layout.numel for slab in members)
            self._rings |= {slab.index: (ring, largest) for slab in members}
            if members[0].trains:
                self._trained.append((ring, members[0].layout.nbytes))

    def missing(self) -> int:
        """Bytes that the slots of slabs which train will take, and do not have yet."""
        return sum(max(0, nbytes - slot.nbytes) for ring, nbytes in self._trained for slot in ring)

    def next(self, slab: Slab) -> GradSlot:
        """The slot whose turn it is, in the slab's ring."""
        ring, _ = self._rings[slab.index]
        turn = self._turns.get(id(ring), 0)
        self._turns[id(ring)] = turn + 1
        return ring[turn % len(ring)]

    def view(self, slot: GradSlot, slab: Slab) -> torch.Tensor:
        """Room for one gradient of the slab, in its own dtype."""
        dtype = slab.layout.dtype
        return slot.bytes(self._rings[slab.index][1] * dtype.itemsize)[: slab.layout.nbytes].view(dtype)

    def sum_view(self, slot: GradSlot, slab: Slab) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for an FP32 sum, and for its rounded copy (the same memory if the slab is FP32)."""
        dtype, numel, largest = slab.layout.dtype, slab.layout.numel, self._rings[slab.index][1]
        room = slot.bytes(largest * (4 if dtype == torch.float32 else 4 + dtype.itemsize))
        total = room[: numel * 4].view(torch.float32)
        if dtype == torch.float32:
            return total, total
        return total, room[largest * 4 : largest * 4 + numel * dtype.itemsize].view(dtype)
