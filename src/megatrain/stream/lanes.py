"""Lanes: ordered queues of work that run alongside compute. Each job declares what it reads and writes.

There are four implementations. `SyncLanes` runs work inline, `DiskLanes` all but disk I/O. `ThreadLanes` runs every
lane on a CPU thread with seeded random delays, so that a missing wait fails in a test without a GPU. `CudaLanes`
(stream/cuda.py) uses CUDA streams.
Compute is the caller's thread and its current CUDA stream. `megatrain/geometry.py` lists the lanes.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from megatrain.errors import LaneFailed
from megatrain.geometry import LANES
from megatrain.store.forks import Owner
from megatrain.store.ticket import DONE, Order, Ticket, Wait
from megatrain.stream.timeline import Measured, Timeline
from megatrain.telemetry.notices import warn

Work = Callable[[], None]
_POLL_SECONDS = 1.0
"""How often a waiting thread checks that the lane is alive."""
WARN_AFTER_SECONDS = 60.0
"""A job that runs longer than this causes a warning."""
FAIL_AFTER_SECONDS = 1800.0
"""After this a job counts as stalled; the longest valid job takes seconds."""


class Lane:
    """An ordered queue of work. This one runs it immediately in the caller's thread."""

    def __init__(self, name: str, timeline: Timeline) -> None:
        self.name = name
        self.timeline = timeline

    def submit(self, work: Work, after: Sequence[Wait] = (), label: str = "", job: str = "") -> Ticket:
        """Submit work that runs after the given work of other lanes or of compute."""
        for _, earlier in after:
            # What runs inline holds up compute.
            with nullcontext() if earlier.done else self.timeline.waiting("compute", earlier.lane):
                earlier.wait()
        with self.timeline.host_span(self.name, label):
            work()
        return DONE

    def close(self, patience: float | None = None) -> None:
        """Finish submitted work and stop; with `patience`, give up after that many seconds."""


class Lanes:
    """The lanes of one engine, by name."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.timeline = Timeline(device)
        self._failure: LaneFailed | None = None
        """The first failure of a lane that has not been raised yet."""
        self._lock = threading.Lock()
        self._by_name = {name: self._make(name) for name, lane in LANES.items() if lane.runs_on is not None}

    def _make(self, name: str) -> Lane:
        return Lane(name, self.timeline)

    def __getitem__(self, name: str) -> Lane:
        return self._by_name[name]

    def submit(
        self,
        lane: str,
        job: str,
        work: Work,
        *,
        reads: Sequence[Order] = (),
        writes: Sequence[Order] = (),
        after: Iterable[Wait] = (),
        label: str = "",
    ) -> Ticket:
        """Submit work that runs after all conflicting work. `job` is its kind, `label` what it works on."""
        waits = [*after]
        for order in reads:
            waits += order.before_reading()
        for order in writes:
            waits += order.before_writing()
        # A lane runs its own work in order.
        waits = [wait for wait in waits if wait.ticket.lane != lane]
        if LANES[lane].after_compute:
            waits.insert(0, Wait("compute", self.mark()))
        ticket = self[lane].submit(work, waits, label, job)
        for order in reads:
            order.read(ticket)
        for order in writes:
            order.write(ticket)
        return ticket

    @contextmanager
    def compute(self, writes: Order) -> Iterator[None]:
        """Order the compute submitted inside after conflicting work, and later work after it."""
        self.order_compute(writes.before_writing())
        try:
            yield
        finally:
            writes.write(self.mark())

    def order_compute(self, waits: Iterable[Wait], measured: Measured | None = None) -> bool:
        """Order compute after work. Returns whether any of it was still pending; then `measured` is called with the
        seconds that compute waited, once they are known."""
        pending = False
        for wait in waits:
            if not wait.ticket.done:
                pending = True
                with self.timeline.waiting("compute", wait.ticket.lane, measured):
                    wait.ticket.order_stream()
        return pending

    def mark(self) -> Ticket:
        """A ticket for everything submitted to compute so far; on the CPU that is finished."""
        return DONE

    def report(self, error: LaneFailed) -> None:
        """Record a lane's failure for `check`."""
        with self._lock:
            self._failure = self._failure or error

    def check(self) -> None:
        """Raise, once, the first failure that has not been raised yet."""
        with self._lock:
            error, self._failure = self._failure, None
        if error is not None:
            raise error

    def quiesce(self) -> None:
        """Wait until every lane has finished its submitted work."""
        for lane in self._by_name.values():
            lane.submit(lambda: None, label="quiesce").wait()

    def close(self, patience: float | None = None) -> None:
        """Finish submitted work and stop; with `patience` (total seconds), abandon lanes that take longer."""
        deadline = None if patience is None else time.monotonic() + patience
        # The update lane first: copies wait for it.
        for lane in sorted(self._by_name.values(), key=lambda lane: lane.name != "update"):
            lane.close(None if deadline is None else max(0.1, deadline - time.monotonic()))


class SyncLanes(Lanes):
    """All work inline in the caller's thread; the reference that other lanes must equal."""


class DiskLanes(Lanes):
    """Disk I/O and the updates that wait for it on threads, everything else inline."""

    def _make(self, name: str) -> Lane:
        return ThreadLane(name, self) if LANES[name].tier == "disk" else Lane(name, self.timeline)


