"""Counters of one engine: cheap integers that tests, the demo and logs read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class WeightUses:
    """Uses of weights that stream, by where the weights were when compute came to them."""

    arrived: int = 0
    """They were in a slot."""
    late: int = 0
    """Their copy had been started, and compute waited for it."""
    missed: int = 0
    """Their copy was started by the use itself."""


@dataclass
class Counters(WeightUses):
    fetches: int = 0
    """Slabs copied from RAM into a slot."""
    prefetched: int = 0
    """Fetches that were submitted before their block asked for them."""
    bytes_h2d: int = 0
    bytes_d2h: int = 0
    bytes_disk_in: int = 0
    bytes_disk_out: int = 0
    drains: int = 0
    """Gradient slabs copied out."""
    steps: int = 0
    """Optimizer steps that changed weights."""
    skipped_steps: int = 0
    """Steps skipped because the gradient norm was not finite."""
    grown_slots: int = 0
    """Slots added because every slot of a ring was in use at once."""
