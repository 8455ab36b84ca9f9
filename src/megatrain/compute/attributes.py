"""Attributes of modules, other than parameters, buffers and submodules: recorded, and put back.

A module may keep what belongs to a buffer in an attribute: the length for which RoPE has its frequencies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

OWN = {"_parameters", "_buffers", "_modules"}
"""Attributes that the engine itself changes."""
Recorded = list[tuple[dict[str, Any], dict[str, Any]]]
"""The attributes of each module, and what they were."""


def recorded(root: torch.nn.Module) -> Recorded:
    """The attributes of a module and of those in it, as they are now."""
    return [(vars(module), _others(vars(module))) for module in root.modules()]


def changed(before: Recorded) -> Recorded:
    """Those of the modules that have other attributes now."""
    return [(now, was) for now, was in before if _differ(_others(now), was)]


def put_back(before: Recorded) -> None:
    for now, was in before:
        for name in now.keys() - was.keys() - OWN:
            del now[name]
        now.update(was)


@contextmanager
def replayed(before: Recorded) -> Iterator[None]:
    """Inside, modules have these attributes."""
    present = [(now, _others(now)) for now, _ in before]
    try:
        put_back(before)
        yield
    finally:
        put_back(present)


def _others(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name not in OWN}


def _differ(now: dict[str, Any], was: dict[str, Any]) -> bool:
    return now.keys() != was.keys() or any(now[name] is not value for name, value in was.items())
