"""Counters of one engine: cheap integers that tests, the demo and logs read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    fetches: int = 0
    """Slabs copied from RAM into a slot."""
    hits: int = 0
    """Uses that found the current weights already in a slot."""
    prefetched: int = 0
    """Fetches that were submitted before their block asked for them."""
    bytes_h2d: int = 0
    bytes_d2h: int = 0
    drains: int = 0
    """Gradient slabs copied out."""
    steps: int = 0
    """Optimizer steps that changed weights."""
    skipped_steps: int = 0
    """Steps skipped because the gradient norm was not finite."""
    grown_slots: int = 0
    """Slots added because every slot of a ring was in use at once."""
