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
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy
import torch

from megatrain._version import __version__
from megatrain.errors import DriveLimit, MegaTrainError, OutOfRam, SettingsError
from megatrain.telemetry import notices
from megatrain.telemetry.lines import LineFile

FILE = "run.jsonl"
FORMAT = 1
RESERVED = (
    "event", "step", "time", "seconds", "tokens_per_second", "busy", "waited", "weight_uses", "memory", "not_finite"
)  # fmt: skip
"""Fields of a step's line that `Record.log` cannot set."""
FIRST_SPANS = 3
"""The step after a start whose spans are written; then the tenth of it, the hundredth, and so on."""
MOST_SPANS = 5000
"""Spans of one step that are written, from its start."""


class Later:
    """A number that a GPU may still be computing, on its way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._integer = not tensor.is_floating_point()
        self._host = torch.empty((), dtype=torch.float64, pin_memory=True)
        self._host.copy_(tensor.detach().reshape(()).to(torch.float64), non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(tensor.device))

    @property
    def done(self) -> bool:
        """Whether the number is known. It never is if the device failed."""
        with suppress(RuntimeError):
            return bool(self._copied.query())
        return False

    def wait(self) -> None:
        with suppress(RuntimeError):
            self._copied.synchronize()

    @property
    def value(self) -> float | int | None:
        """None until it is known."""
        if not self.done:
            return None
        number = float(self._host)
        return int(number) if self._integer else number


@dataclass
class _Step:
    """A step whose line is not written yet."""

    number: int
    page: int
    """Its number in the timeline."""
    outcome: Any
    """`Outcome` of optim/schedule.py, whose norm comes with its ticket."""
    fields: dict[str, Any]

    @property
    def ready(self) -> bool:
        norm_known = self.fields["grad_norm"] is not None or self.outcome.ticket.done
        return norm_known and all(number.done for number in _pending(self.fields))

    @property
    def norm(self) -> Any:
        """The gradient norm; None until it is known."""
        norm = _value(self.fields["grad_norm"])
        return self.outcome.norm if norm is None and self.outcome.ticket.done else norm

    def known(self) -> dict[str, Any]:
        """Number, loss, gradient norm and tokens, None for what is not known."""
        loss, tokens = _value(self.fields["loss"]), _value(self.fields.get("tokens"))
        return {"step": self.number, "loss": loss, "grad_norm": self.norm, "tokens": tokens}


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
        self.closed = False
        self._settle = settle
        """Hands over the times of steps that have ended (`timed`); with True, waits for them."""
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._written = 0
        """Steps of this record that were written."""
        self._weight_uses: Counter[str] = Counter()
        """Those of these steps."""
        self._in_step = False
        """Whether a forward has run since the last step."""
        self._fields: dict[str, Any] = {}
        self._steps: deque[_Step] = deque()
        self._times: dict[int, tuple[Any, float, Sequence[Any]]] = {}
        self._newest: dict[str, Any] = {}
        self._file = None if path is None else LineFile(path)
        notices.listeners.append(self._write_notice)
        self.write("start", megatrain=__version__, format=FORMAT, **start)

    # ---- what users do

    def log(self, **values: Any) -> None:
        """Add values to the line of the current step; right after `optimizer.step()`, to the line of that step.

        A tensor of one element is read when it is known: logging a loss does not wait for the GPU. A name that is
        logged again in the same step replaces the earlier value.
        """
        for name, value in values.items():
            if name in RESERVED:
                raise SettingsError(f"{name} cannot be logged: the record writes it itself; use another name.")
            if isinstance(value, torch.Tensor) and (value.numel() != 1 or value.is_complex()):
                raise SettingsError(
                    f"{name} is a tensor of shape {tuple(value.shape)} and dtype {value.dtype}; log one real number, "
                    "such as its mean()."
                )
        if self._writable:
            with self._lock:
                after_step = self._steps and not self._in_step
                (self._steps[-1].fields if after_step else self._fields).update(_plain(values))

    def write(self, event: str, **values: Any) -> None:
        """Write a line of its own."""
        if self._file is not None and self._writable:
            not_finite: dict[str, str] = {}
            line = _finite({"event": event, "time": now()} | _plain(values), "", not_finite)
            self._file.append(json.dumps(line | ({"not_finite": not_finite} if not_finite else {}), allow_nan=False))

    def close(self, reason: str = "finished", **details: Any) -> None:
        """Write the steps that have not been written, and why the run ended."""
        if not self._writable:
            return
        wait = reason == "finished"
        # A GPU that failed has no times. The error that it caused must not be replaced by another.
        with suppress(RuntimeError):
            self._settle(wait)
        with self._lock:
            while self._steps:
                self._write_step(self._steps.popleft(), wait)
        self.write("end", reason=reason, step=self.step, weight_uses=self._weight_uses, **details)
        self.closed = True
        notices.listeners.remove(self._write_notice)
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Record:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(**ending(error))

    # ---- what an engine and a Trainer tell it

    def begun(self) -> None:
        """A forward of the next step begins: what is logged from now on belongs to that step."""
        if self._writable and not self._in_step:
            self._in_step = True
            self.flush()

    def stepped(self, page: int, outcome: Any, **values: Any) -> None:
        """An optimizer step was submitted. `page`: its number in the timeline."""
        if not self._writable:
            return
        with self._lock:
            self.step += 1
            fields = {"loss": None, "grad_norm": None} | _plain(values) | self._fields
            self._steps.append(_Step(self.step, page, outcome, fields))
            self._fields, self._in_step = {}, False
        self._settle(False)
        self.flush(keep=1)

    def timed(self, times: Any, begin: float, spans: Sequence[Any]) -> None:
        """What the lanes did in a step that began at `begin` (stream/timeline.py). Any thread may call this."""
        if self._writable:
            with self._lock:
                self._times[times.step] = (times, begin, spans)

    def flush(self, keep: int = 0) -> None:
        """Write the lines of steps whose values are known, all but the last `keep`."""
        if not self._writable:
            return
        with self._lock:
            while len(self._steps) > keep and self._steps[0].ready and self._steps[0].page in self._times:
                self._write_step(self._steps.popleft())

    def newest(self) -> dict[str, Any]:
        """Number, loss, gradient norm and tokens of the newest step whose loss is known."""
        with self._lock:
            for step in reversed(self._steps):
                if (known := step.known())["loss"] is not None:
                    return known
            return self._newest

    @property
    def _writable(self) -> bool:
        """False when closed, and in a forked child, whose parent writes. Read before the lock is taken: a child may
        have been forked while another thread held it."""
        return not self.closed and os.getpid() == self._process

    def _write_notice(self, level: str, text: str) -> None:
        self.write(level, text=text)

    def _write_step(self, step: _Step, wait: bool = False) -> None:
        ticket = step.outcome.ticket
        if wait:
            with suppress(MegaTrainError):
                ticket.wait()
            for number in _pending(step.fields):
                number.wait()
        fields = {name: _value(value) for name, value in step.fields.items()} | {"grad_norm": step.norm}
        if ticket.done:
            fields |= {"skipped": True} if step.outcome.skipped else {}
        tokens = fields.get("tokens")
        self._newest = step.known()
        self._written += 1
        times, begin, spans = self._times.get(step.page, (None, 0.0, ()))
        self._times = {page: known for page, known in self._times.items() if page > step.page}
        if times is None:
            self.write("step", step=step.number, **fields)
            return
        seconds, when = round(times.seconds, 6), now(times.ended)
        measured: dict[str, Any] = {"time": when, "seconds": seconds}
        if isinstance(tokens, int | float) and times.seconds > 0:
            measured["tokens_per_second"] = round(tokens / times.seconds, 3)
        for name, lanes in (("busy", times.busy), ("waited", times.waited)):
            measured[name] = {lane: round(spent, 6) for lane, spent in lanes.items()}
        measured["weight_uses"] = asdict(times.weight_uses)
        self._weight_uses.update(measured["weight_uses"])
        self.write("step", step=step.number, **fields, **measured)
        if _has_spans(self._written):
            earliest = sorted((s.start - begin, s.end - begin, s.lane, s.label) for s in spans)[:MOST_SPANS]
            listed = [[lane, label, round(start, 6), round(end, 6)] for start, end, lane, label in earliest]
            self.write("spans", step=step.number, time=when, seconds=seconds, spans=listed)


def now(seconds: float | None = None) -> str:
    """ISO 8601, in UTC; `seconds`: since the epoch."""
    return datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC).isoformat(timespec="microseconds")


def ending(error: BaseException | None) -> dict[str, str]:
    """Why a run ended, for `Record.close`."""
    if error is None:
        return {"reason": "finished"}
    reasons = {OutOfRam: "out_of_ram", DriveLimit: "drive_limit", KeyboardInterrupt: "interrupted"}
    reason = next((reason for kind, reason in reasons.items() if isinstance(error, kind)), "failed")
    first = (str(error).strip().splitlines() or [""])[0]
    return {"reason": reason, "error": f"{type(error).__name__}: {first}"[:500]}


def _has_spans(count: int) -> bool:
    while count > FIRST_SPANS and count % 10 == 0:
        count //= 10
    return count == FIRST_SPANS


def _plain(value: Any) -> Any:
    """A copy made of what JSON has. A number on a GPU becomes a `Later`."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if value is None or isinstance(value, bool | int | float | str | Later):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    if isinstance(value, torch.Tensor | numpy.ndarray | numpy.generic):
        if math.prod(value.shape) != 1:
            return f"{type(value).__name__} {tuple(value.shape)}"
        if isinstance(value, torch.Tensor) and value.is_cuda:
            return Later(value)
        value = value.item()
        return value if isinstance(value, bool | int | float | str) else str(value)
    return str(value)


def _pending(value: Any) -> Iterator[Later]:
    """The numbers in it that come from a GPU."""
    if isinstance(value, Later):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _pending(inner)


def _value(value: Any) -> Any:
    return value.value if isinstance(value, Later) else value


def _finite(value: Any, path: str, not_finite: dict[str, str]) -> Any:
    """The value with null for numbers that JSON does not have; `not_finite` gets what they were, by path."""
    value = _value(value)
    if isinstance(value, dict):
        return {key: _finite(inner, f"{path}.{key}".lstrip("."), not_finite) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner, f"{path}.{index}", not_finite) for index, inner in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        not_finite[path] = str(value)
        return None
    return value
