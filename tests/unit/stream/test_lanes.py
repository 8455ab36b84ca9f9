"""Lanes run work in order and after what it waits for. A failure reaches the user once, with its cause."""

import subprocess
import sys
import threading
import time

import pytest

from megatrain.errors import LaneFailed
from megatrain.geometry import LANES
from megatrain.store.ticket import DONE, Wait
from megatrain.stream import lanes as lanes_module
from megatrain.stream.lanes import SyncLanes, ThreadLanes

KINDS = {
    "sync": SyncLanes,
    "threads": ThreadLanes,
    "delayed": lambda: ThreadLanes(seed=5, max_delay=1e-3),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def lanes(request):
    made = request.param()
    yield made
    made.close()


@pytest.fixture
def threads():
    made = ThreadLanes()
    yield made
    made.close()


def fail(error):
    raise error


def test_one_lane_keeps_order(lanes):
    seen = []
    for number in range(50):
        last = lanes["update"].submit(lambda number=number: seen.append(number))
    last.wait()
    assert seen == list(range(50))


def test_work_runs_after_what_it_waits_for(lanes):
    seen = []
    ticket = DONE
    for number in range(30):
        lane = (lanes["h2d"], lanes["d2h"], lanes["update"])[number % 3]
        ticket = lane.submit(lambda number=number: seen.append(number), after=(Wait("it", ticket),))
    ticket.order_stream()
    assert seen == list(range(30))


def test_lanes_run_concurrently(threads):
    """Work on one lane ends only when work on another has run."""
    gate = threading.Event()
    stuck = threads["update"].submit(gate.wait)
    threads["h2d"].submit(gate.set).wait()
    stuck.wait()


def test_the_caller_does_not_wait(threads):
    gate = threading.Event()
    ticket = threads["update"].submit(gate.wait)
    gate.set()
    ticket.wait()


def test_a_mark_is_done_at_once_on_the_cpu(lanes):
    lanes.mark().wait()
    lanes.mark().order_stream()


def test_sync_failures_are_raised_where_they_happen():
    lanes = SyncLanes()
    with pytest.raises(ZeroDivisionError):
        lanes["h2d"].submit(lambda: fail(ZeroDivisionError("here")))
    lanes.check()


def test_a_failure_is_raised_by_its_ticket_with_the_cause(threads):
    cause = ZeroDivisionError("deep inside")
    ticket = threads["update"].submit(lambda: fail(cause), label="layers.3")
    with pytest.raises(
        LaneFailed, match=r"'layers.3' failed on the update lane \(ZeroDivisionError: deep inside\)"
    ) as caught:
        ticket.wait()
    assert caught.value.__cause__ is cause
    with pytest.raises(LaneFailed):
        ticket.order_stream()


def test_check_raises_a_failure_once(threads):
    with pytest.raises(LaneFailed):
        threads["d2h"].submit(lambda: fail(ValueError("lost"))).wait()
    with pytest.raises(LaneFailed, match="lost"):
        threads.check()
    threads.check()


def test_only_the_first_failure_is_kept(threads):
    for number in range(3):
        with pytest.raises(LaneFailed):
            threads["h2d"].submit(lambda number=number: fail(ValueError(f"number {number}"))).wait()
    with pytest.raises(LaneFailed, match="number 0"):
        threads.check()
    threads.check()


def test_work_after_a_failure_does_not_run_and_names_the_cause(threads):
    seen = []
    root = ValueError("root")
    first = threads["h2d"].submit(lambda: fail(root), label="first")
    second = threads["update"].submit(lambda: seen.append(1), after=(Wait("it", first),), label="second")
    third = threads["d2h"].submit(lambda: seen.append(1), after=(Wait("it", second),), label="third")
    with pytest.raises(LaneFailed, match="first") as caught:
        third.wait()
    assert caught.value.__cause__ is root
    assert seen == []
    with pytest.raises(LaneFailed):
        threads.check()
    threads.check()


def test_a_lane_continues_after_a_failure(threads):
    seen = []
    with pytest.raises(LaneFailed):
        threads["update"].submit(lambda: fail(KeyboardInterrupt())).wait()
    threads["update"].submit(lambda: seen.append(1)).wait()
    assert seen == [1]


def test_close_finishes_submitted_work():
    """This includes work that waits for other lanes."""
    lanes = ThreadLanes(seed=1, max_delay=2e-3)
    seen = []
    ticket = DONE
    for number in range(20):
        lane = (lanes["update"], lanes["d2h"], lanes["h2d"])[number % 3]
        ticket = lane.submit(lambda number=number: seen.append(number), after=(Wait("it", ticket),))
    lanes.close()
    assert seen == list(range(20))
    lanes.close()


def test_close_ends_the_threads():
    before = threading.active_count()
    lanes = ThreadLanes()
    assert threading.active_count() == before + sum(lane.runs_on is not None for lane in LANES.values())
    lanes.close()
    assert threading.active_count() == before


def test_a_finished_job_is_released(threads):
    """Its closure may keep buffers of a model alive."""

    class Big:
        pass

    import weakref

    big = Big()
    alive = weakref.ref(big)
    threads["update"].submit(lambda big=big: None).wait()
    del big
    threads["update"].submit(lambda: None).wait()
    assert alive() is None


def test_the_seed_determines_delays():
    def delays(seed):
        lanes = ThreadLanes(seed=seed, max_delay=1.0)
        found = {lane.name: [lane._delay() for _ in range(50)] for lane in lanes._by_name.values()}
        lanes.close()
        return found

    first = delays(1)
    assert first == delays(1)
    assert first != delays(2)
    assert first["h2d"] != first["update"]
    assert all(0.0 <= delay <= 1.0 for lane in first.values() for delay in lane)
    assert all(0 < sum(delay == 0 for delay in lane) < 50 for lane in first.values())


# ---- stalled and dead lanes


def test_a_dead_lane_is_named(threads, monkeypatch):
    monkeypatch.setattr(lanes_module, "_POLL_SECONDS", 0.01)
    threads["update"].close()
    ticket = threads["update"].submit(lambda: None, label="layers.3")
    with pytest.raises(LaneFailed, match=r"update lane has died, so 'layers.3' will never complete"):
        ticket.wait()


def test_a_stalled_lane_is_named_and_then_abandoned(threads, monkeypatch, announced):
    monkeypatch.setattr(lanes_module, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(lanes_module, "WARN_AFTER_SECONDS", 0.05)
    monkeypatch.setattr(lanes_module, "FAIL_AFTER_SECONDS", 0.3)
    release = threading.Event()
    stuck = threads["update"].submit(release.wait, label="layers.7")
    behind = threads["h2d"].submit(lambda: None, after=(Wait("it", stuck),), label="layers.8")
    with pytest.raises(LaneFailed, match=r"update lane is stalled: it has been running 'layers.7' for"):
        behind.wait()
    warnings = [line for line in announced.messages if "makes no progress" in line]
    assert len(warnings) == 1
    assert "update lane" in warnings[0]
    assert "layers.7" in warnings[0]
    release.set()


def test_a_slow_lane_is_waited_for(threads, monkeypatch):
    monkeypatch.setattr(lanes_module, "_POLL_SECONDS", 0.01)
    done = []
    ticket = threads["update"].submit(lambda: (time.sleep(0.2), done.append(1)))
    ticket.wait()
    assert done == [1]


def test_close_abandons_a_stalled_lane(monkeypatch, announced):
    made = ThreadLanes()
    release = threading.Event()
    made["update"].submit(release.wait, label="layers.2")
    made.close(patience=0.2)  # returns although the lane never stops
    assert any(
        "update lane did not stop and was abandoned" in line and "layers.2" in line for line in announced.messages
    )
    release.set()


INTERRUPTED = """
import signal, threading, torch
from tests.tiny import Stack, engine_of, inputs
model = Stack()
engine = engine_of(model, lanes="threads")
optimizer = engine.optimizer(lr=0.1)
model(inputs(0)).sum().backward()
def stuck():
    threading.Timer(0.5, lambda: signal.raise_signal(signal.SIGINT)).start()
    threading.Event().wait()
try:
    with engine:
        engine._lanes["update"].submit(stuck, label="stuck")
        optimizer.step()
        model(inputs(1))
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_gets_through_a_lane_that_never_ends():
    found = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False)
    assert "interrupted" in found.stdout, found.stderr
    assert "update lane did not stop and was abandoned: it has been running 'stuck'" in found.stderr
    assert found.returncode == 0
