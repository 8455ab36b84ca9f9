"""The search: the fastest decision that fits, always the same one.

Every group of decisions (what is resident, window, offload or not) is bounded by what no schedule beats; groups are
tried in the order of their bounds until no bound is below the best step found. Nothing that is left out could have
been faster, so a machine with more memory, which only adds decisions, never gets a slower plan.
"""

from __future__ import annotations

import dataclasses
import math
import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

from megatrain.errors import SettingsError
from megatrain.geometry import MOST_MICRO_BATCHES, update_threads
from megatrain.hardware.described import folders, resolved
from megatrain.hardware.machine import Disk, Machine, Reach
from megatrain.model.shapes import ModelShape
from megatrain.planner.cost import ASSUMED_DISK, Costs
from megatrain.planner.memory import GIB, STAGES, TIERS, Decision, Ledger
from megatrain.planner.plan import Plan
from megatrain.planner.run import Run
from megatrain.planner.simulate import Simulator, StepEstimate

OffloadDir = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
SLOTS = (4, 3, 2, 1)
GRAD_SLOTS = (2, 1)
USABLE = 0.98
"""Of the memory that a machine has: the rest is the driver's, the kernel's and its page cache's."""
UNKNOWN = 1 << 62
"""Room on a disk that nobody has described."""


