"""Rings of slots: current weights are not copied again, stale ones are, and slots in use are not evicted."""

import threading
import time

import pytest
import torch

from megatrain.store.layout import lay_out
from megatrain.store.memory import Homes
from megatrain.store.ram import HostMemory
from megatrain.store.slab import Slab
from megatrain.store.ticket import Order
from megatrain.stream.ahead import Upcoming
from megatrain.stream.fetch import READ_CONFIDENCE, Fetcher, Lease
from megatrain.stream.lanes import SyncLanes, ThreadLanes
from megatrain.stream.transfer import Link
from megatrain.telemetry.counters import Counters

CPU = torch.device("cpu")
PAGE = 1024


def slabs_of(*pages, held=()):
    memory = HostMemory(pin=False, threads=1)
    slabs = []
    for index, count in enumerate(pages):
        homes = Homes(memory, memory, memory, holds_weight=index in held)
        slab = Slab(index, f"slab{index}", lay_out([("w", torch.Size([count * PAGE]))], torch.float32), homes)
        slab.weight.fill_(float(index + 1))
        slabs.append(slab)
    return slabs


class Bench:
    def __init__(self, *pages, slots=3, lanes=None, held=()):
        self.slabs = slabs_of(*pages, held=held)
        self.counters = Counters()
        self.lanes = lanes or SyncLanes()
        self.link = Link(CPU, self.lanes, self.counters, 1)
        self.fetcher = Fetcher(self.slabs, slots, self.link)

    def acquire(self, *indices, ahead=()):
        lease = Lease()
        self.fetcher.acquire(lease, [self.slabs[i] for i in indices], self.upcoming(*ahead))
        return lease

    def upcoming(self, *indices, confidence=1.0):
        return [Upcoming([self.slabs[i]], confidence) for i in indices]

    def use(self, *indices, ahead=()):
        """Acquire the slabs, read their first values, and release them."""
        lease = Lease()
        try:
            self.fetcher.acquire(lease, [self.slabs[i] for i in indices], self.upcoming(*ahead))
            return [lease.views[i][0].item() for i in indices]
        finally:
            self.fetcher.release(lease)

    def sizes(self):
        return sorted((ring.nbytes, len(ring.slots)) for ring in set(self.fetcher._rings.values()))


def test_slabs_of_similar_size_share_a_ring():
    bench = Bench(10, 9, 8, 2, 2, 2, 1, slots=2)
    assert bench.sizes() == [(2 * PAGE * 4, 2), (10 * PAGE * 4, 2)]
    assert bench.fetcher.slot_bytes() == 2 * (10 + 2) * PAGE * 4


def test_slabs_down_to_half_the_size_share_a_ring():
    assert Bench(8, 4, slots=5).sizes() == [(8 * PAGE * 4, 2)]
    assert Bench(8, 3, slots=5).sizes() == [(3 * PAGE * 4, 1), (8 * PAGE * 4, 1)]


@pytest.mark.parametrize("slots", [1, 2, 3, 20])
def test_a_ring_never_has_more_slots_than_slabs(slots):
    bench = Bench(5, 5, 1, slots=slots)
    assert bench.sizes() == [(1 * PAGE * 4, 1), (5 * PAGE * 4, min(slots, 2))]
    for _ in range(2):
        for index in range(3):
            assert bench.use(index, ahead=[(index + 1) % 3]) == [index + 1.0]
    assert bench.counters.grown_slots == 0


def test_every_element_arrives():
    bench = Bench(2, 2)
    bench.slabs[1].weight.copy_(torch.arange(2 * PAGE))
    lease = bench.acquire(1)
    assert torch.equal(lease.views[1], torch.arange(2.0 * PAGE))
    assert lease.views[1].data_ptr() != bench.slabs[1].weight.data_ptr()


def test_a_slab_in_its_slot_is_a_hit():
    bench = Bench(1, 1, 1)
    for _ in range(3):
        assert [bench.use(i) for i in range(3)] == [[1.0], [2.0], [3.0]]
    assert (bench.counters.fetches, bench.counters.arrived) == (3, 6)
    assert bench.counters.bytes_h2d == 3 * PAGE * 4


def test_the_least_recently_used_slot_is_refilled():
    bench = Bench(1, 1, 1, slots=2)
    for index in (0, 1, 0, 2, 0):
        assert bench.use(index) == [index + 1.0]
    assert (bench.counters.fetches, bench.counters.arrived) == (3, 2)


