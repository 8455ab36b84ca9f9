"""When nothing fits: which tier, by how much, and the settings that would help. Each was tried and makes a plan fit."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatrain.errors import NotEnoughMemory
from megatrain.planner.memory import GIB
from megatrain.planner.run import ASKED, WIDTHS, Run
from megatrain.planner.search import Search

MOST_SUGGESTIONS = 6
SOME_DISK = "/path/on/nvme"
"""Stands for a directory that the user has."""
DISK_TIER = False
"""Whether engines of this version keep states on disk: nobody is sent where they cannot go."""
RUN_FIELDS = {asked: name for name, asked in ASKED.items()}
LIMITS = ("max_vram_gb", "max_ram_gb", "offload_dir")


@dataclass(frozen=True)
class Suggestion:
    """Settings, as `mt.plan` and `mt.init` take them, that make a plan fit."""

    changes: dict[str, Any]
    saves_gb: float
    """GiB less of the tier that was short (more room in it, for a cap that is raised)."""

    def __str__(self) -> str:
        settings = " and ".join(f"{name}={value!r}" for name, value in self.changes.items())
        raised = set(self.changes) <= {"max_vram_gb", "max_ram_gb"}
        return f"{settings} ({'gives' if raised else 'saves'} {self.saves_gb:.1f} GiB)"


class Refusal(NotEnoughMemory):
    """Nothing fits."""

    def __init__(self, message: str, tier: str, shortfall_gb: float, suggestions: tuple[Suggestion, ...]) -> None:
        super().__init__(message)
        self.tier = tier
        self.shortfall_gb = shortfall_gb
        self.suggestions = suggestions


def refusal(search: Search, limits: Mapping[str, Any]) -> Refusal:
    """The error for a search that found nothing."""
    tier, missing = search.shortfall()
    short, has = missing / GIB, search.capacity[tier] / GIB
    suggestions = tuple(itertools.islice(_suggestions(search, limits, tier), MOST_SUGGESTIONS))
    alone = _tried(search, {**limits, "reach": None}, {})
    others = (alone.capacity[tier] - search.capacity[tier]) / GIB
    in_use = f" ({others:.1f} less than it could: something else is using it)" if others > 0.05 else ""
    if suggestions:
        advice = f"any one of these makes it fit: {'; '.join(map(str, suggestions))}"
    elif alone.fits():
        advice = f"no setting makes it fit beside what else is running: {_up(short):g} GiB more of {tier} must be free"
    else:
        advice = f"no setting makes it fit: it takes a machine with {_up(has + short):g} GiB of {tier}"
        if DISK_TIER and tier == "ram" and limits["offload_dir"] is None and search.gpu:
            least = _tried(search, limits, {"offload_dir": SOME_DISK}).need(tier)
            advice += f", or {_up(least / GIB):g} GiB with an offload_dir"
    message = (
        f"{search.shape.name} ({search.shape.parameters / 1e9:.1f}B parameters) does not fit on {search.machine.name}: "
        f"of {tier} it needs at least {has + short:.1f} GiB and may take {has:.1f}{in_use}, short by "
        f"{short:.1f} GiB; {advice}."
    )
    return Refusal(message, tier, short, suggestions)


def apply(changes: Mapping[str, Any], run: Run, limits: Mapping[str, Any]) -> tuple[Run, dict[str, Any]]:
    """A run and limits with some settings changed."""
    fields = {RUN_FIELDS.get(name, name): value for name, value in changes.items() if name not in LIMITS}
    return dataclasses.replace(run, **fields), {**limits, **{n: v for n, v in changes.items() if n in LIMITS}}


def _suggestions(search: Search, limits: Mapping[str, Any], tier: str) -> Iterator[Suggestion]:
    """Single settings that are enough; if there are few, pairs of those that are not."""
    before, singles, enough = search.need(tier), [*_changes(search, limits, tier)], []
    for changes in singles:
        attempt = _tried(search, limits, changes)
        if attempt.fits():
            enough.append(changes)
            yield Suggestion(changes, _saved(attempt, search, tier, before))
    singles = [changes for changes in singles if changes not in enough] if len(enough) < 2 else []
    for changes in singles:
        _, new = apply(changes, search.run, limits)
        changed = _tried(search, limits, changes)
        for more in _changes(changed, new, changed.shortfall()[0]):
            both = {**changes, **more}
            # Nothing twice: a pair the other way round was there before.
            if more in enough or changes.keys() & more.keys() or _index(singles, more) < _index(singles, changes):
                continue
            attempt = _tried(search, limits, both)
            if attempt.fits():
                yield Suggestion(both, _saved(attempt, search, tier, before))


def _tried(search: Search, limits: Mapping[str, Any], changes: Mapping[str, Any]) -> Search:
    run, new = apply(changes, search.run, limits)
    return Search(search.shape, search.machine, run, **new)


def _saved(attempt: Search, search: Search, tier: str, before: int) -> float:
    """GiB that a change gains in the tier that was short."""
    more = attempt.capacity[tier] - search.capacity[tier]
    return max(0.0, (before - attempt.need(tier) + more) / GIB)


def _index(singles: list[dict[str, Any]], changes: dict[str, Any]) -> int:
    """Where a setting stands among the single ones, whatever its value; after all of them if it does not."""
    return next((i for i, single in enumerate(singles) if single.keys() == changes.keys()), len(singles))


def _raised(search: Search, limits: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A cap that is below what the machine has, raised to what is needed."""
    for name, there in (("max_vram_gb", search.machine.vram_bytes), ("max_ram_gb", search.machine.ram_bytes)):
        most = math.ceil(there / GIB)
        if limits[name] is not None and limits[name] < most and _tried(search, limits, {name: most}).fits():
            tenths = _smallest(
                lambda value, name=name: _tried(search, limits, {name: value / 10}).fits(),  # type: ignore[misc]
                int(limits[name] * 10),
                most * 10,
            )
            yield {name: tenths / 10}


def _changes(search: Search, limits: Mapping[str, Any], tier: str) -> Iterator[dict[str, Any]]:
    """Settings that may help, those that change least first."""
    run = search.run

    def most(name: str, step: int, high: int) -> dict[str, Any]:
        return {name: step * _largest(lambda value: _tried(search, limits, {name: step * value}).fits(), high)}

    yield from _raised(search, limits)
    if run.evaluation > 1 and tier == "vram":
        yield most("evaluation", 1, run.evaluation - 1)
    if DISK_TIER and limits["offload_dir"] is None and tier == "ram" and search.gpu:
        yield {"offload_dir": SOME_DISK}
    if run.accumulation > 1 and tier == "ram":
        yield most("accumulation", 1, run.accumulation - 1)
    if run.micro_batch > 1:
        yield most("batch", 1, run.micro_batch - 1)
    if run.length > 64:
        yield most("length", 64, (run.length - 1) // 64)
    if not run.compile and search.gpu and tier == "vram":
        yield {"compile": True}
    if run.precision == "fp32":
        yield {"precision": "bf16"}
    for width in WIDTHS[2:]:
        if WIDTHS.index(width) > WIDTHS.index(run.width):
            yield {"optimizer_compression": width}
    if run.precision != "bf16-sr":
        yield {"precision": "bf16-sr"}


def _largest(fits: Callable[[int], bool], high: int) -> int:
    """The largest value that fits; 1 if none does."""
    return high if fits(high) else max(1, _smallest(lambda value: not fits(value), 1, high) - 1)


def _smallest(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest value above `low` of which something holds, as it does of `high` and all that is larger."""
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _up(value: float) -> float:
    """A tenth of a GiB up."""
    return math.ceil(value * 10 + 0.5) / 10
