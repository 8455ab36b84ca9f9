"""Lanes that issue work and do it later, as CUDA streams: a thread of the CPU must not take issued work for done.

A lane of a stream has two threads here. The first issues work and finishes its ticket; the second does the work, after
the work of other streams that it was ordered after. `stream/cuda.py` does the same with events.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from tests.races import test_delays as scenarios
from tests.races.test_delays import is_detected
from tests.tiny import differences

from megatrain.geometry import LANES
from megatrain.store.ticket import Wait
from megatrain.stream.lanes import HostTicket, Lane, Lanes, SyncLanes, ThreadLane, Work

MAX_DELAY = 1e-3
_issuing = threading.local()
"""`after`: what the work that this thread is issuing must come after."""


class StreamTicket(HostTicket):
    """`finish` means issued."""

    def __init__(self, worker: ThreadLane, label: str) -> None:
        super().__init__(worker, label)
        self.over = threading.Event()

    @property
    def done(self) -> bool:
        return super().done and self.over.is_set()

    def wait(self) -> None:
        super().wait()
        self.over.wait()

    def order_stream(self) -> None:
        after = getattr(_issuing, "after", None)
        if after is None:
            # Compute is the calling thread.
            self.wait()
        else:
            super().wait()
            after.append(self.over)


class StreamLane(ThreadLane):
    tickets = StreamTicket
    worker = "{}-issue"

    def __init__(self, name: str, lanes: Lanes, delay: Callable[[], float]) -> None:
        self._stream: queue.SimpleQueue[tuple[list[threading.Event], Work, threading.Event] | None]
        self._stream, self._pause = queue.SimpleQueue(), delay
        threading.Thread(target=self._execute, daemon=True).start()
        super().__init__(name, lanes)

    def _do(self, work: Work, after: Sequence[Wait], ticket: HostTicket) -> None:
        assert isinstance(ticket, StreamTicket)
        _issuing.after = []
        for _, earlier in after:
            earlier.order_stream()
        self._stream.put((_issuing.after, work, ticket.over))

    def _execute(self) -> None:
        while (item := self._stream.get()) is not None:
            after, work, over = item
            for event in after:
                event.wait()
            time.sleep(self._pause())
            work()
            over.set()
            del item, work

    def close(self, patience: float | None = None) -> None:
        super().close(patience)
        self._stream.put(None)


class StreamLanes(Lanes):
    def __init__(self, seed: int, max_delay: float = MAX_DELAY) -> None:
        self._seed, self._max_delay = seed, max_delay
        super().__init__()

    def _make(self, name: str) -> Lane:
        delay = partial(random.Random(f"{self._seed}/{name}").uniform, 0.0, self._max_delay)
        return StreamLane(name, self, delay) if LANES[name].runs_on == "stream" else ThreadLane(name, self, delay)


@pytest.mark.parametrize("scenario", scenarios.SCENARIOS)
def test_results_do_not_depend_on_when_issued_work_is_done(scenario: Callable[[Lanes], list[Any]]) -> None:
    expected = scenario(SyncLanes())
    for seed in range(3):
        assert differences(scenario(StreamLanes(seed)), expected) == [], seed


@pytest.mark.parametrize(
    "scenario",
    [scenarios.train, scenarios.held, scenarios.all_on_disk, scenarios.more_slots_than_staging,
     scenarios.inputs_on_disk],
)  # fmt: skip
def test_a_thread_that_waits_only_until_work_is_issued_is_detected(
    scenario: Callable[[Lanes], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = scenario(SyncLanes())
    monkeypatch.setattr(StreamTicket, "wait", HostTicket.wait)
    assert is_detected(lambda seed: scenario(StreamLanes(seed, max_delay=1e-2)), expected)
