"""Prefetching on a GPU: every use of weights is counted once, and none is missed once the order is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import small

import megatrain as mt


@pytest.mark.parametrize("slots", [1, 3])
def test_every_use_is_counted_once(slots: int) -> None:
    engine = mt.Engine(small.llama(), device="cuda", debug=mt.Debug(slots=slots))
    optimizer = engine.optimizer()
    fetcher, timeline, counters = engine._step.fetcher, engine._lanes.timeline, engine.counters
    pin, pinned = fetcher._pin, 0

    def counting(slabs: Any, lease: Any) -> None:
        nonlocal pinned
        pinned += len(slabs)
        pin(slabs, lease)

    fetcher._pin = counting  # type: ignore[method-assign]
    steps = []
    timeline.listeners.append(lambda times, *_: steps.append(times.weight_uses))
    for seed in range(6):
        batch = {name: tensor.cuda() for name, tensor in small.batch(seed=seed).items()}
        engine.model(**batch).loss.backward()
        if seed % 2:
            with torch.no_grad():
                engine.model(**batch)
        optimizer.step()
        optimizer.zero_grad()
    engine.synchronize()
    timeline.settle(wait=True)
    assert counters.arrived + counters.late + counters.missed == pinned > 0
    assert [counters.arrived, counters.late, counters.missed] == [
        sum(getattr(step, name) for step in steps) for name in ("arrived", "late", "missed")
    ]
    # The evaluation is new in the second step, and expected too early or too late until its period is known.
    assert all(step.missed > 0 for step in steps) if slots == 1 else steps[-1].missed == 0
    engine.close()
