"""Weights on disk: read into staging buffers in RAM, from which they are copied to the device like weights in RAM.

A staging buffer keeps its weight until another needs the buffer, so a model whose weights all fit is read once per
update. Reads have a lane of their own: compute waits for them, and must not wait for reads of optimizer states.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain.store.memory import Memory
from megatrain.store.slab import Slab
from megatrain.store.ticket import Order
from megatrain.stream.disk_transfer import DiskTransfers
from megatrain.stream.lanes import Lanes
from megatrain.stream.rings import StagingRings


class DiskWeights:
    """Reads weights from disk."""

    def __init__(self, slabs: Sequence[Slab], ram: Memory, lanes: Lanes, transfers: DiskTransfers) -> None:
        self._lanes, self._transfers = lanes, transfers
        on_disk = [slab for slab in slabs if slab.weight_on_disk]
        self._rings = StagingRings("staged weight", on_disk, lambda slab: slab.layout.nbytes, ram)

    def stage(self, slab: Slab) -> tuple[torch.Tensor, bool, Order]:
        """The weight in RAM once its order allows it, and whether that memory is pinned. Submits the read if needed.
        Call with the fetcher's lock held."""
        staging = self._rings.holding(slab)
        if staging is not None:
            self._rings.use(slab, staging)
        else:
            staging = self._rings.next(slab)
            staging.content = None
            self._read(slab, staging.order, staging.view(slab.layout))
            staging.content = slab.index, slab.version
        return staging.view(slab.layout), staging.whole().pinned, staging.order

    def _read(self, slab: Slab, order: Order, view: torch.Tensor) -> None:
        source = slab.open(reads=("weight",))

        def work() -> None:
            copies = [(view, slab.weight_buffer)]
            self._transfers.move("disk_weights", "read weights", slab.name, copies, self._transfers.progress)

        self._lanes.submit("disk_weights", "read weight", work, reads=source.reads, writes=[order], label=slab.name)
