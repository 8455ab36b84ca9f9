"""Predicts which blocks are used next.

Training repeats itself, so the future is looked up in the past, as LZ77 finds repeats in text. The predictor keeps a
history of uses and a pointer to the earlier position whose past is equal to the present for longest. It predicts what
followed there. While that is right, the pointer moves on, so a period of any length is known from its second time on.

Some paths do not repeat: an early exit, a decode loop of varying length. A use therefore also has a usual successor,
and counts how often both guesses were wrong. The better one is predicted; where both are often wrong, nothing is. A
wrong prediction costs a stall, never a wrong result.

A use is a block in a phase (forward, backward, inference). It reads the weights of the block's slabs, from the tiers
where they are at that time (stream/ahead.py). Nothing else needs a prediction: updates read states and gradients in the
order in which they were submitted, and a backward reads the inputs of blocks in the reverse order of its forward.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

BOUNDARY: Hashable = "step"
"""Recorded for an optimizer step: weights needed after it are not final yet."""
LOOKAHEAD = 8
"""Successors to follow for each new use, which bounds the search in a loop."""
HISTORY = 1 << 14
"""Uses that are remembered, at least; at most twice as many."""
CANDIDATES = 8
"""Earlier positions that are compared when a prediction was wrong."""
LONGEST_MATCH = 32
"""Uses that are compared per position."""
USUAL_STRENGTH = 3
"""Other successors in a row after which a well-established usual successor is replaced."""
RATE = 0.25
"""Weight of the newest case in the errors of a use."""
RECENT = 0.03
"""The same for the errors of all uses, which new uses start with."""
LEAST_CONFIDENCE = 0.3
"""Predictions that are less likely than this are not made: their copies would delay the one that is needed."""


class Expected(NamedTuple):
    """A use that is expected."""

    use: Hashable
    confidence: float
    """How likely it is, between 0 and 1."""


class _Use:
    """What is known of a use, whatever came before it."""

    __slots__ = ("key", "match_errors", "newest", "strength", "usual", "usual_errors")

    def __init__(self, key: Hashable, errors: float) -> None:
        self.key = key
        self.newest: _Pair | None = None
        """The pair that it ended last."""
        self.usual: _Pair | None = None
        """The pair with its usual successor."""
        self.strength = 0
        self.match_errors = self.usual_errors = errors
        """How often its successor was predicted wrongly, by the longest match and as the usual one: between 0 and 1,
        newer cases count more."""


class _Pair:
    """A use that follows a given other use."""

    __slots__ = ("last", "use")

    def __init__(self, use: _Use) -> None:
        self.use = use
        self.last = -1
        """Its newest position in the history."""


class Predictor:
    """Learns the sequence of uses while it is recorded. A use is any hashable value."""

    def __init__(self) -> None:
        self._uses: dict[Hashable, _Use] = {}
        self._pairs: dict[tuple[Hashable, Hashable], _Pair] = {}
        self._log: tuple[list[_Pair], list[int], int] = ([_Pair(_Use(BOUNDARY, 0.0))], [-1], 0)
        """The history; for each of its positions, the position before it with the same pair; and the first position
        that is remembered. One tuple, because a Ctrl-C may come between any two statements."""
        self._match = -1
        """The earlier position that the present is compared with; before the first one: there is none."""
        self._run = 0
        """Predictions by this match that were right, one after the other."""
        self._errors = 0.0
        """How often recent predictions were wrong."""

    def record(self, key: Hashable) -> None:
        """Note a use. One that repeats the last one is part of it, because all micro-batches of a window use a block in
        turn."""
        history, before, first = self._log
        current = history[-1].use
        if key == current.key:
            return
        pair = self._pairs.get((current.key, key)) or self._new_pair(current.key, key)
        count, match = len(history), self._match + 1
        predicted = history[match - first] if first < match < first + count else None
        if current.usual is not pair or predicted is not pair or current.usual_errors or current.match_errors:
            self._learn(current, pair, predicted)
        elif current.strength < USUAL_STRENGTH:
            current.strength += 1
        if predicted is pair:
            self._match, self._run = match, self._run + 1
        else:
            self._match, self._run = self._longest_match(pair), 0
        before[count:] = (pair.last,)
        history.append(pair)
        pair.last = first + count
        pair.use.newest = pair
        if count >= 2 * HISTORY:
            self._forget(count - HISTORY)

    def assume(self, uses: Sequence[Hashable]) -> None:
        """Record uses as if they had happened."""
        for use in uses:
            self.record(use)

    def upcoming(self) -> Iterator[Expected]:
        """The next distinct uses up to a step boundary, nearest first."""
        history, _, first = self._log
        end, match = len(history) - 1, self._match - first
        use, index = history[end].use, match
        # A match that has been right for a whole period is trusted, whatever earlier ones were.
        periodic = self._run > end - match
        confidence, remaining = 1.0, LOOKAHEAD
        seen: set[Hashable] = set()
        while remaining:
            if index == end:
                index = match  # the past that is read has reached the present, which repeats it
            following = history[index + 1] if 0 <= index < end else None
            errors, usual = 0.0 if periodic else use.match_errors, use.usual
            if usual is not None and usual.last >= first and (following is None or use.usual_errors < errors):
                following, errors, index = usual, use.usual_errors, usual.last - first
            else:
                index += 1
            confidence *= 1.0 - errors
            if following is None or following.use.key == BOUNDARY or confidence < LEAST_CONFIDENCE:
                return
            use = following.use
            remaining -= 1
            if use.key not in seen:
                seen.add(use.key)
                remaining = LOOKAHEAD
                yield Expected(use.key, confidence)

    def _new_pair(self, before: Hashable, key: Hashable) -> _Pair:
        use = self._uses.get(key)
        if use is None:
            use = self._uses[key] = _Use(key, self._errors)
        pair = self._pairs[before, key] = _Pair(use)
        return pair

    def _learn(self, current: _Use, pair: _Pair, predicted: _Pair | None) -> None:
        """Note that `pair` followed `current`, and which of the two guesses was wrong."""
        usual = current.usual
        if predicted is not None or usual is not None:
            guess = usual if predicted is None or current.usual_errors < current.match_errors else predicted
            self._errors = _toward(self._errors, guess is not pair, RECENT)
        if predicted is not None:
            current.match_errors = _toward(current.match_errors, predicted is not pair, RATE)
        if usual is not None:
            current.usual_errors = _toward(current.usual_errors, usual is not pair, RATE)
        if usual is pair:
            current.strength = min(current.strength + 1, USUAL_STRENGTH)
        elif usual is None or current.strength == 0:
            current.usual = pair
        else:
            current.strength -= 1

    def _longest_match(self, pair: _Pair) -> int:
        """The earlier position of the pair whose past is equal to the present for longest; of equal ones, the newest.
        For a new pair, the newest position of its use."""
        history, before, first = self._log
        if pair.last < first:
            return -1 if pair.use.newest is None else pair.use.newest.last
        best, longest, candidate, end = -1, -1, pair.last, len(history) - 1
        for _ in range(CANDIDATES):
            index, length = candidate - first - 1, 0
            most = min(LONGEST_MATCH, index + 1)
            while length < most and history[index - length] is history[end - length]:
                length += 1
            if length > longest:
                best, longest = candidate, length
            candidate = before[candidate - first]
            if candidate < first or longest == LONGEST_MATCH:
                break
        return best

    def _forget(self, count: int) -> None:
        """Drop the oldest positions, and pairs and uses that have not occurred since."""
        history, before, first = self._log
        self._log = history[count:], before[count:], first + count
        self._pairs = {keys: pair for keys, pair in self._pairs.items() if pair.last >= first + count}
        self._uses = {pair.use.key: pair.use for pair in self._pairs.values()}


def _toward(errors: float, wrong: bool, rate: float) -> float:
    """Move a mean of errors toward the newest case; small values become 0."""
    errors += (wrong - errors) * rate
    return errors if errors > 0.01 else 0.0
