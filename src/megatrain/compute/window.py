"""The window: the micro-batches of a step pass every block together, so that its weights travel once for all of them.

Each micro-batch's unchanged training step runs in a thread of its own, but only the thread that holds the baton runs.
At every block, forward and backward, a thread hands the baton on; the next one brings its own micro-batch to the same
block, and finds the weights there. Each thread keeps its own streams of random numbers.
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
"""The micro-batch of a thread that runs none."""
INTERRUPT_TIMEOUT = 0.5
"""Seconds that micro-batches get to come to their next block after a Ctrl-C."""


def wait_for_turn(position: int) -> None:
    """Called at a block, `position` of the way through a step: let the other micro-batches of the window come this far.

    Nothing outside a window.
    """
    thread = getattr(_thread, "current", None)
    if thread is not None:
        baton, number = thread
        baton.yield_turn(number, position)


class _Baton:
    """One thread runs at a time: whoever is least far, and of those the earliest micro-batch.

    So micro-batches pass every block in their order, also when one of them skips blocks (layer drop).
    """

    def __init__(self, micro_batches: int, device: torch.device) -> None:
        self._condition = threading.Condition()
        self.positions = dict.fromkeys(range(micro_batches), (-1, 0))
        """How far each that has not left is: its position in the step, and how many blocks it has come to."""
        self.finished: set[int] = set()
        """Those whose work is done; one of them may still hold the baton."""
        self._turn = 0
        self._device = device
        self.aborted = False
        """Whether everybody is to give up; stays so for a thread that is left behind."""
        self.error: BaseException | None = None

    def yield_turn(self, number: int, position: int) -> None:
        """Give the baton to whoever is least far and wait until it comes back."""
        with self._condition:
            furthest, blocks = self.positions[number]
            self.positions[number] = (max(furthest, position), blocks + 1)
            self._choose_next()
            # In here nobody else draws yet.
            drawn = Generators.capture(self._device) if self._turn != number else None
        self.wait(number)
        if drawn is not None:
            drawn.restore()

    def wait(self, number: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._turn == number)
        if self.aborted:
            raise WindowAborted("another micro-batch of the window failed.")

    def leave(self, number: int) -> None:
        """The micro-batch is done, or has failed."""
        with self._condition:
            del self.positions[number]
            self._choose_next()

    def join(self) -> bool:
        """Wait until all have left. A Ctrl-C here ends them at their next block; False if one did not get there."""
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
        """Whoever gets the baton from now on gives up."""
        with self._condition:
            self.error, self.aborted = self.error or error, True

    def _choose_next(self) -> None:
        self._turn = min(self.positions, key=lambda number: (self.positions[number], number), default=-1)
        self._condition.notify_all()


Jobs = queue.SimpleQueue[Callable[[], None] | None]


def _run_jobs(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        # The last job's closure must not keep its tensors alive while the thread is idle.
        del job


class WindowThreads:
    """The threads of an engine's windows.

    They stay: CUDA libraries keep a handle per thread, and making one takes tens of milliseconds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._workers: list[tuple[threading.Thread, Jobs]] = []
        self._baton: _Baton | None = None

    def current(self) -> int:
        """The micro-batch that the calling thread runs."""
        thread = getattr(_thread, "current", None)
        return OUTSIDE_WINDOW if thread is None else int(thread[1])

    def check(self) -> None:
        """Raise in a thread whose window was given up: what it still does is nobody's."""
        thread = getattr(_thread, "current", None)
        if thread is not None and thread[0].aborted:
            raise WindowAborted("the window of this micro-batch was given up.")

    def live(self) -> AbstractSet[int]:
        """Micro-batches that have not finished."""
        return set() if self._baton is None else self._baton.positions.keys() - self._baton.finished

    def run(
        self, tasks: Sequence[Callable[[], Result]], seeds: Sequence[int], on_finished: Callable[[], None]
    ) -> list[Result]:
        """Run the tasks together; results in order. The first failure is raised, after all tasks have ended.

        `on_finished` is called whenever a task has ended well.
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
            except BaseException as interrupt:
                if not started:
                    raise
                # They run: they must end before the caller goes on.
                baton.abort(interrupt)
            if not baton.join():
                # Whoever is stuck keeps its thread; it gives up if it ever gets the baton again.
                self._workers = []
        self._baton = None
        if baton.error is not None:
            # What failed holds its frames, and those the tensors of the whole window: nobody but the caller keeps it.
            error, baton.error = baton.error, None
            try:
                raise error
            finally:
                del error
        return [results[number] for number in range(len(tasks))]

    def close(self) -> None:
        for thread, jobs in self._workers:
            jobs.put(None)
            thread.join()
        self._workers = []


def _thread_settings(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """What a thread does not take over from the one that starts it, as it is now; to be applied in the thread."""
    grad, ambient, default_device = torch.is_grad_enabled(), AmbientState.capture(device), torch.get_default_device()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextmanager
    def applied() -> Iterator[None]:
        # A backward of CUDA tensors otherwise runs in one worker thread that all micro-batches share: parking there
        # would be a deadlock.
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
