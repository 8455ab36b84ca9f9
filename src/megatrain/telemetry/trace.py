"""Timelines that Perfetto and chrome://tracing open: of spans in memory, or of a run's record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatrain.errors import MegaTrainError
from megatrain.geometry import GIB

Event = dict[str, Any]
Span = tuple[str, str, float, float]
"""Lane, label, start and end in seconds."""
STEPS = "steps"
LONGEST_LINE = 1 << 24
"""Bytes that are read at once: a file of another kind may have no lines."""
MEMORY = {"vram": "VRAM (GiB)", "ram": "RAM (GiB)"}


def document(spans: Iterable[Span], process: int = 0) -> list[Event]:
    """Trace events of spans, a thread for each lane."""
    spans = list(spans)
    lanes = sorted({lane for lane, *_ in spans}, key=lambda lane: (lane != STEPS, lane != "compute", lane))
    named = [
        {"ph": "M", "pid": process, "tid": tid, "name": "thread_name", "args": {"name": lane}}
        for tid, lane in enumerate(lanes)
    ]
    slices = [
        {"ph": "X", "pid": process, "tid": lanes.index(lane), "cat": lane, "name": label}
        | {"ts": start * 1e6, "dur": (end - start) * 1e6}
        for lane, label, start, end in spans
    ]
    return [*named, *slices]


def dumped(events: Sequence[Event]) -> str:
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def of_run(path: Path) -> str:
    """The trace of a `run.jsonl`: every start of the run is a process in it."""
    lines = list(read(path))
    if not any(line["event"] == "step" for line in lines):
        raise MegaTrainError(f"{path} has no step yet: a step is written when the next one begins, or the run ends.")
    first = min(_seconds(line) for line in lines)
    starts = [index for index, line in enumerate(lines) if line["event"] == "start" and index > 0]
    events: list[Event] = []
    for number, (begin, end) in enumerate(pairwise([0, *starts, len(lines)])):
        try:
            events += _process(number, lines[begin:end], first)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise MegaTrainError(
                f"{path} is not the record of a run: an event has missing or wrong fields ({error!r})."
            ) from error
    return dumped(events)


def read(path: Path) -> Iterator[Event]:
    """The lines of a record. What a killed process left incomplete is passed over."""
    known = False
    with path.open("rb") as file:
        for line in iter(partial(file.readline, LONGEST_LINE), b""):
            try:
                event = json.loads(line)
                _seconds(event)
            except (ValueError, TypeError, LookupError, RecursionError):
                if not known and line.strip():
                    raise MegaTrainError(f"{path} is not the record of a run: its first line is no event.") from None
                continue
            known = True
            yield event


def _process(number: int, lines: Sequence[Event], first: float) -> Iterator[Event]:
    began = lines[0]["time"]
    yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": f"run {number + 1}, started {began}"}}
    spans: list[Span] = []
    last = 0.0
    for line in lines:
        at = _seconds(line) - first
        match line["event"]:
            case "step":
                # Slices of a thread must not overlap, even by a rounding error.
                begin = max(last, at - (line.get("seconds") or 0.0))
                spans.append((STEPS, f"step {line['step']}", min(begin, at), at))
                last = at
                yield from _counters(number, at, line)
            case "spans":
                begin = at - line["seconds"]
                spans += [(lane, label, begin + start, begin + end) for lane, label, start, end in line["spans"]]
            case "save":
                spans.append(("saves", Path(line["path"]).name, at - line["seconds"], at))
            case "start":
                continue
            case event:
                text = str(line.get("text") or line.get("reason") or event)
                title = text.splitlines()[0][:100]
                yield {"ph": "i", "pid": number, "tid": 0, "s": "p", "ts": at * 1e6, "name": title, "cat": event}
    yield from document(spans, number)


def _counters(number: int, at: float, line: Mapping[str, Any]) -> Iterator[Event]:
    values = {"loss": line.get("loss"), "tokens/s": line.get("tokens_per_second")}
    memory = line.get("memory") or {}
    values |= {name: memory[tier] / GIB for tier, name in MEMORY.items() if memory.get(tier)}
    for name, value in values.items():
        if isinstance(value, int | float):
            yield {"ph": "C", "pid": number, "name": name, "ts": at * 1e6, "args": {"value": value}}


def _seconds(line: Event) -> float:
    """When a line was written. Every line has its event and its time; a step's and its spans' are of the step's end."""
    if not isinstance(line["event"], str):
        raise ValueError("no event")
    return datetime.fromisoformat(line["time"]).timestamp()