class HostTicket:
    """Work that a lane's thread marks as finished."""

    def __init__(self, worker: ThreadLane, label: str) -> None:
        self.lane = self.queue = worker.name
        self.label = label
        self._worker = worker
        self._finished = threading.Event()
        self._error: LaneFailed | None = None

    @property
    def done(self) -> bool:
        return self._finished.is_set() and self._error is None

    def wait(self) -> None:
        if not self._finished.is_set():
            self._worker.owner.require("wait for what its lanes do")
        # With a timeout, to notice a thread that died or stalled, and to let Ctrl-C through.
        while not self._finished.wait(_POLL_SECONDS):
            self._worker.check_progress(self.label)
        if self._error is not None:
            raise self._error

    def order_stream(self) -> None:
        self.wait()

    def finish(self, error: LaneFailed | None = None) -> None:
        self._error = error
        self._finished.set()


class ThreadLane(Lane):
    """A lane on one CPU thread. `delay` returns seconds to sleep before and after each piece of work."""

    tickets: type[HostTicket] = HostTicket
    worker = "{}"
    """Format of the thread's name."""

    def __init__(self, name: str, lanes: Lanes, delay: Callable[[], float] | None = None) -> None:
        super().__init__(name, lanes.timeline)
        self.owner = Owner()
        self._worker = self.worker.format(name)
        self._report = lanes.report
        self._delay = delay
        self._job: tuple[str, float] | None = None
        """The running job's label and start time."""
        self._warned = 0.0
        self._queue: queue.SimpleQueue[tuple[Work, Sequence[Wait], HostTicket] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"megatrain-{self._worker}", daemon=True)
        self._thread.start()

    def submit(self, work: Work, after: Sequence[Wait] = (), label: str = "", job: str = "") -> Ticket:
        self.owner.require("run the model")
        ticket = self.tickets(self, label)
        self._queue.put((work, after, ticket))
        return ticket

    def close(self, patience: float | None = None) -> None:
        self._queue.put(None)
        if threading.current_thread() is self._thread:
            return
        deadline = None if patience is None else time.monotonic() + patience
        while self._thread.is_alive() and (deadline is None or time.monotonic() < deadline):
            self._thread.join(min(_POLL_SECONDS, patience or _POLL_SECONDS))
            if self._thread.is_alive():
                self.check_progress("close")
        if self._thread.is_alive():
            warn(f"the {self._worker} lane did not stop and was abandoned: {self._status()}")

    def check_progress(self, waited_for: str) -> None:
        """Called by waiting threads: warn or raise if the lane is dead or its job takes too long."""
        if not self._thread.is_alive():
            raise LaneFailed(
                f"the thread of the {self._worker} lane has died, so {waited_for!r} will never complete: "
                f"{self._status()}; restart from the last checkpoint."
            )
        job = self._job
        if job is None:
            return
        since = time.monotonic() - job[1]
        if since > FAIL_AFTER_SECONDS:
            raise LaneFailed(
                f"the {self._worker} lane is stalled: {self._status()}, and {waited_for!r} waits for it; check the "
                "disk, the driver and the load of the machine, then restart from the last checkpoint."
            )
        if since > WARN_AFTER_SECONDS and self._warned < job[1]:
            self._warned = time.monotonic()
            warn(f"the {self._worker} lane makes no progress: {self._status()}, and {waited_for!r} waits for it")

    def _status(self) -> str:
        job = self._job
        return "it is idle" if job is None else f"it has been running {job[0]!r} for {time.monotonic() - job[1]:.0f} s"

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, after, ticket = item
            try:
                self._do(work, after, ticket)
            except BaseException as cause:
                ticket.finish(self._failed(ticket.label, cause))
            else:
                ticket.finish()
            # Otherwise the last job's closure would keep its buffers alive while the lane is idle.
            self._job = None
            del item, work, after, ticket

    def _do(self, work: Work, after: Sequence[Wait], ticket: HostTicket) -> None:
        for _, earlier in after:
            with self.timeline.waiting(self.name, earlier.lane):
                earlier.wait()
        self._job = (ticket.label, time.monotonic())
        if self._delay is not None:
            time.sleep(self._delay())
        with self.timeline.host_span(self.name, ticket.label):
            work()
        if self._delay is not None:
            time.sleep(self._delay())

    def _failed(self, label: str, cause: BaseException) -> LaneFailed:
        """The error for the ticket of failed work; its first occurrence is reported to `check`."""
        if isinstance(cause, LaneFailed):
            return cause
        error = LaneFailed(
            f"{label!r} failed on the {self._worker} lane ({type(cause).__name__}: {str(cause).rstrip('.')}); restart "
            "from the last checkpoint."
        )
        error.__cause__ = cause
        self._report(error)
        return error


class ThreadLanes(Lanes):
    """Every lane on a CPU thread of its own; with a seed, random delays of up to `max_delay` seconds."""

    def __init__(self, seed: int | None = None, max_delay: float = 1e-3) -> None:
        self._seed, self._max_delay = seed, max_delay
        super().__init__()

    def _make(self, name: str) -> Lane:
        source = random.Random(f"{self._seed}/{name}")

        def delay() -> float:
            # Half of the delays are zero: a lane that runs ahead reveals as much as one that lags.
            return max(0.0, source.uniform(-self._max_delay, self._max_delay))

        return ThreadLane(name, self, None if self._seed is None else delay)
