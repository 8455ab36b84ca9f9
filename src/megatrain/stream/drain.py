"""Moves gradients from compute to the store.

A sum in GPU memory is added to in place. For a sum in RAM, the first gradient of a step is copied to the part's buffer;
every further one is copied to a staging buffer and added on the update lane. Gradients are added in lane order, so the
sum is deterministic. Inside a window, micro-batches are summed on the device first (stream/accumulate.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatrain.geometry import TIERS, grad_slots
from megatrain.store.gradient import CallId, Gradient, Part, add_segments
from megatrain.store.layout import Layout
from megatrain.store.memory import Buffer
from megatrain.store.slab import Slab
from megatrain.store.ticket import Order
from megatrain.stream.add import add_each
from megatrain.stream.disk_gradients import DiskGradients
from megatrain.stream.lanes import Work
from megatrain.stream.norm import square_sum
from megatrain.stream.rings import DeviceBuffers, HostBuffers, Rings
from megatrain.stream.transfer import Link

Gradients = Mapping[int, torch.Tensor]


class GradSlot(DeviceBuffers):
    """A device buffer that gradients of some slabs leave through, with the sum of squares of its content."""

    def __init__(self, members: Sequence[Slab], link: Link) -> None:
        super().__init__("gradient slot", link)
        self.members = members
        self.square_sum = torch.zeros((), dtype=torch.float64, device=link.device)
        self._largest = max(slab.layout.numel for slab in members)

    def view(self, slab: Slab) -> torch.Tensor:
        """The slot as a flat gradient of the slab, in the slab's dtype."""
        dtype = slab.layout.dtype
        return self.allocate(self._largest * dtype.itemsize)[: slab.layout.nbytes].view(dtype)

    def sum_view(self, slab: Slab) -> tuple[torch.Tensor, torch.Tensor]:
        """The slot as an FP32 sum and its rounded copy (the same memory if the slab is FP32)."""
        dtype, numel, rounded = slab.layout.dtype, slab.layout.numel, self._largest * 4
        if dtype == torch.float32:
            total = self.view(slab)
            return total, total
        memory = self.allocate(rounded + self._largest * dtype.itemsize)
        return memory[: numel * 4].view(torch.float32), memory[rounded : rounded + slab.layout.nbytes].view(dtype)


