"""States that live in RAM and are updated on the device: residual and moments come into a slot, and go back from it.

So it is with blocks whose weight and gradient sum are on the device anyway: the update writes the held weight where it
lies. The link and the GPU then do what the CPU would take longer for. Copies in and out have lanes of their own; the
updated weights go out last, behind the next forward, so that slots are free soon.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from megatrain.geometry import PASSING, by_size, round_up
from megatrain.store.moments import Moment
from megatrain.store.slab import Slab, Span
from megatrain.store.ticket import Order
from megatrain.store.vram import lasting
from megatrain.stream.fetch import Fetcher, Slot
from megatrain.stream.lanes import Lanes
from megatrain.stream.transfer import Transfer
from megatrain.telemetry.counters import Counters

ALIGNED = 256
"""Bytes: each role starts on a multiple of it in its slot."""


class _Room:
    """Bytes on the device for the states of one slab; taken at first use, and again when states have grown."""

    def __init__(self, members: Sequence[Slab], device: torch.device) -> None:
        self.order = Order("state slot")
        self._members, self._device = members, device
        self._bytes: torch.Tensor | None = None

    def take(self, lanes: Lanes) -> torch.Tensor:
        needed = max(_size(slab) for slab in self._members)
        if self._bytes is None or self._bytes.numel() < needed:
            self.order.until_writable()
            self._bytes = lasting(needed, self._device)
            # Compute so far may have used these bytes for something that is gone.
            self.order.read(lanes.mark())
        return self._bytes

    def give_back(self) -> None:
        self.order.until_writable()
        self._bytes = None


class Visit(Span):
    """A slab's weight and states on the device, for one update there."""

    def __init__(self, slab: Slab, held: Slot, room: _Room, taken: torch.Tensor) -> None:
        super().__init__(slab, (), ("weight", "states"))
        self.held, self.room = held, room
        self.home = slab.open(writes=("weight", "states"))
        self.writes = [held.order, room.order]
        at = 0
        self.copies: list[torch.Tensor] = []
        """Of the buffers of its states, in their order."""
        for buffer in slab.state_buffers():
            self.copies.append(taken[at : at + buffer.nbytes])
            at += round_up(buffer.nbytes, ALIGNED)

    @property
    def weight(self) -> torch.Tensor:
        return self.held.view(self.slab)

    @property
    def residual(self) -> torch.Tensor | None:
        return self.copies[0].view(torch.int16) if self.home.residual is not None else None

    @property
    def moments(self) -> Mapping[str, Moment]:
        found = self.home.moments
        copies = self.copies[len(self.copies) - len(found) :]
        return {role: found[role].over(copy) for role, copy in zip(found, copies, strict=True)}


class StateStream:
    """Brings states to the device and back."""

    def __init__(
        self,
        slabs: Sequence[Slab],
        device: torch.device,
        lanes: Lanes,
        fetcher: Fetcher,
        transfers: Mapping[str, Transfer],
        counters: Counters,
    ) -> None:
        self._lanes, self._fetcher, self._transfers, self._counters = lanes, fetcher, transfers, counters
        self._rings: dict[int, list[_Room]] = {}
        """By slab; whose turn it is comes first."""
        self._updated: list[Visit] = []
        """Whose weights have not been sent home yet."""
        for members in by_size([s for s in slabs if s.visits and s.trains], lambda slab: slab.layout.nbytes):
            ring = [_Room(members, device) for _ in range(min(PASSING, len(members)))]
            self._rings |= {slab.index: ring for slab in members}

    def make_room(self, slab: Slab) -> None:
        """Take what `open` needs. It may not be there, so this comes before anything of a step is submitted."""
        for room in self._rings.get(slab.index, ()) if slab.visits else ():
            room.take(self._lanes)

    def let_go(self, slabs: Iterable[Slab]) -> None:
        """Give back the room of slabs that the CPU updates from now on."""
        self.send_weights()
        for slab in slabs:
            for room in self._rings.get(slab.index, ()):
                room.give_back()

    def open(self, slab: Slab) -> Visit | None:
        """Weight and states on the device, submitted; None if they are updated where they live. Call with the
        fetcher's lock held."""
        if not slab.visits or slab.index not in self._rings:
            return None
        slab.require_owner()
        held = self._fetcher.held_slot(slab)
        if held is None:
            return None
        ring = self._rings[slab.index]
        room = ring.pop(0)
        ring.append(room)
        visit = Visit(slab, held, room, room.take(self._lanes))
        home = slab.open(reads=("states",))
        buffers, transfer = slab.state_buffers(), self._transfers["states_in"]

        def bring() -> None:
            for copy, buffer in zip(visit.copies, buffers, strict=True):
                transfer.to_device(copy, buffer.bytes, buffer.pinned)

        self._lanes.submit("states_in", "bring", bring, reads=home.reads, writes=[room.order], label=slab.name)
        self._counters.bytes_h2d += _size(slab)
        return visit

    def close(self, visit: Visit) -> None:
        """The update has been submitted: its states go home after it."""
        slab, buffers, transfer = visit.slab, visit.slab.state_buffers(), self._transfers["states_out"]
        visit.held.version = slab.version

        def send() -> None:
            for copy, buffer in zip(visit.copies, buffers, strict=True):
                transfer.to_host(buffer.bytes, copy, buffer.pinned)

        home = slab.open(writes=("states",))
        self._lanes.submit(
            "states_out", "send states", send, reads=[visit.room.order], writes=home.writes, label=slab.name
        )
        self._counters.bytes_d2h += _size(slab)
        self._updated.append(visit)

    def send_weights(self) -> None:
        """The weights of all updates since the last call go home."""
        updated, self._updated = self._updated, []
        for visit in updated:
            home = visit.slab.open(writes=("weight",))

            def send(visit: Visit = visit, home: Span = home) -> None:
                self._transfers["states_out"].to_host(home.weight, visit.weight, home.pinned)

            self._lanes.submit(
                "states_out", "send weight", send, reads=[visit.held.order], writes=home.writes, label=visit.slab.name
            )
            self._counters.bytes_d2h += visit.slab.layout.nbytes


def _size(slab: Slab) -> int:
    return sum(round_up(buffer.nbytes, ALIGNED) for buffer in slab.state_buffers())
