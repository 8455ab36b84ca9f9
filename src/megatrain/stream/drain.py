"""Gradients out: flattened into a slot on the device, copied to host memory, summed there in FP32 in order.

The first use of a slab in a step lands in its gradient buffer as it is. Every further use (another micro-batch, a tied
weight, a second forward) lands in a staging buffer and is added on the update lane, whose order fixes the order of
the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatrain.store.ram import HostBuffer, HostMemory
from megatrain.store.slab import Slab
from megatrain.store.ticket import DONE, Ticket
from megatrain.stream.lanes import Lanes
from megatrain.stream.norm import square_sum
from megatrain.stream.transfer import Transfer
from megatrain.telemetry.counters import Counters


class _GradSlot:
    """A device buffer for one slab's gradient, and its sum of squares beside it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.square_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.drained: Ticket = DONE

    def flat(self, slab: Slab) -> torch.Tensor:
        return self.buffer[: slab.layout.nbytes].view(slab.layout.dtype)


class _Staging:
    def __init__(self) -> None:
        self.buffer: HostBuffer | None = None
        self.summed: Ticket = DONE

    def landing(self, slab: Slab, memory: HostMemory) -> HostBuffer:
        if self.buffer is None or self.buffer.nbytes < slab.layout.nbytes:
            self.summed.wait()
            self.buffer = memory.allocate(slab.layout.nbytes, transferred=True)
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
        memory: HostMemory,
        counters: Counters,
    ) -> None:
        self._device = device
        self._largest = max(slab.layout.nbytes for slab in slabs)
        self._lanes = lanes
        self._transfer = transfer
        self._memory = memory
        self._counters = counters
        self._wanted = slots
        self._slots: list[_GradSlot] = []
        self._staging = [_Staging() for _ in range(2)]
        self._turn = 0

    def collect(self, slab: Slab, gradients: Mapping[int, torch.Tensor]) -> None:
        """Take the gradients of some of a slab's parameters, by index, from compute."""
        if not self._slots:
            self._slots = [_GradSlot(self._largest, self._device) for _ in range(self._wanted)]
        slot = self._slots[self._turn % len(self._slots)]
        self._turn += 1
        # The copy that last drained this slot must have read it before compute writes it again.
        slot.drained.order()
        flat = slot.flat(slab)
        with torch.no_grad():
            flat.zero_()
            for index, gradient in gradients.items():
                segment = slab.layout.segments[index]
                flat[segment.offset : segment.end].view(segment.shape).copy_(gradient)
        if slab.grad.present:
            slot.drained = self._add(slab, flat, frozenset(gradients))
        else:
            slot.drained = self._land(slab, slot)
        slab.grad.present.update(gradients)
        self._counters.drains += 1
        self._counters.bytes_d2h += slab.layout.nbytes

    def _land(self, slab: Slab, slot: _GradSlot) -> Ticket:
        """The first gradient of the step: straight into the slab's own buffer, with its norm."""
        gradient = slab.grad
        gradient.clear()
        target = gradient.landing
        pinned = gradient.buffer is not None and gradient.buffer.pinned
        flat = slot.flat(slab)
        slot.square_sum.copy_(square_sum(flat))
        norm = torch.zeros((), dtype=torch.float64, pin_memory=self._device.type == "cuda")

        def copy() -> None:
            self._transfer.to_host(target, flat, pinned)
            norm.copy_(slot.square_sum, non_blocking=True)

        # After `landed` and `written`: an earlier sum or the update of the step before may still read this buffer.
        gradient.landed = self._lanes.d2h.submit(
            copy, after=(self._lanes.mark(), gradient.landed, slab.written), label=slab.name
        )
        gradient.square_sum = norm
        return gradient.landed

    def _add(self, slab: Slab, flat: torch.Tensor, indices: frozenset[int]) -> Ticket:
        """A further gradient: through a staging buffer, into the FP32 sum."""
        gradient = slab.grad
        before = frozenset(gradient.present)
        staging = self._staging[self._turn % len(self._staging)]
        buffer = staging.landing(slab, self._memory)
        arrived = buffer.bytes[: slab.layout.nbytes].view(slab.layout.dtype)
        copied = self._lanes.d2h.submit(
            # After `summed`: the sum that last used this staging buffer must have read it.
            lambda: self._transfer.to_host(arrived, flat, buffer.pinned),
            after=(self._lanes.mark(), staging.summed),
            label=slab.name,
        )
        first = not gradient.summed
        total = gradient.sum_buffer()

        def add() -> None:
            if first and total.data_ptr() != gradient.landing.data_ptr():
                total.copy_(gradient.landing)
            for index in sorted(indices):
                segment = slab.layout.segments[index]
                piece = arrived[segment.offset : segment.end]
                if index in before:
                    total[segment.offset : segment.end].add_(piece)
                else:
                    total[segment.offset : segment.end].copy_(piece)

        staging.summed = self._lanes.update.submit(add, after=(copied, gradient.landed, slab.written), label=slab.name)
        gradient.landed = staging.summed
        gradient.summed = True
        gradient.square_sum = None
        return copied
