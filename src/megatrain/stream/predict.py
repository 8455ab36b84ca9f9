"""Predicts which block is used next: training repeats itself, so a pair of uses usually has the same successor."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

BOUNDARY: Hashable = "step"
"""Recorded for an optimizer step: weights needed after it are not final yet."""
LOOKAHEAD = 8
"""Successors to follow for each new use, which bounds the search when a block repeats."""


class Predictor:
    """Remembers the successor of every two consecutive uses. A wrong prediction costs a stall, never a wrong result."""

    def __init__(self) -> None:
        self._after: dict[tuple[Hashable, Hashable], Hashable] = {}
        self._last: tuple[Hashable, Hashable] = (BOUNDARY, BOUNDARY)

    def record(self, use: Hashable) -> None:
        self._after[self._last] = use
        self._last = (self._last[1], use)

    def assume(self, uses: Sequence[Hashable]) -> None:
        """Record uses as if they had happened."""
        for use in uses:
            self.record(use)

    def upcoming(self) -> Iterator[Hashable]:
        """The next distinct uses, up to a step boundary. Repeated uses (every micro-batch of a window uses a block) are
        skipped."""
        context, remaining = self._last, LOOKAHEAD
        seen: set[Hashable] = set()
        while remaining and (following := self._after.get(context, BOUNDARY)) != BOUNDARY:
            remaining -= 1
            if following != context[1] and following not in seen:
                seen.add(following)
                remaining += LOOKAHEAD
                yield following
            context = (context[1], following)
