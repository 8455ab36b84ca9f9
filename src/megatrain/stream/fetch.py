"""Weights in: a ring of slots on the device, filled ahead of compute.

A slot holds one version of one slab. It may be refilled when nobody has it pinned, and the copy is ordered after the
compute that used it last. Blocks of like size share a ring, so that a large embedding does not size the slots of
every layer. A held weight has a ring of its own with one slot, which is refilled once per step, after its update.
Several threads may run the model: `lock` guards what is in which slot, and never the compute in between.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatrain.geometry import by_size, weight_slots
from megatrain.store.slab import Slab
from megatrain.store.ticket import Order
from megatrain.store.vram import lasting
from megatrain.stream.lanes import Lanes
from megatrain.stream.transfer import Transfer
from megatrain.telemetry.counters import Counters


class Slot:
    """A device buffer that slabs land in."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.buffer = lasting(nbytes, device)
        self.slab: Slab | None = None
        self.version = -1
        self.pins = 0
        self.used = 0
        """When it was used last, in uses: the least recent is refilled first."""
        self.order = Order("slot")

    def holds(self, slab: Slab) -> bool:
        return self.slab is slab and self.version == slab.version

    @property
    def current(self) -> bool:
        """Whether what it holds is still what the store has."""
        return self.slab is not None and self.version == self.slab.version

    def view(self, slab: Slab) -> torch.Tensor:
        return self.buffer[: slab.layout.nbytes].view(slab.layout.dtype)


