"""What lanes do, and what compute waits for: per step always, as a trace of spans when asked.

Work in a thread is timed by the host's clock, work on a CUDA stream by events. Both are brought to one clock by an
event on a stream that is otherwise idle, once per step. Nothing here makes compute wait: a step's events are read when
they have all happened, usually while the next step runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatrain import files


@dataclass(frozen=True)
class Span:
    """A stretch of work on a lane, in seconds since the timeline started."""

    lane: str
    label: str
    start: float
    end: float


@dataclass(frozen=True)
class Wait:
    """A stretch in which `who` (a lane, or compute) could not go on before `on` was done."""

    who: str
    on: str
    start: float
    end: float


@dataclass(frozen=True)
class StepTimes:
    """One step, from the end of the one before to its own."""

    step: int
    seconds: float
    busy: dict[str, float]
    """Seconds in which each lane was working."""
    waited: dict[str, float]
    """Seconds in which compute waited for each lane. Where a copy could not start because an update was not done, the
    wait counts for the update."""


@dataclass
class _Page:
    """What one step has collected."""

    step: int
    begin: float
    origin: torch.cuda.Event | None
    spans: list[Span] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    pending: list[tuple[str, str, bool, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    end: float = 0.0

    def resolve(self, wait: bool) -> bool:
        """Turn device events into spans; False if some have not happened yet (and `wait` is not set)."""
        if not wait and not all(finish.query() for *_, finish in self.pending):
            return False
        for lane, label, waiting, begin, finish in self.pending:
            if wait:
                finish.synchronize()
            assert self.origin is not None
            start = self.begin + self.origin.elapsed_time(begin) / 1e3
            end = start + begin.elapsed_time(finish) / 1e3
            if waiting:
                self.waits.append(Wait(lane, label, start, end))
            else:
                self.spans.append(Span(lane, label, start, end))
        self.pending = []
        return True

    def times(self) -> StepTimes:
        lanes = sorted({span.lane for span in self.spans})
        busy = {lane: _length(_union(span for span in self.spans if span.lane == lane)) for lane in lanes}
        waited = {lane: 0.0 for lane in lanes if lane != "compute"} | self._waited()
        return StepTimes(self.step, self.end - self.begin, busy, waited)

    def _waited(self) -> dict[str, float]:
        waited: dict[str, float] = {}
        for lane in sorted({wait.on for wait in self.waits if wait.who == "compute"}):
            own = _union(wait for wait in self.waits if wait.who == "compute" and wait.on == lane)
            behind = {wait.on for wait in self.waits if wait.who == lane}
            for cause in sorted(behind - {"compute"}):
                blocked = _union(wait for wait in self.waits if wait.who == lane and wait.on == cause)
                waited[cause] = waited.get(cause, 0.0) + _overlap(own, blocked)
            blocked = _union(wait for wait in self.waits if wait.who == lane and wait.on != "compute")
            waited[lane] = waited.get(lane, 0.0) + _length(own) - _overlap(own, blocked)
        return waited


UNREAD = 2
"""Steps whose events may wait to be read."""
MOST = 1 << 15
"""Entries of a page that are kept when no trace was asked for: evaluation and generation run on without a step."""


class Timeline:
    """Collects spans and waits, a page per step."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        """A CUDA device whose streams are timed; None: the host alone."""
        self.recording = False
        self.spans: list[Span] = []
        self.last: StepTimes | None = None
        """The newest step whose times are known."""
        self._clock = time.perf_counter()
        self._steps = 0
        self._idle: torch.cuda.Stream | None = None
        self._closed: list[_Page] = []
        self._page = self._new_page()

    # ---- steps

    def cut(self) -> None:
        """A step has been submitted: later work belongs to the next."""
        self._page.end = self._now()
        self._closed.append(self._page)
        self._steps += 1
        self._page = self._new_page()
        if len(self._closed) > UNREAD:
            self.settle(wait=False)

    def settle(self, wait: bool) -> None:
        """Read the pages that are complete. Takes milliseconds: best while the device has work to go on with."""
        while self._closed and self._closed[0].resolve(wait):
            page = self._closed.pop(0)
            self.last = page.times()
            self._keep(page)

    # ---- a trace

    def start(self) -> None:
        """Keep spans from now on; the caller has synchronised the engine."""
        self.settle(wait=True)
        self.spans = []
        self._clock = time.perf_counter()
        self._page = self._new_page()
        self.recording = True

    def stop(self) -> None:
        """Resolve device events; the caller has synchronised the engine."""
        self.settle(wait=True)
        self._page.resolve(wait=True)
        self._keep(self._page)
        self.recording = False
        self._page = self._new_page()
        self.spans.sort(key=lambda span: (span.start, span.lane))

    # ---- what is timed

    @contextmanager
    def host_span(self, lane: str, label: str) -> Iterator[None]:
        """Work that the calling thread does."""
        start = self._now()
        try:
            yield
        finally:
            if self._room(self._page):
                self._page.spans.append(Span(lane, label, start, self._now()))

    @contextmanager
    def device_span(self, lane: str, label: str) -> Iterator[None]:
        """Work that the calling thread puts on its current CUDA stream."""
        with self._events(lane, label, waiting=False):
            yield

    @contextmanager
    def waiting(self, who: str, on: str) -> Iterator[None]:
        """What happens inside lets `who` go on only after `on`: in this thread, or for compute on its stream."""
        if who == "compute" and self.device is not None:
            with self._events(who, on, waiting=True):
                yield
            return
        start = self._now()
        try:
            yield
        finally:
            if self._room(self._page):
                self._page.waits.append(Wait(who, on, start, self._now()))

    @contextmanager
    def _events(self, lane: str, label: str, waiting: bool) -> Iterator[None]:
        page = self._page
        if not self._room(page):
            yield
            return
        begin, finish = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # Of the timed device, whichever is current; in a lane's thread that is the lane's own stream.
        stream = torch.cuda.current_stream(self.device)
        begin.record(stream)
        try:
            yield
        finally:
            finish.record(stream)
            page.pending.append((lane, label, waiting, begin, finish))

    # ---- what a trace says

    def busy(self, lane: str) -> float:
        """Seconds in which the lane was working."""
        return _length(_union(span for span in self.spans if span.lane == lane))

    def exposed(self, lane: str, under: str = "compute") -> float:
        """Seconds in which `lane` was working and `under` was not."""
        return self.busy(lane) - _overlap(
            _union(span for span in self.spans if span.lane == lane),
            _union(span for span in self.spans if span.lane == under),
        )

    def save(self, path: str | Path) -> None:
        """Write a trace that chrome://tracing and Perfetto open."""
        lanes = sorted({span.lane for span in self.spans})
        events = [
            {
                "name": span.label,
                "cat": span.lane,
                "ph": "X",
                "pid": 0,
                "tid": lanes.index(span.lane),
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
            }
            for span in self.spans
        ]
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": index, "args": {"name": lane}}
            for index, lane in enumerate(lanes)
        ]
        files.write(path, json.dumps({"traceEvents": names + events}))

    def _room(self, page: _Page) -> bool:
        return self.recording or len(page.spans) + len(page.waits) + len(page.pending) < MOST

    def _keep(self, page: _Page) -> None:
        if self.recording:
            self.spans += page.spans

    def _now(self) -> float:
        return time.perf_counter() - self._clock

    def _new_page(self) -> _Page:
        origin = None
        if self.device is not None:
            if self._idle is None:
                self._idle = torch.cuda.Stream(self.device)
            origin = torch.cuda.Event(enable_timing=True)
            origin.record(self._idle)
            # Nothing else is on that stream: this returns at once, whatever compute is doing.
            origin.synchronize()
        return _Page(self._steps, self._now(), origin)


def _union(stretches: Iterator[Span] | Iterator[Wait]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted((stretch.start, stretch.end) for stretch in stretches):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def _overlap(left: list[tuple[float, float]], right: list[tuple[float, float]]) -> float:
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total
