"""Work that Ctrl-C does not interrupt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def uninterrupted(work: Callable[[], Result]) -> Result:
    """Do work that Ctrl-C does not interrupt: it goes on in a thread of its own if the caller is interrupted. Others
    that use the same buffer wait for it."""
    if threading.current_thread() is not threading.main_thread():
        return work()
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="megatrain-transfer", daemon=True).start()
    return done.result()
