"""What lanes do, and what compute waits for: per step always, as a trace of spans when asked.

Work in a thread is timed by the host's clock, work on a CUDA stream by events. Both are brought to one clock by an
event on a stream that is otherwise idle, once per step. Nothing here makes compute wait: a step's events are read when
they have all happened, usually while the next step runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatrain import files
from megatrain.telemetry import trace
from megatrain.telemetry.counters import WeightUses

Measured = Callable[[float], None]
"""Is called with the seconds of a span."""


@dataclass(frozen=True)
class Span:
    """A stretch of work on a lane, in seconds since the timeline started; or a wait of it (or of compute) for `label`,
    which is another lane."""

    lane: str
    label: str
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
    ended: float = 0.0
    """When it ended, in seconds since the epoch."""
    weight_uses: WeightUses = field(default_factory=WeightUses)


@dataclass
class _Page:
    """What one step has collected."""

    step: int
    begin: float
    origin: torch.cuda.Event | None
    spans: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    pending: list[tuple[bool, str, str, torch.cuda.Event, torch.cuda.Event, Measured | None]] = field(
        default_factory=list
    )
    end: float = 0.0
    ended: float = 0.0
    weight_uses: WeightUses = field(default_factory=WeightUses)
    dropped: bool = False
    """Whether it is no part of a step."""

    def add(self, waiting: bool, span: Span) -> None:
        (self.waits if waiting else self.spans).append(span)

    def resolve(self, wait: bool) -> bool:
        """Turn device events into spans; False if some have not happened yet (and `wait` is not set)."""
        if not wait and not all(finish.query() for *_, finish, _ in self.pending):
            return False
        for waiting, lane, label, begin, finish, measured in self.pending:
            if wait:
                finish.synchronize()
            assert self.origin is not None
            start = self.begin + self.origin.elapsed_time(begin) / 1e3
            seconds = begin.elapsed_time(finish) / 1e3
            self.add(waiting, Span(lane, label, start, start + seconds))
            if measured is not None:
                measured(seconds)
        self.pending = []
        return True

    def times(self) -> StepTimes:
        busy = {lane: _length(_union(self.spans, lane)) for lane in sorted({span.lane for span in self.spans})}
        waited = {lane: 0.0 for lane in busy if lane != "compute"}
        for lane in sorted({wait.label for wait in self.waits if wait.lane == "compute"}):
            waits = _union(wait for wait in self.waits if wait.lane == "compute" and wait.label == lane)
            behind = [wait for wait in self.waits if wait.lane == lane]
            for cause in sorted({wait.label for wait in behind}):
                blocked = _union(wait for wait in behind if wait.label == cause)
                waited[cause] = waited.get(cause, 0.0) + _overlap(waits, blocked)
            waited[lane] = waited.get(lane, 0.0) + _length(waits) - _overlap(waits, _union(behind))
        return StepTimes(self.step, self.end - self.begin, busy, waited, self.ended, self.weight_uses)


_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def current_stream(device: torch.device | None) -> torch.cuda.Stream:
    """`torch.cuda.current_stream`, in a tenth of the time: every call of a block asks several times."""
    if device is None or device.index is None:
        return torch.cuda.current_stream(device)
    key = torch._C._cuda_getCurrentStream(device.index)
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = torch.cuda.current_stream(device)
    return stream


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
        """Of the newest step whose times are known."""
        self.listeners: list[Callable[[StepTimes, float, Sequence[Span]], None]] = []
        """Called with the times, the start and the spans of every step, once they are known, in any thread."""
        self._clock = time.perf_counter()
        self._idle = None if device is None else torch.cuda.Stream(device)
        self._closed: list[_Page] = []
        self._page = self._new_page(0)

    # ---- steps

    def cut(self) -> int:
        """A step has been submitted: later work belongs to the next. The number of the step."""
        self._page.end, self._page.ended = self._now(), time.time()
        self._closed.append(self._page)
        self._page = self._new_page(self._page.step + 1)
        if len(self._closed) > UNREAD:
            self.settle(wait=False)
        return self._page.step - 1

    def restart_step(self) -> None:
        """The step begins here: what came since the last one (an evaluation, a save) is not a part of it."""
        if not self.recording:
            # Its waits are still counted; nothing else of it is read.
            self._page.dropped = True
            self._closed.append(self._page)
            self._page = self._new_page(self._page.step)
            self.settle(wait=False)

    def settle(self, wait: bool) -> None:
        """Read the pages that are complete. Takes milliseconds: best while the device has work to go on with."""
        while self._closed and self._closed[0].resolve(wait):
            page = self._closed.pop(0)
            if page.dropped:
                continue
            self.last = page.times()
            for listener in [*self.listeners]:
                listener(self.last, page.begin, page.spans)
            if self.recording:
                self.spans += page.spans

    @property
    def weight_uses(self) -> WeightUses:
        """Those of the current step."""
        return self._page.weight_uses

    # ---- a trace

    def start(self) -> None:
        """Keep spans from now on; the caller has synchronised the engine."""
        self.settle(wait=True)
        self.spans = []
        self._clock = time.perf_counter()
        self._page = self._new_page(self._page.step)
        self.recording = True

    def stop(self) -> None:
        """Resolve device events; the caller has synchronised the engine."""
        self.settle(wait=True)
        self._page.resolve(wait=True)
        self.spans += self._page.spans
        self.recording = False
        self._page = self._new_page(self._page.step)
        self.spans.sort(key=lambda span: (span.start, span.lane))

    # ---- what is timed

    @contextmanager
    def host_span(
        self, lane: str, label: str, waiting: bool = False, measured: Measured | None = None
    ) -> Iterator[None]:
        """Work that the calling thread does, or its wait for another lane."""
        start = self._now()
        try:
            yield
        finally:
            end = self._now()
            if self._room(self._page):
                self._page.add(waiting, Span(lane, label, start, end))
            if measured is not None:
                measured(end - start)

    @contextmanager
    def device_span(
        self, lane: str, label: str, waiting: bool = False, measured: Measured | None = None
    ) -> Iterator[None]:
        """The same of what the calling thread puts on its current CUDA stream."""
        page = self._page
        if not self._room(page):
            yield
            return
        begin, finish = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # Of the timed device, whichever is current; in a lane's thread that is the lane's own stream.
        stream = current_stream(self.device)
        begin.record(stream)
        try:
            yield
        finally:
            finish.record(stream)
            page.pending.append((waiting, lane, label, begin, finish, measured))

    def waiting(self, who: str, on: str, measured: Measured | None = None) -> AbstractContextManager[None]:
        """What happens inside lets `who` go on only after `on`: in this thread, or for compute on its stream. Waits for
        compute are not kept. `measured` is called with the seconds of the wait once they are known."""
        if on in ("", "compute"):
            return nullcontext()
        on_stream = who == "compute" and self.device is not None
        return (self.device_span if on_stream else self.host_span)(who, on, waiting=True, measured=measured)

    # ---- what a trace says

    def busy(self, lane: str) -> float:
        """Seconds in which the lane was working."""
        return _length(_union(self.spans, lane))

    def exposed(self, lane: str, under: str = "compute") -> float:
        """Seconds in which `lane` was working and `under` was not."""
        return self.busy(lane) - _overlap(_union(self.spans, lane), _union(self.spans, under))

    def save(self, path: str | Path) -> None:
        """Write a trace that chrome://tracing and Perfetto open."""
        spans = ((span.lane, span.label, span.start, span.end) for span in self.spans)
        files.write(path, trace.dumped(trace.document(spans)))

    def _room(self, page: _Page) -> bool:
        return self.recording or len(page.spans) + len(page.waits) + len(page.pending) < MOST

    def _now(self) -> float:
        return time.perf_counter() - self._clock

    def _new_page(self, step: int) -> _Page:
        origin = None
        if self.device is not None:
            origin = torch.cuda.Event(enable_timing=True)
            origin.record(self._idle)
            # Nothing else is on that stream: this returns at once, whatever compute is doing.
            origin.synchronize()
        return _Page(step, self._now(), origin)


def _union(spans: Iterable[Span], lane: str | None = None) -> list[tuple[float, float]]:
    """What the spans cover; only those of a lane, if it is named."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((span.start, span.end) for span in spans if lane in (None, span.lane)):
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
