"""What a plan chooses. Nothing in it changes bits.

Layers are counted from the first. Resident are the first ones: a forward needs them first, so that it starts while the
CPU updates those after them. On disk are the last ones, which are updated last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megatrain.planner.arrays import Ints

STREAMED, HELD, RESIDENT = range(3)
"""Where all that is not a layer (embedding, head, norms) is."""
SLOTS = (4, 3, 2, 1)
GRAD_SLOTS = (2, 1)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One choice."""

    rest: int = STREAMED
    """Embedding, head and all else that is not a layer: streamed, held (weights and sums), or resident."""
    layers: int = 0
    """Layers that are resident."""
    held: int = 0
    """Layers whose weights stay in VRAM, the resident ones among them; the weights of the others are fetched."""
    summed: int = 0
    """Layers whose gradient sums stay in VRAM, the resident ones among them."""
    visited: int = 0
    """Layers whose states come to VRAM for their update if they are not there, the resident ones among them; weights
    and sums of all layers are held then."""
    stored: int = 0
    """Layers with policy `store`."""
    offload: bool = False
    """Whether the other layers have policy `offload` (else `recompute`)."""
    first: int = 0
    """Micro-batches of the first window; 0: as many as in the others."""
    window: int = 1
    """Micro-batches of each window after it."""
    slots: int = 3
    grad_slots: int = 2
    disk: int = 0
    """Blocks that are not resident whose residual and moments are on disk: layers from the last, then the others."""


NAMES = tuple(field.name for field in fields(Decision))


class Decisions:
    """Many choices at once: every field of `Decision` as an array."""

    rest: Ints
    layers: Ints
    held: Ints
    summed: Ints
    visited: Ints
    stored: Ints
    offload: Ints
    first: Ints
    window: Ints
    slots: Ints
    grad_slots: Ints
    disk: Ints

    def __init__(self, **columns: Any) -> None:
        """Arrays of one length, or single values; counts of layers include the resident ones afterwards."""
        default = Decision()
        arrays = [np.asarray(columns.get(name, getattr(default, name)), np.int64) for name in NAMES]
        for name, column in zip(NAMES, np.broadcast_arrays(*arrays), strict=True):
            setattr(self, name, column)
        self.first = np.where(self.first == 0, self.window, self.first)
        for name in ("held", "summed", "visited"):
            setattr(self, name, np.maximum(getattr(self, name), self.layers))

    @classmethod
    def of(cls, decisions: Sequence[Decision]) -> Decisions:
        return cls(**{name: [getattr(decision, name) for decision in decisions] for name in NAMES})

    def __len__(self) -> int:
        return len(self.rest)

    def __getitem__(self, index: int) -> Decision:
        values: dict[str, Any] = {name: int(getattr(self, name)[index]) for name in NAMES}
        return Decision(**values | {"offload": bool(values["offload"])})

    def take(self, chosen: Any) -> Decisions:
        return Decisions(**{name: getattr(self, name)[chosen] for name in NAMES})

    def replace(self, **columns: Any) -> Decisions:
        return Decisions(**{name: getattr(self, name) for name in NAMES} | columns)

    def joined(self, other: Decisions) -> Decisions:
        return Decisions(**{name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in NAMES})

    @property
    def largest(self) -> Ints:
        """Micro-batches in the largest window: those whose inputs and graphs are there together."""
        return np.maximum(self.first, self.window)


class Windows:
    """The windows of every choice: the first, those alike after it, and the last; a step may have the first alone."""

    def __init__(self, chosen: Decisions, micro_batches: int) -> None:
        first = np.minimum(chosen.first, micro_batches)
        size = np.minimum(chosen.window, micro_batches)
        left = micro_batches - first
        self.several = left > 0
        full, tail = left // size, left % size
        last = np.where(tail > 0, tail, size) * self.several
        middle = np.where(tail > 0, full, full - 1) * self.several
        self.sizes: tuple[Ints, ...] = (first, size, last)
        self.times: tuple[Ints, ...] = (np.ones_like(first), middle, self.several.astype(np.int64))
        self.count: Ints = sum(self.times[1:], self.times[0])
        self.single = self.several & ((first == 1) | ((size == 1) & (middle > 0)) | (last == 1))
        """Whether the step has several windows and one of them is a single micro-batch."""
