"""Which threads run the model: the one that trains, its micro-batches in a window, and visitors beside it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from megatrain.compute.block import Block
from megatrain.compute.window import OUTSIDE_WINDOW, Seats
from megatrain.stream.predict import Predictor


class Threads:
    """A thread that only evaluates is a visitor: it must not change what the step knows of itself."""

    def __init__(self, seats: Seats) -> None:
        self._seats = seats
        self._trainer: int | None = None
        """The thread that took the last step, or made the first forward that can be trained."""
        self._latest: int | None = None
        """The thread that called the model last."""
        self._several = -2
        """The last step in which several did."""
        self._own = threading.local()

    def training(self) -> None:
        """The calling thread is the one that trains."""
        self._trainer = threading.get_ident()

    def enter(self, step: int, recomputing: bool) -> bool:
        """The model is called. Whether the calling thread is the one that trains, as far as is known."""
        thread = threading.get_ident()
        if self._trainer is None and torch.is_grad_enabled():
            self._trainer = thread
        # Blocks inside a block are called again in autograd's thread, and micro-batches of a window take turns.
        if self._seats.current() == OUTSIDE_WINDOW and not recomputing:
            if self._latest not in (None, thread):
                self._several = step
            self._latest = thread
        return self._trainer in (None, thread)

    def crowded(self, step: int) -> bool:
        """Whether several threads have run the model in this step or the one before."""
        return self._several + 1 >= step

    def visiting(self) -> bool:
        """Whether the calling thread only evaluates, beside the one that trains."""
        foreign = self._trainer not in (None, threading.get_ident()) and self._seats.current() == OUTSIDE_WINDOW
        return foreign and not torch.is_grad_enabled()

    def predictor(self, blocks: Sequence[Block]) -> Predictor:
        """What a visitor has done so far, and will do next."""
        found: Predictor | None = getattr(self._own, "predictor", None)
        if found is None:
            found = self._own.predictor = Predictor()
            found.expect([("inference", block.index) for block in blocks] * 2)
        return found