def test_one_slot_allows_no_prefetch():
    bench = Bench(1, 1, slots=1)
    assert bench.fetcher.depth == 0
    for index in (0, 1, 0, 1):
        assert bench.use(index, ahead=[1 - index]) == [index + 1.0]
    assert bench.counters.prefetched == 0
    assert bench.counters.fetches == 4


def test_prefetched_slabs_are_hits_later():
    bench = Bench(1, 1, 1, 1)
    assert bench.use(0, ahead=[1, 2]) == [1.0]
    assert (bench.counters.fetches, bench.counters.prefetched) == (3, 2)
    assert bench.use(1) == [2.0]
    assert bench.use(2) == [3.0]
    assert bench.counters.arrived == 2


class Pending:
    """A copy that compute waits for, for a millisecond."""

    lane = queue = "h2d"
    done = False

    def wait(self):
        time.sleep(1e-3)

    order_stream = wait


def test_uses_are_counted_by_where_the_weights_were():
    bench = Bench(1, 1, 1, 1)
    bench.use(0, ahead=[1, 2])
    bench.fetcher._rings[2].find(bench.slabs[2]).order.written = Pending()
    bench.use(1)
    bench.use(2)
    bench.use(3)
    step = bench.lanes.timeline.weight_uses
    for uses in (bench.counters, step):
        assert (uses.arrived, uses.late, uses.missed) == (1, 1, 2)
    bench.lanes.timeline.cut()
    bench.use(3)
    assert bench.lanes.timeline.last is None
    assert (bench.counters.arrived, step.arrived, bench.lanes.timeline.weight_uses.arrived) == (2, 1, 1)


def test_prefetching_stops_when_slots_run_out():
    """Slabs that are needed sooner come first. A later one must not evict an earlier one or the one in use."""
    bench = Bench(1, 1, 1, 1, 1, slots=3)
    lease = bench.acquire(0, ahead=[1, 2, 3, 4])
    assert bench.counters.prefetched == 2
    bench.fetcher.release(lease)
    bench.use(1)
    bench.use(2)
    assert bench.counters.arrived == 2


class Disk:
    """Weights on disk, as far as the fetcher sees them."""

    def __init__(self):
        self.staged = []

    def stage(self, slab):
        self.staged.append(slab.index)
        return slab.weight, False, Order("staged")


def with_disk(bench, *indices):
    """Put weights on a made-up disk. Returns it."""
    disk = bench.fetcher._disk = Disk()
    for index in indices:
        bench.slabs[index].weight_on_disk = bench.fetcher._on_disk = True
    return disk


def test_weights_on_disk_are_read_before_they_have_a_slot():
    """Not those that are in RAM or in a slot, and no more than fit into the staging buffers."""
    bench = Bench(*[1] * 9, slots=2)
    disk = with_disk(bench, *range(2, 9))
    lease = bench.acquire(1, ahead=[2])
    assert disk.staged == [2]
    bench.fetcher.prefetch(bench.upcoming(0, 2, 3, 4, 3, 5, 6), keep=bench.slabs[:3])
    assert disk.staged == [2, 3, 4, 3, 5]
    bench.fetcher.prefetch(bench.upcoming(0, 7, 8), keep=bench.slabs[:3], read_ahead=False)
    assert disk.staged == [2, 3, 4, 3, 5]
    assert bench.counters.prefetched == 1
    bench.fetcher.release(lease)


def test_weights_on_disk_are_not_read_for_an_unlikely_use():
    """Those in RAM are copied all the same: a copy is short."""
    bench = Bench(1, 1, 1, slots=3)
    disk = with_disk(bench, 1)
    bench.fetcher.prefetch(bench.upcoming(1, 2, confidence=READ_CONFIDENCE - 0.1))
    assert (disk.staged, bench.counters.prefetched) == ([], 1)
    bench.fetcher.prefetch(bench.upcoming(1, confidence=READ_CONFIDENCE))
    assert (disk.staged, bench.counters.prefetched) == ([1], 2)


def test_no_more_uses_are_looked_at_than_needed():
    """A prediction costs time, and in a model of a thousand blocks almost all may be held."""
    bench = Bench(*[1] * 4, slots=3, held=(0,))
    bench.use(0)
    ahead = iter(bench.upcoming(1, 0, 2, 3, 1))
    bench.fetcher.prefetch(ahead)
    assert [slabs for slabs, _ in ahead] == [[bench.slabs[3]], [bench.slabs[1]]]


