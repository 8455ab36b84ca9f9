"""The timeline of lanes and the times of a step."""

import json
import threading
from contextlib import contextmanager

import pytest
from tests.tiny import Stack, engine_of, inputs

from megatrain.store.ticket import Wait
from megatrain.stream.lanes import DiskLanes
from megatrain.stream.timeline import Span, Timeline, _Page


def timeline(*spans):
    made = Timeline()
    made.spans = [Span(lane, label, start, end) for lane, label, start, end in spans]
    return made


def test_nothing_is_recorded_before_start():
    record = Timeline()
    with record.host_span("h2d", "a"):
        pass
    assert record.spans == []


def test_spans_while_recording():
    record = Timeline()
    record.start()
    with record.host_span("h2d", "a"):
        with record.host_span("compute", "b"):
            pass
    with pytest.raises(ZeroDivisionError), record.host_span("h2d", "c"):
        raise ZeroDivisionError
    record.stop()
    with record.host_span("h2d", "late"):
        pass
    assert [(span.lane, span.label) for span in record.spans] == [("h2d", "a"), ("compute", "b"), ("h2d", "c")]
    outer, inner, last = record.spans
    assert 0 <= outer.start <= inner.start <= inner.end <= outer.end <= last.start <= last.end


def test_starting_again_clears_the_record():
    record = timeline(("h2d", "old", 0.0, 1.0))
    record.start()
    assert record.spans == []


def test_busy_counts_overlaps_once():
    record = timeline(("h2d", "a", 0, 2), ("h2d", "b", 1, 3), ("h2d", "c", 5, 6), ("compute", "d", 0, 9))
    assert record.busy("h2d") == 4
    assert record.busy("d2h") == 0


def test_exposed_is_what_compute_does_not_hide():
    record = timeline(("h2d", "a", 0, 4), ("compute", "x", 1, 2), ("compute", "y", 3, 6), ("h2d", "b", 5, 8))
    assert record.exposed("h2d") == 7 - (1 + 1 + 1)
    assert record.exposed("h2d", under="d2h") == 7
    assert record.exposed("compute", under="h2d") == 4 - 3


def test_saved_trace_opens_as_json(tmp_path):
    timeline(("h2d", "a", 0.5, 1.0), ("compute", "x", 1.0, 2.0)).save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    work = [(names[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert sorted(work) == [("compute", "x", 1e6, 1e6), ("h2d", "a", 5e5, 5e5)]


@pytest.mark.parametrize("lanes", ["sync", "threads"])
def test_a_step_shows_every_lane(lanes):
    model = Stack()
    with engine_of(model, lanes=lanes, slots=1) as engine:
        optimizer = engine.optimizer()
        with engine.trace() as record:
            for seed in range(2):
                model(inputs(seed)).sum().backward()
            optimizer.step()
        found = {(span.lane, span.label) for span in record.spans}
        for name in ("entry", "layers.0", "layers.2"):
            assert {("compute", f"forward {name}"), ("compute", f"backward {name}")} <= found
            assert {("h2d", name), ("d2h", name), ("update", name)} <= found
        assert ("update", "norm") in found
        count = len(record.spans)
        model(inputs(3))
        engine.synchronize()
        assert len(record.spans) == count


# ---- waits of a step


def page(spans=(), waits=()):
    return _Page(
        3,
        0.0,
        None,
        [Span(lane, "", start, end) for lane, start, end in spans],
        [Span(who, on, start, end) for who, on, start, end in waits],
        end=10.0,
    )


def test_a_wait_counts_for_the_lane_that_was_waited_for():
    times = page([("h2d", 0, 2), ("h2d", 1, 3)], [("compute", "h2d", 1, 3), ("compute", "d2h", 5, 6)]).times()
    assert (times.step, times.seconds) == (3, 10.0)
    assert times.busy == {"h2d": 3}
    assert times.waited == {"d2h": 1, "h2d": 2}


def test_a_wait_for_a_copy_that_waits_for_an_update_counts_for_the_update():
    waits = [("compute", "h2d", 2, 8), ("h2d", "update", 1, 5), ("h2d", "update", 4, 6), ("update", "d2h", 0, 9)]
    assert page(waits=waits).times().waited == {"h2d": 2, "update": 4}


def test_every_step_is_timed():
    model = Stack()
    engine = engine_of(model, lanes="threads")
    optimizer = engine.optimizer(lr=0.1)
    assert engine.step_times is None
    slow, seen = threading.Event(), set()
    waiting = engine._lanes.timeline.waiting

    @contextmanager
    def observed(lane, cause, *measured):
        with waiting(lane, cause, *measured):
            seen.add((lane, cause))
            if {("compute", "h2d"), ("h2d", "update")} <= seen:
                threading.Timer(1.0, slow.set).start()
            yield

    for step in range(3):
        model(inputs(step)).square().mean().backward()
        if step == 1:
            # The update of this step starts only after compute has waited for this, through a copy.
            engine._lanes.timeline.waiting = observed
            engine._lanes["update"].submit(slow.wait, label="in the way")
        optimizer.step()
        optimizer.zero_grad()
    engine.synchronize()
    times = engine.step_times
    assert times.step == 2
    assert times.waited["update"] > 0.2
    assert times.waited["update"] > 10 * times.waited["d2h"]
    assert times.busy["update"] >= 0.9
    assert times.seconds > times.waited["update"]
    engine.close()


def test_waits_outside_steps_are_measured():
    record, measured, times = Timeline(), [], []
    record.listeners.append(lambda *page: times.append(page))
    for _ in range(5):
        with record.waiting("compute", "h2d", measured.append):
            pass
        record.restart_step()
    assert len(measured) == 5
    assert record._closed == times == []


def test_pages_do_not_pile_up():
    model = Stack()
    engine = engine_of(model)
    optimizer = engine.optimizer(lr=0.1)
    for step in range(20):
        model(inputs(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(engine._lanes.timeline._closed) == 1  # read in the next step, or on request
    assert engine.step_times.step == 19
    assert engine._lanes.timeline._closed == []
    assert engine._lanes.timeline.spans == []
    assert engine.step_times.step == 19


def test_what_runs_inline_lets_compute_wait_for_the_disk():
    lanes, slow = DiskLanes(), threading.Event()
    update = lanes["disk_update"].submit(slow.wait, label="update")
    threading.Timer(0.05, slow.set).start()
    lanes["h2d"].submit(lambda: None, after=(Wait("weight written", update),), label="fetch")
    lanes.timeline.cut()
    lanes.timeline.settle(wait=True)
    lanes.close()
    assert lanes.timeline.last.waited["disk_update"] > 0
