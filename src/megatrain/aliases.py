"""Support for renamed settings and arguments: the old name works for one release, with a warning."""

from __future__ import annotations

import sys
import warnings
from typing import Any


def renamed(old: str, new: str) -> None:
    """Warn that `old` was renamed. The warning points at the caller's line outside megatrain."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] == "megatrain":
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"{old} is now {new}; the old name will be removed in the next release.", FutureWarning, stacklevel=level
    )


class Aliased(type):
    """Metaclass of classes that accept old argument names, which `current_names` translates."""

    def __call__(cls, **values: Any) -> Any:
        return super().__call__(**cls.current_names(values))

    def current_names(cls, values: dict[str, Any]) -> dict[str, Any]:
        return values
