"""A steady step, lane by lane: what waits for what, as in engine/step.py; of many decisions at once.

The order of work on every lane is fixed, and a piece starts when its lane is free and what it needs is done. Such a
system is monotone: no piece that gets shorter, and no slot that is added, ever makes the step longer.

The clock starts when the norm is known. Updates then run in forward order on the CPU; a held sum leaves for its update
just before it, and block i is fetched, or its held copy refreshed, when its own is done. Without clipping updates run
in the last backward as gradients land. Each window after the first only adds its own time: what it fetches is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatrain.geometry import LANES, STAGING_SLOTS, grad_slots, weight_slots
from megatrain.planner.arrays import Bools, Floats, Ints, Sums, Table, look_up
from megatrain.planner.cost import CALL_SECONDS, FETCH_SECONDS, OFFLOAD_SECONDS, STEP_SECONDS, TRAINER_SECONDS, Costs
from megatrain.planner.decision import GRAD_SLOTS, RESIDENT, SLOTS, STREAMED, Decision, Decisions, Windows
from megatrain.planner.memory import DISK_STAGED_BLOCKS, Ledger

AHEAD = DISK_STAGED_BLOCKS - 1
"""Blocks whose states are read from disk ahead of their update."""
_weight_slots, _grad_slots = np.vectorize(weight_slots), np.vectorize(grad_slots)


@dataclass(frozen=True)
class StepEstimate:
    """What one step takes."""

    seconds: float
    busy: dict[str, float]
    """Lane → seconds it works."""
    waited: dict[str, float]
    """Lane → seconds that compute waits for it."""
    bottleneck: str
    """The lane that works most of the time."""


class Simulator:
    """Steps of one model and run on one machine, for many decisions."""

    def __init__(self, costs: Costs, ledger: Ledger) -> None:
        self.costs, self.ledger = costs, ledger
        self.count = len(costs.pieces)
        self._around = STEP_SECONDS + TRAINER_SECONDS * costs.run.trainer
        self._sums = {
            name: Sums([float(getattr(piece, name)) for piece in costs.pieces], ledger.layers, ledger.other_blocks)
            for name in vars(costs.pieces[0])
        }
        self._disk_seconds: Table = {}
        last = max(range(self.count), key=lambda i: (costs.pieces[i].fetch_bytes > 0, i))
        self._tail = sum(piece.forward for piece in costs.pieces[last:])
        """Forward of the last block that owns weights, and of those after it."""

    def step(self, decision: Decision) -> StepEstimate:
        """One steady step."""
        chosen = Decisions.of([decision])
        waited = {lane: np.zeros(1) for lane in LANES}
        seconds = float(self.seconds(chosen, waited)[0])
        busy = {lane: float(spent[0]) for lane, spent in self.busy(chosen).items()}
        bottleneck = max(LANES, key=lambda lane: busy[lane])
        return StepEstimate(seconds, busy, {lane: float(spent[0]) for lane, spent in waited.items()}, bottleneck)

    def seconds(self, chosen: Decisions, waited: dict[str, Floats] | None = None) -> Floats:
        """Of each decision; with `waited`, also what compute waits for is added up there."""
        busy = self.busy(chosen)
        if self.costs.machine.gpu is None:
            # Without a GPU everything is done inline, one after the other.
            return self._around + sum(busy.values(), np.zeros(len(chosen)))
        windows = Windows(chosen, self.costs.run.accumulation)
        blocks = [_Block(self.costs, self.ledger, chosen, index) for index in range(self.count)]
        seconds = self._around + self._norm(chosen)
        for number, times in enumerate(windows.times):
            if not times.any():
                continue
            one = _WindowPass(self.costs, chosen, blocks, windows, number)
            seconds = seconds + times * one.run()
            if waited is not None:
                for lane in LANES:
                    waited[lane] += times * one.waited[lane]
        return np.maximum(seconds, self._links(busy))

    def _links(self, busy: dict[str, Floats]) -> Floats:
        """No step is shorter than what the disk takes, or either direction of PCIe."""
        longest = busy["disk"]
        for link in ("in", "out"):
            shared = [busy[name] for name, lane in LANES.items() if lane.link == link]
            longest = np.maximum(longest, self._around + np.sum(shared, axis=0))
        return longest

    def _norm(self, chosen: Decisions) -> Floats:
        """Norm and rounding of the sums that are in VRAM, beside nothing else."""
        return self._sums["norm"].before(chosen.held_gradients, chosen.other_blocks != STREAMED)

    def busy(self, chosen: Decisions) -> dict[str, Floats]:
        """Seconds of work per lane: no step is shorter than the longest."""
        sums, micro = self._sums, self.costs.run.accumulation
        windows = Windows(chosen, micro)
        count, streamed, owned = windows.count, chosen.other_blocks == STREAMED, chosen.other_blocks != RESIDENT
        computed = sums["forward"].total + sums["recompute"].after(chosen.stored_graphs, True) + sums["backward"].total
        compute = micro * computed + self._norm(chosen)
        for size, times in zip(windows.sizes, windows.times, strict=True):
            compute += 2 * times * size * self.costs.call(size) * self.count
        fetched = sums["fetch"].after(chosen.held_weights, streamed)
        h2d = count * (fetched + sums["fetch_backward"].after(chosen.held_weights, streamed))
        h2d += (count - 1) * sums["drain_sum"].after(chosen.held_gradients, streamed)
        # The last layers of a forward are still in their slots when the backward begins.
        in_slots = np.maximum(chosen.held_weights, len(self.ledger.layers) - chosen.slots + 1)
        h2d -= count * sums["fetch_backward"].after(in_slots, False)
        refresh = sums["fetch"].after(chosen.gpu_updates, owned) - fetched
        drained = sums["drain"].after(chosen.held_gradients, streamed)
        d2h = np.where(windows.several, count * sums["drain_sum"].after(chosen.held_gradients, streamed), drained)
        sums_out = sums["sum_out"].after(chosen.gpu_updates, owned) - sums["sum_out"].after(
            chosen.held_gradients, streamed
        )
        parked = len(self.ledger.layers) - chosen.stored_graphs
        compute += chosen.offload_inputs * 2 * micro * OFFLOAD_SECONDS * parked
        d2h += chosen.offload_inputs * micro * sums["offload"].after(chosen.stored_graphs, False)
        h2d += chosen.offload_inputs * micro * sums["restore"].after(chosen.stored_graphs, False)
        update_slowdown = np.where(chosen.streams_states, self.costs.update_slowdown, 1.0)
        update = update_slowdown * sums["update"].after(chosen.gpu_updates, owned) + sums["merge"].after(
            chosen.held_gradients, streamed
        )
        gpu_update = sums["gpu_update"].total - sums["gpu_update"].after(chosen.gpu_updates, owned)
        visits, weights = (
            sums[name].after(chosen.resident_layers, False) - sums[name].after(chosen.gpu_updates, False)
            for name in ("stream_states", "fetch_backward")
        )
        disk = self._disk(chosen)[0]
        lanes = (compute, h2d, refresh, d2h, sums_out, update, gpu_update, visits, visits + weights, disk)
        return dict(zip(LANES, lanes, strict=True))

    def _disk(self, chosen: Decisions) -> tuple[Floats, Floats]:
        """Seconds of the disk, and what the update of the last block there waits for: reads but the first, and writes
        that make room."""

        def seconds(resident: int, layers: int, disk: int) -> tuple[float, float]:
            pieces = self.costs.pieces
            staged = self.ledger.on_disk(resident, layers, disk)
            whole = sum(pieces[i].disk_read + pieces[i].disk_write for i in staged)
            # A block without weights of its own is not fetched, and its forward waits for nothing.
            while staged and not pieces[staged[-1]].fetch_bytes:
                staged.pop()
            if disk <= AHEAD:
                return whole, 0.0
            reads = sum(pieces[i].disk_read for i in staged[AHEAD:])
            return whole, reads + sum(pieces[i].disk_write for i in staged[:-AHEAD])

        columns = chosen.other_blocks == RESIDENT, chosen.resident_layers, chosen.disk_blocks
        whole, waited = look_up(self._disk_seconds, seconds, *columns)
        return whole, waited

    def bounds(self, chosen: Decisions) -> Floats:
        """A step that no schedule beats: the longest lane, or compute with what it always waits for; with clipping, all
        updates and then the last fetched block, the head and the backward."""
        busy = self.busy(chosen)
        if self.costs.machine.gpu is None:
            return sum(busy.values(), np.zeros(len(chosen)))
        sums, windows = self._sums, Windows(chosen, self.costs.run.accumulation)
        # Windows after the first wait for the sums of the one before.
        resumed = sums["drain_sum"].after(chosen.held_gradients, chosen.other_blocks == STREAMED)
        compute: Floats = busy["compute"] + (windows.count - 1) * resumed
        longest = np.maximum(self._around + compute + busy["gpu_update"], self._links(busy))
        if not self.costs.run.clipping:
            return np.maximum(longest, self._around + busy["update"])
        # Of the first window, the forward up to the last block that the CPU updates is what updates can hide under.
        first = windows.sizes[0]
        hidden = sums["forward"].total - np.where(chosen.other_blocks == RESIDENT, 0.0, self._tail)
        hidden = hidden + self.costs.call(first) * self.count
        hidden = hidden + chosen.offload_inputs * OFFLOAD_SECONDS * (len(self.ledger.layers) - chosen.stored_graphs)
        after = self._around + compute - first * hidden
        updates = np.maximum(busy["states_in"], np.maximum(busy["update"], self._disk(chosen)[1]))
        return np.maximum(longest, updates + after)


class _Block:
    """One block in every decision: where it is, and what it keeps."""

    def __init__(self, costs: Costs, ledger: Ledger, chosen: Decisions, index: int) -> None:
        piece, kind = costs.pieces[index], costs.shape.blocks[index].kind
        # A block without weights passes nothing through its ring.
        self.piece, self.ring = piece, costs.rings.get(piece.fetch_bytes, 0)
        if kind == "layer":
            number = ledger.layers.index(index)
            counts = (
                chosen.resident_layers,
                chosen.held_weights,
                chosen.held_gradients,
                chosen.stored_graphs,
                chosen.gpu_updates,
            )
            resident, held, summed, stored, visits = (count > number for count in counts)
            in_slots = number > len(ledger.layers) - chosen.slots
            on_disk = chosen.disk_blocks >= len(ledger.layers) - number
        else:
            resident, held, summed = (
                chosen.other_blocks == RESIDENT,
                chosen.other_blocks != STREAMED,
                chosen.other_blocks != STREAMED,
            )
            stored, visits, in_slots = (np.zeros(len(chosen), bool) for _ in range(3))
            place = len(ledger.other_blocks) - ledger.other_blocks.index(index)
            on_disk = chosen.disk_blocks >= len(ledger.layers) - chosen.resident_layers + place
        owned = piece.fetch_bytes > 0
        self.streams_states = visits & ~resident & (piece.update > 0)
        self.on_gpu = here = resident | self.streams_states
        """Updated in VRAM."""
        self.fetched = ~held & owned
        self.held = held & ~here & owned
        self.fetched_backward = self.fetched & ~in_slots & (kind != "head")
        self.drained = ~summed & (piece.drain > 0)
        self.leaves = summed & ~here & (piece.drain > 0)
        self.updated = ~here & (piece.update > 0)
        update_slowdown = np.where(chosen.streams_states, costs.update_slowdown, 1.0)
        self.update = np.where(here, 0.0, piece.update * update_slowdown) + piece.merge * ~summed
        self.on_disk = on_disk & ~resident
        self.offloaded = (chosen.offload_inputs > 0) & ~stored & (piece.offload > 0)
        self.recompute = np.where(stored, 0.0, piece.recompute)


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


class _WindowPass:
    """One window: the first with the updates before it, the last without clipping with those in its backward."""

    def __init__(self, costs: Costs, chosen: Decisions, blocks: list[_Block], windows: Windows, number: int) -> None:
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
        self.states_in, self.states_out, self.updating = (np.zeros(count) for _ in range(3))
        self.state_slots = [_Queue(STAGING_SLOTS, count) for _ in rings]
        """States that have gone back to RAM: their slots are free."""
        self.sums_out_buffers = [_Queue(STAGING_SLOTS, count) for _ in rings]
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
        if (done := written[-1]) is not None:
            self.updating = done
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
            piece, buffers = block.piece, self.sums_out_buffers[block.ring]
            begin = np.maximum(self.link_out, buffers.before(STAGING_SLOTS))
            self.link_out = np.where(block.leaves, begin + piece.sum_out, self.link_out)
            free = np.where(block.leaves, np.maximum(free, self.link_out), free)
            free = np.where(block.on_disk, np.maximum(free, ready[0]), free)
            free = free + block.update
            written.append(np.where(block.streams_states, self._stream_states(block), free))
            buffers.add(free, block.leaves)
            if block.on_disk.any():
                disk = np.where(block.on_disk, np.maximum(disk, free) + piece.disk_write, disk) + following
                after = [*ready[1:], disk]
                ready = [np.where(block.on_disk, new, old) for new, old in zip(after, ready, strict=True)]
        return written

    def _stream_states(self, block: _Block) -> Floats:
        """States come to VRAM and go back, through a slot that must be free: when they are there."""
        if not block.streams_states.any():
            return self.states_in
        rooms, seconds = self.state_slots[block.ring], block.piece.stream_states
        arrived = np.maximum(self.states_in, rooms.before(STAGING_SLOTS)) + seconds
        self.states_in = np.where(block.streams_states, arrived, self.states_in)
        self.states_out = np.where(
            block.streams_states, np.maximum(self.states_out, arrived) + seconds, self.states_out
        )
        rooms.add(self.states_out, block.streams_states)
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

    def _fetch(self, block: _Block, where: Bools, seconds: float, written: Floats | None) -> None:
        """Weights into a slot; compute waits until they are there."""
        begin = np.maximum(self.link_in, self.released[block.ring].before(self.slots[block.ring]))
        self._arrive(begin, seconds, written, where, "h2d")
        self.compute = self.compute + FETCH_SECONDS * where

    def _arrive(self, begin: Floats, seconds: float, written: Floats | None, where: Bools, lane: str) -> None:
        if written is not None:
            # A fetch that waits for an update: compute waits for that first.
            begin = np.maximum(begin, written)
            self._wait(written, where, "update")
        self.link_in = np.where(where, begin + seconds, self.link_in)
        self._wait(self.link_in, where, lane)

    def _forward(self, block: _Block, written: Floats | None) -> None:
        piece = block.piece
        self._fetch(block, block.fetched, piece.fetch, written)
        if self.first:
            self._arrive(self.link_in, piece.fetch, written, block.held, "refresh")
            self.compute = self.compute + FETCH_SECONDS * (block.held * 1 + block.leaves + 2 * block.streams_states)
        if written is not None:
            self._wait(written, block.streams_states, "states_in")
            # An update in VRAM takes the GPU from compute.
            self.compute = self.compute + piece.gpu_update * block.on_gpu
        usual, beside = (
            self.micro * (seconds + self.call) for seconds in (piece.forward, piece.forward_during_updates)
        )
        share = np.clip((self.updating - self.compute) / np.maximum(beside, CALL_SECONDS), 0.0, 1.0)
        self.compute = self.compute + share * beside + (1 - share) * usual
        self.released[block.ring].add(self.compute, block.fetched)
        if block.offloaded.any():
            # Two inputs may be on their way out; compute waits for those before them.
            self.compute = self.compute + self.micro * OFFLOAD_SECONDS * block.offloaded
            self._wait(self.link_out, block.offloaded, "d2h")
            leaving = np.maximum(self.link_out, self.compute) + self.micro * piece.offload
            self.link_out = np.where(block.offloaded, leaving, self.link_out)

    def _backward(self, block: _Block) -> None:
        piece = block.piece
        if block.offloaded.any():
            self.compute = self.compute + self.micro * OFFLOAD_SECONDS * block.offloaded
            self.link_in = self.link_in + self.micro * piece.restore * block.offloaded
            self._wait(self.link_in, block.offloaded, "h2d")
        if block.fetched_backward.any():
            self._fetch(block, block.fetched_backward, piece.fetch_backward, None)
        self.compute = self.compute + self.micro * (block.recompute + piece.backward + self.call)
        if not self.clipping:
            self.compute = self.compute + piece.gpu_update * (block.on_gpu & self.last)
        self.released[block.ring].add(self.compute, block.fetched)
        if block.drained.any():
            self._drain(block)
        if not self.clipping:
            self._update_as_landed(block)

    def _drain(self, block: _Block) -> None:
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

    def _update_as_landed(self, block: _Block) -> None:
        """Without clipping: held sums leave in the last backward, and each update follows its gradient."""
        piece, buffers = block.piece, self.sums_out_buffers[block.ring]
        leaves, updated = block.leaves & self.last, block.updated & self.last
        free = np.maximum(self.compute, buffers.before(STAGING_SLOTS))
        self.link_out = np.where(leaves, np.maximum(self.link_out, free) + piece.sum_out, self.link_out)
        landed = np.maximum(self.updates, self.link_out) + block.update
        self.disk = self.disk + (piece.disk_read + piece.disk_write) * (block.on_disk & self.last)
        landed = np.where(block.on_disk, np.maximum(landed, self.disk), landed)
        self.updates = np.where(updated, landed, self.updates)
        self.updates = np.where(
            block.streams_states & self.last, np.maximum(self.updates, self._stream_states(block)), self.updates
        )
        buffers.add(self.updates, leaves)