class Search:
    """Decisions for one model, run and machine, within its limits."""

    def __init__(
        self,
        shape: ModelShape,
        machine: Machine,
        run: Run,
        *,
        max_vram_gb: float | None = None,
        max_ram_gb: float | None = None,
        offload_dir: OffloadDir | None = None,
        reach: Reach | None = None,
    ) -> None:
        self.shape, self.machine, self.run = shape, machine, run
        self.reach = reach or Reach()
        self.gpu = machine.gpu is not None
        self.disks = _disks(machine, offload_dir)
        self.capacity = {
            "vram": _capped("max_vram_gb", machine.vram_bytes, max_vram_gb, self.reach.vram, self.reach.held),
            "ram": _capped("max_ram_gb", machine.ram_bytes, max_ram_gb, self.reach.ram),
            "disk": min(sum(disk.free_bytes for disk in self.disks), UNKNOWN),
        }
        self.ledger = Ledger(shape, run, gpu=self.gpu)
        self._relief = lru_cache(maxsize=None)(self._relief_by_count)
        self._simulator: Simulator | None = None

    @property
    def simulator(self) -> Simulator:
        if self._simulator is None:
            self._simulator = Simulator(Costs(self.shape, self.machine, self.run, self.disks), self.ledger)
        return self._simulator

    def best(self) -> tuple[Decision, StepEstimate] | None:
        """The fastest decision that fits; None if none does."""
        groups = sorted(self._groups(), key=lambda group: (group[0], _order(group[1])))
        found: tuple[tuple[float, tuple[int, ...]], Decision, StepEstimate] | None = None
        for bound, group in groups:
            if found is not None and bound > found[0][0]:
                break
            for decision in self._members(group):
                if found is not None and self.simulator.bound(decision) > found[0][0]:
                    continue
                step = self.simulator.step(decision)
                key = (step.seconds, _order(decision))
                if found is None or key < found[0]:
                    found = (key, decision, step)
        return None if found is None else (found[1], found[2])

    def fits(self) -> bool:
        """Whether any decision fits."""
        return any(self._fits(group) for group in self._corners())

    def shortfall(self) -> tuple[str, int]:
        """The tier that is too small and by how many bytes, at the least that any decision takes of it."""
        needs = [self._need(group) for group in self._corners()]
        for tier in ("vram", "ram"):
            over = min(need[tier] for need in needs) - self.capacity[tier]
            if over > 0:
                return tier, over
            needs = [need for need in needs if need[tier] <= self.capacity[tier]]
        return "disk", min(need["disk"] for need in needs) - self.capacity["disk"]

    def need(self, tier: str) -> int:
        """The least that any decision takes of a tier, among those that fit in the tiers before it if any do."""
        needs = [self._need(group) for group in self._corners()]
        if tier != "vram":
            needs = [need for need in needs if need["vram"] <= self.capacity["vram"]] or needs
        return min(need[tier] for need in needs)

    # ---- decisions

    def _choices(self, layers: Sequence[int] | None = None) -> Iterator[Decision]:
        """One decision per group, with the fewest slots: the least memory the group can do with."""
        if layers is None or not self.gpu:
            layers = range(len(self.ledger.layers) + 1) if self.gpu else (0,)
        yes_and_no = (False, True) if self.gpu else (False,)
        for window in windows_of(self.run.accumulation) if self.run.together else [1]:
            for offload in yes_and_no:
                stored = self._least_stored(offload, window)
                for rest in yes_and_no:
                    for count in layers:
                        yield Decision(
                            rest=rest, layers=count, stored=stored, offload=offload, window=window, slots=1,
                            grad_slots=1,
                        )  # fmt: skip

    def _least_stored(self, offload: bool, window: int) -> int:
        """None of the layers or all, whichever takes less: few graphs that are kept may, if none is made again."""
        none = Decision(offload=offload, window=window)
        whole = dataclasses.replace(none, stored=len(self.ledger.layers))
        tier = "vram" if self.gpu else "ram"
        less = self.ledger.account(whole).total(tier) < self.ledger.account(none).total(tier)
        return whole.stored if less else 0

    def _corners(self) -> Iterator[Decision]:
        """Of each group the decisions that take least: no layer resident, all, and as many as VRAM holds."""
        for group in self._choices((0,)):
            yield group
            if not self.gpu:
                continue
            low, high = 0, len(self.ledger.layers)
            yield dataclasses.replace(group, layers=high)
            while low + 1 < high:
                middle = (low + high) // 2
                account = self.ledger.account(dataclasses.replace(group, layers=middle))
                low, high = (middle, high) if account.total("vram") <= self.capacity["vram"] else (low, middle)
            if low:
                yield dataclasses.replace(group, layers=low)

    def _need(self, decision: Decision) -> dict[str, int]:
        """Bytes per tier, with as few blocks on disk as RAM needs; if RAM is short whatever is there, as most help."""
        account = self.ledger.account(decision)
        if account.total("ram") > self.capacity["ram"] and self.disks and self.gpu:
            less = self._on_disk(decision, account.total("ram") - self.capacity["ram"])
            account = self.ledger.account(less)
        return {tier: account.total(tier) for tier in TIERS}

    def _fits(self, decision: Decision) -> bool:
        return all(need <= self.capacity[tier] for tier, need in self._need(decision).items())

    def _groups(self) -> Iterator[tuple[float, Decision]]:
        """Groups in which something fits, each with a bound for all of its members."""
        for group in self._choices():
            filled = self._filled(group)
            if filled is not None:
                # No member has more slots than this, and the more graphs are kept the less is computed.
                yield self.simulator.bound(dataclasses.replace(filled, slots=SLOTS[0])), group

    def _members(self, group: Decision) -> Iterator[Decision]:
        """Members that fit and are not beaten in every number by another."""
        seen: list[Decision] = []
        for slots in SLOTS:
            for grad_slots in GRAD_SLOTS:
                member = self._filled(dataclasses.replace(group, slots=slots, grad_slots=grad_slots))
                if member is None:
                    continue
                beaten = any(
                    other.slots >= slots and other.grad_slots >= grad_slots and other.stored >= member.stored
                    for other in seen
                )
                if not beaten:
                    seen.append(member)
                    yield member

    def _filled(self, decision: Decision) -> Decision | None:
        """With as few blocks on disk as RAM needs and as many graphs kept as VRAM holds; None if it does not fit."""
        account = self.ledger.account(decision)
        room = self.capacity["vram"] - account.total("vram") if self.gpu else 0
        if room < 0:
            return None
        over = account.total("ram") - self.capacity["ram"]
        if over > 0:
            if not (self.disks and self.gpu):
                return None
            decision = self._on_disk(decision, over)
            account = self.ledger.account(decision)
            if any(account.total(tier) > self.capacity[tier] for tier in ("ram", "disk")):
                return None
        if not self.gpu:
            room = self.capacity["ram"] - account.total("ram")
        stored = len(self.ledger.layers) if decision.stored else self.ledger.stored_limit(decision, room)
        while stored > decision.stored:
            more = dataclasses.replace(decision, stored=stored)
            account = self.ledger.account(more)
            if all(account.total(tier) <= room for tier, room in self.capacity.items()):
                return more
            stored -= 1
        return decision

    def _on_disk(self, decision: Decision, over: int) -> Decision:
        """With the fewest blocks on disk that free so much RAM; if none do, with those that free most."""
        relief = self._relief(decision.rest, decision.layers)
        return dataclasses.replace(decision, disk=bisect_left(relief, min(over, relief[-1])))

    def _relief_by_count(self, rest: bool, layers: int) -> list[int]:
        """Blocks on disk → the most RAM that so many or fewer of them free; a few are in RAM on their way."""
        ledger, kept = self.ledger, set(self.ledger.resident(Decision(rest=rest, layers=layers)))
        sizes = [ledger.states[i].residuals + ledger.states[i].moments for i in ledger.disk_order if i not in kept]
        freed, largest = [0, *accumulate(sizes)], [0, *accumulate(sizes, max)]
        return [*accumulate((freed[n] - min(n, STAGES) * largest[n] for n in range(len(freed))), max)]


