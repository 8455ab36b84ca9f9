"""Names that were given up: each still works for one release, with a warning."""

from __future__ import annotations

import sys
import warnings
from typing import Any


def renamed(old: str, new: str) -> None:
    """Warn whoever uses an old name, at the line where they do."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] == "megatrain":
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"{old} is now {new}; the old name will be removed in the next release.", FutureWarning, stacklevel=level
    )


class Aliased(type):
    """Classes whose arguments may have old names: `current_names` gives them in new ones."""

    def __call__(cls, **values: Any) -> Any:
        return super().__call__(**cls.current_names(values))

    def current_names(cls, values: dict[str, Any]) -> dict[str, Any]:
        return values
