"""Gradients on disk: a complete gradient is written as it arrives from the device, and read back for its update.

Only a gradient in its own dtype, of which the norm is known, goes to disk. FP32 sums stay in RAM: a further gradient of
the same step first brings the earlier one back (store/gradient.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatrain.geometry import in_pages
from megatrain.store.gradient import Part, Snapshot
from megatrain.store.memory import Buffer, Memory
from megatrain.store.slab import Slab
from megatrain.store.ticket import Order
from megatrain.stream.disk_transfer import DiskTransfers
from megatrain.stream.lanes import Lanes
from megatrain.stream.rings import Staging, StagingRings


class DiskGradients:
    """Writes gradients to disk and reads them back."""

    def __init__(self, slabs: Sequence[Slab], ram: Memory, lanes: Lanes, transfers: DiskTransfers) -> None:
        self._lanes, self._transfers = lanes, transfers
        on_disk = [slab for slab in slabs if slab.homes.gradients is not None]
        self.rings = StagingRings("staged gradient", on_disk, gradient_bytes, ram)

    def staging(self, slab: Slab) -> Staging | None:
        """The buffer that the slab's next gradient is copied to; None if it does not go to disk."""
        # Several calls contribute to a shared slab, and their gradients are summed.
        return None if slab.shared or not self.rings.of(slab) else self.rings.next(slab)

    def write(self, slab: Slab, part: Part, staging: Staging) -> None:
        """Submit the write of a gradient that was copied to `staging`."""
        buffer = part.move_to_disk()
        self._transfers.commit([(staging.whole().bytes, buffer)])
        self._submit("disk_out", "write gradient", slab, staging, buffer, [staging.order], [part.order])

    def fetch(self, slab: Slab, gradient: Snapshot) -> Snapshot:
        """The gradient in RAM; submits the read if it is on disk."""
        if gradient.on_disk is None:
            return gradient
        staging = self.rings.next(slab)
        self._submit("disk_in", "read gradient", slab, staging, gradient.on_disk, [gradient.order], [staging.order])
        parts = ((staging.view(slab.owned), gradient.present),)
        return replace(gradient, parts=parts, order=staging.order, on_disk=None)

    def _submit(
        self,
        lane: str,
        job: str,
        slab: Slab,
        staging: Staging,
        buffer: Buffer,
        reads: list[Order],
        writes: list[Order],
    ) -> None:
        copies, progress = [(staging.whole().bytes, buffer)], self._transfers.progress

        def work() -> None:
            self._transfers.move(lane, job, slab.name, copies, progress)

        self._lanes.submit(lane, job, work, reads=reads, writes=writes, label=slab.name)


def gradient_bytes(slab: Slab) -> int:
    """Bytes of RAM for a slab's gradient."""
    return in_pages([slab.owned.nbytes])
