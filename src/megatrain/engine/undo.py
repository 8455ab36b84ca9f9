"""Undo lists: every change that an engine makes outside itself is registered before it is made.

An engine has two lists. `Engine.close` runs the first (threads, pinned memory, process settings). `Engine.release` and
a failed attach also run the second (changes to the model).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatrain.store.forks import Owner

_ABSENT: Any = object()


class Undo:
    """Functions that undo changes. Each must be harmless if its change was not made or is already undone."""

    def __init__(self, owner: Owner | None = None) -> None:
        self._entries: list[Callable[[], object]] = []
        self._owner = owner
        """If given, nothing is undone in a forked child of this process."""
        self.timeout: float | None = None
        """Seconds to wait for running work; None: no limit."""

    def add(self, undo: Callable[[], object]) -> None:
        self._entries.append(undo)

    def patch(self, target: Any, name: str, value: Any, *, keep_user_value: bool = False) -> None:
        """Set an instance attribute, and restore the previous one on undo.

        `keep_user_value`: do not restore if the attribute was changed in the meantime.
        """
        attributes = vars(target)
        before = attributes.get(name, _ABSENT)

        def restore() -> None:
            if keep_user_value and attributes.get(name) is not value:
                return
            if before is _ABSENT:
                attributes.pop(name, None)
            else:
                attributes[name] = before

        self.add(restore)
        attributes[name] = value

    def run(self) -> None:
        """Undo all changes, last first. If some fail, the others still run, and the first error is raised.

        May be called again after a Ctrl-C.
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
