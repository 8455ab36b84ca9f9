"""Lanes: ordered queues of work that run beside compute, and the tickets that order one against another.

One interface, three implementations: `SyncLanes` runs work inline; `ThreadLanes` runs every lane on a CPU thread with
seeded random delays, so that a missing wait fails in a test without a GPU; `CudaLanes` (stream/cuda.py) issues copies
on CUDA streams. Compute is whatever the caller's thread (and its current CUDA stream) does.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Protocol

from megatrain.errors import LaneFailed
from megatrain.store.forks import Owner
from megatrain.store.ticket import DONE, Ticket
from megatrain.stream.timeline import Timeline
from megatrain.telemetry.notices import warn

Work = Callable[[], None]
_LOOK_EVERY = 1.0
"""Seconds between looks at a lane that somebody waits for."""
WARN_AFTER = 60.0
"""A lane that has been at one job for longer than this is named in a warning."""
GIVE_UP_AFTER = 1800.0
"""After this it is an error: the longest honest job takes seconds."""


class Lane(Protocol):
    """An ordered queue. `after` names work of other lanes (or compute) that must be finished first."""

    def submit(self, work: Work, after: Sequence[Ticket] = (), label: str = "") -> Ticket: ...


class Closable(Protocol):
    def close(self, patience: float | None = None) -> None: ...


class Lanes(Protocol):
    """The lanes of one engine."""

    h2d: Lane
    d2h: Lane
    update: Lane
    vram: Lane
    """Sums and updates of slabs that lie on the device."""
    timeline: Timeline

    def mark(self) -> Ticket:
        """A ticket for everything compute has been given so far."""

    def check(self) -> None:
        """Raise, once, the first failure of a background lane that nobody has seen."""

    def close(self, patience: float | None = None) -> None:
        """Finish what was submitted, then stop; with `patience`, leave a lane behind that takes longer (seconds)."""


class _InlineLane:
    def __init__(self, name: str, timeline: Timeline) -> None:
        self.name = name
        self.timeline = timeline

    def submit(self, work: Work, after: Sequence[Ticket] = (), label: str = "") -> Ticket:
        for ticket in after:
            ticket.wait()
        with self.timeline.host_span(self.name, label):
            work()
        return DONE


class SyncLanes:
    """Everything inline, in the caller's thread: the reference that the others must equal."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.h2d: Lane = _InlineLane("h2d", self.timeline)
        self.d2h: Lane = _InlineLane("d2h", self.timeline)
        self.update: Lane = _InlineLane("update", self.timeline)
        self.vram: Lane = _InlineLane("vram", self.timeline)

    def mark(self) -> Ticket:
        return DONE

    def check(self) -> None:
        return None

    def close(self, patience: float | None = None) -> None:
        return None


class Failures:
    """Failures of background lanes, until they reach the user's thread."""

    def __init__(self) -> None:
        self._first: LaneFailed | None = None
        self._lock = threading.Lock()

    def add(self, error: LaneFailed) -> None:
        with self._lock:
            self._first = self._first or error

    def take(self) -> LaneFailed | None:
        with self._lock:
            first, self._first = self._first, None
            return first


class HostTicket:
    """Work that is finished when its thread says so."""

    def __init__(self, worker: ThreadLane, label: str) -> None:
        self.lane = worker.name
        self._worker = worker
        self._label = label
        self._finished = threading.Event()
        self._error: LaneFailed | None = None

    def wait(self) -> None:
        if not self._finished.is_set():
            self._worker.owner.require("wait for what its lanes do")
        # In slices: a thread that has died, or does not get on, must be found out, and Ctrl-C must get through.
        while not self._finished.wait(_LOOK_EVERY):
            self._worker.watch(self._label)
        if self._error is not None:
            raise self._error

    def order(self) -> None:
        self.wait()

    def finish(self, error: LaneFailed | None = None) -> None:
        self._error = error
        self._finished.set()


