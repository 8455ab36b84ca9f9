"""A record of what each lane did and when, and how much of it compute had to wait for.

Off by default. On CUDA, spans are pairs of events, resolved when recording ends; on the CPU they are clock readings.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Span:
    """One piece of work: seconds since recording began."""

    lane: str
    label: str
    start: float
    end: float


class Timeline:
    """Collects spans while recording."""

    def __init__(self) -> None:
        self.recording = False
        self.spans: list[Span] = []
        self._origin = 0.0
        self._device_origin: torch.cuda.Event | None = None
        self._pending: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = []

    def start(self, device: torch.device) -> None:
        self.spans = []
        self._pending = []
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._device_origin = torch.cuda.Event(enable_timing=True)
            self._device_origin.record()
            self._device_origin.synchronize()
        else:
            self._device_origin = None
        self._origin = time.perf_counter()
        self.recording = True

    def stop(self) -> None:
        """Resolve device events; the caller has synchronised the engine."""
        self.recording = False
        for lane, label, begin, finish in self._pending:
            finish.synchronize()
            assert self._device_origin is not None
            start = self._device_origin.elapsed_time(begin) / 1e3
            self.spans.append(Span(lane, label, start, start + begin.elapsed_time(finish) / 1e3))
        self._pending = []
        self.spans.sort(key=lambda span: (span.start, span.lane))

    @contextmanager
    def host_span(self, lane: str, label: str) -> Iterator[None]:
        """Record work that the calling thread does."""
        if not self.recording:
            yield
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append(Span(lane, label, start - self._origin, time.perf_counter() - self._origin))

    @contextmanager
    def device_span(self, lane: str, label: str) -> Iterator[None]:
        """Record work that the calling thread puts on its current CUDA stream."""
        if not self.recording:
            yield
            return
        begin, finish = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        try:
            yield
        finally:
            finish.record()
            self._pending.append((lane, label, begin, finish))

    def busy(self, lane: str) -> float:
        """Seconds in which the lane was working."""
        return sum(end - start for start, end in _union(self.spans, lane))

    def exposed(self, lane: str, under: str = "compute") -> float:
        """Seconds in which `lane` was working and `under` was not."""
        return self.busy(lane) - _overlap(_union(self.spans, lane), _union(self.spans, under))

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
        Path(path).write_text(json.dumps({"traceEvents": names + events}))


def _union(spans: list[Span], lane: str) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted((span.start, span.end) for span in spans if span.lane == lane):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _overlap(left: list[tuple[float, float]], right: list[tuple[float, float]]) -> float:
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total
