"""Settings with patterns of block names: refuses what matches no block, and warns of what has no effect."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from megatrain.errors import SettingsError
from megatrain.geometry import PATTERN_SETTINGS, PLACEMENT_SETTINGS, matches
from megatrain.model.blocks import BlockSpec
from megatrain.settings import Settings
from megatrain.telemetry.notices import warn

OVERRIDES = {"resident": [*PLACEMENT_SETTINGS[1:]], "held_gradients": ["gradients_on_disk"]}
"""Setting → those that it overrides for a block that both name (`Placement.homes`)."""
FOR_FROZEN = ("resident", "held_weights", "weights_on_disk")
"""Placements that blocks without trained weights have too."""


def check_patterns(settings: Settings, specs: Sequence[BlockSpec]) -> None:
    """Raise if a pattern matches no block, and warn about those of the user that have no effect."""
    names = [spec.label for spec in specs]
    policies = settings.policy if isinstance(settings.policy, Mapping) else {}
    patterns = {name: getattr(settings, name) for name in PATTERN_SETTINGS}
    for setting, listed in {**patterns, "policy": policies}.items():
        for pattern in listed:
            if not fnmatch.filter(names, pattern):
                nearest = ", ".join(get_close_matches(pattern, names, cutoff=0))
                raise SettingsError(f"{setting}={pattern!r} matches no block; the nearest names are {nearest}.")
    planned = {} if settings.plan is None else settings.plan.settings()
    chosen = {name: listed for name, listed in patterns.items() if listed != planned.get(name, ())}
    _warn_of_overridden(settings, names, chosen)
    _warn_of_absent_state(specs, chosen)
    if policies != planned.get("policy"):
        _warn_of_shadowed(policies, [spec.label for spec in specs if not spec.loose])


def _warn_of_overridden(settings: Settings, names: Sequence[str], chosen: Mapping[str, Sequence[str]]) -> None:
    for stronger, weaker in OVERRIDES.items():
        decided = _matched(names, getattr(settings, stronger))
        for setting in weaker:
            if both := [name for name in _matched(names, chosen.get(setting, ())) if name in decided]:
                more = f" and {len(both) - 1} more" if both[1:] else ""
                warn(f"{setting} has no effect on {both[0]}{more}: {stronger} names the same")


def _warn_of_absent_state(specs: Sequence[BlockSpec], chosen: Mapping[str, Sequence[str]]) -> None:
    """Frozen blocks have no gradients and states, and blocks whose weights are tied to another's have no weights."""
    seen, owned, trained = set[int](), set[str](), set[str]()
    for spec in specs:
        own = {id(p): p.requires_grad for _, p in spec.parameters() if id(p) not in seen}
        seen |= {*own}
        owned |= {spec.label} if own else set()
        trained |= {spec.label} if any(own.values()) else set()
    for setting in PLACEMENT_SETTINGS:
        what = "" if setting in FOR_FROZEN else "trained "
        for pattern in chosen.get(setting, ()):
            found = fnmatch.filter([spec.label for spec in specs], pattern)
            if not {*found} & (trained if what else owned):
                warn(f"{setting}={pattern!r} has no effect: {found[0]} has no {what}weights of its own")


def _warn_of_shadowed(policies: Mapping[str, str], blocks: Sequence[str]) -> None:
    """The first pattern that matches a block decides its policy."""
    left = blocks
    for pattern in policies if blocks else ():
        if not (found := fnmatch.filter(left, pattern)):
            why = "earlier patterns match its blocks" if fnmatch.filter(blocks, pattern) else "it matches no layer"
            warn(f"policy={pattern!r} has no effect: {why}")
        left = [name for name in left if name not in found]


def _matched(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    return [name for name in names if matches(name, patterns)]
