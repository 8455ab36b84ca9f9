"""Gradients on disk: a complete gradient is written as it arrives from the device, and read back for its update.

Only a gradient in its own dtype, of which the norm is known, goes to disk. FP32 sums stay in RAM: a further gradient of
the same step first brings the earlier one back (store/gradient.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatrain.geometry import ALIGN_BYTES, DISK_STAGING_SLOTS, round_up
from megatrain.store.gradient import Part, Snapshot
from megatrain.store.memory import Buffer, Memory
from megatrain.store.slab import Slab
from megatrain.store.ticket import Order
from megatrain.stream.disk_transfer import DiskTransfers
from megatrain.stream.lanes import Lanes
from megatrain.stream.rings import HostBuffers, Rings


class _Staging(HostBuffers):
    """A buffer in RAM for the gradient of one slab of a ring."""

    def __init__(self, members: Sequence[Slab], ram: Memory) -> None:
        super().__init__("staged gradient")
        self._largest, self._ram = max(staged_gradient_bytes(slab) for slab in members), ram

    def whole(self) -> Buffer:
        return self.allocate(self._largest, self._ram)

    def view(self, slab: Slab) -> torch.Tensor:
        return self.whole().bytes[: slab.owned.nbytes].view(slab.owned.dtype)


class DiskGradients:
    """Writes gradients to disk and reads them back."""

    def __init__(self, slabs: Sequence[Slab], ram: Memory, lanes: Lanes, transfers: DiskTransfers) -> None:
        self._lanes, self._transfers = lanes, transfers
        self._rings = Rings(
            [slab for slab in slabs if slab.homes.gradients is not None],
            lambda members: _Staging(members, ram),
            slots=lambda slabs: min(DISK_STAGING_SLOTS, slabs),
            size=lambda slab: slab.owned.nbytes,
        )

    def staging(self, slab: Slab) -> _Staging | None:
        """The buffer that the slab's next gradient is copied to; None if it does not go to disk."""
        # Several calls contribute to a shared slab, and their gradients are summed.
        return None if slab.shared or not self._rings.of(slab) else self._rings.next(slab)

    def allocate(self, slab: Slab) -> None:
        """Allocate what `fetch` needs. It may fail, so call it before anything of a step is submitted."""
        for staging in self._rings.of(slab):
            staging.whole()

    def write(self, slab: Slab, part: Part, staging: _Staging) -> None:
        """Submit the write of a gradient that was copied to `staging`."""
        buffer = part.move_to_disk()
        self._transfers.commit([(staging.whole().bytes, buffer)])
        self._submit("disk_out", "write gradient", slab, staging, buffer, [staging.order], [part.order])

    def fetch(self, slab: Slab, gradient: Snapshot) -> Snapshot:
        """The gradient in RAM; submits the read if it is on disk."""
        if gradient.on_disk is None:
            return gradient
        staging = self._rings.next(slab)
        self._submit("disk_in", "read gradient", slab, staging, gradient.on_disk, [gradient.order], [staging.order])
        parts = ((staging.view(slab), gradient.present),)
        return replace(gradient, parts=parts, order=staging.order, on_disk=None)

    def _submit(
        self,
        lane: str,
        job: str,
        slab: Slab,
        staging: _Staging,
        buffer: Buffer,
        reads: list[Order],
        writes: list[Order],
    ) -> None:
        copies, progress = [(staging.whole().bytes, buffer)], self._transfers.progress

        def work() -> None:
            self._transfers.move(lane, job, slab.name, copies, progress)

        self._lanes.submit(lane, job, work, reads=reads, writes=writes, label=slab.name)


def staged_gradient_bytes(slab: Slab) -> int:
    """Bytes of RAM for a slab's gradient, in whole pages."""
    return round_up(slab.owned.nbytes, ALIGN_BYTES)
