"""States on disk: residual and moments are read into a staging buffer in RAM for their update, and written back. So is
the weight if it is on disk.

Reads, updates and writes have lanes of their own. Two orders keep them apart: that of the staging buffer (*state in
RAM*) and that of the slab's states (*state on disk*). After a step, the states that the next step is expected to update
first are read into the buffers that become free; a wrong guess costs one more read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain.store.memory import Memory
from megatrain.store.slab import Slab
from megatrain.stream.disk_transfer import DiskTransfers
from megatrain.stream.lanes import Lanes
from megatrain.stream.rings import Staging, StagingRings
from megatrain.stream.states import StagedSpan, staged_state_bytes


class DiskStates(StagedSpan):
    """A slab's states in a staging buffer and its weight, in RAM or in the same buffer, for one update."""

    def __init__(self, slab: Slab, staging: Staging, progress: object) -> None:
        memory = staging.whole().bytes
        super().__init__(slab, memory)
        self.staging, self.progress = staging, progress
        self.roles: tuple[str, ...] = ("states",)
        """What is read and written."""
        self.writes = [slab.orders["weight"], staging.order]
        self.moved = [*self.copies]
        """Memory, and the buffer on disk that is read into it and written from it."""
        self._weight: torch.Tensor | None = None
        if slab.weight_on_disk:
            self.roles, self.writes = ("weight", "states"), [staging.order]
            self._weight = memory[staged_state_bytes(slab) :][: slab.layout.nbytes]
            self.moved.append((self._weight, slab.weight_buffer))

    @property
    def weight(self) -> torch.Tensor:
        return super().weight if self._weight is None else self._weight.view(self.slab.layout.dtype)


class DiskStream:
    """Reads states from disk for their update, and writes them back."""

    def __init__(self, slabs: Sequence[Slab], ram: Memory, lanes: Lanes, transfers: DiskTransfers) -> None:
        self._lanes, self.transfers = lanes, transfers
        self._submitted: list[Slab] = []
        """Slabs in the order of their updates in this step."""
        self._unwritten: dict[int, list[DiskStates]] = {}
        """By slab: updates whose write was submitted and is not complete."""
        # Frozen slabs have separate rings without memory until one is unfrozen; the plan counts the others.
        self.rings = {
            trains: StagingRings(
                "staged states",
                [slab for slab in slabs if slab.trains == trains and slab.homes.states.tier == "disk"],
                lambda slab: update_bytes(slab, staged_state_bytes(slab)),
                ram,
                transferred=False,
            )
            for trains in (True, False)
        }

    def rings_of(self, slab: Slab) -> StagingRings:
        """The rings that the slab is in."""
        return self.rings[slab.trains]

    def stage(self, slab: Slab) -> DiskStates | None:
        """The states of a slab in RAM once its order allows it; None if they are not on disk."""
        rings = self.rings_of(slab)
        if not rings.of(slab):
            return None
        slab.require_owner()
        self._submitted.append(slab)
        # A buffer that became too small, because another slab of the ring got more states, no longer holds any.
        rings.allocate(slab)
        staging = rings.holding(slab)
        if staging is None:
            return self._read(slab, rings.next(slab))
        rings.use(slab, staging)
        return DiskStates(slab, staging, self.transfers.progress)

    def send_back(self, staged: DiskStates) -> None:
        """Submit the write, after the update was submitted."""
        slab, staging = staged.slab, staged.staging

        def work() -> None:
            # A skipped step changes nothing.
            if staged.changed:
                self.transfers.move("disk_out", "write states", slab.name, staged.moved, staged.progress)
            self._unwritten[slab.index].remove(staged)

        self._unwritten.setdefault(slab.index, []).append(staged)
        self.transfers.commit(staged.moved)
        on_disk = slab.open(writes=staged.roles)
        self._lanes.submit(
            "disk_out", "write states", work, reads=[staging.order], writes=on_disk.writes, label=slab.name
        )
        staging.content = slab.index, slab.version

    def skip(self, staged: DiskStates) -> None:
        """Its update changes nothing, so nothing will be written."""
        self.transfers.commit(staged.moved, -1)

    def read_ahead(self) -> None:
        """Submit reads for the next step, as far as staging buffers suffice, in the order of this step's updates."""
        order, self._submitted = dict.fromkeys(self._submitted), []
        wanted: dict[int, list[Slab]] = {}
        for slab in order:
            ring = self.rings_of(slab).of(slab)
            first = wanted.setdefault(id(ring), [])
            if len(first) < len(ring):
                first.append(slab)
        for first in wanted.values():
            kept = {(slab.index, slab.version) for slab in first}
            for slab in first:
                if self.rings_of(slab).holding(slab) is None:
                    self._read(slab, next(s for s in self.rings_of(slab).of(slab) if s.content not in kept))

    def unwritten(self, slab: Slab) -> DiskStates | None:
        """The update that changed the slab and did not reach the disk, after a failure. All lanes must be idle.

        Its staging buffer still holds the result: work that would reuse the buffer waits for the write, and fails.
        """
        return next((staged for staged in self._unwritten.get(slab.index, ()) if staged.changed), None)

    def _read(self, slab: Slab, staging: Staging) -> DiskStates:
        staged = DiskStates(slab, staging, self.transfers.progress)
        staging.content = None
        on_disk = slab.open(reads=staged.roles)

        def work() -> None:
            self.transfers.move("disk_in", "read states", slab.name, staged.moved, staged.progress)

        self._lanes.submit("disk_in", "read states", work, reads=on_disk.reads, writes=[staging.order], label=slab.name)
        staging.content = slab.index, slab.version
        return staged


def update_bytes(slab: Slab, states: int) -> int:
    """Bytes of RAM for an update of the slab, given those of its states: none if it has none, as a frozen one."""
    return states + slab.layout.nbytes if states and slab.weight_on_disk else states