class Drain:
    """Moves gradients from compute to the store."""

    def __init__(self, slabs: Sequence[Slab], slots: int, link: Link, disk: DiskGradients | None = None) -> None:
        self.link, self._lanes, self._disk = link, link.lanes, disk
        self._slabs = slabs
        self._staging = [HostBuffers("staging"), HostBuffers("staging")]
        # Frozen slabs have separate rings without memory until one is unfrozen; the plan counts the others. Resident
        # slabs need no slots.
        self.rings = {
            trains: Rings(
                [slab for slab in slabs if slab.trains == trains and not slab.on_device],
                lambda members: GradSlot(members, link),
                lambda members: grad_slots(slots, members),
            )
            for trains in (True, False)
        }

    def unallocated_bytes(self) -> int:
        """Bytes of gradient buffers that the next backward will allocate."""
        return sum(
            slab.owned.nbytes
            for slab in self._slabs
            if slab.trains and not slab.grad.allocated and slab.homes.gradients is None
        )

    def unallocated_slot_bytes(self) -> int:
        """Bytes of gradient slots that the next backward will allocate."""
        return sum(max(0, slot.members[0].layout.nbytes - slot.bytes.numel()) for slot in self.rings[True].all)

    def free_longest(self, slab: Slab) -> GradSlot:
        """The slot that `next_slot` returns, without marking it as used."""
        return self.rings[slab.trains].of(slab)[0]

    def next_slot(self, slab: Slab) -> GradSlot:
        return self.rings[slab.trains].next(slab)

    def collect(self, slab: Slab, call_id: CallId, gradients: Gradients) -> None:
        """Collect the gradients of some of a slab's parameters, by segment, from one call."""
        slab.require_owner()
        part = slab.grad.part(call_id)
        if slab.grad.on_device:
            self.add_in_place(slab, part, gradients)
            return
        slot = self.next_slot(slab)
        # The copy that last drained this slot must have read it before compute writes it again.
        with self._lanes.compute(writes=slot.order), torch.no_grad():
            flat = slot.view(slab)
            flat.zero_()
            # In one call: a dozen launches per layer would take the host longer than the GPU.
            torch._foreach_copy_([slab.layout.view(flat, index) for index in gradients], [*gradients.values()])
        if part.present:
            self._add(slab, part, slot, flat, frozenset(gradients))
        else:
            self.land(slab, part, slot, flat)
        part.present.update(gradients)

    def add_in_place(self, slab: Slab, part: Part, gradients: Gradients) -> None:
        """Add to a sum on the device, on compute's stream."""
        slab.require_owner()
        # Rounded to the gradient dtype first, as when every micro-batch is copied on its own.
        rounded = {index: gradient.to(slab.layout.dtype) for index, gradient in gradients.items()}
        # The previous step's update, or the copy to it, may still read the sum.
        with self._lanes.compute(writes=part.order), torch.no_grad():
            add_each(slab.owned, part.accumulator(gradients.keys()), slab.owned.slice_values(rounded), part.present)
        part.present.update(gradients)
        part.square_sum = None

    def round_in_place(self, part: Part) -> None:
        """Round a complete sum on the device to the gradient dtype, which takes half the memory or less."""
        with self._lanes.compute(writes=part.order), torch.no_grad():
            part.round()

    def land(self, slab: Slab, part: Part, slot: GradSlot, flat: torch.Tensor) -> None:
        """Copy a gradient, in the gradient dtype, and its sum of squares to the part; it replaces what was there."""
        slab.require_owner()
        part.clear()
        flat = slab.owned.slice_flat(flat)
        slot.square_sum.copy_(square_sum(flat))
        norm = torch.zeros((), dtype=torch.float64, pin_memory=self.link.device.type == "cuda")
        staging = None if self._disk is None else self._disk.staging(slab)
        if self._disk is None or staging is None:
            self._send("land", slab, slot, flat, part.landing, part.order, norm)
        else:
            self._send("land", slab, slot, flat, staging.whole(), staging.order, norm)
            self._disk.write(slab, part, staging)
        part.square_sum = norm

    def land_sum(self, slab: Slab, part: Part, slot: GradSlot, flat: torch.Tensor) -> None:
        """Copy an incomplete FP32 sum to the part; it replaces what was there."""
        slab.require_owner()
        self._send("land sum", slab, slot, slab.owned.slice_flat(flat), part.sum_buffer, part.order)
        part.mark_summed()

    def merge(self, gradient: Gradient) -> None:
        """Submit the addition of all parts of a slab to the first one, in the order of their call ids."""
        parts = gradient.active()
        if len(parts) < 2:
            return
        gradient.require_owner()
        first, *rest = parts
        self._lanes.submit(
            TIERS[gradient.homes.sums.tier].update_lane,
            "merge",
            _adding(gradient.layout, first, [(part.flat, frozenset(part.present)) for part in rest]),
            reads=[part.order for part in rest],
            writes=[first.order],
            label=gradient.name,
        )
        first.mark_summed()
        for part in rest:
            first.present |= part.present
            part.clear()

    def _add(self, slab: Slab, part: Part, slot: GradSlot, flat: torch.Tensor, indices: frozenset[int]) -> None:
        """Add a further gradient to the FP32 sum, through a staging buffer."""
        self._staging.reverse()
        staging = self._staging[0]
        buffer = staging.allocate(slab.owned.nbytes, slab.homes.sums)
        arrived = buffer.bytes[: slab.owned.nbytes].view(slab.owned.dtype)
        add = _adding(slab.owned, part, [(arrived, indices)])
        self._send("stage", slab, slot, slab.owned.slice_flat(flat), buffer, staging.order)
        self._lanes.submit("update", "add", add, reads=[staging.order], writes=[part.order], label=slab.name)
        part.mark_summed()

    def _send(
        self,
        job: str,
        slab: Slab,
        slot: GradSlot,
        flat: torch.Tensor,
        target: Buffer,
        order: Order,
        norm: torch.Tensor | None = None,
    ) -> None:
        """Submit the copy of a slot's content to RAM, and of its sum of squares to `norm`."""
        copies = [(target.bytes[: flat.nbytes].view(flat.dtype), flat, target.pinned)]
        if norm is not None:
            copies.append((norm, slot.square_sum, True))
        self.link.copy("d2h", job, copies, reads=[slot.order], writes=[order], label=slab.name)
        self.link.counters.drains += 1
        self.link.counters.bytes_d2h += flat.nbytes


def _adding(layout: Layout, part: Part, more: Sequence[tuple[torch.Tensor, frozenset[int]]]) -> Work:
    """Work that adds further gradients, each with the parameters it has, to a part's FP32 sum."""
    seed = None if part.summed else part.flat
    # Allocated now: in GPU memory it is zeroed on compute's stream, which the work waits for.
    total = part.sum_buffer.view(torch.float32)
    before = frozenset(part.present)

    def add() -> None:
        known = before
        if seed is not None and seed.data_ptr() != total.data_ptr():
            total.copy_(seed)
        for flat, indices in more:
            add_segments(layout, total, flat, indices, known)
            known |= indices

    return add
