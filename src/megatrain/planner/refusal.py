"""The error when nothing fits: which tier is short, by how much, and settings with which a plan was found."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatrain.errors import NotEnoughMemory
from megatrain.geometry import GIB, WIDTHS, unused_disk_bytes
from megatrain.hardware.validation import Frozen
from megatrain.planner.plan import format_parameters
from megatrain.planner.search import USABLE_SHARE, Search

MAX_SUGGESTIONS = 6
MAX_SUGGESTED_VALUE = 1 << 40
"""The largest number that is ever suggested."""
EXAMPLE_DIR = "/mnt/nvme"
CAPS = ("max_vram_gb", "max_ram_gb")


@dataclass(frozen=True)
class Suggestion:
    """Settings, as `mt.plan` and `mt.init` take them, with which a plan fits."""

    changes: dict[str, Any]
    saves_gb: float
    """GiB saved in the tier that was short, or gained there by raising a cap."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "changes", Frozen(self.changes))

    def __str__(self) -> str:
        settings = " and ".join(f"{name}={value!r}" for name, value in self.changes.items())
        return f"{settings} ({'gives' if set(self.changes) <= set(CAPS) else 'saves'} {self.saves_gb:.1f} GiB)"


class Refusal(NotEnoughMemory):
    """No plan fits. Has the tier that is short, by how much, and suggestions."""

    def __init__(self, message: str, tier: str, shortfall_gb: float, suggestions: tuple[Suggestion, ...]) -> None:
        super().__init__(message)
        self.tier, self.shortfall_gb, self.suggestions = tier, shortfall_gb, suggestions

    def __reduce__(self) -> tuple[Any, ...]:
        # By default an exception is unpickled from its message alone. Its notes are in its dict.
        return Refusal, (str(self), self.tier, self.shortfall_gb, self.suggestions), self.__dict__


@dataclass(frozen=True)
class Knob:
    """A setting that may help, and its values, from the smallest change to the smallest memory."""

    name: str
    values: Sequence[Any]

    def at(self, number: int) -> Any:
        value = self.values[number]
        return value / 10 if self.name in CAPS else value


def refusal(search: Search) -> Refusal:
    """The error for a search without a result."""
    tier, missing = search.shortfall()
    short, has = missing / GIB, search.capacity[tier] / GIB
    suggestions = tuple(itertools.islice(_suggestions(search, tier), MAX_SUGGESTIONS))
    others = (search.changed(available=None).capacity[tier] - search.capacity[tier]) / GIB
    in_use = f" ({others:.1f} more are used by something else)" if others > 0.05 else ""
    enough = f"any one of these makes it fit: {'; '.join(map(str, suggestions))}"
    disk = _with_a_disk(search)
    if suggestions:
        advice = f"{enough}; or {disk}" if disk else enough
    else:
        advice = f"to make it fit, {disk}" if disk else _larger_machine(search)
    message = (
        f"{search.shape.name} ({format_parameters(search.shape.parameters)} parameters) does not fit on "
        f"{search.machine.name}: "
        f"it needs at least {has + short:.1f} GiB of {tier} and may use {has:.1f}{in_use}, short by "
        f"{short:.1f} GiB; {advice}."
    )
    return Refusal(message, tier, short, suggestions)


def _with_a_disk(search: Search) -> str:
    """Says that a disk makes it fit, if it does. Which directory that is, only the user knows."""
    if search.disks or not search.gpu:
        return ""
    nbytes = search.changed(offload_dir=EXAMPLE_DIR).least_on_disk()
    return (
        ""
        if nbytes is None
        else "set offload_dir to a directory on an NVMe drive with "
        f"{_round_up((nbytes + unused_disk_bytes(1)) / GIB)} GiB free"
    )


def _larger_machine(search: Search) -> str:
    """What it takes if no setting helps: memory that other processes use, or a larger machine."""
    beside = search.changed(max_vram_gb=None, max_ram_gb=None)
    alone = beside.changed(available=None)
    if alone.fits():
        had = dict(beside.capacity)
        more = [
            f"{_round_up((need - had[tier]) / GIB)} GiB more of {tier}"
            for tier, need in _grow_until_it_fits(beside).items()
        ]
        return f"no setting makes it fit while other programs use the machine: {' and '.join(more)} must be free"
    needed = [
        f"{_round_up((need + unused_disk_bytes(len(alone.disks)) if tier == 'disk' else need / USABLE_SHARE) / GIB)} "
        f"GiB of {tier}"
        for tier, need in _grow_until_it_fits(alone).items()
    ]
    return f"no setting makes it fit: it needs a machine with {' and '.join(needed)}"


