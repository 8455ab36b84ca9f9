"""Tickets represent submitted work; an `Order` sequences the work on one buffer.

A reader waits for the last writer. A writer waits for the last writer and for every reader since. A job declares what
it reads and writes (`Lanes.submit`), and its waits follow from that.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, Protocol


class Ticket(Protocol):
    """A piece of submitted work."""

    lane: str
    """The lane it was submitted to, "compute", or "" for finished work."""

    @property
    def queue(self) -> Hashable:
        """Work in one queue runs in order: a lane, or one thread's work on one stream."""

    @property
    def done(self) -> bool:
        """Whether the work finished without an error, so that nothing needs to wait for it."""

    def wait(self) -> None:
        """Block the calling thread until the work is finished; raise if it failed."""

    def order_stream(self) -> None:
        """Order the current CUDA stream after the work, without blocking the thread if possible."""


class _Done:
    lane = queue = ""
    done = True

    def wait(self) -> None:
        return None

    def order_stream(self) -> None:
        return None


DONE: Ticket = _Done()


class Wait(NamedTuple):
    """A ticket to wait for, with a name by which tests remove the wait."""

    name: str
    ticket: Ticket


class Order:
    """The last writer of one buffer, and its readers since."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.written: Ticket = DONE
        self._readers: dict[Hashable, Ticket] = {}
        """The last reader of each queue."""

    def before_reading(self) -> list[Wait]:
        return [] if self.written is DONE else [Wait(f"{self.name} written", self.written)]

    def before_writing(self) -> list[Wait]:
        return [*self.before_reading(), *[Wait(f"{self.name} read", ticket) for ticket in list(self._readers.values())]]

    def read(self, ticket: Ticket) -> None:
        if ticket is not DONE:
            self._readers[ticket.queue] = ticket

    def write(self, ticket: Ticket) -> None:
        """Record a writer, which waits for all earlier work."""
        self.written = ticket
        self._readers.clear()

    def until_readable(self) -> None:
        """Block until the last writer is done."""
        self.written.wait()

    def until_writable(self) -> None:
        """Block until the last writer and all readers since are done."""
        for wait in self.before_writing():
            wait.ticket.wait()

    def reset(self) -> list[Ticket]:
        """Forget all tickets, in a forked child, and return them."""
        tickets = [self.written, *self._readers.values()]
        self.write(DONE)
        return tickets
