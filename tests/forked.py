"""Run functions in forked children and collect their results or errors."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LONGEST = 300
"""A child that runs longer than this many seconds is killed, so that the test fails instead of hanging. Generous,
for machines that do other work too."""


@dataclass(frozen=True)
class Ended:
    """How a child ended: its return value, the exception it raised (class and message), or the signal that ended it."""

    value: Any = None
    raised: tuple[str, str] | None = None
    signal: int = 0


def run(work: Callable[[], Any]) -> Ended:
    """Call `work` in a forked child and wait for it."""
    return wait(start(work))


def start(work: Callable[[], Any]) -> tuple[int, int]:
    """Fork a child that runs `work` and exits without returning to the caller. Returns its pid and result pipe."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    signal.alarm(LONGEST)
    # Some tests expect the child to crash.
    faulthandler.disable()
    try:
        answer = Ended(work())
    except BaseException as error:
        answer = Ended(raised=(type(error).__name__, str(error)))
    with os.fdopen(writer, "wb") as pipe:
        pickle.dump(answer, pipe)
    os._exit(0)


def wait(child: tuple[int, int]) -> Ended:
    pid, reader = child
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return Ended(signal=os.WTERMSIG(status))
    found = pickle.loads(answer)
    assert isinstance(found, Ended)
    return found
