"""A bar for work that takes long: moving weights, compiling, reading rows, saving.

It looks like Hugging Face's, appears after a second, and is gone when the work is done. There is none if stderr is not
a terminal, or if progress bars were switched off.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

AFTER = 1.0
"""Seconds of work before a bar is shown."""
REFRESH = 0.5
_hidden = 0


@contextmanager
def hidden(hide: bool = True) -> Iterator[None]:
    """Show no bars inside (`disable_tqdm=True` of a Trainer)."""
    global _hidden
    _hidden += hide
    try:
        yield
    finally:
        _hidden -= hide


def shown() -> bool:
    """Whether stderr is a terminal and progress bars are not switched off."""
    if _hidden or sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TQDM_DISABLE"):
        return False
    # Only if the program uses it: importing transformers takes seconds.
    logging = sys.modules.get("transformers.utils.logging")
    return logging is None or bool(logging.is_progress_bar_enabled())


@contextmanager
def progress(total: int | None, unit: str, title: str) -> Iterator[Callable[..., None]]:
    """Show a bar for the work inside, which calls the yielded function with what it has done. Without a total, the bar
    shows the elapsed time."""
    if not shown():
        yield lambda count=1: None
        return
    from tqdm import tqdm  # type: ignore[import-untyped]

    options: dict[str, Any] = {"desc": title, "total": total, "unit": f" {unit}s"}
    if unit == "B":
        options |= {"unit": unit, "unit_scale": True, "unit_divisor": 1024}
    if total is None:
        options["bar_format"] = "{desc}: {elapsed}"
    bar: Any = None
    done, start, ended = 0, time.monotonic(), threading.Event()

    def draw() -> None:
        """In a thread of its own: the work may be one call, such as compiling."""
        nonlocal bar
        wait = AFTER
        while not ended.wait(wait):
            if bar is None:
                bar = tqdm(**options, leave=False, dynamic_ncols=True, file=sys.stderr)
                bar.start_t -= time.monotonic() - start
            bar.n = done
            bar.refresh()
            wait = REFRESH

    def advance(count: int = 1) -> None:
        nonlocal done
        done += count

    thread = threading.Thread(target=draw, name="megatrain progress", daemon=True)
    thread.start()
    try:
        yield advance
    finally:
        ended.set()
        thread.join()
        if bar is not None:
            bar.close()
