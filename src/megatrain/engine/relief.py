"""What blocks keep for their backward, and how they keep less once the device has run out of memory.

Nothing here changes bits: `store`, `recompute` and `offload` give the same gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch

LESS = {"store": "recompute", "recompute": "offload", "offload": "offload"}
"""Policy → the next one, which takes less of the device."""


class Policies:
    """The policy of every block."""

    def __init__(self, chosen: str | Mapping[str, str], blocks: Sequence[str]) -> None:
        patterns = {"*": chosen} if isinstance(chosen, str) else chosen
        self._of = {
            name: next((policy for pattern, policy in patterns.items() if fnmatch(name, pattern)), "recompute")
            for name in blocks
        }

    def __getitem__(self, block: str) -> str:
        return self._of[block]

    def count(self, policy: str) -> int:
        return sum(found == policy for found in self._of.values())

    @property
    def least(self) -> bool:
        """Whether no block could keep less."""
        return all(policy == LESS[policy] for policy in self._of.values())

    @contextmanager
    def lean(self) -> Iterator[None]:
        """No graph is kept inside (no input either, if none was); afterwards half as many as before."""
        stored = [name for name, policy in self._of.items() if policy == "store"]
        leaner = {name: LESS[policy] for name, policy in self._of.items() if policy == "store" or not stored}
        before, self._of = self._of, self._of | leaner
        yield
        # The first half goes on as before: a backward frees the last ones first, so those are worth least.
        self._of |= {name: before[name] for name in stored[: len(stored) // 2]}
