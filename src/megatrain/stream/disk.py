"""States on disk: residual and moments are read into a staging buffer in RAM for their update, and written back. So is
the weight if it is on disk.

Reads, updates and writes have lanes of their own. Two orders keep them apart: that of the staging buffer (*state in
RAM*) and that of the slab's states (*state on disk*). After a step, the states that the next step is expected to update
first are read into the buffers that become free; a wrong guess costs one more read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain.errors import DiskFailed
from megatrain.geometry import ALIGN_BYTES, DISK_STAGING_SLOTS, round_up
from megatrain.store.disk import DiskBuffer
from megatrain.store.memory import Memory
from megatrain.store.slab import Slab
from megatrain.stream.disk_weights import staged_bytes
from megatrain.stream.lanes import Lanes
from megatrain.stream.rings import HostBuffers, Rings
from megatrain.stream.states import StagedSpan
from megatrain.telemetry.counters import Counters


class _Staging(HostBuffers):
    """A buffer in RAM for the states of one slab of a ring."""

    def __init__(self, members: Sequence[Slab], ram: Memory) -> None:
        super().__init__("staged states")
        self._members, self._ram = members, ram
        self.content: tuple[int, int] | None = None
        """The slab, and the version of it, whose states are or will be in the buffer."""

    def allocate_largest(self) -> torch.Tensor:
        nbytes = max(_size(slab) for slab in self._members)
        if self.buffer is None or self.buffer.nbytes < nbytes:
            self.content = None
        return self.allocate(nbytes, self._ram, transferred=False).bytes


class DiskStates(StagedSpan):
    """A slab's states in a staging buffer and its weight, in RAM or in the same buffer, for one update."""

    def __init__(self, slab: Slab, staging: _Staging, progress: object) -> None:
        memory = staging.allocate_largest()
        super().__init__(slab, memory, ALIGN_BYTES)
        self.staging, self.progress = staging, progress
        self.roles: tuple[str, ...] = ("states",)
        """What is read and written."""
        self.writes = [slab.orders["weight"], staging.order]
        self._moved = [*self.copies]
        self._weight: torch.Tensor | None = None
        if slab.weight_on_disk:
            self.roles, self.writes = ("weight", "states"), [staging.order]
            self._weight = memory[_state_size(slab) :][: slab.layout.nbytes]
            self._moved.append((self._weight, slab.weight_buffer))

    @property
    def weight(self) -> torch.Tensor:
        return super().weight if self._weight is None else self._weight.view(self.slab.layout.dtype)

    def move(self, *, write: bool) -> int:
        """Read or write all states. Returns the bytes that moved, which are fewer if some are coded."""
        transfers = []
        for copy, buffer in self._moved:
            assert isinstance(buffer, DiskBuffer)
            transfers.append((buffer, buffer.transfer(copy.data_ptr(), write=write, keep=copy)))
        failed: DiskFailed | None = None
        moved = 0
        for buffer, transfer in transfers:
            # The others use the staging buffer until they are done.
            try:
                moved += buffer.wait(transfer, write=write)
            except DiskFailed as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return moved


