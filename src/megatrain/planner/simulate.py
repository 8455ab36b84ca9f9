"""A steady step, lane by lane: what waits for what, as in engine/step.py.

The order of work on every lane is fixed, and a piece starts when its lane is free and what it needs is done. Such a
system is monotone: no piece that gets shorter, and no slot that is added, ever makes the step longer.

The clock starts when the norm is known. Updates then run in forward order on the CPU, and block i is fetched when its
own is done. Without clipping updates run in the backward as gradients land, and the next forward starts when the last
is done, which is that of the first block. Windows after the first only add their own time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import accumulate

from megatrain.geometry import by_size
from megatrain.planner.cost import PARK, STEP, STREAM, Costs, Piece
from megatrain.planner.memory import STAGES, Decision, Ledger

AHEAD = STAGES - 1
"""Blocks whose states are read from disk ahead of their update."""
LANES = ("compute", "h2d", "d2h", "update", "vram update", "disk")


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


@dataclass(slots=True)
class _Clock:
    """When each lane is free, and what each ring's slots wait for."""

    h2d: float = 0.0
    d2h: float = 0.0
    compute: float = 0.0
    released: dict[int, list[float]] = field(default_factory=dict)
    drained: dict[int, list[float]] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LANES, 0.0))


class Simulator:
    """Steps of one model and run on one machine, for many decisions."""

    def __init__(self, costs: Costs, ledger: Ledger) -> None:
        self._costs, self._ledger = costs, ledger
        self._count = len(costs.pieces)
        groups = by_size({piece.fetch_bytes for piece in costs.pieces}, lambda size: size)
        self._ring = {size: group[0] for group in groups for size in group}
        self._sums = _Sums(costs, ledger)
        last = max(range(self._count), key=lambda i: (costs.pieces[i].fetch_bytes > 0, i))
        self._tail = sum(piece.forward for piece in costs.pieces[last:])
        """Forward of the last block that owns weights, and of those after it."""

    def step(self, decision: Decision) -> StepEstimate:
        """One steady step."""
        windows = self._ledger.windows(decision.window)
        full, last = decision.window, self._costs.run.accumulation - (windows - 1) * decision.window
        updating = _Pass(self, decision, last if windows == 1 else full, several=windows > 1, updates=True)
        seconds, waited = updating.run()
        alike = windows - 1 if last == full else windows - 2
        for micro, times in ((full, alike), (last, windows - 1 - alike)):
            if times > 0:
                plain, more = _Pass(self, decision, micro, several=True, updates=False).run()
                seconds += times * plain
                waited = {lane: waited[lane] + times * more[lane] for lane in LANES}
        busy = self.busy(decision)
        if self._costs.machine.gpu is None:
            # Without a GPU everything is done inline, one after the other.
            seconds = sum(busy.values()) + STEP
        seconds = max(seconds, busy["disk"])
        bottleneck = max(LANES, key=lambda lane: busy[lane])
        return StepEstimate(seconds, busy, waited, bottleneck)

    def busy(self, decision: Decision) -> dict[str, float]:
        """Seconds of work per lane: no step is shorter than the longest."""
        sums, costs = self._sums, self._costs
        micro, windows = costs.run.accumulation, self._ledger.windows(decision.window)
        streamed, disk = (decision.rest, decision.layers), self._ledger.on_disk(decision) if decision.disk else []
        again = sums.layers("forward", decision.stored) + sums.rest("again")
        compute = micro * (sums.all("forward") + again + sums.all("backward"))
        compute += 2 * micro * costs.call(decision.window) * self._count
        h2d = windows * (sums.streamed("fetch", *streamed) + sums.streamed("fetch_back", *streamed))
        h2d += (windows - 1) * sums.streamed("resume", *streamed)
        # The last layers of a forward are still in their slots when the backward begins.
        held = max(decision.layers, len(self._ledger.layers) - decision.slots + 1)
        h2d -= windows * sums.layers("fetch_back", held)
        d2h = windows * sums.streamed("drain" if windows == 1 else "drain_sum", *streamed)
        if decision.offload:
            compute += 2 * micro * PARK * (len(self._ledger.layers) - decision.stored)
            d2h += micro * sums.layers("park", decision.stored)
            h2d += micro * sums.layers("unpark", decision.stored)
        update = sums.streamed("update", *streamed)
        resident = sums.all("gpu_update") - sums.streamed("gpu_update", *streamed)
        on_disk = sum(costs.pieces[i].disk_read + costs.pieces[i].disk_write for i in disk)
        return dict(zip(LANES, (compute, h2d, d2h, update, resident, on_disk), strict=True))

    def bound(self, decision: Decision) -> float:
        """A step that no schedule beats: the longest lane, or compute with what it always waits for; with clipping, all
        updates and then the last fetched block, the head and the backward."""
        busy = self.busy(decision)
        if self._costs.machine.gpu is None:
            return sum(busy.values())
        sums, windows = self._sums, self._ledger.windows(decision.window)
        # Windows after the first wait for the sums of the one before.
        compute = busy["compute"] + (windows - 1) * sums.streamed("resume", decision.rest, decision.layers)
        longest = STEP + max(compute + busy["vram update"], busy["h2d"], busy["d2h"])
        longest = max(longest, busy["disk"])
        if not self._costs.run.clipping:
            return max(longest, STEP + busy["update"])
        first = min(self._costs.run.accumulation, decision.window)
        # Of the first window, the forward up to the last streamed block is what updates can hide under.
        hidden = sums.all("forward") - (0.0 if decision.rest else self._tail)
        hidden += self._costs.call(decision.window) * self._count
        hidden += PARK * (len(self._ledger.layers) - decision.stored) if decision.offload else 0.0
        after = STEP + compute - first * hidden
        return max(longest, busy["update"] + after, self._disk_chain(decision) + after)

    def _disk_chain(self, decision: Decision) -> float:
        """What the update of the last block on disk waits for: reads but the first, and writes that make room."""
        if decision.disk <= AHEAD:
            return 0.0
        pieces, staged = self._costs.pieces, self._ledger.on_disk(decision)
        # A block without weights of its own is not fetched, and its forward waits for nothing.
        while staged and not pieces[staged[-1]].fetch_bytes:
            staged.pop()
        return sum(pieces[i].disk_read for i in staged[AHEAD:]) + sum(pieces[i].disk_write for i in staged[:-AHEAD])