def _grow_until_it_fits(search: Search) -> dict[str, int]:
    """Raise the capacities of a search until it fits; returns tier → new capacity."""
    needed: dict[str, int] = {}
    while not search.fits():
        tier, missing = search.shortfall()
        search.capacity[tier] += missing
        needed[tier] = search.capacity[tier]
    return needed


def _suggestions(search: Search, tier: str) -> Iterator[Suggestion]:
    """Single settings that are sufficient. If fewer than two are, also pairs of the others. If nothing is, all settings
    together, each changed as little as possible."""
    before, knobs = search.need(tier), [knob for knob in _knobs(search) if knob.values]

    def fits(changes: Mapping[str, Any]) -> bool:
        return search.changed(**changes).fits()

    def suggestion(chosen: Sequence[Knob]) -> Suggestion:
        changes = _relaxed(chosen, fits)
        attempt = search.changed(**changes)
        more = attempt.capacity[tier] - search.capacity[tier]
        return Suggestion(changes, max(0.0, (before - attempt.need(tier) + more) / GIB))

    least = next((some for some in _all_combined(knobs) if fits(_strongest(some))), None)
    if least is None:
        return
    enough = [knob for knob in knobs if fits(_strongest([knob]))]
    yield from (suggestion([knob]) for knob in enough)
    pairs = itertools.combinations([knob for knob in knobs if knob not in enough], 2) if len(enough) < 2 else ()
    found = bool(enough)
    for one, other in pairs:
        if one.name != other.name and fits(_strongest([one, other])):
            found = True
            yield suggestion([one, other])
    if not found:
        yield suggestion(least)


def _all_combined(knobs: Sequence[Knob]) -> Iterator[list[Knob]]:
    """All settings together, each name once with all of its values."""
    merged: dict[str, Knob] = {}
    for knob in knobs:
        before = merged.get(knob.name)
        merged[knob.name] = knob if before is None else Knob(knob.name, [*before.values, *knob.values])
    yield [*merged.values()]
    # With narrow experts a compiled layer takes more memory.
    yield [knob for knob in merged.values() if knob.name != "compile"]


def _strongest(knobs: Sequence[Knob]) -> dict[str, Any]:
    return {knob.name: knob.at(-1) for knob in knobs}


def _relaxed(knobs: Sequence[Knob], fits: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
    """Settings that fit with their last values, each then relaxed as far as it still fits, largest changes first."""
    settings = _strongest(knobs)
    # The cap on RAM comes last: before the cap on VRAM it would be relaxed to a plan with all blocks resident.
    for knob in sorted([*knobs[::-1]], key=lambda knob: knob.name == "max_ram_gb"):
        others = {name: value for name, value in settings.items() if name != knob.name}
        if len(knobs) > 2 and fits(others):
            settings = others
            continue
        low, high = -1, len(knob.values) - 1
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits({**others, knob.name: knob.at(middle)}) else (middle, high)
        settings[knob.name] = knob.at(high)
    return settings


def _knobs(search: Search) -> Iterator[Knob]:
    """Settings that may help, the smallest changes first."""
    run = search.run

    def fewer(name: str, current: int, step: int = 1) -> Knob:
        return Knob(name, range((min(current, MAX_SUGGESTED_VALUE) - 1) // step * step, 0, -step))

    for name, total in zip(CAPS, (search.machine.vram_bytes, search.machine.ram_bytes), strict=True):
        cap: Any = search.limits.get(name)
        if cap is not None:
            yield Knob(name, range(int(cap * 10) + 1, 10 * math.ceil(total / GIB) + 1))
    yield fewer("evaluation", run.evaluation)
    yield fewer("accumulation", run.accumulation)
    yield fewer("batch", run.micro_batch)
    yield fewer("length", run.length, 64)
    yield Knob("compile", [] if run.compile else [True])
    yield Knob("precision", ["bf16"] if run.precision == "fp32" else [])
    narrower = [*WIDTHS][[*WIDTHS].index(run.moment_width) + 1 :]
    for width in ("8bit", "4bit"):
        yield Knob("optimizer_compression", [width] if width in narrower else [])
    yield Knob("precision", [] if run.precision == "bf16-sr" else ["bf16-sr"])


def _round_up(value: float) -> str:
    """Rounded up to a tenth, by at least half of one."""
    return f"{math.ceil(value * 10 + 0.5) / 10:.1f}".removesuffix(".0")
