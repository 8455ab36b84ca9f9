"""Which call of a block this is, in the present forward, and how many of them still have their backward to come."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from megatrain.compute.block import Block
from megatrain.store.gradient import Place


class Places:
    """Gradients are summed by place, whatever the timing, so each call of a block needs its name."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._own = threading.local()
        self._unfinished: Counter[int] = Counter()
        """Forwards through each block whose backward has not come yet."""
        self._open = 0
        """The same, through all of them together, since the last step or zero_grad."""
        self._steps = 0

    def begin(self) -> None:
        """A forward begins, of the whole model or of a part of it: calls of a block are counted from here."""
        self._own.calls, self._own.step = Counter(), self._steps

    def of(self, block: Block) -> tuple[Place, Counter[int]]:
        """The place of this call of a block, and all calls of blocks in this forward so far."""
        if self._open == 0 or getattr(self._own, "step", None) != self._steps:
            # No forward pass is open: a part of the model called by itself, or another thread (a block called inside
            # another one is called again in autograd's).
            self.begin()
        calls: Counter[int] = self._own.calls
        calls[block.index] += 1
        with self._lock:
            self._unfinished[block.index] += 1
            self._open += 1
        if calls[block.index] > 1:
            for slab in block.slabs:
                slab.shared = True
        return (block.index, calls[block.index] - 1), calls.copy()

    def returned(self, block: Block) -> None:
        """One backward through a block has come."""
        self._unfinished[block.index] -= 1
        self._open = max(0, self._open - 1)

    def all_returned(self, block: int) -> bool:
        """Whether every forward through a block has had its backward."""
        return self._unfinished[block] <= 0

    def give_up(self) -> None:
        """Backwards that have not come will not count."""
        self._open = 0

    def stepped(self) -> None:
        """A step is over."""
        self._unfinished.clear()
        self._open = 0
        self._steps += 1

    @property
    def recomputing(self) -> bool:
        """Whether the calling thread computes a block again."""
        return getattr(self._own, "recomputing", False)

    @contextmanager
    def counting_from(self, calls: Counter[int]) -> Iterator[None]:
        """A block is computed again: blocks that it calls inside have the places that they had in the forward."""
        before = dict(vars(self._own))
        self._own.calls, self._own.step, self._own.recomputing = calls.copy(), self._steps, True
        try:
            yield
        finally:
            vars(self._own).clear()
            vars(self._own).update(before)
