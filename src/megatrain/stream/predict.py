"""What will be needed next. Training repeats itself, so the successor of a pair of uses is most often what it was."""

from __future__ import annotations

from collections.abc import Hashable

BOUNDARY: Hashable = "step"
"""The use that an optimizer step leaves in the record: weights beyond it are not final yet."""


class Predictor:
    """Remembers, for every two uses in a row, which came next. A wrong guess costs a stall, never a wrong result."""

    def __init__(self) -> None:
        self._after: dict[tuple[Hashable, Hashable], Hashable] = {}
        self._last: tuple[Hashable, Hashable] = (BOUNDARY, BOUNDARY)

    def record(self, use: Hashable) -> None:
        """Note that `use` happens now."""
        self._after[self._last] = use
        self._last = (self._last[1], use)

    def upcoming(self, count: int) -> list[Hashable]:
        """The next uses as far as they are known, not beyond a step boundary."""
        context = self._last
        found: list[Hashable] = []
        while len(found) < count:
            following = self._after.get(context)
            if following is None or following == BOUNDARY:
                break
            found.append(following)
            context = (context[1], following)
        return found
