"""Fetches weights into rings of slots on the device, ahead of compute.

A slot holds one version of one slab. It can be refilled while it is not pinned; the copy is ordered after the compute
that used it last. Slabs of similar size share a ring, so that a large embedding does not determine the size of every
slot. A held weight has a ring with one slot, refilled once per step after its update. Several threads may run the
model: `lock` guards the assignment of slots, not the compute that uses them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import torch

from megatrain.geometry import DISK_STAGING_SLOTS, group_by_size, weight_slots
from megatrain.store.slab import Slab
from megatrain.store.ticket import Order, Ticket
from megatrain.stream.ahead import Upcoming
from megatrain.stream.disk_weights import DiskWeights
from megatrain.stream.rings import DeviceBuffers
from megatrain.stream.transfer import Link
from megatrain.telemetry.counters import WeightUses

LATE_SECONDS = 1e-4
"""Compute that waits longer than this for a prefetched weight counts it as late. Between the two events that measure a
wait on a GPU, the host may take so long even if there is nothing to wait for."""
READ_CONFIDENCE = 0.7
"""How likely a use must be for a prefetch from disk. A read takes longer than the compute of a block, so a wrong one
delays the one that is needed by more than a right one saves."""


class Slot(DeviceBuffers):
    """A device buffer for one slab's weight."""

    def __init__(self, nbytes: int, link: Link) -> None:
        super().__init__("slot", link)
        self.allocate(nbytes)
        self.slab: Slab | None = None
        self.version = -1
        self.pins: set[Lease] = set()
        self.used = 0
        """Clock of its last use; the least recently used slot is evicted first."""

    @property
    def current(self) -> bool:
        """Whether its content equals the store."""
        return self.slab is not None and self.version == self.slab.version

    def view(self, slab: Slab) -> torch.Tensor:
        return self.bytes[: slab.layout.nbytes].view(slab.layout.dtype)


@dataclass(eq=False)
class Ring:
    """Slots of one size."""

    nbytes: int
    slots: list[Slot]

    def find(self, slab: Slab) -> Slot | None:
        return next((slot for slot in self.slots if slot.slab is slab and slot.current), None)

    def evictable(self, keep: AbstractSet[Slab]) -> Slot | None:
        """A slot that can be refilled, without a slab in `keep`: a stale one, else the least recently used."""
        free = [slot for slot in self.slots if not slot.pins and not (slot.current and slot.slab in keep)]
        return min(free, key=lambda slot: (slot.current, slot.used), default=None)


@dataclass(eq=False)
class Lease:
    """Slabs pinned on the device, and their flat views by slab index.

    Made before it is acquired, so that a Ctrl-C at any point leaves one that can be released.
    """

    slots: list[Slot] = field(default_factory=list)
    read: list[Order] = field(default_factory=list)
    """Orders of the slots and resident slabs: refills and updates wait for the compute that reads them."""
    found: list[Order] = field(default_factory=list)
    """Orders of slots that had been filled, or were being filled, before they were acquired."""
    views: dict[int, torch.Tensor] = field(default_factory=dict)
    released: bool = False


