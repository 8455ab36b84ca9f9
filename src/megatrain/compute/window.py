"""The window: micro-batches of a step run block by block together, so each block's weights are fetched once for all.

Each micro-batch runs in its own thread, and only one thread runs at a time. At every block, forward and backward, a
thread passes the baton. The next thread brings its micro-batch to the same block and finds the weights on the device.
Each thread has its own random number state.
"""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import torch

from megatrain import generators
from megatrain.compute.interrupts import DeferInterrupts
from megatrain.compute.replay import AmbientState
from megatrain.errors import WindowAborted
from megatrain.generators import Generators

Result = TypeVar("Result")
_thread = threading.local()
OUTSIDE_WINDOW = -1
"""The micro-batch number of a thread that does not belong to a window."""
INTERRUPT_TIMEOUT = 0.5
"""Seconds to wait after a Ctrl-C until every micro-batch reaches its next block."""


def wait_for_turn(position: int) -> None:
    """Wait until the other micro-batches of the window have reached `position`, counted in blocks through the step.

    Returns at once outside a window.
    """
    thread = getattr(_thread, "current", None)
    if thread is not None:
        baton, number = thread
        baton.yield_turn(number, position)


class _Baton:
    """Lets one thread run at a time: the one that is least far, and among equals the earliest micro-batch.

    Micro-batches therefore pass every block in order, even if one of them skips blocks (layer drop).
    """

    def __init__(self, micro_batches: int, device: torch.device) -> None:
        self._condition = threading.Condition()
        self.positions = dict.fromkeys(range(micro_batches), (-1, 0))
        """Micro-batch → its position in the step and the number of blocks it has reached there, more than one if layers
        are shared; removed when it ends."""
        self.finished: set[int] = set()
        """Micro-batches whose task has returned; one of them may still hold the baton."""
        self._turn = 0
        self._device = device
        self.aborted = False
        """Whether all threads must stop. A stuck thread sees this whenever it continues."""
        self.error: BaseException | None = None

    def yield_turn(self, number: int, position: int) -> None:
        """Pass the baton and wait until it returns."""
        with self._condition:
            furthest, blocks = self.positions[number]
            self.positions[number] = (position, 1) if position > furthest else (furthest, blocks + 1)
            self._choose_next()
            # Capture inside the lock: no other thread draws random numbers yet.
            state = Generators.capture(self._device) if self._turn != number else None
        self.wait(number)
        if state is not None:
            state.restore()

    def wait(self, number: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._turn == number)
        if self.aborted:
            raise WindowAborted("another micro-batch of the window failed.")

    def leave(self, number: int) -> None:
        """Remove a micro-batch that has ended or failed."""
        with self._condition:
            del self.positions[number]
            self._choose_next()

    def join(self) -> bool:
        """Wait until all have left. A Ctrl-C stops them at their next block; returns False if one does not reach it."""
        deadline: float | None = None
        while True:
            try:
                with self._condition:
                    remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
                    return self._condition.wait_for(lambda: not self.positions, remaining)
            except BaseException as error:
                self.abort(error)
                deadline = deadline or time.monotonic() + INTERRUPT_TIMEOUT

    def abort(self, error: BaseException) -> None:
        """Stop every thread when it next gets the baton."""
        with self._condition:
            self.error, self.aborted = self.error or error, True

    def _choose_next(self) -> None:
        self._turn = min(self.positions, key=lambda number: (self.positions[number], number), default=-1)
        self._condition.notify_all()


Jobs = queue.SimpleQueue[Callable[[], None] | None]


def _run_jobs(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        # The closure would keep its tensors alive while the thread is idle.
        del job


class WindowThreads:
    """The threads of an engine's windows, kept between windows.

    CUDA libraries create a handle per thread, which takes tens of milliseconds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._workers: list[tuple[threading.Thread, Jobs]] = []
        self._baton: _Baton | None = None

    def current(self) -> int:
        """The number of the micro-batch that the calling thread runs, or `OUTSIDE_WINDOW`."""
        thread = getattr(_thread, "current", None)
        return OUTSIDE_WINDOW if thread is None else int(thread[1])

    def check(self) -> None:
        """Raise `WindowAborted` in a thread whose window was aborted: its results must not be used."""
        thread = getattr(_thread, "current", None)
        if thread is not None and thread[0].aborted:
            raise WindowAborted("the window of this micro-batch was aborted.")

    def live(self) -> AbstractSet[int]:
        """Micro-batches that have not finished."""
        return set() if self._baton is None else self._baton.positions.keys() - self._baton.finished

    def run(
        self, tasks: Sequence[Callable[[], Result]], seeds: Sequence[int], on_finished: Callable[[], None]
    ) -> list[Result]:
        """Run the tasks together and return their results in order.

        `on_finished` is called after each task that succeeds. The first error is raised after all tasks have ended.
        """
        self._baton = baton = _Baton(len(tasks), self._device)
        results: dict[int, Result] = {}
        inherited = _thread_settings(self._device)

        def body(number: int) -> None:
            _thread.current = (baton, number)
            try:
                baton.wait(number)
                with inherited():
                    generators.seed(seeds[number])
                    results[number] = tasks[number]()
                    baton.finished.add(number)
                    on_finished()
            except WindowAborted:
                pass
            except BaseException as error:
                baton.abort(error)
            finally:
                _thread.current = None
                baton.leave(number)

        while len(self._workers) < len(tasks):
            jobs: Jobs = queue.SimpleQueue()
            name = f"megatrain-micro-{len(self._workers)}"
            thread = threading.Thread(target=_run_jobs, args=(jobs,), name=name, daemon=True)
            thread.start()
            self._workers.append((thread, jobs))
        started = False
        with generators.preserved(self._device):
            try:
                with DeferInterrupts():
                    for number, (_, jobs) in enumerate(self._workers[: len(tasks)]):
                        jobs.put(partial(contextvars.copy_context().run, body, number))
                    started = True
                ended = baton.join()
            except BaseException as interrupt:
                if not started:
                    raise
                # The tasks run already and must end before this returns.
                baton.abort(interrupt)
                ended = baton.join()
            if not ended:
                # A stuck thread is left behind. Its task stops if it ever gets the baton again.
                self._end_workers()
        self._baton = None
        if baton.error is not None:
            # The error's frames hold the tensors of the window, so only the caller may keep a reference to it.
            error, baton.error = baton.error, None
            try:
                raise error
            finally:
                del error
        return [results[number] for number in range(len(tasks))]

    def close(self) -> None:
        for thread, _ in self._end_workers():
            thread.join()

    def _end_workers(self) -> list[tuple[threading.Thread, Jobs]]:
        """Let the threads end after their present jobs; returns them."""
        workers, self._workers = self._workers, []
        for _, jobs in workers:
            jobs.put(None)
        return workers


def _thread_settings(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Capture the settings that a new thread does not inherit; the result applies them in that thread."""
    grad, ambient, default_device = torch.is_grad_enabled(), AmbientState.capture(device), torch.get_default_device()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextmanager
    def applied() -> Iterator[None]:
        # With multithreading, all CUDA backwards share one worker thread, and waiting for a turn there would deadlock.
        with (
            torch.device(default_device) if default_device.type != "cpu" else nullcontext(),
            torch.set_grad_enabled(grad),
            ambient.autocasting(),
            torch.autograd.set_multithreading_enabled(False),
            nullcontext() if stream is None else torch.cuda.device(device),
            nullcontext() if stream is None else torch.cuda.stream(stream),
        ):
            yield

    return applied
