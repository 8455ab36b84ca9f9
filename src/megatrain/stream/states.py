"""States that live in RAM and are updated on the device: residual and moments come into a slot, and go back from it.

So it is with blocks whose weight and gradient sum are on the device anyway: the update writes the held weight where it
lies. The link and the GPU then do what the CPU would take longer for. Copies in and out have lanes of their own; the
updated weights go out last, behind the next forward, so that slots are free soon.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from megatrain.geometry import round_up
from megatrain.store.memory import Buffer
from megatrain.store.moments import Moment
from megatrain.store.slab import Slab, Span
from megatrain.stream.fetch import Fetcher, Slot
from megatrain.stream.rings import DeviceRoom, Rings
from megatrain.stream.transfer import Link

ALIGNED = 256
"""Bytes: each role starts on a multiple of it in its slot."""


class _Room(DeviceRoom):
    """For the states of one slab of a ring."""

    def __init__(self, members: Sequence[Slab], link: Link) -> None:
        super().__init__("state slot", link)
        self._members = members

    def take_largest(self) -> torch.Tensor:
        return self.take(max(_size(slab) for slab in self._members))


class Visit(Span):
    """A slab's weight and states on the device, for one update there."""

    def __init__(self, slab: Slab, held: Slot, room: _Room) -> None:
        super().__init__(slab, (), ("weight", "states"))
        self.held, self.room = held, room
        self.home = slab.open(writes=("weight", "states"))
        self.writes = [held.order, room.order]
        taken, at = room.take_largest(), 0
        self.copies: list[tuple[torch.Tensor, Buffer]] = []
        """Of its states, in their order, and where they live."""
        for buffer in slab.state_buffers():
            self.copies.append((taken[at : at + buffer.nbytes], buffer))
            at += round_up(buffer.nbytes, ALIGNED)

    @property
    def weight(self) -> torch.Tensor:
        return self.held.view(self.slab)

    @property
    def residual(self) -> torch.Tensor | None:
        return self.copies[0][0].view(torch.int16) if self.home.residual is not None else None

    @property
    def moments(self) -> Mapping[str, Moment]:
        found = self.home.moments
        copies = self.copies[len(self.copies) - len(found) :]
        return {role: found[role].over(copy) for role, (copy, _) in zip(found, copies, strict=True)}


class StateStream:
    """Brings states to the device and back."""

    def __init__(self, slabs: Sequence[Slab], fetcher: Fetcher, link: Link) -> None:
        self._fetcher, self._link = fetcher, link
        self._updated: list[Visit] = []
        """Whose weights have not been sent home yet."""
        visiting = [slab for slab in slabs if slab.visits and slab.trains]
        self.rings = Rings(visiting, lambda members: _Room(members, link))

    def make_room(self, slab: Slab) -> None:
        """Take what `open` needs. It may not be there, so this comes before anything of a step is submitted."""
        for room in self.rings.of(slab) if slab.visits else ():
            room.take_largest()

    def stop_holding(self, slabs: Iterable[Slab]) -> None:
        """Give back the room of slabs that the CPU updates from now on."""
        self.send_weights()
        for slab in slabs:
            for room in self.rings.of(slab):
                room.give_back()

    def open(self, slab: Slab) -> Visit | None:
        """Weight and states on the device, submitted; None if they are updated where they live. Call with the
        fetcher's lock held."""
        if not slab.visits or not self.rings.of(slab):
            return None
        slab.require_owner()
        held = self._fetcher.held_slot(slab)
        if held is None:
            return None
        visit = Visit(slab, held, self.rings.next(slab))
        home = slab.open(reads=("states",))
        copies = [(copy, buffer.bytes, buffer.pinned) for copy, buffer in visit.copies]
        self._link.copy("states_in", "bring", copies, reads=home.reads, writes=[visit.room.order], label=slab.name)
        self._link.counters.bytes_h2d += _size(slab)
        return visit

    def close(self, visit: Visit) -> None:
        """The update has been submitted: its states go home after it."""
        slab = visit.slab
        visit.held.version = slab.version
        home = slab.open(writes=("states",))
        copies = [(buffer.bytes, copy, buffer.pinned) for copy, buffer in visit.copies]
        reads = [visit.room.order]
        self._link.copy("states_out", "send states", copies, reads=reads, writes=home.writes, label=slab.name)
        self._link.counters.bytes_d2h += _size(slab)
        self._updated.append(visit)

    def send_weights(self) -> None:
        """The weights of all updates since the last call go home."""
        updated, self._updated = self._updated, []
        for visit in updated:
            slab, reads = visit.slab, [visit.held.order]
            home = slab.open(writes=("weight",))
            copies = [(home.weight, visit.weight, home.pinned)]
            self._link.copy("states_out", "send weight", copies, reads=reads, writes=home.writes, label=slab.name)
            self._link.counters.bytes_d2h += slab.layout.nbytes


def _size(slab: Slab) -> int:
    return sum(round_up(buffer.nbytes, ALIGNED) for buffer in slab.state_buffers())