def solve(
    shape: ModelShape,
    machine: Machine,
    run: Run,
    *,
    max_vram_gb: float | None = None,
    max_ram_gb: float | None = None,
    offload_dir: OffloadDir | None = None,
    reach: Reach | None = None,
) -> Plan:
    """The fastest plan that fits. Raises `NotEnoughMemory` with the settings that would make one fit."""
    from megatrain.planner.refuse import refusal

    limits: dict[str, Any] = {
        "max_vram_gb": max_vram_gb, "max_ram_gb": max_ram_gb, "offload_dir": offload_dir, "reach": reach
    }  # fmt: skip
    search = Search(shape, machine, run, **limits)
    found = search.best()
    if found is None:
        raise refusal(search, limits)
    return make_plan(search, *found)


def make_plan(search: Search, decision: Decision, step: StepEstimate) -> Plan:
    """A decision in the words of the engine."""
    ledger, blocks, run = search.ledger, search.shape.blocks, search.run
    default = "offload" if decision.offload else "recompute"
    stored = {blocks[i].name: "store" for i in ledger.layers[: decision.stored]}
    return Plan(
        model=search.shape.name,
        parameters=search.shape.parameters,
        matmul_parameters=search.shape.matmul_parameters,
        machine=search.machine.name,
        run=run,
        resident=tuple(blocks[i].name for i in ledger.resident(decision)),
        on_disk=tuple(blocks[i].name for i in ledger.on_disk(decision)),
        blocks=len(blocks),
        policy=stored | {"*": default},
        window=decision.window,
        slots=decision.slots,
        grad_slots=decision.grad_slots,
        threads=update_threads(search.machine.cores),
        memory=ledger.account(decision).as_dict(),
        capacity=search.capacity,
        step=step,
        lossy=_lossy(run),
        notes=tuple(_notes(search, decision)),
    )


def windows_of(accumulation: int) -> list[int]:
    """Windows worth trying, largest first: those of equal size that cut a step into 1, 2, 3, 4, 6, 8, 12... of them."""
    found = {-(-accumulation // (base << shift)) for base in (1, 3) for shift in range(accumulation.bit_length() + 1)}
    return sorted({min(window, MOST_MICRO_BATCHES) for window in found}, reverse=True)


def _order(decision: Decision) -> tuple[int, ...]:
    """Of equally fast decisions, the one that takes least memory, with the usual number of slots."""
    return (
        decision.disk, int(decision.offload), int(decision.rest), decision.layers, decision.stored, decision.window,
        abs(decision.slots - 3), abs(decision.grad_slots - 2), decision.slots,
    )  # fmt: skip


def _capped(name: str, there: int, asked: float | None, reach: int | None, held: int = 0) -> int:
    """Bytes that may be taken: of what there is, by what was asked, within reach, beside what is held already."""
    usable = int(there * USABLE)
    if asked is not None:
        if isinstance(asked, bool) or not 0 < asked < math.inf:
            raise SettingsError(f"{name} must be a positive number of GiB or None, not {asked!r}.")
        usable = min(usable, int(asked * GIB))
    return max(0, usable - held if reach is None else min(usable - held, reach))


def _disks(machine: Machine, offload_dir: OffloadDir | None) -> tuple[Disk, ...]:
    """The disks behind the directories: those that the machine describes, and an assumed one for each other."""
    known = {resolved(disk.path): disk for disk in machine.disks} if offload_dir is not None else {}
    return tuple(known.get(path, ASSUMED_DISK) for path in folders(offload_dir))


def _lossy(run: Run) -> tuple[str, ...]:
    found = []
    if run.moment_width != "fp32":
        found.append(f"moments of matrices in {run.moment_width}")
    if run.precision == "bf16-sr":
        found.append("weights in bf16 without an FP32 master, rounded stochastically")
    return tuple(found)


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
    if decision.disk:
        yield "states on disk are planned as designed; engines of this version do not keep any there"
    if decision.disk and ASSUMED_DISK in search.disks:
        yield "the speed of the disk is assumed, and its free space not known"
    if not search.gpu:
        yield "there is no GPU: compute is the CPU's, and nothing overlaps"
