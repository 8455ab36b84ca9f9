"""Weights in: a ring of slots on the device, filled ahead of compute.

A slot holds one version of one slab. It may be refilled when nobody has it pinned, and the copy is ordered after the
compute that used it last. Blocks of like size share a ring, so that a large embedding does not size the slots of
every layer. A held weight has a ring of its own with one slot, which is refilled once per step, after its update.
Several threads may run the model: `lock` guards what is in which slot, and never the compute in between.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import count

import torch

from megatrain.geometry import group_by_size, weight_slots
from megatrain.store.slab import Slab
from megatrain.store.ticket import DONE, Order, Ticket
from megatrain.stream.rings import DeviceBuffers
from megatrain.stream.transfer import Link


class Slot(DeviceBuffers):
    """A device buffer that slabs land in."""

    def __init__(self, nbytes: int, link: Link) -> None:
        super().__init__("slot", link)
        self.take(nbytes)
        self.slab: Slab | None = None
        self.version = -1
        self.pins = 0
        self.used = 0
        """When it was used last, in uses: the least recent is refilled first."""

    @property
    def current(self) -> bool:
        """Whether what it holds is still what the store has."""
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
        """A slot that is not pinned and does not hold a slab to keep: a stale one, else the least recently used."""
        free = [slot for slot in self.slots if not slot.pins and not (slot.current and slot.slab in keep)]
        return min(free, key=lambda slot: (slot.current, slot.used), default=None)


@dataclass
class Lease:
    """Slabs pinned on the device: flat views by slab index."""

    slots: list[Slot] = field(default_factory=list)
    read: list[Order] = field(default_factory=list)
    """Of the slots, and of resident slabs: refills and updates wait for the compute that reads them."""
    views: dict[int, torch.Tensor] = field(default_factory=dict)
    evaluating: bool = False
    """Whether a thread beside the one that trains reads resident slabs where they lie."""


class Fetcher:
    """Brings slabs to the device, on demand and ahead of it."""

    def __init__(self, slabs: Sequence[Slab], slots: int, link: Link) -> None:
        self.lock = threading.RLock()
        """Held while slots are filled, pinned or released, and by whoever submits work that writes to a slab: a copy
        must not take the version of one moment for the content of another."""
        self._evaluations = 0
        """Leases that are evaluating."""
        self._released = threading.Condition(self.lock)
        self._link, self._lanes, self._counters = link, link.lanes, link.counters
        self._clock = count(1)
        self.depth = slots - 1
        """How many uses ahead to fetch: one slot is in use, the others are ahead of it."""
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
    def holding(self) -> bool:
        """Whether weights are held."""
        return bool(self._held)

    def stop_holding(self) -> None:
        """Give the memory of held weights back: from now on they stream, through the rings that there are."""
        with self.lock:
            # A thread that evaluates may read them.
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
        """Whether it is fetched for its next use: neither resident nor held already."""
        return not slab.on_device and (slab.index not in self._held or self._rings[slab.index].find(slab) is None)

    def slot_bytes(self) -> int:
        return sum(slot.bytes.numel() for ring in set(self._rings.values()) for slot in ring.slots)

    def acquire(self, slabs: Sequence[Slab], ahead: Sequence[Slab] = (), evaluating: bool = False) -> Lease:
        """Pin the slabs on the device, start copies of those needed next, and order compute after the arrival;
        `evaluating`: by a thread beside the one that trains."""
        residents = [slab for slab in slabs if slab.on_device]
        lease = Lease()
        try:
            with self.lock:
                if evaluating and residents:
                    self._evaluations += 1
                    lease.evaluating = True
                self._pin([slab for slab in slabs if not slab.on_device], lease)
                self.prefetch(ahead, keep=slabs)
            for slab in residents:
                span = slab.open(reads=("weight",))
                lease.read += span.reads
                lease.views[slab.index] = span.weight
            # Compute must not read a slot before its copy is there, nor a resident slab before its update is done.
            for order in lease.read:
                self._lanes.order_compute(order.before_reading())
            return lease
        except BaseException:
            self._unpin(lease)
            raise

    def release(self, lease: Lease) -> None:
        """Compute that used the slabs has been submitted; their slots may be refilled after it."""
        mark = self._lanes.mark()
        try:
            if lease.evaluating:
                # On a stream that the update knows nothing of.
                mark.wait()
        finally:
            self._unpin(lease, mark)

    def _pin(self, slabs: Sequence[Slab], lease: Lease) -> None:
        for slab in slabs:
            slot = self._rings[slab.index].find(slab)
            if slot is None:
                slot = self._fill(slab, {*slabs})
            else:
                self._counters.hits += 1
            slot.used = next(self._clock)
            slot.pins += 1
            lease.slots.append(slot)
            lease.read.append(slot.order)
            lease.views[slab.index] = slot.view(slab)

    def _unpin(self, lease: Lease, read: Ticket = DONE) -> None:
        with self.lock:
            for slot in lease.slots:
                slot.pins -= 1
            for order in lease.read:
                order.read(read)
            self._evaluations -= lease.evaluating
            self._released.notify_all()

    def wait_for_evaluations(self) -> None:
        """Wait until no evaluating thread reads a resident slab, whose update would write what it reads. Call with the
        lock held, and keep it until the update has been submitted."""
        self._released.wait_for(lambda: self._evaluations <= 0)

    def prefetch(self, slabs: Sequence[Slab], keep: Iterable[Slab]) -> None:
        """Start copies of the slabs that are needed next, nearest first, as far as slots are free."""
        kept = {*keep}
        for slab in slabs:
            if slab.on_device:
                continue
            kept.add(slab)
            ring = self._rings[slab.index]
            if ring.find(slab) is None and ring.evictable(kept) is not None:
                self._fill(slab, kept)
                self._counters.prefetched += 1

    def refresh(self, slabs: Iterable[Slab]) -> None:
        """After a step: start copies of all held weights that it updates, in the given order. They have a lane of their
        own, where one that waits for its update holds up no other fetch."""
        self.prefetch([slab for slab in slabs if slab.index in self._held], keep=())

    def held_slot(self, slab: Slab) -> Slot | None:
        """The slot of a held weight, with what the store has in it or on its way, to be updated there; None while
        somebody has it pinned."""
        self.prefetch([slab], keep=())
        slot = self._rings[slab.index].find(slab)
        return slot if slot is not None and not slot.pins else None

    def _fill(self, slab: Slab, keep: AbstractSet[Slab]) -> Slot:
        ring = self._rings[slab.index]
        slot = ring.evictable(keep)
        if slot is None:
            slot = Slot(ring.nbytes, self._link)
            ring.slots.append(slot)
            self._counters.grown_slots += 1
        # Claimed only once the copy is on its way: if submitting fails, the slot must not seem to hold the slab.
        slot.slab = None
        span = slab.open(reads=("weight",))
        copies = [(slot.view(slab), span.weight, span.pinned)]
        lane = "refresh" if slab.homes.holds_weight else "h2d"
        self._link.copy(lane, "fetch", copies, reads=span.reads, writes=[slot.order], label=slab.name)
        slot.slab, slot.version = slab, slab.version
        slot.used = next(self._clock)
        self._counters.fetches += 1
        self._counters.bytes_h2d += slab.layout.nbytes
        return slot
