"""A ticket stands for submitted work. Slabs keep the tickets of the last work on each role; lanes hand them out."""

from __future__ import annotations

from typing import Protocol


class Ticket(Protocol):
    """A piece of submitted work."""

    lane: str
    """Where the work was submitted: a lane's name, "compute", or nothing for work that never was."""

    def wait(self) -> None:
        """Block the calling thread until the work is finished; raise if it failed."""

    def order(self) -> None:
        """Order the caller's device stream after the work, without blocking the thread if that is possible."""


class _Done:
    lane = ""

    def wait(self) -> None:
        return None

    def order(self) -> None:
        return None


DONE: Ticket = _Done()
