"""Announcements: whatever MegaTrain decides on the user's behalf is said once, in one line, on this logger."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

logger = logging.getLogger("megatrain")
listeners: list[Callable[[str, str], None]] = []
"""Called with ("notice" or "warning", text) for every announcement."""
_process = os.getpid()


class _StderrUnlessConfigured(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints to stderr as long as the application has not configured logging itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr
            with _above_bars():
                super().emit(record)


def announce(message: str, recorded: bool = True) -> None:
    """Say something the user should know, at level INFO. `recorded`: also to records of runs."""
    _installed().info(message)
    if recorded:
        _tell("notice", message)


def warn(message: str) -> None:
    """Say something the user should act on, at level WARNING."""
    _installed().warning(message)
    _tell("warning", message)


def listed(names: Sequence[str]) -> str:
    """Names for a message; of many, the first three and the last."""
    return ", ".join(names if len(names) <= 6 else [*names[:3], "…", names[-1]])


def _tell(kind: str, message: str) -> None:
    for listener in [*listeners]:
        listener(kind, message)


def _above_bars() -> AbstractContextManager[None]:
    """Take tqdm's open bars off the terminal while a line is printed, and draw them again below it."""
    tqdm = sys.modules.get("tqdm.std")
    # A forked child may find tqdm's lock taken by a thread that it does not have.
    if tqdm is None or os.getpid() != _process or not getattr(tqdm.tqdm, "_instances", None):
        return nullcontext()
    return tqdm.tqdm.external_write_mode(file=sys.stderr)  # type: ignore[no-any-return]


def _installed() -> logging.Logger:
    if not logger.handlers:
        handler = _StderrUnlessConfigured()
        handler.setFormatter(logging.Formatter("[megatrain] %(message)s"))
        logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
    return logger
