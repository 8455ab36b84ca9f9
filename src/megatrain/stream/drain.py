"""Gradients out: flattened into a slot on the device, copied to host memory, summed in FP32 in order.

Outside a window, the first gradient of a step lands in its part's buffer as it is; every further one lands in a staging
buffer and is added on the update lane, whose order fixes the order of the sum. Inside a window, micro-batches come one
after the other and are summed on the device (stream/accumulate.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatrain.store.memory import Buffer
from megatrain.store.slab import Part, Place, Slab, add_segments
from megatrain.store.ticket import DONE, Ticket
from megatrain.stream.gradslots import GradRings, GradSlot
from megatrain.stream.lanes import Lane, Lanes
from megatrain.stream.norm import square_sum
from megatrain.stream.transfer import Transfer
from megatrain.telemetry.counters import Counters

Gradients = Mapping[int, torch.Tensor]


class _Staging:
    """A buffer, in the slab's own tier, where a gradient waits to be added."""

    def __init__(self) -> None:
        self.buffer: Buffer | None = None
        self.summed: Ticket = DONE

    def landing(self, slab: Slab) -> Buffer:
        if self.buffer is None or self.buffer.nbytes < slab.layout.nbytes:
            # The last sum has read it, so nothing else uses what it held.
            self.summed.wait()
            if self.buffer is not None:
                slab.memory.free(self.buffer)
                self.buffer = None
            self.buffer = slab.memory.allocate(slab.layout.nbytes, transferred=True)
        return self.buffer


