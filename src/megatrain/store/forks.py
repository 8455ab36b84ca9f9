"""Forked children. The store's memory is shared with them: they read it without a copy, and must not write it.

Writing raises `ForkedProcess`. What gets past that faults: in a child the store's memory is read-only. Fork waits for
updates that were submitted, since lanes do not outlive it: what a child reads is whole, until the parent goes on.
"""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress
from functools import cache
from typing import Protocol

from megatrain.errors import ForkedProcess, MegaTrainError
from megatrain.native import library as native
from megatrain.store.ticket import Ticket
from megatrain.telemetry.notices import warn


class Ordered(Protocol):
    """What has tickets of work that lanes do."""

    def finish_work(self) -> None:
        """Wait for the work."""

    def forget_work(self) -> list[Ticket]:
        """There is no lane that does it. The tickets that it had."""


_ordered: weakref.WeakValueDictionary[int, Ordered] = weakref.WeakValueDictionary()
_of_the_parent: list[Ticket] = []
"""In a child: tickets may hold CUDA events, and CUDA ends a process that destroys those of another."""
_mapped: dict[int, tuple[weakref.ref[mmap.mmap], int, int]] = {}
"""Memory that is there: by identity, with address and size."""


class Owner:
    """The process that made a part of the store."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def here(self) -> bool:
        return os.getpid() == self.pid

    def require(self, doing: str) -> None:
        """Raise in a forked child."""
        if not self.here:
            raise ForkedProcess(
                f"this process ({os.getpid()}) was forked from the one that made the engine: it can read the weights, "
                f"but only process {self.pid} can {doing}; do it there, or start the child with the 'spawn' method and "
                "give it a model of its own."
            )


def protect(memory: mmap.mmap, address: int, nbytes: int) -> None:
    """Make this memory read-only in every child that is forked while it is there."""
    _register()
    key = id(memory)
    _mapped[key] = (weakref.ref(memory, lambda _: _mapped.pop(key, None)), address, nbytes)


def settle_before(ordered: Ordered) -> None:
    """Let every fork wait for the work on it."""
    _register()
    _ordered[id(ordered)] = ordered


@cache
def _register() -> None:
    native.prepare_protect()
    os.register_at_fork(before=_before, after_in_child=_in_child)


def _before() -> None:
    for reference in _ordered.valuerefs():
        ordered = reference()
        if ordered is not None:
            # Work that failed is raised where it is looked for next, in the parent.
            with suppress(MegaTrainError):
                ordered.finish_work()


def _in_child() -> None:
    for reference in _ordered.valuerefs():
        ordered = reference()
        if ordered is not None:
            _of_the_parent.extend(ordered.forget_work())
    for _, address, nbytes in list(_mapped.values()):
        try:
            native.protect(address, nbytes)
        except OSError as error:
            warn(f"a forked child could write the weights of its parent: they cannot be made read-only ({error})")
