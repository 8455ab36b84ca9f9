"""Simulates one steady-state step, lane by lane, with the dependencies of engine/step.py, for many decisions at once.

The order of work on every lane is fixed, and a piece of work starts when its lane is free and its inputs are ready.
Such a system is monotone: shortening a piece or adding a slot never makes the step longer.

The clock starts when the gradient norm is known. The CPU then updates blocks in forward order. A held gradient sum is
copied to RAM just before its update. After the update the block's weights are fetched, or the held copy is refreshed.
Without clipping, updates run in the last backward as gradients arrive. A later window adds only its own time, because
the weights that it fetches have been updated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatrain.geometry import DISK_STAGING_SLOTS, LANES, STAGING_SLOTS, grad_slots, weight_slots
from megatrain.planner.arrays import Bools, Floats, Ints, Sums, Table, look_up
from megatrain.planner.cost import CALL_SECONDS, FETCH_SECONDS, OFFLOAD_SECONDS, STEP_SECONDS, TRAINER_SECONDS, Costs
from megatrain.planner.decision import GRAD_SLOTS, RESIDENT, SLOTS, STREAMED, Decision, Decisions, Windows
from megatrain.planner.memory import Ledger

AHEAD = DISK_STAGING_SLOTS - 1
"""How many blocks ahead of their update states are read from disk."""
_weight_slots, _grad_slots = np.vectorize(weight_slots), np.vectorize(grad_slots)


@dataclass(frozen=True)
class StepEstimate:
    """The predicted time of one step."""

    seconds: float
    busy: dict[str, float]
    """Lane → seconds of work."""
    waited: dict[str, float]
    """Lane → seconds that compute waits for the lane."""
    bottleneck: str
    """The lane with the most seconds of work; reads and writes of a drive count together."""


class Simulator:
    """Step times of one model and run on one machine."""

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
        """Forward seconds of the last block with weights of its own and of the blocks after it."""

    def step(self, decision: Decision) -> StepEstimate:
        chosen, waited = Decisions.of([decision]), {lane: np.zeros(1) for lane in LANES}
        seconds = float(self.seconds(chosen, waited)[0])
        busy = {lane: float(spent[0]) for lane, spent in self.busy(chosen).items()}
        drive = busy["disk_in"] + busy["disk_out"]
        bottleneck = max(LANES, key=lambda lane: (drive if lane.startswith("disk_") else busy[lane], busy[lane]))
        return StepEstimate(seconds, busy, {lane: float(spent[0]) for lane, spent in waited.items()}, bottleneck)

    def seconds(self, chosen: Decisions, waited: dict[str, Floats] | None = None) -> Floats:
        """Seconds of a step of each decision. `waited` receives the seconds that compute waits for each lane."""
        busy = self.busy(chosen)
        if self.costs.machine.gpu is None:  # nothing overlaps
            return self._around + sum(busy.values(), np.zeros(len(chosen)))
        windows = Windows(chosen, self.costs.run.accumulation)
        blocks = [_Block(self.costs, self.ledger, chosen, index) for index in range(self.count)]
        seconds = self._around + self._norm(chosen)
        for number, times in enumerate(windows.times):
            if not times.any():
                continue
            window = _WindowPass(self.costs, chosen, blocks, windows, number)
            seconds = seconds + times * window.run()
            if waited is not None:
                for lane in LANES:
                    waited[lane] += times * window.waited[lane]
        return np.maximum(seconds, self._links(busy))

    def _links(self, busy: dict[str, Floats]) -> Floats:
        """A lower bound: the work of the disk, and of each direction of PCIe."""
        longest = busy["disk_in"] + busy["disk_out"]
        for link in ("in", "out"):
            shared = [busy[name] for name, lane in LANES.items() if lane.link == link]
            longest = np.maximum(longest, self._around + np.sum(shared, axis=0))
        return longest

    def _norm(self, chosen: Decisions) -> Floats:
        """Norm and rounding of the gradient sums in VRAM, which overlap with nothing."""
        return self._sums["norm"].before(chosen.held_gradients, chosen.other_blocks != STREAMED)

    def busy(self, chosen: Decisions) -> dict[str, Floats]:
        """Lane → seconds of work."""
        sums, micro, layers = self._sums, self.costs.run.accumulation, len(self.ledger.layers)
        windows = Windows(chosen, micro)
        count, streamed, in_ram = windows.count, chosen.other_blocks == STREAMED, chosen.other_blocks != RESIDENT
        grads, offloads, stored = chosen.held_gradients, chosen.offload_inputs, chosen.stored_graphs
        computed = sums["forward"].total + sums["recompute"].after(stored, True) + sums["backward"].total
        compute = micro * computed + self._norm(chosen)
        for size, times in zip(windows.sizes, windows.times, strict=True):
            compute += 2 * times * size * self.costs.call(size) * self.count
        fetched = sums["fetch"].after(chosen.held_weights, streamed)
        h2d = count * (fetched + sums["fetch_backward"].after(chosen.held_weights, streamed))
        h2d += (count - 1) * sums["drain_sum"].after(grads, streamed)
        # The last layers of a forward are still in their slots when the backward starts.
        in_slots = np.maximum(chosen.held_weights, layers - chosen.slots + 1)
        h2d -= count * sums["fetch_backward"].after(in_slots, False)
        refresh = sums["fetch"].after(chosen.gpu_updates, in_ram) - fetched
        drained = sums["drain"].after(grads, streamed)
        d2h = np.where(windows.several, count * sums["drain_sum"].after(grads, streamed), drained)
        sums_out = sums["sum_out"].after(chosen.gpu_updates, in_ram) - sums["sum_out"].after(grads, streamed)
        compute += offloads * 2 * micro * OFFLOAD_SECONDS * (layers - stored)
        d2h += offloads * micro * sums["offload"].after(stored, False)
        h2d += offloads * micro * sums["restore"].after(stored, False)
        slowdown = np.where(chosen.streams_states, self.costs.update_slowdown, 1.0)
        update = slowdown * sums["update"].after(chosen.gpu_updates, in_ram) + sums["merge"].after(grads, streamed)
        gpu_update = sums["gpu_update"].total - sums["gpu_update"].after(chosen.gpu_updates, in_ram)
        states, weights = (
            sums[name].after(chosen.resident_layers, False) - sums[name].after(chosen.gpu_updates, False)
            for name in ("stream_states", "fetch_backward")
        )
        # Updates of states on disk are counted with the others: they share the CPU.
        reads, writes, _ = self._disk(chosen)
        lanes = (compute, h2d, refresh, d2h, sums_out, update, gpu_update, states, states + weights)
        return dict(zip(LANES, (*lanes, reads, 0 * reads, writes, 0 * reads), strict=True))

    def _disk(self, chosen: Decisions) -> tuple[Floats, Floats, Floats]:
        """Seconds of reads and of writes, and how long the last update of a block on disk waits: for all reads but the
        first, and for the writes that free memory for them."""

        def seconds(resident: int, layers: int, disk: int) -> tuple[float, float, float]:
            pieces = self.costs.pieces
            staged = self.ledger.on_disk(resident, layers, disk)
            total = sum(pieces[i].disk_read for i in staged), sum(pieces[i].disk_write for i in staged)
            # The forward of a block without weights of its own waits for no update.
            while staged and not pieces[staged[-1]].fetch_bytes:
                staged.pop()
            if disk <= AHEAD:
                return *total, 0.0
            reads = sum(pieces[i].disk_read for i in staged[AHEAD:])
            return *total, reads + sum(pieces[i].disk_write for i in staged[:-AHEAD])

        columns = chosen.other_blocks == RESIDENT, chosen.resident_layers, chosen.disk_blocks
        reads, writes, waited = look_up(self._disk_seconds, seconds, *columns)
        return reads, writes, waited

    def bounds(self, chosen: Decisions) -> Floats:
        """A lower bound for the seconds of a step: the longest lane, or compute and its unavoidable waits. With
        clipping also all updates, followed by the last fetched block, the head and the backward."""
        busy = self.busy(chosen)
        if self.costs.machine.gpu is None:
            return sum(busy.values(), np.zeros(len(chosen)))
        sums, windows = self._sums, Windows(chosen, self.costs.run.accumulation)
        # Each window after the first waits for the gradient sums of the previous one.
        resumed = sums["drain_sum"].after(chosen.held_gradients, chosen.other_blocks == STREAMED)
        compute: Floats = busy["compute"] + (windows.count - 1) * resumed
        longest = np.maximum(self._around + compute + busy["gpu_update"], self._links(busy))
        if not self.costs.run.clipping:
            return np.maximum(longest, self._around + busy["update"])
        # Updates can overlap with the first window's forward, up to the last block that the CPU updates.
        first = windows.sizes[0]
        overlapped = sums["forward"].total - np.where(chosen.other_blocks == RESIDENT, 0.0, self._tail)
        overlapped = overlapped + self.costs.call(first) * self.count
        overlapped = overlapped + chosen.offload_inputs * OFFLOAD_SECONDS * (
            len(self.ledger.layers) - chosen.stored_graphs
        )
        after = self._around + compute - first * overlapped
        updates = np.maximum(busy["states_in"], np.maximum(busy["update"], self._disk(chosen)[2]))
        return np.maximum(longest, updates + after)


class _Block:
    """One block, in every decision: its placement and what it keeps for the backward."""

    def __init__(self, costs: Costs, ledger: Ledger, chosen: Decisions, index: int) -> None:
        piece, kind = costs.pieces[index], costs.shape.blocks[index].kind
        # A block without weights never uses its ring.
        self.piece, self.ring = piece, costs.rings.get(piece.fetch_bytes, 0)
        if kind == "layer":
            number = ledger.layers.index(index)
            resident, held = chosen.resident_layers > number, chosen.held_weights > number
            held_sum, stored = chosen.held_gradients > number, chosen.stored_graphs > number
            on_gpu = chosen.gpu_updates > number
            in_slots = number > len(ledger.layers) - chosen.slots
            on_disk = chosen.disk_blocks >= len(ledger.layers) - number
        else:
            resident, held_sum = chosen.other_blocks == RESIDENT, chosen.other_blocks != STREAMED
            held, (stored, on_gpu, in_slots) = held_sum, (np.zeros(len(chosen), bool) for _ in range(3))
            position = len(ledger.other_blocks) - ledger.other_blocks.index(index)
            on_disk = chosen.disk_blocks >= len(ledger.layers) - chosen.resident_layers + position
        has_weights = piece.fetch_bytes > 0
        self.streams_states = on_gpu & ~resident & (piece.update > 0)
        self.updated_on_gpu = resident | self.streams_states
        self.fetched = ~held & has_weights
        self.refreshed = held & ~self.updated_on_gpu & has_weights
        self.fetched_backward = self.fetched & ~in_slots & (kind != "head")
        self.drained = ~held_sum & (piece.drain > 0)
        self.sum_copied_out = held_sum & ~self.updated_on_gpu & (piece.drain > 0)
        self.updated_on_cpu = ~self.updated_on_gpu & (piece.update > 0)
        slowdown = np.where(chosen.streams_states, costs.update_slowdown, 1.0)
        self.update = np.where(self.updated_on_gpu, 0.0, piece.update * slowdown) + piece.merge * ~held_sum
        self.on_disk = on_disk & ~resident
        self.offloaded = (chosen.offload_inputs > 0) & ~stored & (piece.offload > 0)
        self.recompute = np.where(stored, 0.0, piece.recompute)


class _Queue:
    """When the last uses of a ring's slots ended, in every decision."""

    def __init__(self, length: int, decisions: int) -> None:
        self._times = np.zeros((length, decisions))
        self._each = np.arange(decisions)

    def before(self, count: Ints | int) -> Floats:
        """When the use that came `count` before the next one ended; 0 if there was none."""
        times: Floats = self._times[count - 1, self._each]
        return times

    def add(self, when: Floats, where: Bools) -> None:
        np.copyto(self._times[1:], self._times[:-1].copy(), where=where)
        np.copyto(self._times[0], when, where=where)


