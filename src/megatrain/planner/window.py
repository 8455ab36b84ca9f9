"""Walks one window of a step, lane by lane, for many decisions at once.

The order of work on every lane is fixed, and a piece of work starts when its lane is free and its inputs are ready. The
drive has one queue for all that it reads and writes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatrain.geometry import DISK_STAGING_SLOTS, LANES, STAGING_SLOTS, grad_slots, weight_slots
from megatrain.planner.arrays import Bools, Floats, Ints
from megatrain.planner.cost import CALL_SECONDS, FETCH_SECONDS, OFFLOAD_SECONDS, Costs, Piece
from megatrain.planner.decision import GRAD_SLOTS, RESIDENT, SLOTS, STREAMED, Decisions, Windows
from megatrain.planner.disk import ALONE, BESIDE, FROZEN, weight_counts
from megatrain.planner.memory import Ledger

AHEAD = DISK_STAGING_SLOTS - 1
"""How many blocks ahead of their update states are read from disk."""
_weight_slots, _grad_slots = np.vectorize(weight_slots), np.vectorize(grad_slots)


class PlacedBlock:
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
            rank: Any = len(ledger.layers) - 1 - number
        else:
            resident, held_sum = chosen.other_blocks == RESIDENT, chosen.other_blocks != STREAMED
            held, (stored, on_gpu, in_slots) = held_sum, (np.zeros(len(chosen), bool) for _ in range(3))
            position = len(ledger.other_blocks) - 1 - ledger.other_blocks.index(index)
            rank = len(ledger.layers) - chosen.resident_layers + position
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
        self.disk = DiskWork.of(piece, chosen, ~resident, rank)
        update = piece.update if self.disk is None else np.where(self.disk.updated, piece.update_on_disk, piece.update)
        self.update = np.where(self.updated_on_gpu, 0.0, update * slowdown) + piece.merge * ~held_sum
        if self.disk is not None:
            self.disk.gradient &= self.drained & (ledger.disk.gradient_count(chosen) > rank)
        self.offloaded = (chosen.offload_inputs > 0) & ~stored & (piece.offload > 0)
        self.recompute = np.where(stored, 0.0, piece.recompute)


class DiskWork:
    """What the drive does for one block in a step, in every decision."""

    def __init__(self, piece: Piece, chosen: Decisions, streamed: Bools, rank: Any) -> None:
        """`rank`: how many blocks go to disk before this one."""
        counts = weight_counts(chosen)
        frozen = streamed & (counts[FROZEN] > rank)
        trained = streamed & (counts[BESIDE if piece.frozen_bytes else ALONE] > rank)
        self.updated = streamed & (chosen.disk_blocks > rank)
        """Whether states are on disk."""
        self.gradient: Bools = self.updated & (piece.gradient_write > 0)
        """Whether the gradient is on disk."""
        self.read_states: Floats = piece.disk_read + piece.trained_read * trained
        self.write_states: Floats = piece.disk_write + piece.trained_write * trained
        """Seconds of the states, and of the weights that are updated with them."""
        self.read_weight: Floats = piece.frozen_read * frozen + piece.trained_read * trained
        """What a fetch reads first."""
        self.read_refresh: Floats = piece.trained_read * trained
        """What a refresh reads first: frozen weights have not changed."""

    @classmethod
    def of(cls, piece: Piece, chosen: Decisions, streamed: Bools, rank: Any) -> DiskWork | None:
        """None if no decision has any of the block on disk."""
        most = np.maximum(chosen.disk_blocks, chosen.disk_frozen)
        return cls(piece, chosen, streamed, rank) if (streamed & (most > rank)).any() else None


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


class WindowPass:
    """One window. The first one includes the updates after the norm; without clipping the last one includes them."""

    def __init__(
        self, costs: Costs, chosen: Decisions, blocks: list[PlacedBlock], windows: Windows, number: int
    ) -> None:
        count = len(chosen)
        self.blocks, self.micro, self.several, self.first = blocks, windows.sizes[number], windows.several, number == 0
        # The only window of a step is its first and its last.
        self.last = ~windows.several if self.first else np.full(count, number == 2)
        self.clipping = costs.run.clipping
        self.call = costs.call(self.micro)
        self.compute, self.link_in, self.link_out, self.updates, self.disk = (np.zeros(count) for _ in range(5))
        self.gradients_written = np.zeros(count)
        rings = range(max(costs.rings.values(), default=0) + 1)
        self.released = [_Queue(max(SLOTS), count) for _ in rings]
        self.sent = [_Queue(max(GRAD_SLOTS), count) for _ in rings]
        self.states_in, self.states_out, self.updating = (np.zeros(count) for _ in range(3))
        self.state_slots = [_Queue(STAGING_SLOTS, count) for _ in rings]
        """When streamed states were back in RAM, which frees their slot."""
        self.sums_out_buffers = [_Queue(STAGING_SLOTS, count) for _ in rings]
        """When updates from held sums ended, which frees their buffer in RAM."""
        self.gradient_buffers = [_Queue(DISK_STAGING_SLOTS, count) for _ in rings]
        """When gradients were on disk, or their updates ended, which frees their buffer in RAM."""
        self.unwritten: tuple[PlacedBlock, Floats] | None = None
        """A gradient to be written to disk, and when it has arrived in RAM."""
        self.weight_buffers = [_Queue(DISK_STAGING_SLOTS, count) for _ in rings]
        """When weights from disk were copied to the GPU, which frees their buffer in RAM."""
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
        in_order = self._update_in_order() if self.first and self.clipping else [(None, None)] * len(self.blocks)
        if (done := in_order[-1][0]) is not None:
            self.updating = done
        for block, (written, staged) in zip(self.blocks, in_order, strict=True):
            self._forward(block, written, staged)
        for block in reversed(self.blocks):
            self._backward(block)
        self._write_gradient()
        self._wait(self.link_out, np.ones_like(self.last), "d2h")
        # The first update of the next step reads the last gradient.
        self._wait(self.gradients_written, np.ones_like(self.last), "disk_out")
        self._wait(self.updates, self.last & (not self.clipping), "update")
        return self.compute

    def _update_in_order(self) -> list[tuple[Floats | None, Floats | None]]:
        """When each block's update after the norm is done, and its weight, if that is on disk, has been read again. A
        held sum is copied out before its update; states on disk are written after it, which frees memory for others."""
        free = np.zeros_like(self.compute)
        done: list[tuple[Floats | None, Floats | None]] = []
        ready: list[Floats | None] = [None] * len(self.blocks)
        reads = self._reads()

        def read_ahead(index: int) -> None:
            if index < len(reads) and (seconds := reads[index]) is not None:
                self.disk = self.disk + seconds
                ready[index] = np.where(seconds > 0, self.disk, 0.0)

        for index in range(AHEAD):
            read_ahead(index)
        for index, block in enumerate(self.blocks):
            piece, buffers, disk = block.piece, self.sums_out_buffers[block.ring], block.disk
            begin = np.maximum(self.link_out, buffers.before(STAGING_SLOTS))
            self.link_out = np.where(block.sum_copied_out, begin + piece.sum_out, self.link_out)
            free = np.where(block.sum_copied_out, np.maximum(free, self.link_out), free)
            if disk is not None and (arrived := ready[index]) is not None:
                free = np.where(disk.updated, np.maximum(free, arrived), free)
            free = free + block.update
            written = np.where(block.streams_states, self._stream_states(block), free)
            buffers.add(free, block.sum_copied_out)
            if disk is not None:
                self.disk = np.where(disk.updated, np.maximum(self.disk, free) + disk.write_states, self.disk)
                self.disk = self.disk + disk.read_weight * block.fetched + disk.read_refresh * block.refreshed
            done.append((written, self.disk))
            read_ahead(index + AHEAD)
        return done

    def _reads(self) -> list[Floats | None]:
        """Seconds to read what the update of each block needs. The first states were read during the backward."""
        before = np.zeros_like(self.last, np.int64)
        seconds: list[Floats | None] = []
        for block in self.blocks:
            if (disk := block.disk) is None:
                seconds.append(None)
                continue
            states = disk.read_states * (disk.updated & (before >= AHEAD))
            seconds.append(states + block.piece.gradient_read * disk.gradient)
            before = before + disk.updated
        return seconds

    def _stream_states(self, block: PlacedBlock) -> Floats:
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

    def _wait(self, until: Floats, where: Bools, cause: str) -> None:
        waits = np.where(where, np.maximum(until - self.compute, 0.0), 0.0)
        self.waited[cause] += waits
        self.compute = self.compute + waits

    def _fetch(
        self, block: PlacedBlock, where: Bools, seconds: float, after: Floats | None, staged: Floats | None
    ) -> None:
        """Copy weights into a slot. Compute waits for the copy."""
        begin = np.maximum(self.link_in, self.released[block.ring].before(self.slots[block.ring]))
        if block.disk is not None:
            begin = np.maximum(begin, self._read_weight(block, where, block.disk.read_weight, after, staged))
        self._arrive(begin, seconds, after, where, "h2d")
        if block.disk is not None:
            self.weight_buffers[block.ring].add(self.link_in, where & (block.disk.read_weight > 0))
        self.compute = self.compute + FETCH_SECONDS * where

    def _refresh(self, block: PlacedBlock, after: Floats | None, staged: Floats | None) -> None:
        """Copy updated weights into their copy in VRAM."""
        begin = self.link_in
        if block.disk is not None:
            begin = np.maximum(begin, self._read_weight(block, block.refreshed, block.disk.read_refresh, after, staged))
        self._arrive(begin, block.piece.fetch, after, block.refreshed, "refresh")

    def _read_weight(
        self, block: PlacedBlock, where: Bools, seconds: Floats, after: Floats | None, staged: Floats | None
    ) -> Floats:
        """When weights have been read from disk into a buffer in RAM, which takes `seconds`; `staged`: they are read
        with the updates, and there then. Compute waits for it."""
        where = where & (seconds > 0)
        if staged is None:
            free = self.weight_buffers[block.ring].before(DISK_STAGING_SLOTS)
            self.disk = np.where(where, np.maximum(self.disk, free) + seconds, self.disk)
            staged = self.disk
        if after is not None:
            self._wait(after, where, "update")
        self._wait(staged, where, "disk_weights")
        return np.where(where, staged, 0.0)

    def _arrive(self, begin: Floats, seconds: float, written: Floats | None, where: Bools, lane: str) -> None:
        if written is not None:
            # The copy waits for the update, so this wait of compute is attributed to the update.
            begin = np.maximum(begin, written)
            self._wait(written, where, "update")
        self.link_in = np.where(where, begin + seconds, self.link_in)
        self._wait(self.link_in, where, lane)

    def _forward(self, block: PlacedBlock, written: Floats | None, staged: Floats | None) -> None:
        piece = block.piece
        self._fetch(block, block.fetched, piece.fetch, written, staged)
        if self.first:
            self._refresh(block, written, staged)
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

    def _backward(self, block: PlacedBlock) -> None:
        piece = block.piece
        if block.offloaded.any():
            self.compute = self.compute + self.micro * OFFLOAD_SECONDS * block.offloaded
            self.link_in = self.link_in + self.micro * piece.restore * block.offloaded
            self._wait(self.link_in, block.offloaded, "h2d")
        if block.fetched_backward.any():
            self._fetch(block, block.fetched_backward, piece.fetch_backward, None, None)
        each = block.recompute + piece.backward + self.call
        if not self.first and block.drained.any():
            # The sum of earlier windows is fetched ahead, and needed by the gradient of the first micro-batch.
            begin = np.maximum(self.link_in, self.sent[block.ring].before(self.grad_slots[block.ring]))
            self.link_in = np.where(block.drained, begin + piece.drain_sum, self.link_in)
            self.compute = self.compute + each
            self._wait(self.link_in, block.drained, "h2d")
            self.compute = self.compute + (self.micro - 1) * each
        else:
            self.compute = self.compute + self.micro * each
        if not self.clipping:
            self.compute = self.compute + piece.gpu_update * (block.updated_on_gpu & self.last)
        self.released[block.ring].add(self.compute, block.fetched)
        if block.drained.any():
            self._drain(block)
        if not self.clipping:
            self._update_on_arrival(block)

    def _drain(self, block: PlacedBlock) -> None:
        """Copy a streamed gradient to RAM through a free slot."""
        piece, slots = block.piece, self.sent[block.ring]
        self._wait(slots.before(self.grad_slots[block.ring]), block.drained, "d2h")
        seconds, begin = np.where(self.several, piece.drain_sum, piece.drain), np.maximum(self.link_out, self.compute)
        on_disk = None if block.disk is None else block.disk.gradient
        if on_disk is not None:
            # One of the buffers may have the gradient that is still to be written.
            free = self.gradient_buffers[block.ring].before(DISK_STAGING_SLOTS - 1)
            begin = np.maximum(begin, np.where(on_disk, free, 0.0))
        self.link_out = np.where(block.drained, begin + seconds, self.link_out)
        slots.add(self.link_out, block.drained)
        if on_disk is not None:
            self._write_gradient()
            self.unwritten = block, self.link_out

    def _write_gradient(self) -> None:
        """Write the last gradient to disk. The drive reads weights for the next backward before it."""
        if self.unwritten is None:
            return
        block, arrived = self.unwritten
        assert block.disk is not None
        on_disk, self.unwritten = block.disk.gradient, None
        written = np.maximum(self.disk, arrived) + block.piece.gradient_write
        self.disk = np.where(on_disk, written, self.disk)
        self.gradients_written = np.where(on_disk, written, self.gradients_written)
        self.gradient_buffers[block.ring].add(self.disk, on_disk)

    def _update_on_arrival(self, block: PlacedBlock) -> None:
        """Without clipping: held sums are copied out in the last backward, and each update follows its gradient."""
        piece, buffers = block.piece, self.sums_out_buffers[block.ring]
        copied_out, updated = block.sum_copied_out & self.last, block.updated_on_cpu & self.last
        free = np.maximum(self.compute, buffers.before(STAGING_SLOTS))
        self.link_out = np.where(copied_out, np.maximum(self.link_out, free) + piece.sum_out, self.link_out)
        done = np.maximum(self.updates, self.link_out) + block.update
        if (disk := block.disk) is not None:
            self._write_gradient()
            self.disk = self.disk + (disk.read_states + disk.write_states) * (disk.updated & self.last)
            self.disk = self.disk + piece.gradient_read * disk.gradient
            done = np.where(disk.updated, np.maximum(done, self.disk), done)
        self.updates = np.where(updated, done, self.updates)
        streamed = np.maximum(self.updates, self._stream_states(block))
        self.updates = np.where(block.streams_states & self.last, streamed, self.updates)
        buffers.add(self.updates, copied_out)
        if disk is not None:
            self.gradient_buffers[block.ring].add(self.updates, disk.gradient)
