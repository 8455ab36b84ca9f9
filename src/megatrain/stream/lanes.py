"""Lanes: ordered queues of work that run beside compute, and how work says what it reads and writes.

One interface, three implementations: `SyncLanes` runs work inline; `ThreadLanes` runs every lane on a CPU thread with
seeded random delays, so that a missing wait fails in a test without a GPU; `CudaLanes` (stream/cuda.py) issues copies
on CUDA streams. Compute is whatever the caller's thread (and its current CUDA stream) does. Which lanes there are, and
what they are for, stands in `megatrain/geometry.py`.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Protocol

from megatrain.errors import LaneFailed
from megatrain.geometry import LANES
from megatrain.store.forks import Owner
from megatrain.store.ticket import DONE, Order, Ticket, Wait
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

    def submit(self, work: Work, after: Sequence[Wait] = (), label: str = "", job: str = "") -> Ticket: ...

    def close(self, patience: float | None = None) -> None: ...


class Lanes:
    """The lanes of one engine, by name."""

    def __init__(self, make: Callable[[str], Lane], timeline: Timeline, failures: Failures) -> None:
        self.timeline = timeline
        self._failures = failures
        self._by_name = {name: make(name) for name, lane in LANES.items() if lane.runs is not None}

    def __getitem__(self, name: str) -> Lane:
        return self._by_name[name]

    def submit(
        self,
        lane: str,
        job: str,
        work: Work,
        *,
        reads: Iterable[Order] = (),
        writes: Iterable[Order] = (),
        after: Iterable[Wait] = (),
        label: str = "",
    ) -> Ticket:
        """Give a lane work, after everybody that it conflicts with: `job` is its kind, `label` what it is done to."""
        reads, writes = list(reads), list(writes)
        waits = [Wait("compute", self.mark())] if LANES[lane].after_compute else []
        # A lane is in order by itself.
        waits += [wait for wait in [*after, *_waits(reads, writes)] if wait.ticket.lane != lane]
        ticket = self[lane].submit(work, waits, label, job)
        _record(ticket, reads, writes)
        return ticket

    @contextmanager
    def compute(self, *, reads: Iterable[Order] = (), writes: Iterable[Order] = ()) -> Iterator[None]:
        """What compute is given inside comes after everybody that it conflicts with, and others after it."""
        reads, writes = list(reads), list(writes)
        self.order(_waits(reads, writes))
        try:
            yield
        finally:
            _record(self.mark(), reads, writes)

    def order(self, waits: Iterable[Wait]) -> None:
        """Let compute come after the given work."""
        for wait in waits:
            if wait.ticket.lane in ("", "compute"):
                wait.ticket.order()
            elif not wait.ticket.done:
                with self.timeline.waiting("compute", wait.ticket.lane):
                    wait.ticket.order()

    def mark(self) -> Ticket:
        """A ticket for everything compute has been given so far."""
        # On the CPU compute is synchronous: what was given to it is finished.
        return DONE

    def check(self) -> None:
        """Raise, once, the first failure of a background lane that nobody has seen."""
        error = self._failures.take()
        if error is not None:
            raise error

    def quiesce(self) -> None:
        """Wait until every lane has done what it was given."""
        for lane in self._by_name.values():
            lane.submit(lambda: None, label="quiesce").wait()

    def close(self, patience: float | None = None) -> None:
        """Finish what was submitted, then stop; with `patience` (seconds, for all together), leave a lane behind that
        takes longer."""
        deadline = None if patience is None else time.monotonic() + patience
        # Updates first: copies wait for them.
        for lane in sorted(self._by_name.values(), key=lambda lane: lane is not self._by_name["update"]):
            lane.close(None if deadline is None else max(0.1, deadline - time.monotonic()))


def _waits(reads: Sequence[Order], writes: Sequence[Order]) -> list[Wait]:
    return [wait for o in reads for wait in o.before_reading()] + [wait for o in writes for wait in o.before_writing()]


def _record(ticket: Ticket, reads: Sequence[Order], writes: Sequence[Order]) -> None:
    for order in reads:
        order.read(ticket)
    for order in writes:
        order.write(ticket)


class _InlineLane:
    def __init__(self, name: str, timeline: Timeline) -> None:
        self.name = name
        self.timeline = timeline

    def submit(self, work: Work, after: Sequence[Wait] = (), label: str = "", job: str = "") -> Ticket:
        for wait in after:
            wait.ticket.wait()
        with self.timeline.host_span(self.name, label):
            work()
        return DONE

    def close(self, patience: float | None = None) -> None:
        return None


class SyncLanes(Lanes):
    """Everything inline, in the caller's thread: the reference that the others must equal."""

    def __init__(self) -> None:
        timeline = Timeline()
        super().__init__(lambda name: _InlineLane(name, timeline), timeline, Failures())


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

    @property
    def queue(self) -> str:
        return self.lane

    @property
    def done(self) -> bool:
        return self._finished.is_set() and self._error is None

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
        self._queue: queue.SimpleQueue[tuple[Work, Sequence[Wait], str, HostTicket] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"megatrain-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Work, after: Sequence[Wait] = (), label: str = "", job: str = "") -> Ticket:
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
                for _, earlier in after:
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


class ThreadLanes(Lanes):
    """Every lane on a CPU thread of its own; with a seed, delays of up to `max_delay` seconds at random."""

    def __init__(self, seed: int | None = None, max_delay: float = 1e-3) -> None:
        timeline, failures = Timeline(), Failures()

        def delay(lane: str) -> Callable[[], float] | None:
            if seed is None:
                return None
            source = random.Random(f"{seed}/{lane}")
            # Half of the pauses are zero: a lane that runs ahead is as telling as one that lags.
            return lambda: max(0.0, source.uniform(-max_delay, max_delay))

        super().__init__(lambda name: ThreadLane(name, timeline, failures, delay(name)), timeline, failures)
