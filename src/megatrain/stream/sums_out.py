"""Copies held gradient sums to RAM for their update: rounded on the device, in the order of the updates.

They go through a ring, so that neither tier needs a second gradient for every block. The copies have a lane of their
own, so that one that waits for a free buffer does not block other copies.
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
    """Buffers for one rounded gradient, on the device and in RAM."""

    def __init__(self, nbytes: int, link: Link) -> None:
        self._nbytes = nbytes
        self.device = DeviceBuffers("rounded", link)
        self.host = HostBuffers("sum buffer")

    def allocate(self, slab: Slab, gradient: Snapshot) -> tuple[torch.Tensor, bool, torch.Tensor | None]:
        """The tensor in RAM, whether it is pinned, and the tensor to round to on the device (None: already rounded)."""
        dtype, nbytes = slab.owned.dtype, slab.owned.nbytes
        buffer = self.host.allocate(self._nbytes, slab.homes.transit)
        rounded = None if gradient.flat.dtype == dtype else self.device.allocate(self._nbytes)[:nbytes].view(dtype)
        return buffer.bytes[:nbytes].view(dtype), buffer.pinned, rounded


class SumsOut:
    """Copies gradients to RAM, where the weight of their slab is."""

    def __init__(self, slabs: Sequence[Slab], link: Link) -> None:
        self._link = link
        streamed = [slab for slab in slabs if not slab.on_device]
        self.rings = Rings(
            streamed, lambda members: _Buffers(members[0].owned.nbytes, link), size=lambda slab: slab.owned.nbytes
        )

    def allocate(self, slab: Slab, gradient: Snapshot) -> None:
        """Allocate what `send` needs. It may fail, so call it before anything of a step is submitted."""
        for buffers in self.rings.of(slab) if slab.held_sum else ():
            buffers.allocate(slab, gradient)

    def stop_holding(self, slabs: Iterable[Slab]) -> None:
        for slab in slabs:
            for buffers in self.rings.of(slab):
                buffers.host.free(slab.homes.transit)
                buffers.device.free()

    def send(self, slab: Slab, gradient: Snapshot) -> Snapshot:
        """The gradient in the tier where the slab is updated; submits the copy if it is not there."""
        if not slab.held_sum:
            return gradient
        slab.require_owner()
        buffers = self.rings.next(slab)
        target, pinned, rounded = buffers.allocate(slab, gradient)

        def work() -> None:
            source = gradient.flat if rounded is None else rounded.copy_(gradient.flat)
            self._link.transfers["sums_out"].to_host(target, source, pinned)

        reads, writes = [gradient.order], [buffers.host.order]
        self._link.lanes.submit("sums_out", "send sum", work, reads=reads, writes=writes, label=slab.name)
        self._link.counters.drains += 1
        self._link.counters.bytes_d2h += slab.owned.nbytes
        return replace(gradient, parts=((target, gradient.present),), order=buffers.host.order)
