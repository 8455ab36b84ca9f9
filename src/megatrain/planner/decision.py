"""What a plan chooses. None of it changes the bits of a result.

Layers are counted from the first one. The first layers are the resident ones: a forward needs them first, so it can
start while the CPU updates the others. The last layers are the ones on disk: they are updated last (planner/disk.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import numpy as np

from megatrain.planner.arrays import Ints

STREAMED, HELD, RESIDENT = range(3)
"""Where the blocks that are not layers (embedding, head, norms) are placed."""
SLOTS = (4, 3, 2, 1)
GRAD_SLOTS = (2, 1)
NONE: Any = 0
ONE: Any = 1
USUAL_SLOTS: Any = 3
USUAL_GRAD_SLOTS: Any = 2
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class _Choices(Generic[Value]):
    """The fields of one decision (integers) or of many (arrays)."""

    other_blocks: Value = NONE
    """Embedding, head and every other block that is not a layer: `STREAMED`, `HELD` (weights and sums) or
    `RESIDENT`."""
    resident_layers: Value = NONE
    """Resident layers. The next three counts include them."""
    held_weights: Value = NONE
    """Layers whose weights stay in VRAM. The weights of the others are fetched."""
    held_gradients: Value = NONE
    """Layers whose gradient sums stay in VRAM."""
    gpu_updates: Value = NONE
    """Layers that are updated on the GPU. If these are more than the resident ones, their states are streamed there,
    and weights and sums of all layers are held."""
    stored_graphs: Value = NONE
    """Layers with policy `store`."""
    offload_inputs: Value = NONE
    """Whether the other layers have policy `offload` (1) or `recompute` (0)."""
    first_window: Value = NONE
    """Micro-batches of the first window; 0: as many as in the others."""
    window: Value = ONE
    """Micro-batches of each window after the first."""
    slots: Value = USUAL_SLOTS
    grad_slots: Value = USUAL_GRAD_SLOTS
    disk_blocks: Value = NONE
    """Blocks whose residual and moments are on disk: layers from the last one, then the other blocks. Resident blocks
    never are."""
    disk_weights: Value = NONE
    """Of these, in the same order, the blocks whose weights are on disk too."""
    disk_gradients: Value = NONE
    """The same for gradients that are not held in VRAM. Those of a step of several windows are never on disk."""
    disk_frozen: Value = NONE
    """Blocks whose frozen weights are on disk, in the same order. Of those with states on disk too, all weights are."""


NAMES = tuple(field.name for field in fields(_Choices))


class Decision(_Choices[int]):
    """One choice."""


class Decisions(_Choices[Ints]):
    """Many choices at once: each field is an array."""

    def __init__(self, **columns: Any) -> None:
        """Arrays of one length, or single values."""
        default = Decision()
        arrays = [np.asarray(columns.get(name, getattr(default, name)), np.int64) for name in NAMES]
        values = dict(zip(NAMES, np.broadcast_arrays(*arrays), strict=True))
        values["first_window"] = np.where(values["first_window"] == 0, values["window"], values["first_window"])
        for name in ("held_weights", "held_gradients", "gpu_updates"):
            values[name] = np.maximum(values[name], values["resident_layers"])
        vars(self).update(values)

    @classmethod
    def of(cls, decisions: Sequence[Decision]) -> Decisions:
        return cls(**{name: [getattr(decision, name) for decision in decisions] for name in NAMES})

    def __len__(self) -> int:
        return len(self.other_blocks)

    def __getitem__(self, index: int) -> Decision:
        return Decision(**{name: int(getattr(self, name)[index]) for name in NAMES})

    def take(self, indices: Any) -> Decisions:
        """The choices at some indices, or where a mask is True."""
        return Decisions(**{name: getattr(self, name)[indices] for name in NAMES})

    def replace(self, **columns: Any) -> Decisions:
        return Decisions(**{name: getattr(self, name) for name in NAMES} | columns)

    def concatenate(self, other: Decisions) -> Decisions:
        return Decisions(**{name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in NAMES})

    @property
    def largest_window(self) -> Ints:
        """Micro-batches in the largest window: their inputs and graphs are in memory at the same time."""
        return np.maximum(self.first_window, self.window)

    @property
    def streams_states(self) -> Any:
        """Whether some layers that are not resident are updated on the GPU."""
        return self.gpu_updates > self.resident_layers


class Windows:
    """The windows of every choice: the first, equal ones after it, and the last. A step may have only the first."""

    def __init__(self, chosen: Decisions, micro_batches: int) -> None:
        first = np.minimum(chosen.first_window, micro_batches)
        size = np.minimum(chosen.window, micro_batches)
        remaining = micro_batches - first
        self.several = remaining > 0
        full, tail = remaining // size, remaining % size
        last = np.where(tail > 0, tail, size) * self.several
        middle = np.where(tail > 0, full, full - 1) * self.several
        self.sizes: tuple[Ints, ...] = (first, size, last)
        self.times: tuple[Ints, ...] = (np.ones_like(first), middle, self.several.astype(np.int64))
        self.count: Ints = sum(self.times[1:], self.times[0])
        self.single = self.several & ((first == 1) | ((size == 1) & (middle > 0)) | (last == 1))
        """Whether the step has several windows and one of them has a single micro-batch."""
