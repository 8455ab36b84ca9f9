"""Sums of a window on the device: micro-batches pass a block one after the other, and their gradients travel once.

A sum continues where an earlier window of the same step left it, so the order of additions, and with it every bit, is
that of one micro-batch after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatrain.store.gradient import OUTSIDE_BLOCKS, CallId, Part
from megatrain.store.slab import Slab
from megatrain.store.ticket import Wait
from megatrain.stream.add import add_each
from megatrain.stream.drain import Drain, Gradients, GradSlot

_Key = tuple[Slab, CallId]


@dataclass
class _Sum:
    """A sum that lies on the device for longer than the window: nothing of it is sent."""

    part: Part
    fresh: bool
    """Whether nothing of this step had landed before."""
    added: int = field(default=0, init=False)


@dataclass
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

    def __init__(self, drain: Drain, whole: bool, turns: Turns, sent: Callable[[Slab], None]) -> None:
        self._drain = drain
        self._whole = whole
        """Whether this window is the whole step: its sums may then be rounded before they travel."""
        self._turns = turns
        self._sent = sent
        self._given: defaultdict[_Key, set[int]] = defaultdict(set)
        """Micro-batches whose gradients have been added."""
        self._held: defaultdict[_Key, dict[int, Gradients]] = defaultdict(dict)
        self._open: dict[_Key, _Sum] = {}
        self.revisited = False
        """Whether a micro-batch added twice to one call: the order is then not that of one after the other."""

    def collect(self, slab: Slab, call_id: CallId, gradients: Gradients) -> None:
        """Add the gradients of the micro-batch that runs now, after those of the earlier ones."""
        key, seat = (slab, call_id), self._turns.current()
        given, held = self._given[key], self._held[key]
        if call_id != OUTSIDE_BLOCKS and (seat in given or seat in held):
            self.revisited = True
        if self._too_early(key, seat) and seat not in held:
            held[seat] = gradients
            return
        self._add(key, seat, gradients)
        self._release(key)
        if key in self._open and not slab.shared and not held and self._turns.live() <= given:
            # Nobody is to come: it travels while the next block is computed, not only when that one needs the slot.
            self._send(key)

    def holds(self, slab: Slab) -> bool:
        """Whether something of a slab's gradient has not left yet, or may still come."""
        return any(key[0] is slab for key in [*self._open, *[key for key, held in self._held.items() if held]])

    def left(self) -> None:
        """A micro-batch has finished: what waited for it need not any more."""
        for key in list(self._held):
            self._release(key)

    def _too_early(self, key: _Key, seat: int) -> bool:
        return any(earlier < seat and earlier not in self._given[key] for earlier in self._turns.live())

    def _release(self, key: _Key) -> None:
        held = self._held[key]
        while held and not self._too_early(key, seat := min(held)):
            self._add(key, seat, held.pop(seat))

    def _add(self, key: _Key, seat: int, gradients: Gradients) -> None:
        if key not in self._open:
            self._open[key] = self._begin(*key)
        slab, entry = key[0], self._open[key]
        entry.added += 1
        if isinstance(entry, _Passing):
            # Rounded to the gradient dtype first, as it is when every micro-batch travels on its own.
            rounded = {index: gradient.to(slab.layout.dtype) for index, gradient in gradients.items()}
            with torch.no_grad():
                add_each(slab.layout, entry.total, rounded, entry.present)
            entry.present.update(gradients)
        else:
            self._drain.add_in_place(slab, entry.part, gradients)
        self._given[key].add(seat)

    def close(self) -> None:
        """Send all sums home."""
        for key in list(self._open):
            self._send(key)

    def _begin(self, slab: Slab, call_id: CallId) -> _Sum:
        """A sum that is empty, or what an earlier window or micro-batch of this step summed up."""
        slot = None if slab.grad.on_device else self._drain.next_slot(slab)
        # The micro-batches have moved on from the other calls: what they summed travels while this one is computed.
        for key, other in list(self._open.items()):
            if key[1] != call_id or (isinstance(other, _Passing) and other.slot is slot):
                self._send(key)
        part = slab.grad.part(call_id)
        if part.present and self._given[slab, call_id]:
            # It came back to a call that the window had finished: from now on its sum stays FP32 until it is used.
            slab.shared = True
        if slot is None:
            return _Sum(part, not part.present)
        # The copy that last drained this slot must have read it before compute writes it again.
        self._drain.link.lanes.order_compute(slot.order.before_writing())
        entry = _Passing(part, not part.present, slot, *slot.sum_view(slab), {*part.present})
        entry.total.zero_()
        if part.present:
            self._resume(slab, entry)
        return entry

    def _resume(self, slab: Slab, entry: _Passing) -> None:
        """Bring back what has been summed up."""
        part, link = entry.part, self._drain.link
        source = part.sum_buffer if part.summed else part.landing
        target = slab.owned.slice_flat(entry.total if part.summed else entry.rounded)
        link.copy(
            "h2d",
            "resume",
            [(target, source.view(target.dtype), source.pinned)],
            reads=[part.order],
            writes=[entry.slot.order],
            # Compute has just cleared the buffer that this fills.
            after=[Wait("compute", link.lanes.mark())],
            label=slab.name,
        )
        link.lanes.order_compute(entry.slot.order.before_reading())
        if not part.summed:
            slab.owned.slice_flat(entry.total).copy_(target)

    def _send(self, key: _Key) -> None:
        slab, entry = key[0], self._open.pop(key)
        part = entry.part
        # Rounded only if nothing can follow: the window is the step, and every micro-batch has given to this call.
        everybody = self._turns.live() <= self._given[key]
        complete = entry.fresh and (entry.added == 1 or (self._whole and not slab.shared)) and everybody
        if isinstance(entry, _Passing):
            if part.dtype == torch.float32 or complete:
                entry.rounded.copy_(entry.total)
                self._drain.land(slab, part, entry.slot, entry.rounded)
            else:
                self._drain.land_sum(slab, part, entry.slot, entry.total)
            part.present.update(entry.present)
        elif complete and self._whole:
            self._drain.round_in_place(part)
        # What is held for an earlier micro-batch is still to be added.
        if not self._held[key]:
            self._sent(slab)