class Drain:
    """Moves gradients from compute to the store."""

    def __init__(
        self,
        slabs: Sequence[Slab],
        slots: int,
        device: torch.device,
        lanes: Lanes,
        transfer: Transfer,
        counters: Counters,
    ) -> None:
        self.device = device
        self.lanes = lanes
        self.transfer = transfer
        self.rings = GradRings(slabs, slots, device)
        self.counters = counters
        self._slabs = slabs
        self._staging = {tier: [_Staging() for _ in range(2)] for tier in ("ram", "vram")}
        self._turn = 0
        for slab in slabs:
            slab.grad.merge = self.merge

    def missing(self) -> int:
        """Bytes of gradients that will be allocated when they come."""
        return sum(slab.layout.nbytes for slab in self._slabs if slab.trains and not slab.grad.allocated)

    def collect(self, slab: Slab, place: Place, gradients: Gradients) -> None:
        """Take the gradients of some of a slab's parameters, by segment, from one place in the model."""
        slab.require_owner()
        slot = self.rings.next(slab)
        # The copy that last drained this slot must have read it before compute writes it again.
        with self.lanes.timeline.waiting("compute", "d2h"):
            slot.drained.order()
        flat = self.rings.view(slot, slab)
        with torch.no_grad():
            flat.zero_()
            # All at once: a call for each of a layer's dozen would keep the host busier than the GPU.
            torch._foreach_copy_([slab.layout.view(flat, index) for index in gradients], [*gradients.values()])
        part = slab.grad.part(place)
        if part.present:
            slot.drained = self._add(slab, part, flat, frozenset(gradients))
        else:
            slot.drained = self.land(slab, part, slot, flat)
        part.present.update(gradients)

    def land(self, slab: Slab, part: Part, slot: GradSlot, flat: torch.Tensor) -> Ticket:
        """The whole gradient of the step so far, in the gradient dtype: into the part's buffer, with its norm."""
        slab.require_owner()
        part.clear()
        target = part.landing
        slot.square_sum.copy_(square_sum(flat))
        norm = torch.zeros((), dtype=torch.float64, pin_memory=self.device.type == "cuda")

        def copy() -> None:
            self.transfer.to_host(target.view(part.dtype), flat, target.pinned)
            norm.copy_(slot.square_sum, non_blocking=True)

        # After `landed` and `written`: an earlier sum or the update of the step before may still read this buffer.
        part.landed = self.leaving(slab).submit(
            copy, after=(self.lanes.mark(), part.landed, slab.written), label=slab.name
        )
        part.square_sum = norm
        self._count(slab, flat)
        return part.landed

    def land_sum(self, slab: Slab, part: Part, flat: torch.Tensor) -> Ticket:
        """An FP32 sum that is not complete: into the part's FP32 buffer, replacing what was there."""
        slab.require_owner()
        target = part.sum_buffer
        part.landed = self.leaving(slab).submit(
            lambda: self.transfer.to_host(target.view(torch.float32), flat, target.pinned),
            after=(self.lanes.mark(), part.landed, slab.written),
            label=slab.name,
        )
        part.summed, part.square_sum = True, None
        self._count(slab, flat)
        return part.landed

    def merge(self, slab: Slab) -> None:
        """Submit the sum of all parts of a slab into the first one, in the order of their places."""
        parts = slab.grad.active()
        if len(parts) < 2:
            return
        slab.require_owner()
        first, *others = parts
        total = first.sum_buffer.view(torch.float32)
        seed = None if first.summed else first.flat
        flats = [(part.flat, frozenset(part.present)) for part in others]
        before = frozenset(first.present)

        def add() -> None:
            known = set(before)
            if seed is not None and seed.data_ptr() != total.data_ptr():
                total.copy_(seed)
            for flat, indices in flats:
                add_segments(slab.layout, total, flat, indices, known)
                known |= indices

        first.landed = self.updating(slab).submit(
            add,
            # After compute so far: a sum in GPU memory has just been filled with zeros there.
            after=(*[part.landed for part in parts], slab.written, *([self.lanes.mark()] if slab.resident else [])),
            label=f"merge {slab.name}",
        )
        first.summed, first.square_sum = True, None
        for part in others:
            first.present |= part.present
            part.clear()
            # The next gradient of that place must not overwrite what the merge still reads.
            part.landed = first.landed

    def _add(self, slab: Slab, part: Part, flat: torch.Tensor, indices: frozenset[int]) -> Ticket:
        """A further gradient: through a staging buffer, into the FP32 sum."""
        before = set(part.present)
        ring = self._staging[slab.memory.tier]
        staging = ring[self._turn % len(ring)]
        self._turn += 1
        buffer = staging.landing(slab)
        arrived = buffer.bytes[: slab.layout.nbytes].view(slab.layout.dtype)
        seed = None if part.summed else part.flat
        # Before the mark: in GPU memory it is filled with zeros on compute's stream.
        total = part.sum_buffer.view(torch.float32)
        copied = self.leaving(slab).submit(
            # After `summed`: the sum that last used this staging buffer must have read it.
            lambda: self.transfer.to_host(arrived, flat, buffer.pinned),
            after=(self.lanes.mark(), staging.summed),
            label=slab.name,
        )

        def add() -> None:
            if seed is not None and seed.data_ptr() != total.data_ptr():
                total.copy_(seed)
            add_segments(slab.layout, total, arrived, indices, before)

        staging.summed = self.updating(slab).submit(add, after=(copied, part.landed, slab.written), label=slab.name)
        part.landed = staging.summed
        part.summed, part.square_sum = True, None
        self._count(slab, flat)
        return copied

    def leaving(self, slab: Slab) -> Lane:
        """The lane that takes gradients away from compute: to host memory, or to where a resident slab keeps them."""
        return self.lanes.vram if slab.resident else self.lanes.d2h

    def updating(self, slab: Slab) -> Lane:
        """The lane that sums and updates a slab: where it lies."""
        return self.lanes.vram if slab.resident else self.lanes.update

    def _count(self, slab: Slab, flat: torch.Tensor) -> None:
        if slab.resident:
            return
        self.counters.drains += 1
        self.counters.bytes_d2h += flat.numel() * flat.element_size()