class _WindowPass:
    """One window. The first one includes the updates after the norm; without clipping the last one includes them."""

    def __init__(self, costs: Costs, chosen: Decisions, blocks: list[_Block], windows: Windows, number: int) -> None:
        count = len(chosen)
        self.blocks, self.micro, self.several, self.first = blocks, windows.sizes[number], windows.several, number == 0
        # The only window of a step is its first and its last.
        self.last = ~windows.several if self.first else np.full(count, number == 2)
        self.clipping = costs.run.clipping
        self.call = costs.call(self.micro)
        self.compute, self.link_in, self.link_out, self.updates, self.disk = (np.zeros(count) for _ in range(5))
        rings = range(max(costs.rings.values(), default=0) + 1)
        self.released = [_Queue(max(SLOTS), count) for _ in rings]
        self.sent = [_Queue(max(GRAD_SLOTS), count) for _ in rings]
        self.states_in, self.states_out, self.updating = (np.zeros(count) for _ in range(3))
        self.state_slots = [_Queue(STAGING_SLOTS, count) for _ in rings]
        """When streamed states were back in RAM, which frees their slot."""
        self.sums_out_buffers = [_Queue(STAGING_SLOTS, count) for _ in rings]
        """When updates from held sums ended, which frees their buffer in RAM."""
        self.slots, self.grad_slots = [], []
        for ring in rings:
            members = [block for block in blocks if block.ring == ring]
            fetched = sum(block.fetched for block in members)
            trained = sum(block.drained | block.sum_copied_out for block in members)
            self.slots.append(np.maximum(1, _weight_slots(chosen.slots, fetched)))
            self.grad_slots.append(np.maximum(1, _grad_slots(chosen.grad_slots, trained)))
        self.waited = {lane: np.zeros(count) for lane in LANES}

    def run(self) -> Floats:
        """Seconds from the norm, or from the end of the previous window."""
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
        """When each block's update after the norm is done. A held sum is copied out before its update; states on disk
        are read ahead of it and written after it."""
        free, disk = np.zeros_like(self.compute), np.zeros_like(self.compute)
        # The first states were read during the backward. Each write frees memory for the next read.
        ready = [np.zeros_like(self.compute) for _ in range(AHEAD)]
        coming = self._read_next()
        written: list[Floats] = []
        for block, following in zip(self.blocks, coming, strict=True):
            piece, buffers = block.piece, self.sums_out_buffers[block.ring]
            begin = np.maximum(self.link_out, buffers.before(STAGING_SLOTS))
            self.link_out = np.where(block.sum_copied_out, begin + piece.sum_out, self.link_out)
            free = np.where(block.sum_copied_out, np.maximum(free, self.link_out), free)
            free = np.where(block.on_disk, np.maximum(free, ready[0]), free)
            free = free + block.update
            written.append(np.where(block.streams_states, self._stream_states(block), free))
            buffers.add(free, block.sum_copied_out)
            if block.on_disk.any():
                disk = np.where(block.on_disk, np.maximum(disk, free) + piece.disk_write, disk) + following
                after = [*ready[1:], disk]
                ready = [np.where(block.on_disk, new, old) for new, old in zip(after, ready, strict=True)]
        return written

    def _stream_states(self, block: _Block) -> Floats:
        """Stream a block's states to VRAM and back through a free slot; returns when they have arrived."""
        if not block.streams_states.any():
            return self.states_in
        slots, seconds = self.state_slots[block.ring], block.piece.stream_states
        arrived = np.maximum(self.states_in, slots.before(STAGING_SLOTS)) + seconds
        returned = np.maximum(self.states_out, arrived) + seconds
        self.states_in = np.where(block.streams_states, arrived, self.states_in)
        self.states_out = np.where(block.streams_states, returned, self.states_out)
        slots.add(self.states_out, block.streams_states)
        return self.states_in

    def _read_next(self) -> list[Floats]:
        """For each block on disk, the seconds to read the states of the block `AHEAD` places after it."""
        ahead = [np.zeros_like(self.compute) for _ in range(AHEAD)]
        seconds: list[Floats] = []
        for block in reversed(self.blocks):
            seconds.append(np.where(block.on_disk, ahead[-1], 0.0))
            reads: list[Any] = [block.piece.disk_read, *ahead[:-1]]
            ahead = [np.where(block.on_disk, new, old) for new, old in zip(reads, ahead, strict=True)]
        return seconds[::-1]

    def _wait(self, until: Floats, where: Bools, cause: str) -> None:
        waits = np.where(where, np.maximum(until - self.compute, 0.0), 0.0)
        self.waited[cause] += waits
        self.compute = self.compute + waits

    def _fetch(self, block: _Block, where: Bools, seconds: float, written: Floats | None) -> None:
        """Copy weights into a slot. Compute waits for the copy."""
        begin = np.maximum(self.link_in, self.released[block.ring].before(self.slots[block.ring]))
        self._arrive(begin, seconds, written, where, "h2d")
        self.compute = self.compute + FETCH_SECONDS * where

    def _arrive(self, begin: Floats, seconds: float, written: Floats | None, where: Bools, lane: str) -> None:
        if written is not None:
            # The copy waits for the update, so this wait of compute is attributed to the update.
            begin = np.maximum(begin, written)
            self._wait(written, where, "update")
        self.link_in = np.where(where, begin + seconds, self.link_in)
        self._wait(self.link_in, where, lane)

    def _forward(self, block: _Block, written: Floats | None) -> None:
        piece = block.piece
        self._fetch(block, block.fetched, piece.fetch, written)
        if self.first:
            self._arrive(self.link_in, piece.fetch, written, block.refreshed, "refresh")
            copies = block.refreshed * 1 + block.sum_copied_out + 2 * block.streams_states
            self.compute = self.compute + FETCH_SECONDS * copies
        if written is not None:
            self._wait(written, block.streams_states, "states_in")
            # An update on the GPU delays compute.
            self.compute = self.compute + piece.gpu_update * block.updated_on_gpu
        alone = self.micro * (piece.forward + self.call)
        during_updates = self.micro * (piece.forward_during_updates + self.call)
        share = np.clip((self.updating - self.compute) / np.maximum(during_updates, CALL_SECONDS), 0.0, 1.0)
        self.compute = self.compute + share * during_updates + (1 - share) * alone
        self.released[block.ring].add(self.compute, block.fetched)
        if block.offloaded.any():
            # At most two inputs are being copied out; compute waits for earlier ones.
            self.compute = self.compute + self.micro * OFFLOAD_SECONDS * block.offloaded
            self._wait(self.link_out, block.offloaded, "d2h")
            copied = np.maximum(self.link_out, self.compute) + self.micro * piece.offload
            self.link_out = np.where(block.offloaded, copied, self.link_out)

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
            self.compute = self.compute + piece.gpu_update * (block.updated_on_gpu & self.last)
        self.released[block.ring].add(self.compute, block.fetched)
        if block.drained.any():
            self._drain(block)
        if not self.clipping:
            self._update_on_arrival(block)

    def _drain(self, block: _Block) -> None:
        """Copy a streamed gradient to RAM through a free slot."""
        piece, slots = block.piece, self.sent[block.ring]
        if not self.first:
            # The sum of earlier windows is fetched when the first micro-batch needs it, not ahead of time.
            resumed = np.maximum(self.link_in, self.compute) + piece.drain_sum
            self.link_in = np.where(block.drained, resumed, self.link_in)
            self._wait(self.link_in, block.drained, "h2d")
        self._wait(slots.before(self.grad_slots[block.ring]), block.drained, "d2h")
        seconds = np.where(self.several, piece.drain_sum, piece.drain)
        sent = np.maximum(self.link_out, self.compute) + seconds
        self.link_out = np.where(block.drained, sent, self.link_out)
        slots.add(self.link_out, block.drained)

    def _update_on_arrival(self, block: _Block) -> None:
        """Without clipping: held sums are copied out in the last backward, and each update follows its gradient."""
        piece, buffers = block.piece, self.sums_out_buffers[block.ring]
        copied_out, updated = block.sum_copied_out & self.last, block.updated_on_cpu & self.last
        free = np.maximum(self.compute, buffers.before(STAGING_SLOTS))
        self.link_out = np.where(copied_out, np.maximum(self.link_out, free) + piece.sum_out, self.link_out)
        done = np.maximum(self.updates, self.link_out) + block.update
        self.disk = self.disk + (piece.disk_read + piece.disk_write) * (block.on_disk & self.last)
        done = np.where(block.on_disk, np.maximum(done, self.disk), done)
        self.updates = np.where(updated, done, self.updates)
        streamed = np.maximum(self.updates, self._stream_states(block))
        self.updates = np.where(block.streams_states & self.last, streamed, self.updates)
        buffers.add(self.updates, copied_out)
