"""Which slabs are needed next, as far as uses of blocks can be predicted (stream/predict.py)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from megatrain.store.slab import Slab
from megatrain.stream.predict import BOUNDARY, Predictor

LOOK_AHEAD = 32
"""Expected uses that are worth looking at. Most often the first few are enough; not if most weights are resident, or
some are on disk."""


class Upcoming(NamedTuple):
    """Slabs that are expected to be used together."""

    slabs: Sequence[Slab]
    confidence: float
    """How likely that is, between 0 and 1."""


class _Evaluation(threading.local):
    predictor: Predictor | None = None


class Ahead:
    """Follows the uses of blocks. Call it, and iterate over what it returns, with the fetcher's lock."""

    def __init__(self, slabs: Sequence[Sequence[Slab]]) -> None:
        """`slabs`: those of each block. Until a step has run, blocks are expected in the order that they have here."""
        self._slabs = slabs
        self.predictor = Predictor()
        """Of the training thread. Benchmarks replace it; results do not depend on it."""
        self.predictor.assume([("inference", index) for index in range(len(slabs))] * 2)
        self.predictor.assume([("forward", index) for index in range(len(slabs))])
        self.predictor.assume([("backward", index) for index in reversed(range(len(slabs)))])
        self.predictor.record(BOUNDARY)
        self._evaluation = _Evaluation()
        """An evaluation thread's own, so that it does not disturb that of the training thread."""

    def after(self, phase: str, block: int, evaluating: bool) -> Iterator[Upcoming]:
        """Note a use of a block, given by its index, and return those expected after it, nearest first."""
        predictor = self.predictor
        if evaluating:
            if self._evaluation.predictor is None:
                self._evaluation.predictor = Predictor()
                self._evaluation.predictor.assume([("inference", index) for index in range(len(self._slabs))] * 2)
            predictor = self._evaluation.predictor
        predictor.record((phase, block))
        return self._upcoming(predictor)

    def after_step(self) -> Iterator[Upcoming]:
        """Note a step, and return the uses expected after it."""
        self.predictor.record(BOUNDARY)
        return self._upcoming(self.predictor)

    def _upcoming(self, predictor: Predictor) -> Iterator[Upcoming]:
        for use, confidence in islice(predictor.upcoming(), LOOK_AHEAD):
            if isinstance(use, tuple):
                yield Upcoming(self._slabs[use[1]], confidence)
