"""Announcements: whatever MegaTrain decides on the user's behalf is said once, in one line, on this logger."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("megatrain")


class _StderrUnlessConfigured(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints to stderr as long as the application has not configured logging itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr
            super().emit(record)


def announce(message: str) -> None:
    """Say something the user should know, at level INFO."""
    _installed().info(message)


def warn(message: str) -> None:
    """Say something the user should act on, at level WARNING."""
    _installed().warning(message)


def _installed() -> logging.Logger:
    if not logger.handlers:
        handler = _StderrUnlessConfigured()
        handler.setFormatter(logging.Formatter("[megatrain] %(message)s"))
        logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
    return logger
