"""On SIGTERM a Trainer finishes the step, saves a checkpoint, and the process exits.

A second SIGTERM goes to the previous handler at once. A forked child has that handler from the start, because data
loaders and pools end their workers with SIGTERM.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from megatrain.telemetry.notices import warn

EXIT = 128 + signal.SIGTERM
_listening: list[Termination] = []
_masks = threading.local()


class EvaluationCut(Exception):
    """Ends an evaluation during training, because the run ends."""


class Termination(TrainerCallback):
    """Ends a run, with a checkpoint, at the end of the step in which SIGTERM arrives."""

    def __init__(self, training: Callable[[], bool]) -> None:
        self._training = training
        self.requested = False
        self._previous: Any = None
        self._owner = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGTERM inside the block, and pass it on afterwards. Has no effect outside the main thread.

        If the process ignores SIGTERM, or its handler was not set by Python, nothing changes.
        """
        previous = signal.getsignal(signal.SIGTERM)
        in_main = threading.current_thread() is threading.main_thread()
        if not in_main or previous is signal.SIG_IGN or previous is None or self._owner == os.getpid():
            yield
            return
        self.requested, self._previous, self._owner = False, previous, os.getpid()
        _listening.append(self)
        signal.signal(signal.SIGTERM, self._handle)
        try:
            yield
        finally:
            _listening.remove(self)
            # A handler that was set in the meantime stays.
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, previous)
            self._owner = 0
            came, self.requested = self.requested, False
        if not came:
            return
        if callable(previous):
            previous(signal.SIGTERM, None)
        else:
            # The exit status of SIGTERM, but with `finally` blocks and exit handlers.
            raise SystemExit(EXIT)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested and os.getpid() == self._owner:
            self.requested = True
            return
        signal.signal(number, self._previous)
        if callable(self._previous):
            self._previous(number, frame)
        else:
            os.kill(os.getpid(), number)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.requested:
            warn(f"SIGTERM: saving a checkpoint after step {state.global_step}, then the run stops")
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.requested:
            control.should_evaluate = False

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.requested and self._training():
            raise EvaluationCut


def _before_fork() -> None:
    # Block the signal: in the child it would be lost before the previous handler is restored.
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if _listening else None


def _after_fork() -> None:
    if _masks.before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _in_child() -> None:
    if _listening:
        signal.signal(signal.SIGTERM, _listening[0]._previous)
        _listening.clear()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
