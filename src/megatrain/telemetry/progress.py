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
    """No bars inside: a Trainer with `disable_tqdm=True` wants none."""
    global _hidden
    _hidden += hide
    try:
        yield
    finally:
        _hidden -= hide


def shown() -> bool:
    """Whether there is a terminal, and nobody has switched progress bars off."""
    if _hidden or sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TQDM_DISABLE"):
        return False
    # Only if the program uses it: importing transformers takes seconds.
    logging = sys.modules.get("transformers.utils.logging")
    return logging is None or bool(logging.is_progress_bar_enabled())


def _nowhere(count: int = 1) -> None:
    """Stands in for a bar that is not shown."""


@contextmanager
def progress(total: int | None, unit: str, title: str) -> Iterator[Callable[..., None]]:
    """Show how far the work inside is; call what is given with what has been done. Without a total: for how long."""
    if not shown():
        yield _nowhere
        return
    from tqdm import tqdm  # type: ignore[import-untyped]

    layout: dict[str, Any] = {"bar_format": "{desc}: {elapsed}"} if total is None else {}
    scaled: dict[str, Any] = {"unit_scale": True, "unit_divisor": 1024} if unit == "B" else {}
    bar: Any = None
    done, began, ended = 0, time.monotonic(), threading.Event()

    def draw() -> None:
        """In a thread of its own: the work may be one call, such as compiling."""
        nonlocal bar
        wait = AFTER
        while not ended.wait(wait):
            if bar is None:
                bar = tqdm(
                    total=total, initial=0, unit=f" {unit}s" if unit != "B" else unit, desc=title, leave=False,
                    dynamic_ncols=True, file=sys.stderr, **layout, **scaled,
                )  # fmt: skip
                bar.start_t -= time.monotonic() - began
            bar.n = done
            bar.refresh()
            wait = REFRESH

    def advance(count: int = 1) -> None:
        nonlocal done
        done += count

    drawing = threading.Thread(target=draw, name="megatrain progress", daemon=True)
    drawing.start()
    try:
        yield advance
    finally:
        ended.set()
        drawing.join()
        if bar is not None:
            bar.close()
