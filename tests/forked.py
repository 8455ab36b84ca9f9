"""Functions run in forked children; what they return or raise comes back."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LONGEST = 60
"""Seconds after which a child that hangs is ended, so that the test fails and does not hang itself."""


@dataclass(frozen=True)
class Ended:
    """What became of a child: a value, or what it raised (class and message), or the signal that ended it."""

    value: Any = None
    raised: tuple[str, str] | None = None
    signal: int = 0


def run(work: Callable[[], Any]) -> Ended:
    """Call `work` in a forked child and wait for it."""
    return wait(start(work))


def start(work: Callable[[], Any]) -> tuple[int, int]:
    """A forked child that calls `work` and ends without leaving through its caller: its pid, and where it answers."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    signal.alarm(LONGEST)
    # A fault may be what the test waits for.
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