class Ring:
    """Slots of one size."""

    def __init__(self, nbytes: int, slots: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.device = device
        self.slots = [Slot(nbytes, device) for _ in range(slots)]

    def fits(self, slab: Slab) -> bool:
        """Whether the slab is of like size."""
        return slab.layout.nbytes <= self.nbytes <= 2 * slab.layout.nbytes

    def find(self, slab: Slab) -> Slot | None:
        return next((slot for slot in self.slots if slot.holds(slab)), None)

    def victim(self, keep: set[int]) -> Slot | None:
        """A slot that is not pinned and does not hold a slab to keep: a stale one, else the least recently used."""
        free = [slot for slot in self.slots if slot.pins == 0 and not self._kept(slot, keep)]
        return min(free, key=lambda slot: (slot.current, slot.used), default=None)

    def grow(self) -> Slot:
        slot = Slot(self.nbytes, self.device)
        self.slots.append(slot)
        return slot

    @staticmethod
    def _kept(slot: Slot, keep: set[int]) -> bool:
        return slot.slab is not None and slot.slab.index in keep and slot.current


@dataclass(frozen=True)
class Lease:
    """Slabs pinned on the device: flat views by slab index."""

    slots: list[Slot]
    read: list[Order]
    """Of the slots, and of resident slabs: refills and updates wait for the compute that reads them."""
    views: dict[int, torch.Tensor]
    visiting: bool


class Fetcher:
    """Brings slabs to the device, on demand and ahead of it."""

    def __init__(
        self,
        slabs: Sequence[Slab],
        slots: int,
        device: torch.device,
        lanes: Lanes,
        transfers: Mapping[str, Transfer],
        counters: Counters,
    ) -> None:
        self.lock = threading.RLock()
        """Held while slots are filled, pinned or released, and by whoever submits work that writes to a slab: a copy
        must not take the version of one moment for the content of another."""
        self._visits = 0
        """Leases of visiting threads that read resident slabs where they lie."""
        self._left = threading.Condition(self.lock)
        self._lanes = lanes
        self._transfers = transfers
        self._counters = counters
        self._clock = 0
        self.depth = slots - 1
        """How many uses ahead to fetch: one slot is in use, the others are ahead of it."""
        self._slots = slots
        self._device = device
        self._rings: dict[int, Ring] = {}
        travelling = [slab for slab in slabs if not slab.on_device]
        self._held = {slab.index: slab for slab in travelling if slab.homes.held}
        for slab in self._held.values():
            self._share([slab])
        self._share([slab for slab in travelling if not slab.homes.held])

    def _share(self, slabs: Sequence[Slab]) -> None:
        for members in by_size(slabs, lambda slab: slab.layout.nbytes):
            ring = Ring(members[0].layout.nbytes, weight_slots(self._slots, len(members)), self._device)
            for slot in ring.slots:
                self._after_compute(slot)
            self._rings |= {slab.index: ring for slab in members}

    @property
    def holding(self) -> bool:
        """Whether weights are held."""
        return bool(self._held)

    def let_go(self) -> None:
        """Give the memory of held weights back: from now on they stream, through the rings that there are."""
        with self.lock:
            # A thread that evaluates may read them.
            self._left.wait_for(lambda: not any(slot.pins for i in self._held for slot in self._rings[i].slots))
            held, self._held = [*self._held.values()], {}
            for slab in held:
                for slot in self._rings.pop(slab.index).slots:
                    slot.order.until_writable()
                slab.homes.held = False
            rings = [*self._rings.values()]
            fitting = {slab.index: [ring for ring in rings if ring.fits(slab)] for slab in held}
            self._rings |= {index: found[0] for index, found in fitting.items() if found}
            self._share([slab for slab in held if not fitting[slab.index]])

    def travels(self, slab: Slab) -> bool:
        """Whether it is fetched for its next use: neither resident nor held already."""
        return not slab.on_device and (slab.index not in self._held or self._rings[slab.index].find(slab) is None)

    def slot_bytes(self) -> int:
        return sum(slot.buffer.numel() for ring in set(self._rings.values()) for slot in ring.slots)

    def acquire(self, slabs: Sequence[Slab], ahead: Sequence[Slab] = (), visiting: bool = False) -> Lease:
        """Pin the slabs on the device, start copies of those needed next, and order compute after the arrival.

        `visiting`: by a thread beside the one that trains.
        """
        slots: list[Slot] = []
        residents = [slab for slab in slabs if slab.on_device]
        visit = visiting and bool(residents)
        counted = False
        try:
            with self.lock:
                self._visits += visit
                counted = visit
                self._pin(slabs, slots)
                self.prefetch(ahead, keep=slabs)
            spans = {slab.index: slab.open(reads=("weight",)) for slab in residents}
            read = [slot.order for slot in slots] + [order for span in spans.values() for order in span.reads]
            # Compute must not read a slot before its copy is there, nor a resident slab before its update is done.
            for order in read:
                self._lanes.order(order.before_reading())
            fetched = [slab for slab in slabs if not slab.on_device]
            views = {slab.index: slot.view(slab) for slab, slot in zip(fetched, slots, strict=True)}
            views |= {index: span.weight for index, span in spans.items()}
            return Lease(slots, read, views, visit)
        except BaseException:
            with self.lock:
                for slot in slots:
                    slot.pins -= 1
                self._visits -= counted
                self._left.notify_all()
            raise

    def _pin(self, slabs: Sequence[Slab], slots: list[Slot]) -> None:
        needed = {slab.index for slab in slabs}
        for slab in slabs:
            if slab.on_device:
                continue
            slot = self._rings[slab.index].find(slab)
            if slot is None:
                slot = self._fill(slab, needed)
            else:
                self._counters.hits += 1
            self._clock += 1
            slot.used = self._clock
            slot.pins += 1
            slots.append(slot)

    def release(self, lease: Lease) -> None:
        """Compute that used the slabs has been submitted; their slots may be refilled after it."""
        mark = self._lanes.mark()
        try:
            if lease.visiting:
                # On a stream that the update knows nothing of.
                mark.wait()
        finally:
            with self.lock:
                for slot in lease.slots:
                    slot.pins -= 1
                for order in lease.read:
                    order.read(mark)
                self._visits -= lease.visiting
                self._left.notify_all()

    def until_left(self) -> None:
        """Wait until no visiting thread reads a resident slab, whose update would write what it reads. Call with the
        lock held, and keep it until the update has been submitted."""
        self._left.wait_for(lambda: self._visits <= 0)

    def prefetch(self, slabs: Sequence[Slab], keep: Iterable[Slab]) -> None:
        """Start copies of the slabs that are needed next, nearest first, as far as slots are free."""
        kept = {slab.index for slab in keep}
        for slab in slabs:
            if slab.on_device:
                continue
            kept.add(slab.index)
            ring = self._rings[slab.index]
            if ring.find(slab) is None and ring.victim(kept) is not None:
                self._fill(slab, kept)
                self._counters.prefetched += 1

    def refresh(self, slabs: Iterable[Slab]) -> None:
        """After a step: start copies of all held weights that it updates, in the given order. They have a lane of their
        own, where one that waits for its update holds up no other fetch."""
        for slab in slabs:
            if slab.index in self._held:
                self.prefetch([slab], keep=())

    def held_slot(self, slab: Slab) -> Slot | None:
        """The slot of a held weight, with what the store has in it or on its way, to be updated there; None while
        somebody has it pinned."""
        self.prefetch([slab], keep=())
        slot = self._rings[slab.index].find(slab)
        return slot if slot is not None and not slot.pins else None

    def _after_compute(self, slot: Slot) -> None:
        """Before the first copy into it: compute so far may have used these bytes for something that is gone."""
        slot.order.read(self._lanes.mark())

    def _fill(self, slab: Slab, keep: set[int]) -> Slot:
        ring = self._rings[slab.index]
        slot = ring.victim(keep)
        if slot is None:
            slot = ring.grow()
            self._after_compute(slot)
            self._counters.grown_slots += 1
        view = slot.view(slab)
        # Claimed only once the copy is on its way: if submitting fails, the slot must not seem to hold the slab.
        slot.slab = None
        span = slab.open(reads=("weight",))
        lane = "hold" if slab.homes.held else "h2d"
        self._lanes.submit(
            lane,
            "fetch",
            lambda: self._transfers[lane].to_device(view, span.weight, span.pinned),
            reads=span.reads,
            writes=[slot.order],
            label=slab.name,
        )
        slot.slab, slot.version = slab, slab.version
        self._clock += 1
        slot.used = self._clock
        self._counters.fetches += 1
        self._counters.bytes_h2d += slab.layout.nbytes
        return slot