class DiskStream:
    """Reads states from disk for their update, and writes them back."""

    def __init__(self, slabs: Sequence[Slab], ram: Memory, lanes: Lanes, counters: Counters) -> None:
        self._lanes, self._counters = lanes, counters
        self.progress: object = ""
        """Its text says which parts of the model have taken the step that is being submitted (optim/schedule.py)."""
        self.failed: DiskFailed | None = None
        """The first failure. Some parts of the model may have taken a step that others have not."""
        self._submitted: list[Slab] = []
        """Slabs in the order of their updates in this step."""
        self._unwritten: dict[int, list[DiskStates]] = {}
        """By slab: updates whose write was submitted and is not complete."""
        on_disk = [slab for slab in slabs if slab.homes.states.tier == "disk"]
        self.rings = Rings(
            on_disk, lambda members: _Staging(members, ram), slots=lambda slabs: min(DISK_STAGING_SLOTS, slabs)
        )

    def allocate(self, slab: Slab) -> None:
        """Allocate what `stage` needs. It may fail, so call it before anything of a step is submitted."""
        for staging in self.rings.of(slab):
            staging.allocate_largest()

    def stage(self, slab: Slab) -> DiskStates | None:
        """The states of a slab in RAM once its order allows it; None if they are not on disk."""
        if not self.rings.of(slab):
            return None
        slab.require_owner()
        self._submitted.append(slab)
        staging = self._holding(slab)
        if staging is None:
            return self._read(slab, self.rings.next(slab))
        self.rings.use(slab, staging)
        return DiskStates(slab, staging, self.progress)

    def send_back(self, staged: DiskStates) -> None:
        """Submit the write, after the update was submitted."""
        slab, staging = staged.slab, staged.staging

        def work() -> None:
            # A skipped step changes nothing.
            if staged.changed:
                self._counters.bytes_disk_out += self._move(staged, write=True)
            self._unwritten[slab.index].remove(staged)

        self._unwritten.setdefault(slab.index, []).append(staged)
        on_disk = slab.open(writes=staged.roles)
        self._lanes.submit(
            "disk_out", "write states", work, reads=[staging.order], writes=on_disk.writes, label=slab.name
        )
        staging.content = slab.index, slab.version

    def read_ahead(self) -> None:
        """Submit reads for the next step, as far as staging buffers suffice, in the order of this step's updates."""
        order, self._submitted = dict.fromkeys(self._submitted), []
        wanted: dict[int, list[Slab]] = {}
        for slab in order:
            ring = self.rings.of(slab)
            first = wanted.setdefault(id(ring), [])
            if len(first) < len(ring):
                first.append(slab)
        for first in wanted.values():
            kept = {(slab.index, slab.version) for slab in first}
            for slab in first:
                if self._holding(slab) is None:
                    self._read(slab, next(s for s in self.rings.of(slab) if s.content not in kept))

    def unwritten(self, slab: Slab) -> DiskStates | None:
        """The update that changed the slab and did not reach the disk, after a failure. All lanes must be idle.

        Its staging buffer still holds the result: work that would reuse the buffer waits for the write, and fails.
        """
        return next((staged for staged in self._unwritten.get(slab.index, ()) if staged.changed), None)

    def _holding(self, slab: Slab) -> _Staging | None:
        return next((s for s in self.rings.of(slab) if s.content == (slab.index, slab.version)), None)

    def _read(self, slab: Slab, staging: _Staging) -> DiskStates:
        staged = DiskStates(slab, staging, self.progress)
        staging.content = None
        on_disk = slab.open(reads=staged.roles)

        def work() -> None:
            self._counters.bytes_disk_in += self._move(staged, write=False)

        self._lanes.submit("disk_in", "read states", work, reads=on_disk.reads, writes=[staging.order], label=slab.name)
        staging.content = slab.index, slab.version
        return staged

    def _move(self, staged: DiskStates, *, write: bool) -> int:
        try:
            return staged.move(write=write)
        except DiskFailed as error:
            done, lane = ("written", "disk_out") if write else ("read", "disk_in")
            said = f"the states of {staged.slab.name} could not be {done} (lane {lane}): {error} {staged.progress}"
            self.note_failure(DiskFailed(said))
            raise DiskFailed(said) from error

    def note_failure(self, error: DiskFailed) -> None:
        """Stop training: every later step raises the first failure."""
        self.failed = self.failed or error


def _state_size(slab: Slab) -> int:
    return sum(round_up(buffer.nbytes, ALIGN_BYTES) for buffer in slab.state_buffers())


def _size(slab: Slab) -> int:
    return _state_size(slab) + (staged_bytes(slab) if slab.weight_on_disk else 0)
