"""What will be needed next. Training repeats itself, so the successor of a pair of uses is most often what it was."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

BOUNDARY: Hashable = "step"
"""The use that an optimizer step leaves in the record: weights beyond it are not final yet."""
LOOKAHEAD = 8
"""Uses that are looked at for each one that is found, and before the first, so that a block that repeats for ever is no
endless loop."""


class Predictor:
    """Remembers, for every two uses in a row, which came next. A wrong guess costs a stall, never a wrong result."""

    def __init__(self) -> None:
        self._after: dict[tuple[Hashable, Hashable], Hashable] = {}
        self._last: tuple[Hashable, Hashable] = (BOUNDARY, BOUNDARY)

    def record(self, use: Hashable) -> None:
        """Note that `use` happens now."""
        self._after[self._last] = use
        self._last = (self._last[1], use)

    def assume(self, uses: Sequence[Hashable]) -> None:
        """Note uses as if they had happened."""
        for use in uses:
            self.record(use)

    def upcoming(self) -> Iterator[Hashable]:
        """The next different uses, as far as they are known, not beyond a step boundary. A use that repeats (every
        micro-batch of a window uses a block) is no other use."""
        context, looks = self._last, LOOKAHEAD
        passed: set[Hashable] = set()
        while looks and (following := self._after.get(context, BOUNDARY)) != BOUNDARY:
            looks -= 1
            if following != context[1] and following not in passed:
                passed.add(following)
                looks += LOOKAHEAD
                yield following
            context = (context[1], following)