def test_a_version_change_fetches_again():
    bench = Bench(1, 1)
    assert bench.use(0) == [1.0]
    bench.slabs[0].before_write()
    bench.slabs[0].weight.fill_(7.0)
    assert bench.use(0) == [7.0]
    assert (bench.counters.fetches, bench.counters.arrived) == (2, 0)


def test_a_stale_slot_is_evicted_first():
    """Its contents are useless, however recently it was used."""
    bench = Bench(1, 1, 1, slots=2)
    bench.use(0)
    bench.use(1)
    bench.slabs[1].version += 1
    bench.use(2)
    bench.use(0)
    assert bench.counters.arrived == 1


def test_slots_in_use_are_never_refilled():
    bench = Bench(1, 1, 1, slots=2)
    leases = [bench.acquire(i) for i in range(3)]
    assert bench.counters.grown_slots == 1
    assert [lease.views[i][0].item() for i, lease in enumerate(leases)] == [1.0, 2.0, 3.0]
    for lease in leases:
        bench.fetcher.release(lease)
    assert bench.use(0, 1, 2) == [1.0, 2.0, 3.0]
    assert bench.counters.grown_slots == 1


def test_a_block_with_more_slabs_than_slots():
    bench = Bench(1, 1, 1, slots=1)
    assert bench.use(0, 1, 2) == [1.0, 2.0, 3.0]
    assert bench.counters.grown_slots == 2
    assert bench.use(0, 1, 2) == [1.0, 2.0, 3.0]
    assert bench.counters.arrived == 3


def test_a_slab_acquired_twice_at_once():
    """A block used inside itself takes one slot, which stays pinned until the last release."""
    bench = Bench(1, 1, slots=1)
    outer, inner = bench.acquire(0), bench.acquire(0)
    bench.fetcher.release(inner)
    bench.use(1)
    assert outer.views[0][0].item() == 1.0
    assert bench.counters.grown_slots == 1


def test_a_failed_copy_leaves_no_slot_pinned():
    bench = Bench(1, 1, 1, slots=3)
    transfer = bench.link.transfers["h2d"]
    copy = transfer.to_device
    for failing in range(1, 4):
        calls = iter(range(1, 100))

        def to_device(*args, failing=failing, calls=calls):
            if next(calls) == failing:
                raise KeyboardInterrupt
            copy(*args)

        for slab in bench.slabs:
            slab.version += 1
        transfer.to_device = to_device
        with pytest.raises(KeyboardInterrupt):
            bench.use(0, 1, ahead=[2])
        transfer.to_device = copy
        assert [bench.use(i) for i in range(3)] == [[1.0], [2.0], [3.0]]
    assert not any(slot.pins for ring in bench.fetcher._rings.values() for slot in ring.slots)


def test_a_fetch_waits_for_the_update_and_an_update_can_wait_for_the_fetch():
    bench = Bench(1, 1, lanes=ThreadLanes(seed=0, max_delay=5e-3))
    slab = bench.slabs[0]
    for value in range(10):
        span = slab.open(writes=("weight",))
        bench.lanes.submit(
            "update", "update", lambda value=value, span=span: span.weight.fill_(float(value)), writes=span.writes
        )
        slab.version += 1
        assert bench.use(0) == [float(value)]
    bench.lanes.close()


def test_slabs_no_longer_held_share_the_existing_rings():
    bench = Bench(4, 3, 8, 4, 1, 1, slots=2, held=(1, 2, 4, 5))
    kib = PAGE * 4
    assert bench.sizes() == [(kib, 1), (kib, 1), (3 * kib, 1), (4 * kib, 2), (8 * kib, 1)]
    assert bench.use(0, 1, 2, 3, 4, 5) == [1, 2, 3, 4, 5, 6]
    bench.fetcher.stop_holding()
    assert not bench.fetcher.holding
    assert bench.sizes() == [(kib, 2), (4 * kib, 2), (8 * kib, 1)]
    assert [bench.use(index) for index in range(6)] == [[1], [2], [3], [4], [5], [6]]


def test_held_slots_are_freed_after_their_last_reader():
    bench = Bench(1, 1, held=(0, 1))
    lease = bench.acquire(0)
    happened = []

    def stop_holding():
        bench.fetcher.stop_holding()
        happened.append("let go")

    thread = threading.Thread(target=stop_holding)
    thread.start()
    thread.join(0.05)
    happened.append("released")
    bench.fetcher.release(lease)
    thread.join()
    assert happened == ["released", "let go"]
