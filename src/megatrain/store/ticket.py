"""Tickets stand for submitted work, and an `Order` says whose turn it is at one piece of memory.

Whoever reads waits for the last writer; whoever writes waits for the last writer and for every reader since. That is
the whole rule: a job says what it reads and what it writes (`Lanes.submit`), and its waits follow.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, Protocol


class Ticket(Protocol):
    """A piece of submitted work."""

    lane: str
    """Where the work was submitted: a lane's name, "compute", or nothing for work that never was."""

    @property
    def queue(self) -> Hashable:
        """Work of one queue is done in the order of its tickets: a lane's, or what one thread gives one stream."""

    @property
    def done(self) -> bool:
        """Whether the work is finished, and did not fail: nothing needs to wait for it."""

    def wait(self) -> None:
        """Block the calling thread until the work is finished; raise if it failed."""

    def order_stream(self) -> None:
        """Order the caller's device stream after the work, without blocking the thread if that is possible."""


class _Done:
    lane = queue = ""
    done = True

    def wait(self) -> None:
        return None

    def order_stream(self) -> None:
        return None


DONE: Ticket = _Done()


class Wait(NamedTuple):
    """What a job comes after, and its name: tests take waits away by name."""

    name: str
    ticket: Ticket


class Order:
    """The last writer of one piece of memory, and its readers since."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.written: Ticket = DONE
        self._readers: dict[Hashable, Ticket] = {}
        """The last of each queue, which is in order itself."""

    def before_reading(self) -> list[Wait]:
        return [] if self.written is DONE else [Wait(f"{self.name} written", self.written)]

    def before_writing(self) -> list[Wait]:
        return [*self.before_reading(), *[Wait(f"{self.name} read", ticket) for ticket in list(self._readers.values())]]

    def read(self, ticket: Ticket) -> None:
        """The work of this ticket reads it."""
        if ticket is not DONE:
            self._readers[ticket.queue] = ticket

    def write(self, ticket: Ticket) -> None:
        """The work of this ticket, which waits for everybody before it, writes it."""
        self.written = ticket
        self._readers.clear()

    def until_readable(self) -> None:
        """Let the calling thread wait for the last writer."""
        self.written.wait()

    def until_writable(self) -> None:
        """Let the calling thread wait for the last writer and all readers."""
        for wait in self.before_writing():
            wait.ticket.wait()

    def reset(self) -> list[Ticket]:
        """In a forked child: what was submitted is the parent's. The tickets that there were."""
        tickets = [self.written, *self._readers.values()]
        self.write(DONE)
        return tickets
