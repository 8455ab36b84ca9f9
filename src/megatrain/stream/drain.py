"""Gradients out of compute: added where their sum lies on the device, or sent home through a slot.

A sum whose home is GPU memory is added to in place. Of one whose home is RAM, the first gradient of a step lands in its
part's buffer as it is; every further one lands in a staging buffer and is added on the update lane, whose order fixes
the order of the sum. Inside a window, micro-batches come one after the other and are summed on the device first
(stream/accumulate.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatrain.geometry import TIERS
from megatrain.store.gradient import Gradient, Part, Place, add_segments
from megatrain.store.memory import Buffer
from megatrain.store.slab import Slab
from megatrain.store.ticket import Order
from megatrain.stream.add import add_each
from megatrain.stream.gradslots import GradRings, GradSlot
from megatrain.stream.lanes import Lanes
from megatrain.stream.norm import square_sum
from megatrain.stream.transfer import Transfer
from megatrain.telemetry.counters import Counters

Gradients = Mapping[int, torch.Tensor]


class _Staging:
    """A buffer in RAM where a gradient waits to be added."""

    def __init__(self) -> None:
        self.buffer: Buffer | None = None
        self.order = Order("staging")

    def landing(self, slab: Slab) -> Buffer:
        if self.buffer is None or self.buffer.nbytes < slab.owned.nbytes:
            # The last sum has read it, so nothing else uses what it held.
            self.order.until_writable()
            if self.buffer is not None:
                slab.homes.sums.free(self.buffer)
                self.buffer = None
            self.buffer = slab.homes.sums.allocate(slab.owned.nbytes, transferred=True)
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
        self._staging = [_Staging() for _ in range(2)]
        self._turn = 0

    def missing(self) -> int:
        """Bytes of gradients that will be allocated when they come."""
        return sum(slab.owned.nbytes for slab in self._slabs if slab.trains and not slab.grad.allocated)

    def collect(self, slab: Slab, place: Place, gradients: Gradients) -> None:
        """Take the gradients of some of a slab's parameters, by segment, from one place in the model."""
        slab.require_owner()
        part = slab.grad.part(place)
        if slab.grad.on_device:
            self.add_in_place(slab, part, gradients)
            return
        slot = self.rings.next(slab)
        # The copy that last drained this slot must have read it before compute writes it again.
        with self.lanes.compute(writes=[slot.order]), torch.no_grad():
            flat = self.rings.view(slot, slab)
            flat.zero_()
            # All at once: a call for each of a layer's dozen would keep the host busier than the GPU.
            torch._foreach_copy_([slab.layout.view(flat, index) for index in gradients], [*gradients.values()])
        if part.present:
            self._add(slab, part, slot, flat, frozenset(gradients))
        else:
            self.land(slab, part, slot, flat)
        part.present.update(gradients)

    def add_in_place(self, slab: Slab, part: Part, gradients: Gradients) -> None:
        """Add to a sum that lies on the device, on compute's own stream."""
        slab.require_owner()
        # Rounded to the gradient dtype first, as it is when every micro-batch travels on its own.
        rounded = {index: gradient.to(slab.layout.dtype) for index, gradient in gradients.items()}
        # The update, or what takes the sum to it, may still read what the step before left there.
        with self.lanes.compute(writes=[part.order]), torch.no_grad():
            add_each(slab.owned, part.accumulator(gradients.keys()), slab.owned.pick(rounded), part.present)
        part.present.update(gradients)
        part.square_sum = None

    def round_in_place(self, slab: Slab, part: Part) -> None:
        """A sum on the device that nothing of the step follows: rounded, it takes half the memory or less."""
        with self.lanes.compute(writes=[part.order]), torch.no_grad():
            part.round()

    def land(self, slab: Slab, part: Part, slot: GradSlot, flat: torch.Tensor) -> None:
        """The whole gradient of the step so far, in the gradient dtype: into the part's buffer, with its norm."""
        slab.require_owner()
        part.clear()
        target, flat = part.landing, slab.owned.within(flat)
        slot.square_sum.copy_(square_sum(flat))
        norm = torch.zeros((), dtype=torch.float64, pin_memory=self.device.type == "cuda")

        def copy() -> None:
            self.transfer.to_host(target.view(part.dtype), flat, target.pinned)
            norm.copy_(slot.square_sum, non_blocking=True)

        self.lanes.submit("d2h", "land", copy, reads=[slot.order], writes=[part.order], label=slab.name)
        part.square_sum = norm
        self._count(flat)

    def land_sum(self, slab: Slab, part: Part, slot: GradSlot, flat: torch.Tensor) -> None:
        """An FP32 sum that is not complete: into the part's FP32 buffer, replacing what was there."""
        slab.require_owner()
        target, flat = part.sum_buffer, slab.owned.within(flat)
        self.lanes.submit(
            "d2h",
            "land sum",
            lambda: self.transfer.to_host(target.view(torch.float32), flat, target.pinned),
            reads=[slot.order],
            writes=[part.order],
            label=slab.name,
        )
        part.now_sum()
        self._count(flat)

    def merge(self, gradient: Gradient) -> None:
        """Submit the sum of all parts of a slab into the first one, in the order of their places."""
        parts = gradient.active()
        if len(parts) < 2:
            return
        gradient.require_owner()
        first, *others = parts
        seed = None if first.summed else first.flat
        # Before it is submitted: in GPU memory it is filled with zeros on compute's stream.
        total = first.sum_buffer.view(torch.float32)
        flats = [(part.flat, frozenset(part.present)) for part in others]
        before = frozenset(first.present)

        def add() -> None:
            known = set(before)
            if seed is not None and seed.data_ptr() != total.data_ptr():
                total.copy_(seed)
            for flat, indices in flats:
                add_segments(gradient.layout, total, flat, indices, known)
                known |= indices

        self.lanes.submit(
            TIERS[gradient.homes.sums.tier].updates,
            "merge",
            add,
            reads=[part.order for part in others],
            writes=[first.order],
            label=gradient.name,
        )
        first.now_sum()
        for part in others:
            first.present |= part.present
            part.clear()

    def _add(self, slab: Slab, part: Part, slot: GradSlot, flat: torch.Tensor, indices: frozenset[int]) -> None:
        """A further gradient: through a staging buffer, into the FP32 sum."""
        before = set(part.present)
        staging = self._staging[self._turn % len(self._staging)]
        self._turn += 1
        buffer = staging.landing(slab)
        arrived = buffer.bytes[: slab.owned.nbytes].view(slab.owned.dtype)
        flat = slab.owned.within(flat)
        seed = None if part.summed else part.flat
        total = part.sum_buffer.view(torch.float32)

        def add() -> None:
            if seed is not None and seed.data_ptr() != total.data_ptr():
                total.copy_(seed)
            add_segments(slab.owned, total, arrived, indices, before)

        self.lanes.submit(
            "d2h",
            "stage",
            lambda: self.transfer.to_host(arrived, flat, buffer.pinned),
            reads=[slot.order],
            writes=[staging.order],
            label=slab.name,
        )
        self.lanes.submit("update", "add", add, reads=[staging.order], writes=[part.order], label=slab.name)
        part.now_sum()
        self._count(flat)

    def _count(self, flat: torch.Tensor) -> None:
        self.counters.drains += 1
        self.counters.bytes_d2h += flat.numel() * flat.element_size()
