"""Held gradient sums on their way to the update: rounded on the device, copied to RAM, in the order of the updates.

They pass a ring, so that neither tier needs a second gradient for every block. The copies have a lane of their own,
where one that waits for an update to free its place holds up no other copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from megatrain.store.gradient import Snapshot
from megatrain.store.slab import Slab
from megatrain.stream.rings import DeviceBuffers, HostBuffers, Rings
from megatrain.stream.transfer import Link


class _Buffers:
    """Room for one gradient, rounded, on both sides."""

    def __init__(self, nbytes: int, link: Link) -> None:
        self._nbytes = nbytes
        self.slot = DeviceBuffers("rounded", link)
        self.home = HostBuffers("sum buffer")

    def take(self, slab: Slab, gradient: Snapshot) -> tuple[torch.Tensor, bool, torch.Tensor | None]:
        """Where it goes in RAM, whether that is pinned, and where it is rounded before; what is in the gradient dtype
        goes as it lies."""
        dtype, nbytes = slab.owned.dtype, slab.owned.nbytes
        buffer = self.home.take(self._nbytes, slab.homes.states)
        slot = None if gradient.flat.dtype == dtype else self.slot.take(self._nbytes)[:nbytes].view(dtype)
        return buffer.bytes[:nbytes].view(dtype), buffer.pinned, slot


class SumsOut:
    """Brings gradients to the tier of their slab's states."""

    def __init__(self, slabs: Sequence[Slab], link: Link) -> None:
        self._link = link
        streamed = [slab for slab in slabs if not slab.on_device]
        self.rings = Rings(
            streamed, lambda members: _Buffers(members[0].owned.nbytes, link), size=lambda slab: slab.owned.nbytes
        )

    def allocate(self, slab: Slab, gradient: Snapshot) -> None:
        """Take what `send` needs. It may not be there, so this comes before anything of a step is submitted."""
        for buffers in self.rings.of(slab) if slab.held_sum else ():
            buffers.take(slab, gradient)

    def stop_holding(self, slabs: Iterable[Slab]) -> None:
        """Give back the room of slabs whose sums are no longer held."""
        for slab in slabs:
            for buffers in self.rings.of(slab):
                buffers.home.give_back(slab.homes.states)
                buffers.slot.give_back()

    def send(self, slab: Slab, gradient: Snapshot) -> Snapshot:
        """The gradient where the slab is updated; submitted, if it has to travel."""
        if not slab.held_sum:
            return gradient
        slab.require_owner()
        buffers = self.rings.next(slab)
        target, pinned, slot = buffers.take(slab, gradient)

        def work() -> None:
            source = gradient.flat if slot is None else slot.copy_(gradient.flat)
            self._link.transfers["sums_out"].to_host(target, source, pinned)

        reads, writes = [gradient.order], [buffers.home.order]
        self._link.lanes.submit("sums_out", "send sum", work, reads=reads, writes=writes, label=slab.name)
        self._link.counters.drains += 1
        self._link.counters.bytes_d2h += slab.owned.nbytes
        return replace(gradient, parts=((target, gradient.present),), order=buffers.home.order)
