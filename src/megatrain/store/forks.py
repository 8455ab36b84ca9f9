"""Forked children share the store's memory: they read it without a copy and must not write it.

Writing raises `ForkedProcess`, and the memory is mapped read-only in the child. A fork waits for submitted updates,
because lanes do not survive it; the child sees complete updates until the parent continues.
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
from megatrain.store.ticket import Order, Ticket
from megatrain.telemetry.notices import warn

_orders: weakref.WeakValueDictionary[int, Order] = weakref.WeakValueDictionary()
"""Orders of memory that lanes read and write."""
_parent_tickets: list[Ticket] = []
"""In a child: kept alive, since destroying another process's CUDA events aborts the process."""
_mapped: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, int]] = weakref.WeakKeyDictionary()
"""Live mappings → (address, size)."""


class Closable(Protocol):
    def close(self) -> None: ...


_files: weakref.WeakSet[Closable] = weakref.WeakSet()
"""Open files that children must not use."""


class Owner:
    """The process that created an object."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_current(self) -> bool:
        return os.getpid() == self.pid

    def require(self, doing: str) -> None:
        if not self.is_current:
            raise ForkedProcess(
                f"this process ({os.getpid()}) was forked from the one that made the engine: it can read the weights, "
                f"but only process {self.pid} can {doing}; do it there, or start the child with the 'spawn' method and "
                "give it a model of its own."
            )


def protect(memory: mmap.mmap, address: int, nbytes: int) -> None:
    """Make this memory read-only in children forked during its lifetime."""
    _register()
    _mapped[memory] = (address, nbytes)


def close_in_child(file: Closable) -> None:
    """Close this file in children forked during its lifetime."""
    _register()
    _files.add(file)


def wait_before_fork(order: Order) -> Order:
    """Make every fork wait for the work on this memory."""
    _register()
    _orders[id(order)] = order
    return order


@cache
def _register() -> None:
    native.prepare_protect()
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


def _before_fork() -> None:
    for reference in _orders.valuerefs():
        # The parent raises failed work where it next waits for it.
        with suppress(MegaTrainError):
            if (order := reference()) is not None:
                order.until_writable()


def _after_fork_in_child() -> None:
    for reference in _orders.valuerefs():
        if (order := reference()) is not None:
            # The parent's lanes do the submitted work.
            _parent_tickets.extend(order.reset())
    for file in list(_files):
        file.close()
    for address, nbytes in list(_mapped.values()):
        try:
            native.protect(address, nbytes)
        except OSError as error:
            warn(f"the weights could not be made read-only in a forked child ({error}): it must not write to them")
