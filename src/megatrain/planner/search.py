"""Branch and bound: finds the fastest decision that fits. The result is deterministic.

A group is all decisions that differ only in slots and in the number of stored graphs. Each group has a lower bound for
its step time. Groups are simulated in the order of their bounds, until no bound is below the fastest step so far. A
machine with more memory only adds decisions, so it never gets a slower plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Unpack

import numpy as np

from megatrain.errors import SettingsError
from megatrain.geometry import (
    GIB,
    MAX_WINDOW,
    cached_bytes,
    transit_bytes,
    unused_disk_bytes,
    update_threads,
    window_sizes,
)
from megatrain.hardware.machine import AvailableMemory, Disk, Machine, striped
from megatrain.hardware.validation import folders, resolved
from megatrain.model.shapes import ModelShape
from megatrain.planner.arrays import Bools, Ints, most_layers
from megatrain.planner.cost import ASSUMED_DISK, Costs
from megatrain.planner.decision import (
    GRAD_SLOTS,
    HELD,
    RESIDENT,
    SLOTS,
    STREAMED,
    USUAL_GRAD_SLOTS,
    USUAL_SLOTS,
    Decision,
    Decisions,
)
from megatrain.planner.disk import ON_DISK
from megatrain.planner.memory import TIERS, Ledger
from megatrain.planner.plan import Plan
from megatrain.planner.run import Limits, Run, split
from megatrain.planner.simulate import Simulator, StepEstimate

WEIGHT_LEVELS, SUM_LEVELS = 4, 8
"""The number of layers with held weights (or sums) is tried in steps of this fraction of all layers."""
GROUPS_AT_ONCE = 64
"""Groups that are simulated together, in the order of their bounds."""
EXACT_DECISIONS, NEGLIGIBLE_GAIN = 4_000, 0.01
"""After so many simulated decisions, others are simulated only if they may be faster by this share. Models whose steps
are bound by launches have tens of thousands of decisions that are equally fast."""
USABLE_SHARE = 0.98
"""The share of a machine's memory that a plan may use. The driver, the kernel and its page cache need the rest."""
UNKNOWN_DISK_BYTES = 1 << 62
"""Free space of a disk that is not described."""


