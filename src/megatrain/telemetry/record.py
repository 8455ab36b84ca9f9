"""`run.jsonl`: what a run does, one JSON object per line (docs/record.md lists the events and their fields).

A line is written completely or not at all. Values that the GPU has not computed yet are copied to the host without a
wait, so the line of a step is written as soon as they have arrived: usually while the next step runs. A disk that
cannot be written ends the recording with a warning, never the run.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy
import torch

from megatrain._version import __version__
from megatrain.errors import MegaTrainError, OutOfRam, SettingsError
from megatrain.telemetry import notices
from megatrain.telemetry.lines import LineFile

FILE = "run.jsonl"
FORMAT = 1
RESERVED = ("event", "step", "time", "seconds", "tokens_per_second", "busy", "waited", "memory", "not_finite")
"""Fields of a step's line that `Record.log` cannot set."""
FIRST_SPANS = 3
"""The step after a start whose spans are written; then the tenth of it, the hundredth, and so on."""
MOST_SPANS = 5000
"""Spans of one step that are written, from its start."""


class Later:
    """A number that a GPU may still be computing, on its way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._whole = not tensor.is_floating_point()
        self._host = torch.empty((), dtype=torch.float64, pin_memory=True)
        self._host.copy_(tensor.detach().reshape(()).to(torch.float64), non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(tensor.device))

    @property
    def done(self) -> bool:
        return bool(self._copied.query())

    def value(self, wait: bool = False) -> float | int | None:
        """None if it has not arrived and `wait` is not set, or if the device failed."""
        try:
            if wait:
                self._copied.synchronize()
            elif not self._copied.query():
                return None
        except RuntimeError:
            return None
        number = float(self._host)
        return int(number) if self._whole else number


def deferred(value: Any, name: str = "a value") -> Any:
    """A tensor of one element as a number, read later if it is on a GPU; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1 or value.is_complex():
        raise SettingsError(
            f"{name} is a tensor of shape {tuple(value.shape)} and dtype {value.dtype}; log one real number, such as "
            "its mean()."
        )
    return Later(value) if value.is_cuda else value.detach().item()


@dataclass
class _Step:
    """A step whose line is not written yet."""

    number: int
    page: int
    """Of the timeline."""
    outcome: Any
    """`Outcome` of optim/schedule.py, whose norm comes with its ticket."""
    fields: dict[str, Any]
    time: str = field(default_factory=lambda: now())

    @property
    def ready(self) -> bool:
        known = self.fields.get("grad_norm") is not None or self.outcome.ticket.done
        return known and all(value.done for value in self.fields.values() if isinstance(value, Later))


