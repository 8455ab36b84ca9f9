"""What a slab needs of the memory it lies in, whichever tier that is."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Buffer(Protocol):
    """A run of bytes. `pinned` says whether copies between it and the device need no staging."""

    nbytes: int
    pinned: bool
    bytes: torch.Tensor

    def view(self, dtype: torch.dtype) -> torch.Tensor: ...


class Memory(Protocol):
    """One tier."""

    tier: str
    """"ram" or "vram"."""
    held: int
    """Bytes that have been allocated."""

    def allocate(self, nbytes: int, *, transferred: bool) -> Buffer:
        """Zeroed memory; `transferred` if the device copies from or to it."""

    def free(self, buffer: Any) -> None:
        """Give a buffer of this tier back; the caller has waited for all work on it."""
