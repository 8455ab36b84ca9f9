"""Offloaded tensors: where one is, and which ones the backward pass needs after it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megatrain.store.memory import Buffer, Memory
from megatrain.store.ticket import DONE, Order, Ticket


@dataclass(eq=False)
class Place:
    """Memory in RAM or on disk that holds one offloaded tensor at a time."""

    memory: Memory
    buffer: Buffer
    order: Order
    target: torch.Tensor | None = None
    """The device tensor that the content is being copied to. An abandoned backward pass never asks for it, so the
    reference stays here until compute is ordered after the copy: the allocator would otherwise reuse memory that is
    still being written."""
    copy_back: Ticket = DONE

    @property
    def on_disk(self) -> bool:
        return self.memory.tier == "disk"

    def take_target(self) -> torch.Tensor | None:
        """The device tensor, if a copy back was started; compute is then ordered after that copy."""
        target, self.target = self.target, None
        if target is not None:
            self.copy_back.order_stream()
        return target


class Turn:
    """Tensors of one call of a block, or of one call by each micro-batch of a window. Backward passes take turns in the
    reverse order, and the tensors of a turn in the order of the forward."""

    def __init__(self, block: str = "", previous: Turn | None = None) -> None:
        self.block = block
        self.callers: set[int] = set()
        """Threads that made these calls."""
        self.tensors: list[Callable[[], OffloadedTensor | None]] = []
        """Weak references: the graph keeps its tensors, and they keep their turn."""
        self.previous: Callable[[], Turn | None] = (lambda: None) if previous is None else weakref.ref(previous)


@dataclass(eq=False)
class OffloadedTensor:
    """One tensor in RAM or on disk."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    place: Place
    turn: Turn
    restored: bool = False

    def __post_init__(self) -> None:
        self._number = len(self.turn.tensors)
        self.turn.tensors.append(weakref.ref(self))

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in memory that begins with its bytes."""
        return memory[: self.nbytes].view(self.dtype).view(self.shape)

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def upcoming(self) -> Iterator[OffloadedTensor]:
        """Tensors that the backward should need after this one, soonest first. A wrong order costs only time."""
        turn: Turn | None = self.turn
        first = self._number + 1
        while turn is not None:
            for reference in turn.tensors[first:]:
                tensor = reference()
                if tensor is not None and not tensor.restored:
                    yield tensor
            turn, first = turn.previous(), 0