class Search:
    """The decisions for one model and run that fit on one machine within its limits."""

    def __init__(
        self,
        shape: ModelShape,
        machine: Machine,
        run: Run,
        *,
        known_ledger: Ledger | None = None,
        **limits: Unpack[Limits],
    ) -> None:
        self.shape, self.machine, self.run, self.limits = shape, machine, run, limits
        self.gpu = machine.gpu is not None
        self.disks = _disks(machine, limits.get("offload_dir"))
        free = limits.get("available") or AvailableMemory()
        self.capacity = {
            "vram": _capacity("max_vram_gb", machine.vram_bytes, limits.get("max_vram_gb"), free.vram, free.held),
            "ram": _capacity("max_ram_gb", machine.ram_bytes, limits.get("max_ram_gb"), free.ram),
            "disk": min(
                max(0, int(striped(self.disks, "free_bytes")) - unused_disk_bytes(len(self.disks))), UNKNOWN_DISK_BYTES
            ),
        }
        # Whether coding pays is measured when training begins.
        coded = run.optimizer_compression == "lossless"
        transit = transit_bytes([disk.direct for disk in self.disks], coded)
        same = known_ledger is not None and known_ledger.transit == transit
        self.ledger = known_ledger if known_ledger and same else Ledger(shape, run, self.gpu, transit)
        self._simulator: Simulator | None = None

    def changed(self, **options: Any) -> Search:
        """The same search with some options changed, by the names that `plan` takes."""
        fields, limits = split(options)
        run = dataclasses.replace(self.run, **fields)
        known = self.ledger if run == self.run else None
        return Search(self.shape, self.machine, run, known_ledger=known, **self.limits | limits)

    @property
    def simulator(self) -> Simulator:
        if self._simulator is None:
            self._simulator = Simulator(Costs(self.shape, self.machine, self.run, self.disks), self.ledger)
        return self._simulator

    def plan(self) -> Plan:
        """The fastest plan that fits. Raises `NotEnoughMemory` with the settings that would make one fit."""
        from megatrain.planner.refusal import refusal

        best = self.best() if self.fits() else None
        if best is None:
            raise refusal(self)
        return make_plan(self, *best)

    def best(self) -> tuple[Decision, StepEstimate] | None:
        """The fastest decision that fits, or None."""
        groups, bounds = self._groups()
        best: tuple[tuple[float, ...], Decision] | None = None
        fastest, simulated = math.inf, 0
        for some in _promising_first(groups, bounds):
            # A bound is summed in another order than a step, and may exceed it by a rounding error.
            limit = fastest * (1 + 1e-12 if simulated < EXACT_DECISIONS else 1 - NEGLIGIBLE_GAIN)
            promising = some[bounds[some] <= limit]
            if not len(promising):
                break
            members = self._members(groups.take(promising))
            members = members.take(self.simulator.bounds(members) <= limit)
            if not len(members):
                continue
            simulated += len(members)
            seconds = self.simulator.seconds(members)
            fastest = min(fastest, seconds.min())
            for index in map(int, np.flatnonzero(seconds <= fastest)):
                key = (float(seconds[index]), *_tie_break(members[index]))
                if best is None or key < best[0]:
                    best = (key, members[index])
        if best is None:
            return None
        decision = self._with_gradients_instead(best[1])
        return decision, self.simulator.step(decision)

    def _with_gradients_instead(self, decision: Decision) -> Decision:
        """The decision with the number of gradients on disk that is fastest, and as few states there as then suffice.

        Gradients are written in the backward, when the drive is otherwise idle, and states under the next forward.
        """
        count = decision.disk_blocks
        gradients, states = (side.ravel() for side in np.indices((count + 1, count + 1)))
        states, gradients = states[states >= gradients], gradients[states >= gradients]
        each = Decisions(**vars(decision) | {"disk_blocks": states, "disk_gradients": gradients})
        each = each.take(self._fits_in(self.ledger.totals(each)))
        # States ascend for each number of gradients.
        each = each.take(np.unique(each.disk_gradients, return_index=True)[1])
        seconds = self.simulator.seconds(each)
        fastest = min(range(len(each)), key=lambda i: (seconds[i], *_tie_break(each[i])))
        return each[fastest] if seconds[fastest] < self.simulator.seconds(Decisions.of([decision]))[0] else decision

    def fits(self) -> bool:
        """Whether any decision fits."""
        return any(bool(self._fits_in(needs).any()) for needs in self._smallest())

    def least_on_disk(self) -> int | None:
        """The fewest bytes on disk of the smallest decisions that fit; None if none fits."""
        needs = self._needs()
        fits = self._fits_in(needs)
        return int(needs["disk"][fits].min()) if fits.any() else None

    def shortfall(self) -> tuple[str, int]:
        """The tier that is too small, and how many bytes the smallest decision lacks there."""
        needs = self._needs()
        among = np.ones_like(needs["vram"], bool)
        for tier in ("vram", "ram"):
            over = int(needs[tier][among].min()) - self.capacity[tier]
            if over > 0:
                return tier, over
            among &= needs[tier] <= self.capacity[tier]
        return "disk", int(needs["disk"][among].min()) - self.capacity["disk"]

    def need(self, tier: str) -> int:
        """The fewest bytes of a tier that any decision takes, among those that fit in VRAM if there are any."""
        needs = self._needs()
        among = needs["vram"] <= self.capacity["vram"]
        return int(needs[tier][among].min() if tier != "vram" and among.any() else needs[tier].min())

    def _choices(self, layers: Sequence[int], held: Sequence[int]) -> Decisions:
        """One decision per group: the one that takes the least memory, with the fewest slots."""
        windows = window_choices(self.run.accumulation) if self.run.together else [(1, 1)]
        if not self.gpu:
            return self._fewest_bytes(_combinations(windows))
        sums, every = self._levels(SUM_LEVELS), len(self.ledger.layers)
        found = _combinations(
            windows,
            offload_inputs=(0, 1),
            other_blocks=(STREAMED, HELD, RESIDENT),
            resident_layers=layers,
            held_weights=held,
            held_gradients=sums,
        )
        streaming = _combinations(
            windows,
            other_blocks=(HELD, RESIDENT),
            resident_layers=layers,
            gpu_updates=sums,
            held_weights=(every,),
            held_gradients=(every,),
        )
        return self._fewest_bytes(found.concatenate(streaming.take(streaming.streams_states)))

    def _levels(self, parts: int) -> list[int]:
        count = len(self.ledger.layers)
        return sorted({-(-count * part // parts) for part in range(parts + 1)})

    def _fewest_bytes(self, chosen: Decisions) -> Decisions:
        """No stored graphs or all of them, whichever takes less memory: with all of them nothing is recomputed."""
        tier = "vram" if self.gpu else "ram"
        all_stored = chosen.replace(stored_graphs=len(self.ledger.layers))
        less = self.ledger.totals(all_stored)[tier] < self.ledger.totals(chosen)[tier]
        return chosen.replace(stored_graphs=np.where(less, all_stored.stored_graphs, 0))

    def _needs(self) -> dict[str, Ints]:
        """Bytes per tier of the smallest decisions."""
        needs = [*self._smallest()]
        return {tier: np.concatenate([need[tier] for need in needs]) for tier in TIERS}

    def _smallest(self) -> Iterator[dict[str, Ints]]:
        """Bytes per tier of the smallest decisions: with no resident layers, all, and as many as fit in VRAM."""
        least = self._choices((0,), (0,))
        if not self.gpu:
            yield self.ledger.totals(self._on_disk(least))
            return

        def needs(layers: Any) -> dict[str, Ints]:
            return self.ledger.totals(self._on_disk(least.replace(resident_layers=layers)))

        def fit(layers: Ints) -> Bools:
            return needs(layers)["vram"] <= self.capacity["vram"]

        every, none_resident = len(self.ledger.layers), needs(0)
        yield none_resident
        yield needs(every)
        # The others have no resident layers either way.
        least = least.take(none_resident["vram"] <= self.capacity["vram"])
        yield needs(most_layers(np.zeros_like(least.resident_layers), every, fit))

    def _fits_in(self, totals: dict[str, Ints]) -> Bools:
        fits: Bools = np.logical_and.reduce([totals[tier] <= self.capacity[tier] for tier in TIERS])
        return fits

    def _groups(self) -> tuple[Decisions, Any]:
        """The groups with a member that fits, and a lower bound for the members of each."""
        chosen = self._choices(range(len(self.ledger.layers) + 1), self._levels(WEIGHT_LEVELS))
        filled = self._filled(chosen.take(self.ledger.least_vram(chosen) <= self.capacity["vram"]))
        # Members have no more slots and no more stored graphs than this, and more of either is never slower.
        return filled, self.simulator.bounds(filled.replace(slots=SLOTS[0]))

    def _members(self, groups: Decisions) -> Decisions:
        """All members of some groups that fit."""
        count = len(SLOTS) * len(GRAD_SLOTS)
        slots, grad_slots = zip(*product(SLOTS, GRAD_SLOTS), strict=True)
        each = groups.take(np.repeat(np.arange(len(groups)), count))
        each = each.replace(slots=np.tile(slots, len(groups)), grad_slots=np.tile(grad_slots, len(groups))).replace(
            **dict.fromkeys(ON_DISK, 0)
        )
        return self._filled(self._fewest_bytes(each.replace(stored_graphs=0)))

    def _filled(self, chosen: Decisions) -> Decisions:
        """The decisions that fit, with as few blocks on disk and as many stored graphs as memory allows."""
        chosen = self._on_disk(chosen)
        chosen = chosen.take(self._fits_in(self.ledger.totals(chosen)))
        return self.ledger.with_stored_graphs(chosen, self.capacity)

    def _on_disk(self, chosen: Decisions) -> Decisions:
        """With the least on disk that makes a decision fit in RAM. States can be streamed to the GPU only from RAM."""
        if not (self.disks and self.gpu):
            return chosen
        over = self.ledger.totals(chosen)["ram"] - self.capacity["ram"]
        return self.ledger.disk.freeing(chosen, np.where(chosen.streams_states, 0, over))


def make_plan(search: Search, decision: Decision, step: StepEstimate) -> Plan:
    """A decision as a `Plan`."""
    ledger, blocks, run = search.ledger, search.shape.blocks, search.run
    named: dict[str, Any] = {
        field: tuple(blocks[i].name for i in indices) for field, indices in ledger.placed(decision).items()
    }
    stored = {blocks[i].name: "store" for i in ledger.layers[: decision.stored_graphs]}
    return Plan(
        model=search.shape.name,
        parameters=search.shape.parameters,
        matmul_parameters=search.shape.matmul_parameters,
        machine=search.machine.name,
        run=run,
        blocks=len(blocks),
        policy=stored | {"*": "offload" if decision.offload_inputs else "recompute"},
        windows=window_sizes((decision.first_window or decision.window, decision.window), run.accumulation),
        slots=decision.slots,
        grad_slots=decision.grad_slots,
        threads=update_threads(search.machine.cores),
        memory=ledger.account(decision),
        capacity=search.capacity,
        step=step,
        lossy=tuple(_lossy(run)),
        notes=tuple(_notes(search, decision)),
        written=ledger.disk.written(decision),
        **named,
    )


def _combinations(windows: Sequence[tuple[int, int]], **choices: Sequence[int]) -> Decisions:
    """Every combination of windows and choices, with the fewest slots."""
    grid = np.meshgrid(np.arange(len(windows)), *map(np.array, choices.values()), indexing="ij")
    number, *columns = (column.ravel() for column in grid)
    first, window = np.array(windows).T[:, number]
    values = dict(zip(choices, columns, strict=True))
    distinct = np.ones(len(number), bool)
    for name in {"held_weights", "held_gradients", "gpu_updates"} & values.keys():
        # All counts up to the number of resident layers mean the same: keep one of them.
        distinct &= (values[name] == 0) | (values[name] > values["resident_layers"])
    return Decisions(first_window=first, window=window, slots=1, grad_slots=1, **values).take(distinct)


def window_choices(accumulation: int) -> list[tuple[int, int]]:
    """Window sizes to try, as pairs of the first window and the others: equal windows that split a step into 1, 2, 3,
    4, 6, 8, 12... parts, and single micro-batches after a first window of 2, 4, 8..."""
    sizes = {-(-accumulation // (base << shift)) for base in (1, 3) for shift in range(accumulation.bit_length() + 1)}
    equal = sorted({min(window, MAX_WINDOW) for window in sizes}, reverse=True)
    first = [1 << shift for shift in range(1, MAX_WINDOW.bit_length()) if 1 << shift < accumulation]
    return [(window, window) for window in equal] + [(window, 1) for window in first]


def _promising_first(groups: Decisions, bounds: Any) -> Iterator[Any]:
    """Indices of groups, by their lower bounds. Before them the group with the most in VRAM, which is the fastest for a
    model that fits, or nearly so."""
    if len(groups):
        most = groups.resident_layers + (groups.other_blocks == RESIDENT)
        yield np.lexsort((bounds, -most))[:1]
    order = np.argsort(bounds, kind="stable")
    for start in range(0, len(order), GROUPS_AT_ONCE):
        yield order[start : start + GROUPS_AT_ONCE]


def _tie_break(decision: Decision) -> tuple[int, ...]:
    """Orders equally fast decisions: the least memory first, then the usual number of slots."""
    return (
        decision.disk_weights, decision.disk_gradients, decision.disk_blocks, decision.disk_frozen,
        decision.offload_inputs, decision.other_blocks, decision.resident_layers,
        decision.held_weights, decision.held_gradients, decision.gpu_updates, decision.stored_graphs, decision.window,
        decision.first_window, abs(decision.slots - USUAL_SLOTS), abs(decision.grad_slots - USUAL_GRAD_SLOTS),
        decision.slots,
    )  # fmt: skip


def _capacity(name: str, total: int, asked: float | None, available: int | None, held: int = 0) -> int:
    """Bytes that a plan may take: at most `asked`, at most what is available now, less what the process holds."""
    usable = int(total * USABLE_SHARE)
    if asked is not None:
        if isinstance(asked, bool) or not 0 < asked < math.inf:
            raise SettingsError(f"{name} must be a positive number of GiB or None, not {asked!r}.")
        usable = min(usable, int(asked * GIB))
    return max(0, usable - held if available is None else min(usable - held, available))


def _disks(machine: Machine, offload_dir: Any) -> tuple[Disk, ...]:
    """The disk of each directory: the one that the machine describes, or `ASSUMED_DISK`."""
    known = {resolved(disk.path): disk for disk in machine.disks} if offload_dir is not None else {}
    return tuple(known.get(path, ASSUMED_DISK) for path in folders(offload_dir))


def _lossy(run: Run) -> Iterator[str]:
    if run.moment_width != "fp32":
        yield f"moments of matrices in {run.moment_width}"
    if run.precision == "bf16-sr":
        yield "weights in bf16 without an FP32 master, rounded stochastically"


def _notes(search: Search, decision: Decision) -> Iterator[str]:
    positions, length = search.shape.positions, search.run.length
    if 0 < positions < length:
        yield f"sequences of {length:,} tokens are longer than the {positions:,} positions of the model's config"
    if search.shape.guessed:
        yield f"what {', '.join(search.shape.guessed)} keep for the backward is estimated, not counted: leave some room"
    if search.gpu and search.run.precision == "fp32":
        rate = search.machine.matmul
        yield (
            f"true FP32 products run at {rate['fp32'] / 1e12:.0f} TFLOP/s here, BF16 at {rate['bf16'] / 1e12:.0f}; "
            "precision='bf16' keeps the exact FP32 master too"
        )
    if decision.disk_blocks + decision.disk_frozen and ASSUMED_DISK in search.disks:
        yield "the speed of the disk is assumed, and its free space not known"
    cached = cached_bytes([disk.direct for disk in search.disks])
    if decision.disk_blocks + decision.disk_frozen and cached:
        yield f"without direct I/O, {cached / GIB:.2g} GiB of RAM are page cache"
    if not search.gpu:
        yield "there is no GPU: compute is the CPU's, and nothing overlaps"
