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

from megatrain.geometry import LANES, lanes_on
from megatrain.planner.arrays import Floats, Ints, Sums, Table, look_up
from megatrain.planner.cost import OFFLOAD_SECONDS, STEP_SECONDS, TRAINER_SECONDS, Costs
from megatrain.planner.decision import RESIDENT, STREAMED, Decision, Decisions, Windows
from megatrain.planner.disk import TRAINED, DiskSums
from megatrain.planner.memory import Ledger
from megatrain.planner.window import AHEAD, PlacedBlock, WindowPass


@dataclass(frozen=True)
class StepEstimate:
    """The predicted time of one step."""

    seconds: float
    busy: dict[str, float]
    """Lane → seconds of work."""
    waited: dict[str, float]
    """Lane → seconds that compute waits for the lane."""
    bottleneck: str
    """The lane with the most seconds of work. Lanes that share the drives, or the cores, count together."""


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
        self._updates, self._updates_on_disk = (
            DiskSums([getattr(piece, name) for piece in costs.pieces], ledger.layers, ledger.other_blocks)
            for name in ("update", "update_on_disk")
        )
        """Seconds of updates of states on disk, if they were in RAM and as they are."""
        self._disk_seconds: Table = {}
        last = max(range(self.count), key=lambda i: (costs.pieces[i].fetch_bytes > 0, i))
        self._tail = sum(piece.forward for piece in costs.pieces[last:])
        """Forward seconds of the last block with weights of its own and of the blocks after it."""

    def step(self, decision: Decision) -> StepEstimate:
        chosen, waited = Decisions.of([decision]), {lane: np.zeros(1) for lane in LANES}
        total = float(self.seconds(chosen, waited)[0])
        spent = self.busy(chosen)
        busy = {lane: float(seconds[0]) for lane, seconds in spent.items()}
        together = busy | {lane: float(_sum(spent, kind)[0]) for kind in ("thread", "drive") for lane in lanes_on(kind)}
        bottleneck = max(LANES, key=lambda lane: (together[lane], busy[lane]))
        return StepEstimate(total, busy, {lane: float(seconds[0]) for lane, seconds in waited.items()}, bottleneck)

    def seconds(self, chosen: Decisions, waited: dict[str, Floats] | None = None) -> Floats:
        """Seconds of a step of each decision. `waited` receives the seconds that compute waits for each lane."""
        busy = self.busy(chosen)
        if self.costs.machine.gpu is None:  # nothing overlaps
            return self._around + sum(busy.values(), np.zeros(len(chosen)))
        windows = Windows(chosen, self.costs.run.accumulation)
        blocks = [PlacedBlock(self.costs, self.ledger, chosen, index) for index in range(self.count)]
        seconds = self._around + self._norm(chosen)
        for number, times in enumerate(windows.times):
            if not times.any():
                continue
            window = WindowPass(self.costs, chosen, blocks, windows, number)
            seconds = seconds + times * window.run()
            if waited is not None:
                for lane in LANES:
                    waited[lane] += times * window.waited[lane]
        return np.maximum(seconds, self._links(busy))

    def _links(self, busy: dict[str, Floats]) -> Floats:
        """A lower bound: the work of the disk, and of each direction of PCIe."""
        longest = _sum(busy, "drive")
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
        disk_layers, others = self.ledger.disk.taken(chosen, chosen.disk_blocks)
        on_disk = np.minimum(disk_layers, layers - chosen.gpu_updates), others
        gpu_update = sums["gpu_update"].total - sums["gpu_update"].after(chosen.gpu_updates, in_ram)
        states, weights = (
            sums[name].after(chosen.resident_layers, False) - sums[name].after(chosen.gpu_updates, False)
            for name in ("stream_states", "fetch_backward")
        )
        reads, writes, _ = self._disk(chosen)
        gradients_in, gradients_out = self._gradients_on_disk(chosen)
        updates_in, updates_out, fetched = self._weights_on_disk(chosen, count)
        # Plans do not decide which inputs are on disk.
        return dict.fromkeys(LANES, np.zeros(len(chosen))) | {
            "compute": compute,
            "h2d": h2d,
            "refresh": refresh,
            "d2h": d2h,
            "sums_out": sums_out,
            # The two are summed in different orders.
            "update": np.maximum(update - slowdown * self._updates.of(on_disk), 0.0),
            "gpu_update": gpu_update,
            "states_in": states,
            "states_out": states + weights,
            "disk_in": reads + gradients_in + updates_in,
            "disk_update": slowdown * self._updates_on_disk.of(on_disk),
            "disk_out": writes + gradients_out + updates_out,
            "disk_weights": fetched,
        }

    def _gradients_on_disk(self, chosen: Decisions) -> tuple[Any, Any]:
        """Seconds to read gradients from disk, and to write them there."""
        if not (self.costs.disk[0] and (chosen.disk_gradients > 0).any()):
            return 0.0, 0.0
        nbytes = self.ledger.disk.gradients(chosen)
        return nbytes / self.costs.disk[0], nbytes / self.costs.disk[1]

    def _weights_on_disk(self, chosen: Decisions, windows: Ints) -> tuple[Any, Any, Any]:
        """Seconds of weights on disk: read and written for their updates, and read for their fetches and refreshes."""
        read, write = self.costs.disk
        disk, streamed = self.ledger.disk, chosen.other_blocks == STREAMED
        if not (read and ((chosen.disk_weights > 0) | (chosen.disk_frozen > 0)).any()):
            return 0.0, 0.0, np.zeros(len(chosen))
        fetched_layers = len(self.ledger.layers) - chosen.held_weights
        trained = disk.weights(chosen, TRAINED)
        refreshed = trained - disk.weights_among(chosen, fetched_layers, streamed, TRAINED)
        fetched = disk.weights_among(chosen, fetched_layers, streamed)
        fetched += disk.weights_among(chosen, fetched_layers, streamed, backward=True)
        # As for fetches, the last layers of a forward are still in their slots.
        fetched -= disk.weights_among(chosen, np.minimum(fetched_layers, chosen.slots - 1), False)
        return trained / read, trained / write, (windows * fetched + refreshed) / read

    def _disk(self, chosen: Decisions) -> tuple[Floats, Floats, Floats]:
        """Seconds to read and to write states, and how long the last update of a block on disk waits: for all reads but
        the first, and for the writes that free memory for them."""

        def seconds(resident: int, layers: int, disk: int) -> tuple[float, float, float]:
            pieces = self.costs.pieces
            staged = sorted(self.ledger.disk.order(resident, layers)[:disk])
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
        compute: Floats = busy["compute"]
        longest = np.maximum(self._around + compute + busy["gpu_update"], self._links(busy))
        if not self.costs.run.clipping:
            return np.maximum(longest, self._around + _sum(busy, "thread"))
        # Updates can overlap with the first window's forward, up to the last block that the CPU updates.
        first = windows.sizes[0]
        overlapped = sums["forward"].total - np.where(chosen.other_blocks == RESIDENT, 0.0, self._tail)
        overlapped = overlapped + self.costs.call(first) * self.count
        overlapped = overlapped + chosen.offload_inputs * OFFLOAD_SECONDS * (
            len(self.ledger.layers) - chosen.stored_graphs
        )
        after = self._around + compute - first * overlapped
        waited: Floats = self._disk(chosen)[2] + self._gradients_on_disk(chosen)[0]
        updates: Floats = np.maximum(busy["states_in"], np.maximum(_sum(busy, "thread"), waited))
        return np.maximum(longest, updates + after)


def _sum(busy: dict[str, Floats], runs_on: str) -> Floats:
    """Seconds of all lanes of one kind."""
    total: Floats = np.sum([busy[lane] for lane in lanes_on(runs_on)], axis=0)
    return total
