"""The interface of a memory tier, and which tier each role of a slab lives in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(eq=False)
class Buffer:
    """Contiguous bytes in one tier."""

    bytes: torch.Tensor
    pinned: bool
    """Whether the device can copy from and to it without staging."""

    @property
    def nbytes(self) -> int:
        return self.bytes.numel()

    def view(self, dtype: torch.dtype) -> torch.Tensor:
        return self.bytes.view(dtype)

    def read(self, start: int, end: int) -> torch.Tensor:
        """The bytes from `start` to `end`: a view, or a copy of what is on disk."""
        return self.bytes[start:end]

    @contextmanager
    def changing(self, start: int, end: int) -> Iterator[torch.Tensor]:
        """The bytes to be changed in place; what is on disk is written when the context ends."""
        yield self.bytes[start:end]

    def zero(self, start: int, end: int) -> None:
        self.bytes[start:end].zero_()

    def set_constant(self, constant: bool) -> None:
        """Say whether updates leave it as it is. A tier may count what a step writes; this one does not."""

    def holds_fp32(self) -> None:
        """Say that all bytes are FP32 numbers. A tier may code them losslessly; this one does not."""


class Memory(Protocol):
    """One tier."""

    tier: str
    """A key of `megatrain.geometry.TIERS`."""

    def allocate(self, nbytes: int, *, transferred: bool) -> Buffer:
        """Zeroed memory. `transferred`: the device copies from or to it."""

    def free(self, buffer: Any) -> None:
        """Free a buffer. All work on it must be done (on the device: ordered before the current stream)."""


@dataclass
class Homes:
    """The tiers in which a slab keeps its weight, its states (residual and moments) and its gradient sum."""

    weight: Memory
    states: Memory
    sums: Memory
    holds_weight: bool = False
    """Whether a copy of the weight stays on the device between uses."""
    streams_states: bool = False
    """Whether states are streamed to the device for their update, given that weight and sum are held there."""
    ram: Memory | None = None
    """Memory for copies in transit; None: that of the weight."""
    gradients: Memory | None = None
    """Where a gradient that is complete waits for its update; None: where sums are."""

    def __post_init__(self) -> None:
        if self.weight.tier == "vram":
            assert self.states.tier == "vram", "a weight lives in GPU memory only together with its states"

    @property
    def complete_gradients(self) -> Memory:
        """Where gradients that are complete wait for their update."""
        return self.sums if self.gradients is None else self.gradients

    @property
    def transit(self) -> Memory:
        """Where data waits on its way between the device and its home."""
        return self.weight if self.ram is None else self.ram

    @classmethod
    def all_in(cls, memory: Memory) -> Homes:
        return cls(memory, memory, memory)