class _Sums:
    """Sums over pieces: of all, of layers from some on, of what is streamed."""

    def __init__(self, costs: Costs, ledger: Ledger) -> None:
        self._after: dict[str, list[float]] = {}
        self._rest: dict[str, float] = {}
        for name in (item.name for item in fields(Piece)):
            values = [float(getattr(piece, name)) for piece in costs.pieces]
            if name == "fetch_back":
                # The head is not fetched again: its gradients are taken in the forward.
                values = [0.0 if kind == "head" else v for v, kind in zip(values, costs.kinds, strict=True)]
            self._after[name] = [*accumulate([values[i] for i in reversed(ledger.layers)], initial=0.0)][::-1]
            self._rest[name] = sum(values[i] for i in ledger.rest)
        self._rest["again"] = sum(costs.pieces[i].forward for i in ledger.rest if costs.kinds[i] != "head")

    def layers(self, name: str, start: int) -> float:
        """Of the layers from `start` on."""
        return self._after[name][start]

    def rest(self, name: str) -> float:
        return self._rest[name]

    def all(self, name: str) -> float:
        return self._after[name][0] + self._rest[name]

    def streamed(self, name: str, rest: bool, layers: int) -> float:
        return self._after[name][layers] + (0.0 if rest else self._rest[name])


