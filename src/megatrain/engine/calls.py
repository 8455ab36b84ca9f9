"""Which thread runs the model, and which call of a block this is within the forward."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from megatrain.compute.block import Block
from megatrain.compute.node import CallInfo
from megatrain.compute.window import OUTSIDE_WINDOW, WindowThreads


class _ThreadState(threading.local):
    """The state of one thread's forward."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()
        self.step: int | None = None
        """The step that `calls` belongs to."""
        self.recomputing = False


class CallTracker:
    """Numbers the calls of each block and counts those without a backward.

    Gradients are summed by call id, so the sum does not depend on timing.
    """

    def __init__(self, window_threads: WindowThreads, lock: threading.RLock) -> None:
        self._window_threads, self._lock = window_threads, lock
        self.steps = 0
        self._pending: Counter[int] = Counter()
        """Block → forwards in this step whose backward has not run yet."""
        self._total_pending = 0
        """The same for all blocks, since the last step or zero_grad."""
        self._training_thread: int | None = None
        """The thread of the last step; before the first step, of the first forward with gradients."""
        self._last_thread: int | None = None
        """The thread that called the model last."""
        self._last_multithreaded_step = -2
        """The last step in which several threads called the model."""
        self._thread = _ThreadState()

    # ---- threads

    def mark_training_thread(self) -> None:
        """Make the calling thread the training thread."""
        self._training_thread = threading.get_ident()

    def enter_model(self) -> bool:
        """Note that the calling thread calls the model. Returns False if another thread is the training thread."""
        thread = threading.get_ident()
        if self._training_thread is None and torch.is_grad_enabled():
            self._training_thread = thread
        # A recompute may run in autograd's thread, and micro-batches of a window never run at the same time.
        if self._window_threads.current() == OUTSIDE_WINDOW and not self._thread.recomputing:
            if self._last_thread not in (None, thread):
                self._last_multithreaded_step = self.steps
            self._last_thread = thread
        return self._training_thread in (None, thread)

    def multithreaded(self) -> bool:
        """Whether several threads ran the model in this step or the previous one."""
        return self._last_multithreaded_step + 1 >= self.steps

    def evaluating(self) -> bool:
        """Whether the calling thread only evaluates, beside the training thread."""
        if torch.is_grad_enabled() or self._window_threads.current() != OUTSIDE_WINDOW:
            return False
        return self._training_thread not in (None, threading.get_ident())

    # ---- call ids

    def start_forward(self) -> None:
        """Count calls from zero: a forward of the model, or of a part of it, begins."""
        self._thread.calls, self._thread.step = Counter(), self.steps

    def start_call(self, block: Block, policy: str) -> CallInfo:
        """Register a call of a block that will be differentiated."""
        if self._total_pending == 0 or self._thread.step != self.steps:
            # No forward pass is open in this thread: part of the model was called directly, or autograd's thread
            # recomputes a block that contains this one.
            self.start_forward()
        calls = self._thread.calls
        calls[block.index] += 1
        with self._lock:
            self._pending[block.index] += 1
            self._total_pending += 1
        if calls[block.index] > 1:
            for slab in block.slabs:
                slab.shared = True
        call_id = block.index, calls[block.index] - 1
        return CallInfo(call_id, policy, self.multithreaded, partial(self._replay_call_ids, calls.copy()))

    @contextmanager
    def _replay_call_ids(self, calls: Counter[int]) -> Iterator[None]:
        """Inside, nested blocks get the call ids that they had in the original forward."""
        thread = self._thread
        before = thread.calls, thread.step, thread.recomputing
        thread.calls, thread.step, thread.recomputing = calls.copy(), self.steps, True
        try:
            yield
        finally:
            thread.calls, thread.step, thread.recomputing = before

    def backward_done(self, block: Block) -> None:
        self._pending[block.index] -= 1
        self._total_pending = max(0, self._total_pending - 1)

    def all_backwards_done(self, block: int) -> bool:
        """Whether every forward through the block has had its backward."""
        return self._pending[block] <= 0

    def discard_pending(self) -> None:
        """Stop waiting for missing backwards."""
        self._total_pending = 0

    def after_step(self) -> None:
        self._pending.clear()
        self._total_pending = 0
        self.steps += 1
