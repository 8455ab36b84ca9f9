"""What an engine changes outside itself, with the way back: every change is listed before it is made.

An engine has two lists. `Engine.close` runs the first: threads, pinned memory, what is set in the process. `release`
runs the second as well: what was done to the model. So does an attach that fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatrain.store.forks import Owner

_ABSENT: Any = object()


class Undo:
    """Functions that take changes back. Each must do no harm if its change was not made, or is taken back already."""

    def __init__(self, owner: Owner | None = None) -> None:
        self._entries: list[Callable[[], object]] = []
        self._owner = owner
        """The process whose changes they are, if they are not undone in a forked child."""
        self.timeout: float | None = None
        """Seconds that work under way gets to finish; None: as long as it takes."""

    def add(self, undo: Callable[[], object]) -> None:
        self._entries.append(undo)

    def patch(self, target: Any, name: str, value: Any, *, keep_user_value: bool = False) -> None:
        """Give an object an attribute of its own, and later back what it had.

        `keep_user_value`: what the user has set there meanwhile stays.
        """
        own = vars(target)
        before = own.get(name, _ABSENT)

        def put_back() -> None:
            if keep_user_value and own.get(name) is not value:
                return
            if before is _ABSENT:
                own.pop(name, None)
            else:
                own[name] = before

        self.add(put_back)
        own[name] = value

    def run(self) -> None:
        """Take all back, last first. If some fail, the others are still taken back, and the first error is raised.

        After a Ctrl-C it may be called again.
        """
        failed: Exception | None = None
        while self._entries and (self._owner is None or self._owner.is_current):
            entry = self._entries[-1]
            try:
                entry()
            except Exception as error:
                failed = failed or error
            if self._entries and self._entries[-1] is entry:
                self._entries.pop()
        if failed is not None:
            raise failed
