"""What a slab needs of the memory it lies in, whichever tier that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(eq=False)
class Buffer:
    """A run of bytes in one tier."""

    bytes: torch.Tensor
    pinned: bool
    """Whether copies between it and the device need no staging."""

    @property
    def nbytes(self) -> int:
        return self.bytes.numel()

    def view(self, dtype: torch.dtype) -> torch.Tensor:
        return self.bytes.view(dtype)


class Memory(Protocol):
    """One tier."""

    tier: str
    """Its name: a key of `megatrain.geometry.TIERS`, which says what lanes move and update it."""

    def allocate(self, nbytes: int, *, transferred: bool) -> Buffer:
        """Zeroed memory; `transferred` if the device copies from or to it."""

    def free(self, buffer: Any) -> None:
        """Give a buffer of this tier back; the caller has waited for all work on it (on the device: its stream has)."""


@dataclass
class Homes:
    """Where a slab keeps its weight, its states (residual and moments) and its gradient sum, between uses."""

    weight: Memory
    states: Memory
    sums: Memory
    holds_weight: bool = False
    """Whether the device has a copy of the weight that outlives one use."""
    streams_states: bool = False
    """Whether its states come to the device to be updated there, as long as weight and sum are there too."""

    def __post_init__(self) -> None:
        if self.weight.tier == "vram":
            assert self.states.tier == "vram", "a weight lives in GPU memory only together with its states"

    @classmethod
    def all_in(cls, memory: Memory) -> Homes:
        """All in one tier."""
        return cls(memory, memory, memory)
