"""Timelines that Perfetto and chrome://tracing open: of spans in memory, or of a run's record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from megatrain.errors import MegaTrainError
from megatrain.telemetry.record import FILE

Event = dict[str, Any]
Span = tuple[str, str, float, float]
"""Lane, label, start and end in seconds."""
STEPS = "steps"
MEMORY = {"vram": "VRAM (GiB)", "ram": "RAM (GiB)"}


def document(spans: Iterable[Span], process: int = 0, origin: float = 0.0) -> list[Event]:
    """Trace events of spans, a thread for each lane; `origin` is added to their times."""
    spans = list(spans)
    lanes = sorted({lane for lane, *_ in spans}, key=lambda lane: (lane != STEPS, lane != "compute", lane))
    named = [
        {"ph": "M", "pid": process, "tid": tid, "name": "thread_name", "args": {"name": lane}}
        for tid, lane in enumerate(lanes)
    ]
    slices = [
        {"ph": "X", "pid": process, "tid": lanes.index(lane), "cat": lane, "name": label}
        | {"ts": (origin + start) * 1e6, "dur": (end - start) * 1e6}
        for lane, label, start, end in spans
    ]
    return [*named, *slices]


def dumped(events: Sequence[Event]) -> str:
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def of_run(where: str | Path) -> str:
    """The trace of a run directory or a `run.jsonl`: every start of the run is a process in it."""
    path = Path(where)
    if path.is_dir():
        path = path / FILE
        if not path.is_file():
            raise MegaTrainError(f"{where} has no {FILE}: no run was recorded there.")
    runs = list(_runs(path))
    first = min((_seconds(line) for lines in runs for line in lines), default=0.0)
    if not any(line["event"] == "step" for lines in runs for line in lines):
        raise MegaTrainError(f"{path} has no step yet: a step is written when the next one begins, or the run ends.")
    return dumped([event for number, lines in enumerate(runs) for event in _process(number, lines, first)])


def read(path: Path) -> Iterator[Event]:
    """The lines of a record. What a killed process left incomplete is passed over."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise MegaTrainError(f"{path} does not exist; name a run's output directory or its {FILE}.") from None
    except OSError as error:
        raise MegaTrainError(f"{path} cannot be read ({error.strerror}).") from error
    known = False
    for line in text.split(b"\n"):
        try:
            found = json.loads(line)
            _seconds(found)
        except (ValueError, TypeError, LookupError, RecursionError):
            if not known and line.strip():
                raise MegaTrainError(f"{path} is not the record of a run: its first line is no event.") from None
            continue
        known = True
        yield found


def _runs(path: Path) -> Iterator[list[Event]]:
    """The lines of each start."""
    lines: list[Event] = []
    for line in read(path):
        if line["event"] == "start" and lines:
            yield lines
            lines = []
        lines.append(line)
    if lines:
        yield lines


def _process(number: int, lines: Sequence[Event], first: float) -> Iterator[Event]:
    began = lines[0]["time"]
    yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": f"run {number + 1}, started {began}"}}
    spans: list[Span] = []
    last = 0.0
    for line in lines:
        at = _seconds(line) - first
        match line["event"]:
            case "step":
                # Slices of one thread must not overlap, also not by what was rounded.
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
                shown = {"name": text.splitlines()[0][:100] if text else event, "cat": event}
                yield {"ph": "i", "pid": number, "tid": 0, "s": "p", "ts": at * 1e6} | shown
    yield from document(spans, number)


def _counters(number: int, at: float, line: Mapping[str, Any]) -> Iterator[Event]:
    values = {"loss": line.get("loss"), "tokens/s": line.get("tokens_per_second")}
    held = line.get("memory") or {}
    values |= {shown: held[tier] / 2**30 for tier, shown in MEMORY.items() if held.get(tier) is not None}
    for name, value in values.items():
        if isinstance(value, int | float):
            yield {"ph": "C", "pid": number, "name": name, "ts": at * 1e6, "args": {"value": value}}


def _seconds(line: Event) -> float:
    """When a line was written. Every line has its event and its time; a step's and its spans' are of the step's end."""
    if not isinstance(line["event"], str):
        raise ValueError("no event")
    return datetime.fromisoformat(line["time"]).timestamp()
