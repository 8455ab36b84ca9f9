"""A steady step, lane by lane: what waits for what, as in engine/step.py; of many decisions at once.

The order of work on every lane is fixed, and a piece starts when its lane is free and what it needs is done. Such a
system is monotone: no piece that gets shorter, and no slot that is added, ever makes the step longer.

The clock starts when the norm is known. Updates then run in forward order on the CPU; a held sum leaves for its update
just before it, and block i is fetched, or its held copy refreshed, when its own is done. Without clipping updates run
in the last backward as gradients land. Each window after the first only adds its own time: what it fetches is there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatrain.geometry import LANES
from megatrain.planner.cost import PARK, STEP, TRAINER, Costs
from megatrain.planner.decision import RESIDENT, STREAMED, Decision, Decisions, Floats, Sums, Table, Windows, looked_up
from megatrain.planner.memory import Ledger
from megatrain.planner.passes import AHEAD, Block, Pass


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
        self._around = STEP + TRAINER * costs.run.trainer
        self._sums = {
            name: Sums([float(getattr(piece, name)) for piece in costs.pieces], ledger.layers, ledger.rest)
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
        blocks = [Block(self.costs, self.ledger, chosen, index) for index in range(self.count)]
        seconds = self._around + self._norm(chosen)
        for number, times in enumerate(windows.times):
            if not times.any():
                continue
            one = Pass(self.costs, chosen, blocks, windows, number)
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
        return self._sums["norm"].before(chosen.summed, chosen.rest != STREAMED)

    def busy(self, chosen: Decisions) -> dict[str, Floats]:
        """Seconds of work per lane: no step is shorter than the longest."""
        sums, micro = self._sums, self.costs.run.accumulation
        windows = Windows(chosen, micro)
        count, streamed, owned = windows.count, chosen.rest == STREAMED, chosen.rest != RESIDENT
        computed = sums["forward"].total + sums["again"].after(chosen.stored, True) + sums["backward"].total
        compute = micro * computed + self._norm(chosen)
        for size, times in zip(windows.sizes, windows.times, strict=True):
            compute += 2 * times * size * self.costs.call(size) * self.count
        fetched = sums["fetch"].after(chosen.held, streamed)
        h2d = count * (fetched + sums["fetch_back"].after(chosen.held, streamed))
        h2d += (count - 1) * sums["drain_sum"].after(chosen.summed, streamed)
        # The last layers of a forward are still in their slots when the backward begins.
        in_slots = np.maximum(chosen.held, len(self.ledger.layers) - chosen.slots + 1)
        h2d -= count * sums["fetch_back"].after(in_slots, False)
        hold = sums["fetch"].after(chosen.visited, owned) - fetched
        drained = sums["drain"].after(chosen.summed, streamed)
        d2h = np.where(windows.several, count * sums["drain_sum"].after(chosen.summed, streamed), drained)
        leave = sums["leave"].after(chosen.visited, owned) - sums["leave"].after(chosen.summed, streamed)
        parked = len(self.ledger.layers) - chosen.stored
        compute += chosen.offload * 2 * micro * PARK * parked
        d2h += chosen.offload * micro * sums["park"].after(chosen.stored, False)
        h2d += chosen.offload * micro * sums["unpark"].after(chosen.stored, False)
        crowded = np.where(chosen.visited > chosen.layers, self.costs.crowded, 1.0)
        update = crowded * sums["update"].after(chosen.visited, owned) + sums["merge"].after(chosen.summed, streamed)
        vram = sums["gpu_update"].total - sums["gpu_update"].after(chosen.visited, owned)
        visits, weights = (
            sums[name].after(chosen.layers, False) - sums[name].after(chosen.visited, False)
            for name in ("visit", "fetch_back")
        )
        disk = self._disk(chosen)[0]
        lanes = (compute, h2d, hold, d2h, leave, update, vram, visits, visits + weights, disk)
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

        columns = chosen.rest == RESIDENT, chosen.layers, chosen.disk
        whole, waited = looked_up(self._disk_seconds, seconds, *columns)
        return whole, waited

    def bounds(self, chosen: Decisions) -> Floats:
        """A step that no schedule beats: the longest lane, or compute with what it always waits for; with clipping, all
        updates and then the last fetched block, the head and the backward."""
        busy = self.busy(chosen)
        if self.costs.machine.gpu is None:
            return sum(busy.values(), np.zeros(len(chosen)))
        sums, windows = self._sums, Windows(chosen, self.costs.run.accumulation)
        # Windows after the first wait for the sums of the one before.
        resumed = sums["drain_sum"].after(chosen.summed, chosen.rest == STREAMED)
        compute: Floats = busy["compute"] + (windows.count - 1) * resumed
        longest = np.maximum(self._around + compute + busy["vram"], self._links(busy))
        if not self.costs.run.clipping:
            return np.maximum(longest, self._around + busy["update"])
        # Of the first window, the forward up to the last block that the CPU updates is what updates can hide under.
        first = windows.sizes[0]
        hidden = sums["forward"].total - np.where(chosen.rest == RESIDENT, 0.0, self._tail)
        hidden = hidden + self.costs.call(first) * self.count
        hidden = hidden + chosen.offload * PARK * (len(self.ledger.layers) - chosen.stored)
        after = self._around + compute - first * hidden
        updates = np.maximum(busy["states_in"], np.maximum(busy["update"], self._disk(chosen)[1]))
        return np.maximum(longest, updates + after)
