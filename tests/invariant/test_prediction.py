"""Results do not depend on predictions: right, wrong, none or random ones give the same bits."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator
from typing import Any

import pytest
import torch
from tests.tiny import Stack, engine_of, inputs, roles

from megatrain.stream.lanes import SyncLanes, ThreadLanes
from megatrain.stream.predict import BOUNDARY, Expected, Predictor

DEPTH = 5


class Silent(Predictor):
    def upcoming(self) -> Iterator[Expected]:
        return iter(())


class Backwards(Predictor):
    """Names the uses that are furthest away first."""

    def upcoming(self) -> Iterator[Expected]:
        return iter([*super().upcoming()][::-1])


class Garbage(Predictor):
    """Names blocks at random, several times, in phases that do not exist; and things that are no blocks."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def upcoming(self) -> Iterator[Expected]:
        for _ in range(self._random.randrange(8)):
            phases: list[Hashable] = [("forward", self._random.randrange(DEPTH + 1)), ("lunch", 0), BOUNDARY, 7, None]
            yield Expected(self._random.choice(phases), self._random.choice([-1.0, 0.5, 2.0]))


def run(predictor: Predictor, lanes: Any, slots: int) -> list[Any]:
    """Steps with a changing path, an evaluation in between, and updates during the backward."""
    model = Stack(depth=DEPTH)
    with engine_of(model, lanes=lanes, slots=slots) as engine:
        optimizer = engine.optimizer(lr=0.1)
        engine._step.ahead.predictor = predictor
        seen: list[Any] = []
        for step in range(4):
            with optimizer.final_backward():
                model(inputs(step), skip=[step, 4 - step]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen.append(model(inputs(step), skip=[2] * (step % 2)))
        return [*seen, roles(engine)]


@pytest.mark.parametrize("first", ["training", "evaluation", "evaluation after training"])
def test_the_first_pass_is_prefetched(first: str) -> None:
    """Blocks are expected in the order in which the model registers them. Only the first has to be waited for."""
    model = Stack(depth=DEPTH)
    with engine_of(model) as engine:
        optimizer = engine.optimizer(lr=0.1)
        for training in {"training": [True], "evaluation": [False]}.get(first, [True, False]):
            with torch.set_grad_enabled(training):
                result = model(inputs(0))
            if training:
                result.square().mean().backward()
                optimizer.step()
        # The entry and the layers have rings of their own, and a step prefetches for the next forward.
        assert engine.counters.missed == 1
        assert engine.counters.prefetched > DEPTH


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    return bool(first == second)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("kind", [Predictor, Silent, Backwards, Garbage])
def test_any_prediction_gives_the_same_bits(kind: type[Predictor], slots: int) -> None:
    expected = run(Predictor(), SyncLanes(), 3)
    for lanes in (SyncLanes(), ThreadLanes(seed=slots, max_delay=2e-4)):
        found = run(kind(), lanes, slots)
        assert all(map(same, expected, found))
