"""Weights on disk: read into staging buffers in RAM, from which they are copied to the device like weights in RAM.

A staging buffer keeps its weight until another needs the buffer, so a model whose weights all fit is read once per
update. Reads have a lane of their own: compute waits for them, and must not wait for reads of optimizer states.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain.geometry import ALIGN_BYTES, DISK_STAGING_SLOTS, round_up
from megatrain.store.memory import Memory
from megatrain.store.slab import Slab
from megatrain.store.ticket import Order
from megatrain.stream.disk_transfer import DiskTransfers
from megatrain.stream.lanes import Lanes
from megatrain.stream.rings import HostBuffers, Rings


class _Staging(HostBuffers):
    """A buffer in RAM for the weight of one slab of a ring."""

    def __init__(self, members: Sequence[Slab], ram: Memory) -> None:
        super().__init__("staged weight")
        self._largest, self._ram = max(map(staged_bytes, members)), ram
        self.content: tuple[int, int] | None = None
        """The slab, and the version of it, whose weight is or will be in the buffer."""

    def view(self, slab: Slab) -> torch.Tensor:
        buffer = self.allocate(self._largest, self._ram)
        return buffer.bytes[: slab.layout.nbytes].view(slab.layout.dtype)

    @property
    def pinned(self) -> bool:
        return self.buffer is not None and self.buffer.pinned


class DiskWeights:
    """Reads weights from disk."""

    def __init__(self, slabs: Sequence[Slab], ram: Memory, lanes: Lanes, transfers: DiskTransfers) -> None:
        self._lanes, self._transfers = lanes, transfers
        self._rings = Rings(
            [slab for slab in slabs if slab.weight_on_disk],
            lambda members: _Staging(members, ram),
            slots=lambda slabs: min(DISK_STAGING_SLOTS, slabs),
        )

    def stage(self, slab: Slab) -> tuple[torch.Tensor, bool, Order]:
        """The weight in RAM once its order allows it, and whether that memory is pinned. Submits the read if needed.
        Call with the fetcher's lock held."""
        wanted = slab.index, slab.version
        staging = next((each for each in self._rings.of(slab) if each.content == wanted), None)
        if staging is not None:
            self._rings.use(slab, staging)
            return staging.view(slab), staging.pinned, staging.order
        staging = self._rings.next(slab)
        staging.content = None
        view = staging.view(slab)
        self._read(slab, staging.order, view)
        staging.content = wanted
        return view, staging.pinned, staging.order

    def _read(self, slab: Slab, order: Order, view: torch.Tensor) -> None:
        source = slab.open(reads=("weight",))

        def work() -> None:
            copies = [(view, slab.weight_buffer)]
            self._transfers.move("disk_weights", "read weights", slab.name, copies, self._transfers.progress)

        self._lanes.submit("disk_weights", "read weight", work, reads=source.reads, writes=[order], label=slab.name)


def staged_bytes(slab: Slab) -> int:
    """Bytes of RAM for a slab's weight, in whole pages."""
    return round_up(slab.layout.nbytes, ALIGN_BYTES)
