"""What will be needed next. Training repeats itself, so the successor of a pair of uses is most often what it was."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

BOUNDARY: Hashable = "step"
"""The use that an optimizer step leaves in the record: weights beyond it are not final yet."""
LOOKAHEAD = 4
"""Uses that are looked at for each one that is found, so that a block that repeats for ever is no endless loop."""


class Predictor:
    """Remembers, for every two uses in a row, which came next. A wrong guess costs a stall, never a wrong result."""

    def __init__(self) -> None:
        self._after: dict[tuple[Hashable, Hashable], Hashable] = {}
        self._last: tuple[Hashable, Hashable] = (BOUNDARY, BOUNDARY)

    def record(self, use: Hashable) -> None:
        """Note that `use` happens now."""
        self._after[self._last] = use
        self._last = (self._last[1], use)

    def expect(self, uses: Sequence[Hashable]) -> None:
        """Note uses as if they had happened."""
        for use in uses:
            self.record(use)

    def upcoming(self, count: int, wanted: Callable[[Hashable], bool] = lambda _: True) -> list[Hashable]:
        """The next different uses that are wanted, as far as they are known, not beyond a step boundary. A use that
        repeats (every micro-batch of a window uses a block) is no other use."""
        context = self._last
        found: list[Hashable] = []
        passed: set[Hashable] = set()
        looks = LOOKAHEAD * count
        while looks and len(found) < count:
            looks -= 1
            following = self._after.get(context)
            if following is None or following == BOUNDARY:
                break
            if following != context[1] and following not in passed:
                passed.add(following)
                if wanted(following):
                    found.append(following)
                else:
                    looks += LOOKAHEAD
            context = (context[1], following)
        return found