class Fetcher:
    """Copies weights to the device, on demand and ahead of time."""

    def __init__(self, slabs: Sequence[Slab], slots: int, link: Link, disk: DiskWeights | None = None) -> None:
        self._disk = disk
        self._on_disk = any(slab.weight_on_disk for slab in slabs)
        self.lock = threading.RLock()
        """Held while slots are filled, pinned or released, and while work that writes a slab is submitted, so that a
        copy's version number matches its content."""
        self._evaluations: set[Lease] = set()
        """Those of evaluation threads that read resident slabs in place."""
        self._released = threading.Condition(self.lock)
        self._link, self._lanes, self._counters = link, link.lanes, link.counters
        self._clock = count(1)
        self.depth = slots - 1
        """Uses to fetch ahead: one slot is in use, the others are prefetched."""
        self._slots = slots
        self._rings: dict[int, Ring] = {}
        streamed = [slab for slab in slabs if not slab.on_device]
        self._held = {slab.index: slab for slab in streamed if slab.homes.holds_weight}
        for slab in self._held.values():
            self._add_rings([slab])
        self._add_rings([slab for slab in streamed if not slab.homes.holds_weight])

    def _add_rings(self, slabs: Sequence[Slab]) -> None:
        for members in group_by_size(slabs, lambda slab: slab.layout.nbytes):
            nbytes = members[0].layout.nbytes
            wanted = weight_slots(self._slots, len(members))
            ring = Ring(nbytes, [Slot(nbytes, self._link) for _ in range(wanted)])
            self._rings |= {slab.index: ring for slab in members}

    @property
    def streams(self) -> bool:
        """Whether weights of any slab are fetched when they are used next."""
        return len(self._rings) > len(self._held) or any(slab.weight_on_disk for slab in self._held.values())

    @property
    def holding(self) -> bool:
        return bool(self._held)

    def stop_holding(self) -> None:
        """Free the memory of held weights; from now on they are streamed through the existing rings where these fit."""
        with self.lock:
            # An evaluation thread may be reading them.
            self._released.wait_for(lambda: not any(slot.pins for i in self._held for slot in self._rings[i].slots))
            held, self._held = [*self._held.values()], {}
            for slab in held:
                for slot in self._rings.pop(slab.index).slots:
                    slot.order.until_writable()
                slab.homes.holds_weight = False
            rings = [*self._rings.values()]
            for slab in held:
                nbytes = slab.layout.nbytes
                like = next((ring for ring in rings if nbytes <= ring.nbytes <= 2 * nbytes), None)
                if like is not None:
                    self._rings[slab.index] = like
            self._add_rings([slab for slab in held if slab.index not in self._rings])

    def needs_fetch(self, slab: Slab) -> bool:
        """Whether its next use needs a copy: it is neither resident nor held and current."""
        return not slab.on_device and (slab.index not in self._held or self._rings[slab.index].find(slab) is None)

    def slot_bytes(self) -> int:
        return sum(slot.bytes.numel() for ring in set(self._rings.values()) for slot in ring.slots)

    def acquire(
        self, lease: Lease, slabs: Sequence[Slab], ahead: Iterable[Upcoming] = (), evaluating: bool = False
    ) -> None:
        """Pin the slabs on the device, start copies of those needed next, and order compute after the copies. Release
        the lease, also if this fails. `evaluating`: the caller is an evaluation thread."""
        residents = [slab for slab in slabs if slab.on_device]
        with self.lock:
            if evaluating and residents:
                self._evaluations.add(lease)
            self._pin([slab for slab in slabs if not slab.on_device], lease)
            self.prefetch(ahead, slabs, read_ahead=not evaluating)
        for slab in residents:
            span = slab.open(reads=("weight",))
            lease.read += span.reads
            lease.views[slab.index] = span.weight
        # Compute must not read a slot before its copy, nor a resident slab before its update, is done.
        count = partial(self._count_use, self._lanes.timeline.weight_uses)
        for order in lease.read:
            found = order in lease.found
            pending = self._lanes.order_compute(order.before_reading(), count if found else None)
            if found and not pending:
                count(0.0)

    def release(self, lease: Lease) -> None:
        """Unpin the slabs; their slots may be refilled after the compute submitted so far. A second call does nothing,
        unless a Ctrl-C ended the first."""
        if lease.released:
            return
        mark = self._lanes.mark()
        try:
            if lease in self._evaluations:
                # The update is not ordered after this thread's stream.
                mark.wait()
        finally:
            self._unpin(lease, mark)

    def _pin(self, slabs: Sequence[Slab], lease: Lease) -> None:
        for slab in slabs:
            slot = self._rings[slab.index].find(slab)
            if slot is None:
                slot = self._fill(slab, {*slabs})
                self._counters.missed += 1
                self._lanes.timeline.weight_uses.missed += 1
            else:
                lease.found.append(slot.order)
            slot.used = next(self._clock)
            lease.slots.append(slot)
            slot.pins.add(lease)
            lease.read.append(slot.order)
            lease.views[slab.index] = slot.view(slab)

    def _count_use(self, step: WeightUses, waited: float) -> None:
        """Count the use of a slot that was found, in a step."""
        with self.lock:
            for uses in (self._counters, step):
                uses.late += waited > LATE_SECONDS
                uses.arrived += waited <= LATE_SECONDS

    def _unpin(self, lease: Lease, read: Ticket) -> None:
        with self.lock:
            for order in lease.read:
                order.read(read)
            for slot in lease.slots:
                slot.pins.discard(lease)
            self._evaluations.discard(lease)
            self._released.notify_all()
            lease.released = True

    def wait_for_evaluations(self) -> None:
        """Wait until no evaluation thread reads a resident slab, which an update writes in place. Call with the lock
        held, and keep it until the update has been submitted."""
        self._released.wait_for(lambda: not self._evaluations)

    def prefetch(self, ahead: Iterable[Upcoming], keep: Iterable[Slab] = (), read_ahead: bool = True) -> None:
        """Start copies for the next uses, nearest first, while slots are free. With `read_ahead`, also start reads from
        disk before there is a slot: of no more slabs than a ring has staging buffers, so that none evicts another."""
        if not self.streams:
            return
        needed, copies, read = {*keep}, self.depth, set[Slab]()
        reads = DISK_STAGING_SLOTS if self._on_disk and read_ahead else 0
        for slabs, confidence in ahead:
            streamed = [slab for slab in slabs if self.needs_fetch(slab)]
            likely = [slab for slab in streamed if confidence >= READ_CONFIDENCE or not slab.weight_on_disk]
            if copies and streamed:
                copies -= 1
                needed.update(streamed)
                for slab in likely:
                    self._start(slab, needed)
            for slab in likely:
                if len(read) < reads and slab.weight_on_disk and self._rings[slab.index].find(slab) is None:
                    assert self._disk is not None
                    self._disk.stage(slab)
                    read.add(slab)
            if not copies and len(read) == reads:
                return

    def refresh(self, slabs: Iterable[Slab]) -> None:
        """After a step, start copies of the held weights among `slabs`, in order. They have a lane of their own, so
        that one that waits for its update does not block other fetches. Those on disk are left to `prefetch`: all reads
        from disk share a lane."""
        for slab in slabs:
            if slab.index in self._held and not slab.weight_on_disk:
                self._start(slab, {slab})

    def held_slot(self, slab: Slab) -> Slot | None:
        """The slot of a held weight, current or being filled, for an update in place; None while it is pinned."""
        self._start(slab, {slab})
        slot = self._rings[slab.index].find(slab)
        return slot if slot is not None and not slot.pins else None

    def _start(self, slab: Slab, keep: AbstractSet[Slab]) -> None:
        """Start a copy of the slab, unless it has a slot or none is free."""
        ring = self._rings[slab.index]
        if ring.find(slab) is None and ring.evictable(keep) is not None:
            self._fill(slab, keep)
            self._counters.prefetched += 1

    def _fill(self, slab: Slab, keep: AbstractSet[Slab]) -> Slot:
        ring = self._rings[slab.index]
        slot = ring.evictable(keep)
        if slot is None:
            slot = Slot(ring.nbytes, self._link)
            ring.slots.append(slot)
            self._counters.grown_slots += 1
        # Assigned only after the copy was submitted: if that fails, the slot must not seem to hold the slab.
        slot.slab = None
        if slab.weight_on_disk:
            assert self._disk is not None
            weight, pinned, staged = self._disk.stage(slab)
            reads = [staged]
        else:
            span = slab.open(reads=("weight",))
            weight, pinned, reads = span.weight, span.pinned, span.reads
        lane = "refresh" if slab.homes.holds_weight else "h2d"
        copies = [(slot.view(slab), weight, pinned)]
        self._link.copy(lane, "fetch", copies, reads=reads, writes=[slot.order], label=slab.name)
        slot.slab, slot.version = slab, slab.version
        slot.used = next(self._clock)
        self._counters.fetches += 1
        self._counters.bytes_h2d += slab.layout.nbytes
        return slot
