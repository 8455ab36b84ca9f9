"""Who calls the model, and which call of a block this is, in the present forward."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatrain.compute.block import Block
from megatrain.compute.window import OUTSIDE_WINDOW, WindowThreads
from megatrain.store.gradient import CallId
from megatrain.stream.predict import Predictor


class _ThreadState(threading.local):
    """What a thread knows of its own forward."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()
        self.step: int | None = None
        """The step that those calls are of."""
        self.recomputing = False
        self.predictor: Predictor | None = None


class CallTracker:
    """Gradients are summed by call id, so that the sum does not depend on timing.

    A thread that only evaluates, beside the one that trains, is a visitor: it must not change what the step knows.
    """

    def __init__(self, window_threads: WindowThreads, lock: threading.RLock) -> None:
        self._window_threads, self._lock = window_threads, lock
        self.steps = 0
        self._pending: Counter[int] = Counter()
        """Forwards through each block whose backward has not come yet."""
        self._total_pending = 0
        """The same, through all of them together, since the last step or zero_grad."""
        self._training_thread: int | None = None
        """The thread that took the last step, or made the first forward that can be trained."""
        self._last_thread: int | None = None
        """The thread that called the model last."""
        self._last_multithreaded_step = -2
        """The last step in which several did."""
        self._thread = _ThreadState()

    # ---- threads

    def mark_training_thread(self) -> None:
        """The calling thread is the one that trains."""
        self._training_thread = threading.get_ident()

    def enter_model(self) -> bool:
        """The model is called. Whether the calling thread is the one that trains, as far as is known."""
        thread = threading.get_ident()
        if self._training_thread is None and torch.is_grad_enabled():
            self._training_thread = thread
        # Blocks inside a block are called again in autograd's thread, and micro-batches of a window take turns.
        if self._window_threads.current() == OUTSIDE_WINDOW and not self._thread.recomputing:
            if self._last_thread not in (None, thread):
                self._last_multithreaded_step = self.steps
            self._last_thread = thread
        return self._training_thread in (None, thread)

    def multithreaded(self) -> bool:
        """Whether several threads have run the model in this step or the one before."""
        return self._last_multithreaded_step + 1 >= self.steps

    def evaluating(self) -> bool:
        """Whether the calling thread is a visitor."""
        foreign = (
            self._training_thread not in (None, threading.get_ident())
            and self._window_threads.current() == OUTSIDE_WINDOW
        )
        return foreign and not torch.is_grad_enabled()

    def evaluation_predictor(self, blocks: Sequence[Block]) -> Predictor:
        """What the calling thread has done so far, and will do next."""
        if self._thread.predictor is None:
            self._thread.predictor = Predictor()
            self._thread.predictor.assume([("inference", block.index) for block in blocks] * 2)
        return self._thread.predictor

    # ---- call ids

    def start_forward(self) -> None:
        """A forward begins, of the whole model or of a part of it: calls of a block are counted from here."""
        self._thread.calls, self._thread.step = Counter(), self.steps

    def start_call(self, block: Block) -> tuple[CallId, Counter[int]]:
        """The id of this call of a block, and all calls of blocks in this forward so far."""
        if self._total_pending == 0 or self._thread.step != self.steps:
            # No forward pass is open: a part of the model called by itself, or another thread (a block called inside
            # another one is called again in autograd's).
            self.start_forward()
        calls = self._thread.calls
        calls[block.index] += 1
        with self._lock:
            self._pending[block.index] += 1
            self._total_pending += 1
        if calls[block.index] > 1:
            for slab in block.slabs:
                slab.shared = True
        return (block.index, calls[block.index] - 1), calls.copy()

    @contextmanager
    def replay_call_ids(self, calls: Counter[int]) -> Iterator[None]:
        """A block is computed again: blocks that it calls inside have the call ids that they had in the forward."""
        thread = self._thread
        before = thread.calls, thread.step, thread.recomputing
        thread.calls, thread.step, thread.recomputing = calls.copy(), self.steps, True
        try:
            yield
        finally:
            thread.calls, thread.step, thread.recomputing = before

    def backward_done(self, block: Block) -> None:
        """One backward through a block has come."""
        self._pending[block.index] -= 1
        self._total_pending = max(0, self._total_pending - 1)

    def all_backwards_done(self, block: int) -> bool:
        """Whether every forward through a block has had its backward."""
        return self._pending[block] <= 0

    def discard_pending(self) -> None:
        """Backwards that have not come will not count."""
        self._total_pending = 0

    def after_step(self) -> None:
        """A step is over."""
        self._pending.clear()
        self._total_pending = 0
        self.steps += 1
