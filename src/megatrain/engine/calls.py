"""Who calls the model, and which call of a block this is, in the present forward."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatrain.compute.block import Block
from megatrain.compute.window import OUTSIDE_WINDOW, Seats
from megatrain.store.gradient import CallId
from megatrain.stream.predict import Predictor


class _Own(threading.local):
    """What a thread knows of its own forward."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()
        self.step: int | None = None
        """The step that those calls are of."""
        self.recomputing = False
        self.predictor: Predictor | None = None


class Calls:
    """Gradients are summed by call id, so that the sum does not depend on timing.

    A thread that only evaluates, beside the one that trains, is a visitor: it must not change what the step knows.
    """

    def __init__(self, seats: Seats, lock: threading.RLock) -> None:
        self._seats, self._lock = seats, lock
        self.steps = 0
        self._unfinished: Counter[int] = Counter()
        """Forwards through each block whose backward has not come yet."""
        self._open = 0
        """The same, through all of them together, since the last step or zero_grad."""
        self._trainer: int | None = None
        """The thread that took the last step, or made the first forward that can be trained."""
        self._latest: int | None = None
        """The thread that called the model last."""
        self._several = -2
        """The last step in which several did."""
        self._own = _Own()

    # ---- threads

    def training(self) -> None:
        """The calling thread is the one that trains."""
        self._trainer = threading.get_ident()

    def enter(self) -> bool:
        """The model is called. Whether the calling thread is the one that trains, as far as is known."""
        thread = threading.get_ident()
        if self._trainer is None and torch.is_grad_enabled():
            self._trainer = thread
        # Blocks inside a block are called again in autograd's thread, and micro-batches of a window take turns.
        if self._seats.current() == OUTSIDE_WINDOW and not self._own.recomputing:
            if self._latest not in (None, thread):
                self._several = self.steps
            self._latest = thread
        return self._trainer in (None, thread)

    def crowded(self) -> bool:
        """Whether several threads have run the model in this step or the one before."""
        return self._several + 1 >= self.steps

    def visiting(self) -> bool:
        """Whether the calling thread is a visitor."""
        foreign = self._trainer not in (None, threading.get_ident()) and self._seats.current() == OUTSIDE_WINDOW
        return foreign and not torch.is_grad_enabled()

    def visitors_predictor(self, blocks: Sequence[Block]) -> Predictor:
        """What the calling thread has done so far, and will do next."""
        if self._own.predictor is None:
            self._own.predictor = Predictor()
            self._own.predictor.expect([("inference", block.index) for block in blocks] * 2)
        return self._own.predictor

    # ---- call ids

    def begin(self) -> None:
        """A forward begins, of the whole model or of a part of it: calls of a block are counted from here."""
        self._own.calls, self._own.step = Counter(), self.steps

    def call_id(self, block: Block) -> tuple[CallId, Counter[int]]:
        """The id of this call of a block, and all calls of blocks in this forward so far."""
        if self._open == 0 or self._own.step != self.steps:
            # No forward pass is open: a part of the model called by itself, or another thread (a block called inside
            # another one is called again in autograd's).
            self.begin()
        calls = self._own.calls
        calls[block.index] += 1
        with self._lock:
            self._unfinished[block.index] += 1
            self._open += 1
        if calls[block.index] > 1:
            for slab in block.slabs:
                slab.shared = True
        return (block.index, calls[block.index] - 1), calls.copy()

    @contextmanager
    def counting_from(self, calls: Counter[int]) -> Iterator[None]:
        """A block is computed again: blocks that it calls inside have the call ids that they had in the forward."""
        own = self._own
        before = own.calls, own.step, own.recomputing
        own.calls, own.step, own.recomputing = calls.copy(), self.steps, True
        try:
            yield
        finally:
            own.calls, own.step, own.recomputing = before

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
        self.steps += 1