class ThreadLane:
    """A lane on one CPU thread. `delay`, if given, is slept before and after each piece of work."""

    def __init__(
        self, name: str, timeline: Timeline | None, failures: Failures, delay: Callable[[], float] | None = None
    ) -> None:
        self.name = name
        self.timeline = timeline
        self.owner = Owner()
        self._failures = failures
        self._delay = delay
        self._job: tuple[str, float] | None = None
        """What it is at, and since when."""
        self._warned = 0.0
        self._queue: queue.SimpleQueue[tuple[Work, Sequence[Ticket], str, HostTicket] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"megatrain-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Work, after: Sequence[Ticket] = (), label: str = "") -> Ticket:
        self.owner.require("run the model")
        ticket = HostTicket(self, label)
        self._queue.put((work, after, label, ticket))
        return ticket

    def close(self, patience: float | None = None) -> None:
        """Finish what was submitted and end the thread; with `patience`, give up on it after that many seconds."""
        self._queue.put(None)
        if threading.current_thread() is self._thread:
            return
        deadline = None if patience is None else time.monotonic() + patience
        while self._thread.is_alive() and (deadline is None or time.monotonic() < deadline):
            self._thread.join(min(_LOOK_EVERY, patience or _LOOK_EVERY))
            if self._thread.is_alive():
                self.watch("close")
        if self._thread.is_alive():
            warn(f"the {self.name} lane was left behind: {self._standing()}")

    def watch(self, waited_for: str) -> None:
        """Called by whoever waits: names the lane if it is dead, or has been at one job for too long."""
        if not self._thread.is_alive():
            raise LaneFailed(
                f"the {self.name} lane is dead, so {waited_for!r} will never be done: {self._standing()}; "
                "restart from the last checkpoint."
            )
        job = self._job
        if job is None:
            return
        since = time.monotonic() - job[1]
        if since > GIVE_UP_AFTER:
            raise LaneFailed(
                f"the {self.name} lane is stalled: {self._standing()}. {waited_for!r} waits for it; restart from the "
                "last checkpoint, and look at the disk, the driver and the machine's load."
            )
        if since > WARN_AFTER and self._warned < job[1]:
            self._warned = time.monotonic()
            warn(f"the {self.name} lane does not get on: {self._standing()}; {waited_for!r} waits for it")

    def _standing(self) -> str:
        job = self._job
        return "it has no work" if job is None else f"it has been at {job[0]!r} for {time.monotonic() - job[1]:.0f} s"

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, after, label, ticket = item
            try:
                for earlier in after:
                    if self.timeline is None or earlier.lane in ("", "compute"):
                        earlier.wait()
                        continue
                    with self.timeline.waiting(self.name, earlier.lane):
                        earlier.wait()
                self._job = (label, time.monotonic())
                self._pause()
                with self.timeline.host_span(self.name, label) if self.timeline is not None else nullcontext():
                    work()
                self._pause()
            except BaseException as cause:
                ticket.finish(self.failed(label, cause))
            else:
                ticket.finish()
            # Without this the last job's closure keeps its buffers alive while the lane is idle.
            self._job = None
            del item, work, after, ticket

    def failed(self, label: str, cause: BaseException) -> LaneFailed:
        """The error that work which failed leaves in its ticket; reported once to `check`."""
        if isinstance(cause, LaneFailed):
            return cause
        error = LaneFailed(f"work on the {self.name} lane failed ({label}): {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        self._failures.add(error)
        return error

    def _pause(self) -> None:
        if self._delay is not None:
            time.sleep(self._delay())


def close_all(lanes: Sequence[Closable], patience: float | None) -> None:
    """Close one after the other; `patience` is for all of them together."""
    deadline = None if patience is None else time.monotonic() + patience
    for lane in lanes:
        lane.close(None if deadline is None else max(0.1, deadline - time.monotonic()))


class ThreadLanes:
    """Every lane on a CPU thread of its own; with a seed, delays of up to `max_delay` seconds at random."""

    def __init__(self, seed: int | None = None, max_delay: float = 1e-3) -> None:
        self.timeline = Timeline()
        self._failures = Failures()

        def delay(lane: str) -> Callable[[], float] | None:
            if seed is None:
                return None
            source = random.Random(f"{seed}/{lane}")
            # Half of the pauses are zero: a lane that runs ahead is as telling as one that lags.
            return lambda: max(0.0, source.uniform(-max_delay, max_delay))

        self._lanes = [
            ThreadLane(name, self.timeline, self._failures, delay(name)) for name in ("h2d", "d2h", "update", "vram")
        ]
        self.h2d: Lane = self._lanes[0]
        self.d2h: Lane = self._lanes[1]
        self.update: Lane = self._lanes[2]
        self.vram: Lane = self._lanes[3]

    def mark(self) -> Ticket:
        # Compute on the CPU is synchronous: what was given to it is finished.
        return DONE

    def check(self) -> None:
        error = self._failures.take()
        if error is not None:
            raise error

    def close(self, patience: float | None = None) -> None:
        close_all(self._lanes, patience)