class _Pass:
    """One window, forward and backward, with or without the updates of a step."""

    def __init__(self, simulator: Simulator, decision: Decision, micro: int, several: bool, updates: bool) -> None:
        ledger, self.costs = simulator._ledger, simulator._costs
        self.simulator, self.decision, self.micro, self.several = simulator, decision, micro, several
        self.updates = updates
        self.resident = set(ledger.resident(decision))
        self.on_disk = set(ledger.on_disk(decision))
        self.stored = set(ledger.layers[: decision.stored])
        self.clipping = self.costs.run.clipping
        self.call = self.costs.call(decision.window)
        self.clock = _Clock()
        self.written = [0.0] * simulator._count
        self.late: set[int] = set()
        """Blocks whose update waited for the disk."""
        members: dict[int, int] = {}
        for index, piece in enumerate(self.costs.pieces):
            if index not in self.resident and piece.fetch_bytes:
                ring = simulator._ring[piece.fetch_bytes]
                members[ring] = members.get(ring, 0) + 1
        self.slots = {ring: min(decision.slots, count) for ring, count in members.items()}
        self.grad_slots = {ring: min(decision.grad_slots, (count + 1) // 2) for ring, count in members.items()}
        self.held: list[int] = []

    def run(self) -> tuple[float, dict[str, float]]:
        """Seconds from the norm to the next, and what compute waited for."""
        costs, clock = self.costs, self.clock
        order = range(len(costs.pieces))
        if self.updates and self.clipping:
            self._update_in_order()
        for index in order:
            self._forward(index, costs.pieces[index])
        done = 0.0
        self.held = [i for i in order if costs.kinds[i] == "layer" and i not in self.resident]
        self.held = self.held[max(0, len(self.held) - self.decision.slots + 1) :]
        landed: list[tuple[int, float]] = []
        for index in reversed(order):
            landed.append((index, self._backward(index, costs.pieces[index])))
        if self.updates and not self.clipping:
            done = self._update_as_landed(landed)
        end = max(clock.compute, clock.d2h)
        clock.waited["d2h"] += end - clock.compute
        if done > end:
            clock.waited["update"] += done - end
            end = done
        return end + (STEP if self.updates else 0.0), clock.waited

    def _update_in_order(self) -> None:
        """The CPU's updates after the norm, states from disk read ahead and written behind."""
        free = disk = 0.0
        pieces, staged = self.costs.pieces, sorted(self.on_disk)
        # The first states were read during the backward; each next one is, when a block before it has been written.
        ready = dict.fromkeys(staged[:AHEAD], 0.0)
        coming = iter(staged[AHEAD:])
        for index, piece in enumerate(pieces):
            if index in self.resident:
                continue
            if index in self.on_disk and ready[index] > free:
                free = ready[index]
                self.late.add(index)
            free += piece.update
            self.written[index] = free
            if index in self.on_disk:
                disk = max(disk, free) + piece.disk_write
                following = next(coming, None)
                if following is not None:
                    disk += pieces[following].disk_read
                    ready[following] = disk

    def _update_as_landed(self, landed: list[tuple[int, float]]) -> float:
        free = disk = 0.0
        for index, when in landed:
            if index not in self.resident:
                free = max(free, when) + self.costs.pieces[index].update
                if index in self.on_disk:
                    disk += self.costs.pieces[index].disk_read + self.costs.pieces[index].disk_write
                    free = max(free, disk)
        return free

    def _fetch(self, index: int, piece: Piece, seconds: float, bound_by_update: bool) -> None:
        """Weights into a slot; compute waits until they are there."""
        clock = self.clock
        ring = self.simulator._ring[piece.fetch_bytes]
        released = clock.released.setdefault(ring, [])
        slots = self.slots[ring]
        begin = clock.h2d
        if len(released) >= slots:
            begin = max(begin, released[-slots])
        cause = "h2d"
        if bound_by_update and self.written[index] > begin:
            begin = self.written[index]
            cause = "disk" if index in self.late else "update"
        clock.h2d = begin + seconds
        self._wait(clock.h2d, cause)
        clock.compute += STREAM

    def _wait(self, until: float, cause: str) -> None:
        clock = self.clock
        if until > clock.compute:
            clock.waited[cause] += until - clock.compute
            clock.compute = until

    def _forward(self, index: int, piece: Piece) -> None:
        clock, micro = self.clock, self.micro
        streamed = index not in self.resident and piece.fetch_bytes > 0
        if streamed:
            self._fetch(index, piece, piece.fetch, self.updates and self.clipping)
        elif index in self.resident and self.updates and self.clipping:
            clock.compute += piece.gpu_update
        clock.compute += micro * (piece.forward + self.call)
        if streamed:
            clock.released[self.simulator._ring[piece.fetch_bytes]].append(clock.compute)
        if self.decision.offload and index not in self.stored and piece.park:
            # Two inputs may be on their way out; compute waits for those before them.
            clock.compute += micro * PARK
            self._wait(clock.d2h, "d2h")
            clock.d2h = max(clock.d2h, clock.compute) + micro * piece.park

    def _backward(self, index: int, piece: Piece) -> float:
        """When its gradients are in RAM."""
        clock, micro, kind = self.clock, self.micro, self.costs.kinds[index]
        streamed = index not in self.resident and piece.fetch_bytes > 0
        again = 0.0 if index in self.stored or kind == "head" else piece.forward
        if self.decision.offload and index not in self.stored and piece.unpark:
            clock.compute += micro * PARK
            clock.h2d += micro * piece.unpark
            self._wait(clock.h2d, "h2d")
        if streamed and kind != "head" and index not in self.held:
            self._fetch(index, piece, piece.fetch_back, False)
        clock.compute += micro * (again + piece.backward + self.call)
        if not streamed:
            if index in self.resident and self.updates and not self.clipping:
                clock.compute += piece.gpu_update
            return clock.compute
        ring = self.simulator._ring[piece.fetch_bytes]
        clock.released.setdefault(ring, []).append(clock.compute)
        if self.several and not self.updates:
            # The sum so far is fetched when the first micro-batch needs it, not ahead.
            clock.h2d = max(clock.h2d, clock.compute) + piece.resume
            self._wait(clock.h2d, "h2d")
        drained = clock.drained.setdefault(ring, [])
        slots = max(1, self.grad_slots[ring])
        if len(drained) >= slots:
            self._wait(drained[-slots], "d2h")
        clock.d2h = max(clock.d2h, clock.compute) + (piece.drain_sum if self.several else piece.drain)
        drained.append(clock.d2h)
        return clock.d2h