class Record:
    """Appends what a run does to a file of JSON lines. `engine.record(path)` makes one.

    `log` adds values to the line of a step, and `optimizer.step()` completes it. Close it, leave it as a context
    manager, or close the engine: the last lines are written then.
    """

    def __init__(
        self,
        path: Path | None,
        start: Mapping[str, Any],
        *,
        step: int = 0,
        settle: Callable[[bool], None] = lambda wait: None,
    ) -> None:
        self.step = step
        """The number of the last step."""
        self._settle = settle
        """Hands over the times of steps that have ended (`timed`); with True, waits for them."""
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._since_start = 0
        self._begun = False
        """Whether the step after the last one has begun."""
        self._fields: dict[str, Any] = {}
        self._steps: deque[_Step] = deque()
        self._times: dict[int, tuple[Any, float, Sequence[Any]]] = {}
        self._newest: dict[str, Any] = {}
        self._file = None if path is None else LineFile(path)
        self.closed = False
        notices.listeners.append(self._heard)
        self.write("start", megatrain=__version__, format=FORMAT, **start)

    # ---- what users do

    def log(self, **values: Any) -> None:
        """Add values to the line of the step under way; right after `optimizer.step()`, to the line of that step.

        A tensor of one element is read when it is there: logging a loss does not wait for the GPU. A name that is
        logged again in the same step replaces the earlier value.
        """
        if reserved := [name for name in values if name in RESERVED]:
            raise SettingsError(f"{reserved[0]} cannot be logged: the record writes it itself; use another name.")
        if not self._mine:
            return
        kept = {name: deferred(value, name) for name, value in values.items()}
        with self._lock:
            late = not self._begun and self._steps
            (self._steps[-1].fields if late else self._fields).update(kept)

    def write(self, event: str, **values: Any) -> None:
        """Write a line of its own."""
        if self._file is not None and self._mine:
            content, found = _finite({"event": event, "time": now()} | _plain(values))
            self._file.append(json.dumps(content | ({"not_finite": found} if found else {}), allow_nan=False))

    def close(self, reason: str = "finished", **details: Any) -> None:
        """Write the steps that have not been written, and why the run ended."""
        if not self._mine:
            return
        wait = reason == "finished"
        self._settle(wait)
        with self._lock:
            while self._steps:
                self._write_step(self._steps.popleft(), wait)
        self.write("end", reason=reason, step=self.step, **details)
        self.closed = True
        with suppress(ValueError):
            notices.listeners.remove(self._heard)
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Record:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(**ending(error))

    # ---- what an engine and a Trainer tell it

    def begun(self) -> None:
        """A forward of the next step begins: what is logged from now on belongs to that step."""
        if self._mine and not self._begun:
            with self._lock:
                self._begun = True
            self.flush()

    def stepped(self, page: int, outcome: Any, **values: Any) -> None:
        """An optimizer step was submitted. `page`: its number in the timeline."""
        if not self._mine:
            return
        with self._lock:
            self.step += 1
            self._steps.append(_Step(self.step, page, outcome, {"loss": None, "grad_norm": None} | values))
            self._steps[-1].fields.update(self._fields)
            self._fields, self._begun = {}, False
        self._settle(False)
        self.flush(keep=1)

    def timed(self, times: Any, begin: float, spans: Sequence[Any]) -> None:
        """What the lanes did in a step that began at `begin` (stream/timeline.py). Any thread may call this."""
        if self._mine:
            with self._lock:
                self._times[times.step] = (times, begin, spans)

    def flush(self, keep: int = 0) -> None:
        """Write the lines of steps whose values are known, all but the last `keep`."""
        if not self._mine:
            return
        with self._lock:
            while len(self._steps) > keep and self._steps[0].ready and self._steps[0].page in self._times:
                self._write_step(self._steps.popleft(), wait=False)

    def newest(self) -> dict[str, Any]:
        """Number, loss and tokens of the newest step for which they are known."""
        with self._lock:
            for step in reversed(self._steps):
                loss, tokens = (_value(step.fields.get(name)) for name in ("loss", "tokens"))
                if loss is not None:
                    return {"step": step.number, "loss": loss, "tokens": tokens}
            return self._newest

    @property
    def _mine(self) -> bool:
        """False in a forked child, whose parent writes, and when closed. Asked before the lock is taken: a child may
        have been forked while another thread held it."""
        return not self.closed and os.getpid() == self._owner

    def _heard(self, level: str, text: str) -> None:
        self.write(level, text=text)

    def _write_step(self, step: _Step, wait: bool) -> None:
        if wait:
            with suppress(MegaTrainError):
                step.outcome.ticket.wait()
        fields = {name: _value(value, wait) for name, value in step.fields.items()}
        if fields["grad_norm"] is None and step.outcome.ticket.done:
            fields["grad_norm"] = step.outcome.norm
        if step.outcome.ticket.done and step.outcome.skipped:
            fields["skipped"] = True
        times, begin, spans = self._times.get(step.page, (None, 0.0, ()))
        for page in [page for page in self._times if page <= step.page]:
            del self._times[page]
        tokens = fields.get("tokens")
        measured: dict[str, Any] = {}
        if times is not None:
            step.time = now(times.ended)
            measured["seconds"] = round(times.seconds, 6)
            if isinstance(tokens, int | float) and times.seconds > 0:
                measured["tokens_per_second"] = round(tokens / times.seconds, 3)
            measured["busy"], measured["waited"] = _rounded(times.busy), _rounded(times.waited)
        self._newest = {"step": step.number, "loss": fields["loss"], "tokens": tokens}
        self.write("step", **{"step": step.number, "time": step.time} | fields | measured)
        self._since_start += 1
        if times is not None and _has_spans(self._since_start):
            listed = sorted((s.start - begin, s.end - begin, s.lane, s.label) for s in spans)[:MOST_SPANS]
            shown = [[lane, label, round(start, 6), round(end, 6)] for start, end, lane, label in listed]
            self.write("spans", step=step.number, time=step.time, seconds=measured["seconds"], spans=shown)


def now(seconds: float | None = None) -> str:
    """ISO 8601, in UTC; `seconds`: since the epoch."""
    return datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC).isoformat(timespec="microseconds")


def ending(error: BaseException | None) -> dict[str, str]:
    """Why a run ended, for `Record.close`."""
    if error is None:
        return {"reason": "finished"}
    reason = "failed"
    if isinstance(error, OutOfRam):
        reason = "out_of_ram"
    elif isinstance(error, KeyboardInterrupt):
        reason = "interrupted"
    first = (str(error).strip().splitlines() or [""])[0]
    return {"reason": reason, "error": f"{type(error).__name__}: {first}"[:500]}


def _value(value: Any, wait: bool = False) -> Any:
    return value.value(wait) if isinstance(value, Later) else value


def _has_spans(count: int) -> bool:
    while count > FIRST_SPANS and count % 10 == 0:
        count //= 10
    return count == FIRST_SPANS


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {lane: round(spent, 6) for lane, spent in seconds.items()}


def _plain(value: Any) -> Any:
    """Made of what JSON has."""
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, torch.Tensor | numpy.ndarray | numpy.generic):
        return _plain(value.item()) if math.prod(value.shape) == 1 else f"{type(value).__name__} {tuple(value.shape)}"
    return str(value)


def _finite(value: Any, path: str = "") -> tuple[Any, dict[str, str]]:
    """With null for numbers that JSON does not have, and what those were, by their place."""
    if isinstance(value, float) and not math.isfinite(value):
        return None, {path: str(value)}
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value)
    else:
        return value, {}
    cleaned = {key: _finite(inner, f"{path}.{key}".lstrip(".")) for key, inner in pairs}
    found = {place: text for _, places in cleaned.values() for place, text in places.items()}
    kept = {key: inner for key, (inner, _) in cleaned.items()}
    return (kept if isinstance(value, dict) else [*kept.values()]), found
