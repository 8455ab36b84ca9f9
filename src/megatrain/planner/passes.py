"""One window of a step, forward and backward, lane by lane, in many decisions at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatrain.geometry import LANES, PASSING, grad_slots, weight_slots
from megatrain.planner.cost import PARK, STREAM, Costs
from megatrain.planner.decision import GRAD_SLOTS, RESIDENT, SLOTS, STREAMED, Bools, Decisions, Floats, Ints, Windows
from megatrain.planner.memory import STAGES, Ledger

AHEAD = STAGES - 1
"""Blocks whose states are read from disk ahead of their update."""
_weight_slots, _grad_slots = np.vectorize(weight_slots), np.vectorize(grad_slots)


class Block:
    """One block in every decision: where it is, and what it keeps."""

    def __init__(self, costs: Costs, ledger: Ledger, chosen: Decisions, index: int) -> None:
        piece, kind = costs.pieces[index], costs.shape.blocks[index].kind
        # A block without weights passes nothing through its ring.
        self.piece, self.ring = piece, costs.rings.get(piece.fetch_bytes, 0)
        if kind == "layer":
            number = ledger.layers.index(index)
            counts = (chosen.layers, chosen.held, chosen.summed, chosen.stored, chosen.visited)
            resident, held, summed, stored, visits = (count > number for count in counts)
            in_slots = number > len(ledger.layers) - chosen.slots
            on_disk = chosen.disk >= len(ledger.layers) - number
        else:
            resident, held, summed = chosen.rest == RESIDENT, chosen.rest != STREAMED, chosen.rest != STREAMED
            stored, visits, in_slots = (np.zeros(len(chosen), bool) for _ in range(3))
            place = len(ledger.rest) - ledger.rest.index(index)
            on_disk = chosen.disk >= len(ledger.layers) - chosen.layers + place
        owned = piece.fetch_bytes > 0
        self.visits = visits & ~resident & (piece.update > 0)
        self.here = here = resident | self.visits
        """Updated in VRAM."""
        self.fetched = ~held & owned
        self.held = held & ~here & owned
        self.fetched_back = self.fetched & ~in_slots & (kind != "head")
        self.drained = ~summed & (piece.drain > 0)
        self.leaves = summed & ~here & (piece.drain > 0)
        self.updated = ~here & (piece.update > 0)
        crowded = np.where(chosen.visited > chosen.layers, costs.crowded, 1.0)
        self.update = np.where(here, 0.0, piece.update * crowded) + piece.merge * ~summed
        self.on_disk = on_disk & ~resident
        self.parked = (chosen.offload > 0) & ~stored & (piece.park > 0)
        self.again = np.where(stored, 0.0, piece.again)


class _Queue:
    """When the last few of something were done, by decision: what a ring's slots wait for."""

    def __init__(self, length: int, decisions: int) -> None:
        self._times = np.zeros((length, decisions))
        self._each = np.arange(decisions)

    def before(self, count: Ints | int) -> Floats:
        """When the one was done that came so many before the next; 0 if there was none."""
        found: Floats = self._times[count - 1, self._each]
        return found

    def add(self, when: Floats, where: Bools) -> None:
        np.copyto(self._times[1:], self._times[:-1].copy(), where=where)
        np.copyto(self._times[0], when, where=where)


