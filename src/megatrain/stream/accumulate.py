"""Sums of a window on the device: micro-batches pass a block one after the other, and their gradients travel once.

A sum continues where an earlier window of the same step left it, so the order of additions, and with it every bit, is
that of one micro-batch after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

import torch

from megatrain.store.gradient import OUTSIDE, Part, Place
from megatrain.store.slab import Slab
from megatrain.store.ticket import Wait
from megatrain.stream.add import add_each
from megatrain.stream.drain import Drain, Gradients
from megatrain.stream.gradslots import GradSlot
from megatrain.stream.transfer import Transfer


@dataclass(kw_only=True)
class _Sum:
    """A sum that lies on the device for longer than the window: nothing of it is sent."""

    slab: Slab
    part: Part
    fresh: bool
    """Whether nothing of this step had landed before."""
    added: int = 0


@dataclass(kw_only=True)
class _Passing(_Sum):
    """A sum that passes a slot."""

    slot: GradSlot
    total: torch.Tensor
    """FP32, on the device."""
    rounded: torch.Tensor
    """Room for the total in the gradient dtype."""
    present: set[int]


class Turns(Protocol):
    """Who is running in a window, and who is still to come."""

    def current(self) -> int:
        """The micro-batch that runs now."""

    def live(self) -> AbstractSet[int]:
        """Micro-batches that have not finished."""


class WindowSums:
    """Open sums of one window. A gradient that comes before an earlier micro-batch's is held until that has come."""

    def __init__(
        self, drain: Drain, transfer: Transfer, whole: bool, turns: Turns, sent: Callable[[Slab], None]
    ) -> None:
        self._drain = drain
        self._turns = turns
        self._sent = sent
        self._given: dict[tuple[int, Place], set[int]] = {}
        self._held: dict[tuple[int, Place], dict[int, tuple[Slab, Gradients]]] = {}
        self._transfer = transfer
        self._whole = whole
        """Whether this window is the whole step: its sums may then be rounded before they travel."""
        self._open: dict[tuple[int, Place], _Sum] = {}
        self.revisited = False
        """Whether a micro-batch gave twice to one place: the order is then not that of one after the other."""

    def collect(self, slab: Slab, place: Place, gradients: Gradients) -> None:
        """Add the gradients of the micro-batch that runs now, after those of the earlier ones."""
        key, seat = (slab.index, place), self._turns.current()
        if place != OUTSIDE and (seat in self._given.get(key, ()) or seat in self._held.get(key, ())):
            self.revisited = True
        if self._too_early(key, seat) and seat not in self._held.get(key, {}):
            self._held.setdefault(key, {})[seat] = (slab, gradients)
            return
        self._add(slab, place, gradients)
        self._given.setdefault(key, set()).add(seat)
        self._release(key)
        if key in self._open and not slab.shared and not self._held.get(key) and self._turns.live() <= self._given[key]:
            # Nobody is to come: it travels while the next block is computed, not only when that one needs the slot.
            self._send(key)

    def holds(self, slab: Slab) -> bool:
        """Whether something of a slab's gradient has not left yet, or may still come."""
        return any(
            index == slab.index for index, _ in [*self._open, *[key for key, kept in self._held.items() if kept]]
        )

    def left(self) -> None:
        """A micro-batch has finished: what waited for it need not any more."""
        for key in list(self._held):
            self._release(key)

    def _too_early(self, key: tuple[int, Place], seat: int) -> bool:
        given = self._given.get(key, set())
        return any(earlier < seat and earlier not in given for earlier in self._turns.live())

    def _release(self, key: tuple[int, Place]) -> None:
        held = self._held.get(key, {})
        while held and not self._too_early(key, seat := min(held)):
            slab, gradients = held.pop(seat)
            self._add(slab, key[1], gradients)
            self._given.setdefault(key, set()).add(seat)

    def _add(self, slab: Slab, place: Place, gradients: Gradients) -> None:
        key = (slab.index, place)
        if key not in self._open:
            self._open[key] = self._begin(slab, place)
        entry = self._open[key]
        entry.added += 1
        if not isinstance(entry, _Passing):
            self._drain.add_in_place(slab, entry.part, gradients)
            return
        # Rounded to the gradient dtype first, as it is when every micro-batch travels on its own.
        rounded = {index: gradient.to(slab.layout.dtype) for index, gradient in gradients.items()}
        with torch.no_grad():
            add_each(slab.layout, entry.total, rounded, entry.present)
        entry.present.update(gradients)

    def close(self) -> None:
        """Send all sums home."""
        for key in list(self._open):
            self._send(key)

    def _begin(self, slab: Slab, place: Place) -> _Sum:
        slot = None if slab.grad.on_device else self._drain.rings.next(slab)
        # The micro-batches have moved on from the other places: what they summed travels while this one is computed.
        for key, other in list(self._open.items()):
            if key[1] != place or (isinstance(other, _Passing) and other.slot is slot):
                self._send(key)
        part = slab.grad.part(place)
        if part.present and self._given.get((slab.index, place)):
            # It came back to a place that the window had left: from now on its sum stays FP32 until it is used.
            slab.shared = True
        if slot is None:
            return _Sum(slab=slab, part=part, fresh=not part.present)
        # The copy that last drained this slot must have read it before compute writes it again.
        self._drain.lanes.order(slot.order.before_writing())
        total, rounded = self._drain.rings.sum_view(slot, slab)
        total.zero_()
        entry = _Passing(
            slab=slab, part=part, fresh=not part.present, slot=slot, total=total, rounded=rounded,
            present=set(part.present),
        )  # fmt: skip
        if part.present:
            self._resume(entry)
        return entry

    def _resume(self, entry: _Passing) -> None:
        """Bring back what an earlier window or micro-batch of this step summed up."""
        part, lanes = entry.part, self._drain.lanes
        source = part.sum_buffer if part.summed else part.landing
        target = entry.slab.owned.within(entry.total if part.summed else entry.rounded)
        lanes.submit(
            "h2d",
            "resume",
            lambda: self._transfer.to_device(target, source.view(target.dtype), source.pinned),
            reads=[part.order],
            writes=[entry.slot.order],
            # After compute so far: it has just cleared the buffer that this fills.
            after=[Wait("compute", lanes.mark())],
            label=entry.slab.name,
        )
        lanes.order(entry.slot.order.before_reading())
        if not part.summed:
            entry.slab.owned.within(entry.total).copy_(target)

    def _send(self, key: tuple[int, Place]) -> None:
        entry = self._open.pop(key)
        slab, part = entry.slab, entry.part
        # Rounded only if nothing can follow: the window is the step, and every micro-batch has given to this place.
        everybody = self._turns.live() <= self._given.get(key, set())
        complete = entry.fresh and (entry.added == 1 or (self._whole and not slab.shared)) and everybody
        if not isinstance(entry, _Passing):
            if complete and self._whole:
                self._drain.round_in_place(slab, part)
        elif part.dtype == torch.float32 or complete:
            entry.rounded.copy_(entry.total)
            self._drain.land(slab, part, entry.slot, entry.rounded)
            part.present.update(entry.present)
        else:
            self._drain.land_sum(slab, part, entry.slot, entry.total)
            part.present.update(entry.present)
        # What is held for an earlier micro-batch is still to be added.
        if not self._held.get(key):
            self._sent(slab)
