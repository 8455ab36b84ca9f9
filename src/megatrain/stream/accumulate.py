"""Gradient sums of a window, on the device: each block's sum is copied to host memory once per window.

A sum continues from what earlier windows of the same step accumulated, which is fetched ahead if a slot is free.
Micro-batches are added in their order, so the result is bitwise that of running them one after another.
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
from megatrain.stream.add import add_each
from megatrain.stream.drain import Drain, Gradients, GradSlot

_Key = tuple[Slab, CallId]


@dataclass
class _DeviceSum:
    """A sum that lives on the device beyond the window; nothing is copied to host memory."""

    part: Part
    fresh: bool
    """Whether the part had no gradient of this step yet."""
    count: int = field(default=0, init=False)


@dataclass
class _SlotSum(_DeviceSum):
    """A sum in a gradient slot, which is copied to host memory."""

    slot: GradSlot
    total: torch.Tensor
    """FP32, on the device."""
    rounded: torch.Tensor
    """Buffer for the total in the gradient dtype."""
    present: set[int]
    writes: int
    """Of the part, when the sum began: others mean that users have written to what was fetched."""

    def continues(self) -> bool:
        """Whether the part is still what was fetched."""
        return self.present == self.part.present and self.writes == self.part.writes


class MicroBatches(Protocol):
    """The micro-batches of a window."""

    def current(self) -> int:
        """The micro-batch that the calling thread runs."""

    def live(self) -> AbstractSet[int]:
        """Micro-batches that have not finished."""


class WindowSums:
    """The open sums of one window. A gradient that arrives before an earlier micro-batch's waits for that one."""

    def __init__(self, drain: Drain, full_step: bool, running: MicroBatches, on_sent: Callable[[Slab], None]) -> None:
        self._drain = drain
        self._full_step = full_step
        """Whether the window is the whole step: sums may then be rounded before they are copied."""
        self._micro_batches = running
        self._on_sent = on_sent
        self._added: defaultdict[_Key, set[int]] = defaultdict(set)
        """Micro-batches whose gradients are in the sum."""
        self._early: defaultdict[_Key, dict[int, Gradients]] = defaultdict(dict)
        """Gradients that wait for those of an earlier micro-batch."""
        self._open: dict[_Key, _DeviceSum] = {}
        self._fetched: dict[_Key, _SlotSum] = {}
        """Sums of earlier windows that are on their way to the device, and that nothing was added to yet."""
        self.repeated_call = False
        """Whether a micro-batch differentiated a call twice, so that the order of additions is not the usual one."""

    def collect(self, slab: Slab, call_id: CallId, gradients: Gradients) -> None:
        """Add the gradients of the current micro-batch, after those of earlier ones."""
        key, micro_batch = (slab, call_id), self._micro_batches.current()
        added, early = self._added[key], self._early[key]
        if call_id != OUTSIDE_BLOCKS and (micro_batch in added or micro_batch in early):
            self.repeated_call = True
        if self._is_early(key, micro_batch) and micro_batch not in early:
            early[micro_batch] = gradients
            return
        self._add(key, micro_batch, gradients)
        self._add_early(key)
        if key in self._open and not slab.shared and not early and self._micro_batches.live() <= added:
            # Complete: copy it while the next block is computed, not only when that block needs the slot.
            self._send(key)

    def fetch(self, slab: Slab, call_id: CallId) -> None:
        """Start to fetch what this step has accumulated for a call whose backward is near, if a slot is free."""
        key, part = (slab, call_id), slab.grad.parts.get(call_id)
        if slab.grad.on_device or part is None or not part.present or key in self._open or key in self._fetched:
            return
        used = [entry.slot for entry in [*self._open.values(), *self._fetched.values()] if isinstance(entry, _SlotSum)]
        if self._drain.free_longest(slab) not in used:
            self._fetched[key] = self._load(slab, part, self._drain.next_slot(slab))

    def has_pending(self, slab: Slab) -> bool:
        """Whether part of the slab's gradient has not been sent, or may still arrive."""
        return any(key[0] is slab for key in [*self._open, *[key for key, early in self._early.items() if early]])

    def micro_batch_finished(self) -> None:
        """Gradients that waited for the finished micro-batch are added now."""
        for key in list(self._early):
            self._add_early(key)

    def _is_early(self, key: _Key, micro_batch: int) -> bool:
        live = self._micro_batches.live()
        return any(earlier < micro_batch and earlier not in self._added[key] for earlier in live)

    def _add_early(self, key: _Key) -> None:
        early = self._early[key]
        while early and not self._is_early(key, micro_batch := min(early)):
            self._add(key, micro_batch, early.pop(micro_batch))

    def _add(self, key: _Key, micro_batch: int, gradients: Gradients) -> None:
        if key not in self._open:
            self._open[key] = self._begin(*key)
        slab, entry = key[0], self._open[key]
        entry.count += 1
        if isinstance(entry, _SlotSum):
            # Rounded to the gradient dtype first, as when every micro-batch is copied on its own.
            rounded = {index: gradient.to(slab.layout.dtype) for index, gradient in gradients.items()}
            with torch.no_grad():
                add_each(slab.layout, entry.total, rounded, entry.present)
            entry.present.update(gradients)
        else:
            self._drain.add_in_place(slab, entry.part, gradients)
        self._added[key].add(micro_batch)

    def close(self) -> None:
        for key in list(self._open):
            self._send(key)

    def abandon(self) -> None:
        """Send nothing. Whoever uses the slots next waits for the additions."""
        for entry in self._open.values():
            if isinstance(entry, _SlotSum):
                entry.slot.order.read(self._drain.link.lanes.mark())

    def _begin(self, slab: Slab, call_id: CallId) -> _DeviceSum:
        """A sum that is empty, or that continues what this step has accumulated."""
        entry = self._fetched.pop((slab, call_id), None)
        if entry is not None and not entry.continues():
            entry = None
        slot = None
        if not slab.grad.on_device:
            slot = self._drain.next_slot(slab) if entry is None else entry.slot
        # The micro-batches have moved on from other calls: their sums are copied while this one is computed.
        for key, other in list(self._open.items()):
            if key[1] != call_id or (isinstance(other, _SlotSum) and other.slot is slot):
                self._send(key)
        part = slab.grad.part(call_id)
        if part.present and self._added[slab, call_id]:
            # A call that was sent already gets more gradients: from now on its sum stays FP32 until it is used.
            slab.shared = True
        if slot is None:
            return _DeviceSum(part, not part.present)
        if entry is None:
            self._fetched = {key: other for key, other in self._fetched.items() if other.slot is not slot}
            entry = self._load(slab, part, slot)
        self._start(slab, entry)
        return entry

    def _load(self, slab: Slab, part: Part, slot: GradSlot) -> _SlotSum:
        """A sum in a slot, with the copy of what this step has accumulated on its way."""
        entry = _SlotSum(part, not part.present, slot, *slot.sum_view(slab), {*part.present}, part.writes)
        if part.present:
            source = part.sum_buffer if part.summed else part.landing
            target = slab.owned.slice_flat(entry.total if part.summed else entry.rounded)
            self._drain.link.copy(
                "h2d",
                "resume",
                [(target, source.view(target.dtype), source.pinned)],
                reads=[part.order],
                writes=[slot.order],
                label=slab.name,
            )
        return entry

    def _start(self, slab: Slab, entry: _SlotSum) -> None:
        """Order compute after what the slot is still used for, or filled with."""
        order, lanes = entry.slot.order, self._drain.link.lanes
        if entry.fresh:
            # The copy that last drained this slot must have read it before compute writes it again.
            lanes.order_compute(order.before_writing())
            entry.total.zero_()
            return
        # The copy has waited for that one.
        lanes.order_compute(order.before_reading())
        if not entry.part.summed:
            slab.owned.slice_flat(entry.total).copy_(slab.owned.slice_flat(entry.rounded))

    def _send(self, key: _Key) -> None:
        slab, entry = key[0], self._open.pop(key)
        part = entry.part
        # Rounded only if nothing can follow: the window is the step, and every micro-batch has been added.
        all_added = self._micro_batches.live() <= self._added[key]
        complete = entry.fresh and (entry.count == 1 or (self._full_step and not slab.shared)) and all_added
        if isinstance(entry, _SlotSum):
            if part.dtype == torch.float32 or complete:
                entry.rounded.copy_(entry.total)
                self._drain.land(slab, part, entry.slot, entry.rounded)
            else:
                self._drain.land_sum(slab, part, entry.slot, entry.total)
            part.present.update(entry.present)
        elif complete and self._full_step:
            self._drain.round_in_place(part)
        # Gradients that wait for an earlier micro-batch are still to be added.
        if not self._early[key]:
            self._on_sent(slab)