class Pass:
    """One window, forward and backward; the first with the updates before it, the last without clipping with those in
    its backward."""

    def __init__(self, costs: Costs, chosen: Decisions, blocks: list[Block], windows: Windows, number: int) -> None:
        count = len(chosen)
        self.blocks, self.micro, self.several, self.first = blocks, windows.sizes[number], windows.several, number == 0
        # A step of one window has its updates in that one, whichever they belong to.
        self.last = ~windows.several if self.first else np.full(count, number == 2)
        self.clipping = costs.run.clipping
        self.call = costs.call(self.micro)
        self.compute, self.link_in, self.link_out, self.updates, self.disk = (np.zeros(count) for _ in range(5))
        rings = range(max(costs.rings.values(), default=0) + 1)
        self.released = [_Queue(max(SLOTS), count) for _ in rings]
        self.sent = [_Queue(max(GRAD_SLOTS), count) for _ in rings]
        self.states_in, self.states_out = np.zeros(count), np.zeros(count)
        self.rooms = [_Queue(PASSING, count) for _ in rings]
        """States that have gone back to RAM: their slots are free."""
        self.left = [_Queue(PASSING, count) for _ in rings]
        """Held sums that have been updated: their buffers in RAM are free."""
        self.slots, self.grad_slots = [], []
        for ring in rings:
            members = [block for block in blocks if block.ring == ring]
            fetched = sum(block.fetched for block in members)
            trained = sum(block.drained | block.leaves for block in members)
            self.slots.append(np.maximum(1, _weight_slots(chosen.slots, fetched)))
            self.grad_slots.append(np.maximum(1, _grad_slots(chosen.grad_slots, trained)))
        self.waited = {lane: np.zeros(count) for lane in LANES}

    def run(self) -> Floats:
        """Seconds from the norm, or from the end of the window before."""
        written = self._update_in_order() if self.first and self.clipping else [None] * len(self.blocks)
        for block, when in zip(self.blocks, written, strict=True):
            self._forward(block, when)
        for block in reversed(self.blocks):
            self._backward(block)
        self._wait(self.link_out, np.ones_like(self.last), "d2h")
        self._wait(self.updates, self.last & (not self.clipping), "update")
        return self.compute

    def _update_in_order(self) -> list[Floats]:
        """The CPU's updates after the norm: when each is done. Held sums leave before theirs; states from disk are read
        ahead and written behind."""
        free, disk = np.zeros_like(self.compute), np.zeros_like(self.compute)
        # The first states were read during the backward; each next one is, when a block before it has been written.
        ready = [np.zeros_like(self.compute) for _ in range(AHEAD)]
        coming = self._read_next()
        written: list[Floats] = []
        for block, following in zip(self.blocks, coming, strict=True):
            piece, buffers = block.piece, self.left[block.ring]
            begin = np.maximum(self.link_out, buffers.before(PASSING))
            self.link_out = np.where(block.leaves, begin + piece.leave, self.link_out)
            free = np.where(block.leaves, np.maximum(free, self.link_out), free)
            free = np.where(block.on_disk, np.maximum(free, ready[0]), free)
            free = free + block.update
            written.append(np.where(block.visits, self._visit(block), free))
            buffers.add(free, block.leaves)
            if block.on_disk.any():
                disk = np.where(block.on_disk, np.maximum(disk, free) + piece.disk_write, disk) + following
                after = [*ready[1:], disk]
                ready = [np.where(block.on_disk, new, old) for new, old in zip(after, ready, strict=True)]
        return written

    def _visit(self, block: Block) -> Floats:
        """States come to VRAM and go back, through a slot that must be free: when they are there."""
        if not block.visits.any():
            return self.states_in
        rooms, seconds = self.rooms[block.ring], block.piece.visit
        arrived = np.maximum(self.states_in, rooms.before(PASSING)) + seconds
        self.states_in = np.where(block.visits, arrived, self.states_in)
        self.states_out = np.where(block.visits, np.maximum(self.states_out, arrived) + seconds, self.states_out)
        rooms.add(self.states_out, block.visits)
        return self.states_in

    def _read_next(self) -> list[Floats]:
        """For each block on disk, the seconds in which the states of the one `AHEAD` places after it are read."""
        ahead = [np.zeros_like(self.compute) for _ in range(AHEAD)]
        found: list[Floats] = []
        for block in reversed(self.blocks):
            found.append(np.where(block.on_disk, ahead[-1], 0.0))
            reads: list[Any] = [block.piece.disk_read, *ahead[:-1]]
            ahead = [np.where(block.on_disk, new, old) for new, old in zip(reads, ahead, strict=True)]
        return found[::-1]

    def _wait(self, until: Floats, where: Bools, cause: str) -> None:
        waits = np.where(where, np.maximum(until - self.compute, 0.0), 0.0)
        self.waited[cause] += waits
        self.compute = self.compute + waits

    def _fetch(self, block: Block, where: Bools, seconds: float, written: Floats | None) -> None:
        """Weights into a slot; compute waits until they are there."""
        begin = np.maximum(self.link_in, self.released[block.ring].before(self.slots[block.ring]))
        self._arrive(begin, seconds, written, where, "h2d")
        self.compute = self.compute + STREAM * where

    def _arrive(self, begin: Floats, seconds: float, written: Floats | None, where: Bools, lane: str) -> None:
        if written is not None:
            # A fetch that waits for an update: compute waits for that first.
            begin = np.maximum(begin, written)
            self._wait(written, where, "update")
        self.link_in = np.where(where, begin + seconds, self.link_in)
        self._wait(self.link_in, where, lane)

    def _forward(self, block: Block, written: Floats | None) -> None:
        piece = block.piece
        self._fetch(block, block.fetched, piece.fetch, written)
        if self.first:
            self._arrive(self.link_in, piece.fetch, written, block.held, "hold")
            self.compute = self.compute + STREAM * (block.held * 1 + block.leaves + 2 * block.visits)
        if written is not None:
            self._wait(written, block.visits, "states_in")
            # An update in VRAM takes the GPU from compute.
            self.compute = self.compute + piece.gpu_update * block.here
        self.compute = self.compute + self.micro * (piece.forward + self.call)
        self.released[block.ring].add(self.compute, block.fetched)
        if block.parked.any():
            # Two inputs may be on their way out; compute waits for those before them.
            self.compute = self.compute + self.micro * PARK * block.parked
            self._wait(self.link_out, block.parked, "d2h")
            leaving = np.maximum(self.link_out, self.compute) + self.micro * piece.park
            self.link_out = np.where(block.parked, leaving, self.link_out)

    def _backward(self, block: Block) -> None:
        piece = block.piece
        if block.parked.any():
            self.compute = self.compute + self.micro * PARK * block.parked
            self.link_in = self.link_in + self.micro * piece.unpark * block.parked
            self._wait(self.link_in, block.parked, "h2d")
        if block.fetched_back.any():
            self._fetch(block, block.fetched_back, piece.fetch_back, None)
        self.compute = self.compute + self.micro * (block.again + piece.backward + self.call)
        if not self.clipping:
            self.compute = self.compute + piece.gpu_update * (block.here & self.last)
        self.released[block.ring].add(self.compute, block.fetched)
        if block.drained.any():
            self._drain(block)
        if not self.clipping:
            self._update_as_landed(block)

    def _drain(self, block: Block) -> None:
        """A streamed gradient goes to RAM, through a slot that must be free."""
        piece, slots = block.piece, self.sent[block.ring]
        if not self.first:
            # The sum so far is fetched when the first micro-batch needs it, not ahead.
            resumed = np.maximum(self.link_in, self.compute) + piece.drain_sum
            self.link_in = np.where(block.drained, resumed, self.link_in)
            self._wait(self.link_in, block.drained, "h2d")
        self._wait(slots.before(self.grad_slots[block.ring]), block.drained, "d2h")
        seconds = np.where(self.several, piece.drain_sum, piece.drain)
        sent = np.maximum(self.link_out, self.compute) + seconds
        self.link_out = np.where(block.drained, sent, self.link_out)
        slots.add(self.link_out, block.drained)

    def _update_as_landed(self, block: Block) -> None:
        """Without clipping: held sums leave in the last backward, and each update follows its gradient."""
        piece, buffers = block.piece, self.left[block.ring]
        leaves, updated = block.leaves & self.last, block.updated & self.last
        free = np.maximum(self.compute, buffers.before(PASSING))
        self.link_out = np.where(leaves, np.maximum(self.link_out, free) + piece.leave, self.link_out)
        landed = np.maximum(self.updates, self.link_out) + block.update
        self.disk = self.disk + (piece.disk_read + piece.disk_write) * (block.on_disk & self.last)
        landed = np.where(block.on_disk, np.maximum(landed, self.disk), landed)
        self.updates = np.where(updated, landed, self.updates)
        self.updates = np.where(block.visits & self.last, np.maximum(self.updates, self._visit(block)), self.updates)
        buffers.add(self.updates, leaves)
