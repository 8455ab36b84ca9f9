"""Replays: the predictor against no prefetch, a static list and the true order, in a model of a tier."""

import json

import pytest
from benchmarks.replay import TIERS, Event, Nothing, Static, Tier, Trace, guesses, read, replay, synthetic

from megatrain.stream.predict import BOUNDARY, Predictor

TRACES = {trace.name: trace for trace in synthetic()}


@pytest.mark.parametrize("tier", TIERS[::2], ids=lambda tier: tier.name)
@pytest.mark.parametrize("name", TRACES)
def test_the_predictor_against_the_others(name, tier):
    """By the seconds that compute waits; after two periods, and from the first use on."""
    trace = TRACES[name]
    for skip in (2 * trace.period, 0):
        results = {kind: replay(trace, tier, guess(), skip) for kind, guess in guesses(trace).items()}
        for result in results.values():
            assert result.arrived + result.late + result.missed == sum(len(e.slabs) for e in trace.events[skip:])
        stalled = {kind: result.stalled for kind, result in results.items()}
        assert stalled["learned"] <= 1.02 * stalled["static"]
        if skip:
            assert results["learned"].seconds <= 1.03 * results["nothing"].seconds
        if skip and trace.periodic:
            assert stalled["learned"] <= 1.01 * stalled["clairvoyant"]


def test_most_traces_are_periodic():
    assert sum(trace.periodic for trace in TRACES.values()) == 9


def test_the_model_of_a_tier():
    """Two slabs of 10 bytes at 10 bytes/s with a latency of 1 s; each use computes for 5 s."""
    trace = Trace("", [Event("a", 5.0, (0,)), Event("b", 5.0, (1,)), Event(BOUNDARY, 1.0)] * 2, {0: 10, 1: 10}, 3)
    tier = Tier("", 1.0, 10.0, 2)
    result = replay(trace, tier, Nothing())
    # Every use waits for 1 s of copying and 1 s of latency, also in the second step, which needs new weights.
    assert (result.stalled, result.seconds) == (8.0, 30.0)
    assert (result.arrived, result.late, result.missed) == (0, 0, 4)
    result = replay(trace, tier, Static(3))
    # In the second step a is copied during the step's 1 s and then for 1 s more, and b behind it.
    assert (result.stalled, result.seconds) == (5.0, 27.0)
    assert (result.arrived, result.late, result.missed) == (1, 1, 2)


def test_a_use_of_more_slabs_than_buffers():
    trace = Trace("", [Event("a", 1.0, (0, 1, 2))] * 3, {0: 10, 1: 10, 2: 10}, 1)
    result = replay(trace, Tier("", 0.0, 10.0, 2), Predictor())
    assert (result.stalled, result.arrived, result.missed) == (3.0, 6, 3)


def test_a_recorded_trace_is_read(tmp_path):
    access = {"role": "weight", "tier": "ram", "bytes": 5, "trained": True}
    lines = [
        {"seconds": 0.0, "phase": "forward", "block": 0, "slab": 0, **access},
        {"seconds": 0.0, "phase": "forward", "block": 0, "slab": 1, **access, "trained": False},
        {"seconds": 0.5, "phase": "step"},
        {"seconds": 2.0, "phase": "period"},
        {"seconds": 2.0, "phase": "forward", "block": 0, "slab": 0, **access},
    ]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = read(tmp_path / "run.jsonl")
    use = ("forward", 0)
    assert trace.events == [Event(use, 0.5, (0, 1)), Event(BOUNDARY, 1.5), Event(use, 0.0, (0,))]
    assert (trace.sizes, trace.period, trace.frozen) == ({0: 5, 1: 5}, 2, {1})
    assert replay(trace, TIERS[0], Predictor()).missed == 3
