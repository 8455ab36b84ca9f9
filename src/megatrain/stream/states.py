"""Streamed states: residual and moments in RAM are copied to a slot on the device for their update, and back.

This is for blocks whose weight and gradient sum are held on the device; the update writes the held weight in place. It
pays where link and GPU are faster than the CPU's update. Copies in and out have lanes of their own. Updated weights are
copied last, so that slots are free early.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from megatrain.geometry import ALIGN_BYTES, in_pages, round_up
from megatrain.store.memory import Buffer
from megatrain.store.moments import Moment
from megatrain.store.slab import Slab, Span
from megatrain.stream.fetch import Fetcher, Slot
from megatrain.stream.rings import DeviceBuffers, Rings
from megatrain.stream.transfer import Link


class _StateSlot(DeviceBuffers):
    """A device buffer for the states of one slab of a ring."""

    def __init__(self, members: Sequence[Slab], link: Link) -> None:
        super().__init__("state slot", link)
        self._members = members

    def allocate_largest(self) -> torch.Tensor:
        return self.allocate(max(map(staged_state_bytes, self._members)))


class StagedSpan(Span):
    """A slab opened for one update, with copies of its states in other memory."""

    def __init__(self, slab: Slab, memory: torch.Tensor) -> None:
        super().__init__(slab, (), ("weight", "states"))
        offset = 0
        self.copies: list[tuple[torch.Tensor, Buffer]] = []
        """The staged copy of each state, and the buffer in its home."""
        for buffer in slab.state_buffers():
            self.copies.append((memory[offset : offset + buffer.nbytes], buffer))
            offset += round_up(buffer.nbytes, ALIGN_BYTES)

    @property
    def residual(self) -> torch.Tensor | None:
        return self.copies[0][0].view(torch.int16) if self.slab.residual is not None else None

    @property
    def moments(self) -> Mapping[str, Moment]:
        moments = self.slab.moments
        copies = self.copies[len(self.copies) - len(moments) :]
        return {role: moments[role].with_storage(copy) for role, (copy, _) in zip(moments, copies, strict=True)}


class StagedStates(StagedSpan):
    """A slab's weight and states on the device, for one update there."""

    def __init__(self, slab: Slab, held: Slot, slot: _StateSlot) -> None:
        super().__init__(slab, slot.allocate_largest())
        self.held, self.slot = held, slot
        self.writes = [held.order, slot.order]

    @property
    def weight(self) -> torch.Tensor:
        return self.held.view(self.slab)


class StateStream:
    """Copies states to the device for their update, and back."""

    def __init__(self, slabs: Sequence[Slab], fetcher: Fetcher, link: Link) -> None:
        self._fetcher, self._link = fetcher, link
        self._updated: list[StagedStates] = []
        """Updates whose weights have not been copied to RAM yet."""
        streamed = [slab for slab in slabs if slab.streams_states and slab.trains]
        self.rings = Rings(streamed, lambda members: _StateSlot(members, link))

    def allocate(self, slab: Slab) -> None:
        """Allocate what `stage` needs. It may fail, so call it before anything of a step is submitted."""
        for slot in self.rings.of(slab) if slab.streams_states else ():
            slot.allocate_largest()

    def stop_holding(self, slabs: Iterable[Slab]) -> None:
        self.send_weights()
        for slab in slabs:
            for slot in self.rings.of(slab):
                slot.free()

    def stage(self, slab: Slab) -> StagedStates | None:
        """Copy the states to the device; None if the slab is updated in RAM. Call with the fetcher's lock held."""
        if not slab.streams_states or not self.rings.of(slab):
            return None
        slab.require_owner()
        held = self._fetcher.held_slot(slab)
        if held is None:
            return None
        staged = StagedStates(slab, held, self.rings.next(slab))
        in_ram = slab.open(reads=("states",))
        copies = [(copy, buffer.bytes, buffer.pinned) for copy, buffer in staged.copies]
        writes = [staged.slot.order]
        self._link.copy("states_in", "fetch states", copies, reads=in_ram.reads, writes=writes, label=slab.name)
        self._link.counters.bytes_h2d += sum(copy.nbytes for copy, _ in staged.copies)
        return staged

    def send_back(self, staged: StagedStates) -> None:
        """Submit the copy of the states to RAM, after the update was submitted."""
        slab = staged.slab
        staged.held.version = slab.version
        in_ram = slab.open(writes=("states",))
        copies = [(buffer.bytes, copy, buffer.pinned) for copy, buffer in staged.copies]
        reads = [staged.slot.order]
        self._link.copy("states_out", "send states", copies, reads=reads, writes=in_ram.writes, label=slab.name)
        self._link.counters.bytes_d2h += sum(copy.nbytes for copy, _ in staged.copies)
        self._updated.append(staged)

    def send_weights(self) -> None:
        """Submit the copies of the weights of all updates since the last call."""
        updated, self._updated = self._updated, []
        for staged in updated:
            slab, reads = staged.slab, [staged.held.order]
            in_ram = slab.open(writes=("weight",))
            copies = [(in_ram.weight, staged.weight, in_ram.pinned)]
            self._link.copy("states_out", "send weight", copies, reads=reads, writes=in_ram.writes, label=slab.name)
            self._link.counters.bytes_d2h += slab.layout.nbytes


def staged_state_bytes(slab: Slab) -> int:
    """Bytes of a slab's states in a slot or a staging buffer."""
    return in_pages(buffer.nbytes for buffer in slab.state_buffers())
