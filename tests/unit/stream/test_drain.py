"""Gradients out: the first lands as it is, further ones are summed in FP32 in order, and rounding happens once."""

import pytest
import torch

from megatrain.store.layout import lay_out
from megatrain.store.memory import Homes
from megatrain.store.ram import HostMemory
from megatrain.store.slab import Slab
from megatrain.store.vram import DeviceMemory
from megatrain.stream.drain import Drain
from megatrain.stream.lanes import SyncLanes, ThreadLanes
from megatrain.stream.norm import snapshot_square_sum, square_sum
from megatrain.stream.transfer import Link
from megatrain.telemetry.counters import Counters

CPU = torch.device("cpu")


class Bench:
    def __init__(self, dtype=torch.bfloat16, slots=2, lanes=None, sizes=(8, 8, 8)):
        memory = HostMemory(pin=False, threads=1)
        layout = lay_out([(name, torch.Size([n])) for name, n in zip("abcdef", sizes, strict=False)], dtype)
        self.slab = Slab(0, "slab", layout, Homes.all_in(memory))
        self.lanes = lanes or SyncLanes()
        self.counters = Counters()
        self.drain = Drain([self.slab], slots, Link(CPU, self.lanes, self.counters, 1))
        self.slab.grad.merge = self.drain.merge

    def collect(self, call_id=(0, 0), **gradients):
        self.drain.collect(self.slab, call_id, {"abcdef".index(name): value for name, value in gradients.items()})

    @property
    def part(self):
        return self.slab.grad.merged()

    def sum_of(self, name):
        segment = self.slab.layout.segments["abcdef".index(name)]
        return self.slab.grad.read().flat[segment.offset : segment.end]

    def rounded(self, name):
        segment = self.slab.layout.segments["abcdef".index(name)]
        self.part.order.until_readable()
        return self.slab.grad.snapshot().flat[segment.offset : segment.end].to(self.slab.layout.dtype).float()


def lanes():
    return [SyncLanes(), ThreadLanes(seed=0, max_delay=1e-3)]


@pytest.mark.parametrize("lanes", lanes(), ids=lambda lanes: type(lanes).__name__)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_three_hundred_ones_are_three_hundred(lanes, slots):
    """In BF16 they would be 256."""
    bench = Bench(slots=slots, lanes=lanes)
    for _ in range(300):
        bench.collect(a=torch.ones(8, dtype=torch.bfloat16))
    assert bench.sum_of("a").tolist() == [300.0] * 8
    assert bench.sum_of("a").dtype == torch.float32
    assert bench.counters.drains == 300


def test_the_sum_is_rounded_once():
    """1 + 2^-9 + 2^-9 is not 1 in FP32; each addend alone would vanish in BF16."""
    bench = Bench()
    for value in (1.0, 2.0**-9, 2.0**-9, 2.0**-8):
        bench.collect(a=torch.full((8,), value, dtype=torch.bfloat16))
    assert bench.sum_of("a")[0].item() == 1.0 + 2.0**-7
    assert bench.rounded("a").tolist() == [1.0 + 2.0**-7] * 8


def test_the_order_of_the_sum_is_the_order_of_arrival():
    gradients = [torch.randn(8, generator=torch.Generator().manual_seed(i)) * 10.0**i for i in range(-3, 4)]
    for order in (gradients, gradients[::-1]):
        bench = Bench(torch.float32)
        expected = torch.zeros(8)
        for gradient in order:
            bench.collect(a=gradient)
            expected = expected + gradient
        assert torch.equal(bench.sum_of("a"), expected)


def test_one_gradient_lands_in_its_own_dtype():
    bench = Bench()
    value = torch.randn(8).bfloat16()
    bench.collect(a=value)
    assert bench.sum_of("a").dtype == torch.bfloat16
    assert torch.equal(bench.sum_of("a"), value)
    assert list(bench.part.buffers) == [torch.bfloat16]


def test_an_fp32_gradient_for_a_bf16_slab_is_rounded_when_it_lands():
    bench = Bench()
    value = torch.randn(8)
    bench.collect(a=value)
    assert torch.equal(bench.rounded("a"), value.bfloat16().float())


def test_parameters_without_gradient():
    bench = Bench(torch.float32)
    bench.collect(a=torch.ones(8), c=torch.full((8,), 3.0))
    assert bench.slab.grad.present == {0, 2}
    bench.collect(b=torch.full((8,), 2.0), c=torch.full((8,), 4.0))
    assert bench.slab.grad.present == {0, 1, 2}
    assert [bench.sum_of(name)[0].item() for name in "abc"] == [1.0, 2.0, 7.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_first_gradient_replaces_whatever_was_there(dtype):
    """A parameter that comes in later in the step, in a buffer that still holds the sum of the step before."""
    bench = Bench(dtype)
    for _ in range(2):
        bench.collect(a=torch.full((8,), 100.0), b=torch.full((8,), 100.0))
    bench.slab.grad.clear()
    bench.collect(a=torch.ones(8))
    assert bench.slab.grad.present == {0}
    bench.collect(b=torch.ones(8))
    bench.collect(b=torch.ones(8))
    assert [bench.sum_of(name)[0].item() for name in "ab"] == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_dropped_gradient_does_not_come_back(dtype):
    bench = Bench(dtype)
    for _ in range(2):
        bench.collect(a=torch.full((8,), 5.0), b=torch.full((8,), 5.0))
    bench.slab.grad.drop(0)
    bench.collect(a=torch.ones(8), b=torch.ones(8))
    assert [bench.sum_of(name)[0].item() for name in "ab"] == [1.0, 11.0]
    bench.slab.grad.drop(0)
    bench.slab.grad.drop(1)
    assert not bench.part.summed
    bench.collect(a=torch.full((8,), 2.0))
    assert bench.sum_of("a")[0].item() == 2.0


def test_gradients_of_any_stride():
    bench = Bench(torch.float32, sizes=(12,))
    value = torch.randn(12, 2)[:, 1]
    bench.collect(a=value)
    assert torch.equal(bench.sum_of("a"), value)


@pytest.mark.parametrize("lanes", lanes(), ids=lambda lanes: type(lanes).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sum_of_squares_that_comes_along_is_the_one_computed_afterwards(dtype, lanes):
    bench = Bench(dtype, lanes=lanes)
    bench.collect(a=torch.randn(8), c=torch.randn(8))
    bench.part.order.until_readable()
    along = bench.part.square_sum.clone()
    assert along.item() > 0
    bench.part.square_sum = None
    assert snapshot_square_sum(bench.slab.grad.snapshot()) == along.item()
    bench.collect(a=torch.randn(8))
    assert bench.part.square_sum is None
    full = torch.zeros(bench.slab.layout.numel)
    for index in (0, 2):
        segment = bench.slab.layout.segments[index]
        full[segment.offset : segment.end] = bench.rounded("abc"[index])
    assert snapshot_square_sum(bench.slab.grad.snapshot()) == square_sum(full).item()


@pytest.mark.parametrize("lanes", lanes(), ids=lambda lanes: type(lanes).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_places_are_summed_one_after_the_other(dtype, lanes):
    """A tied weight: all micro-batches of the first place, plus all of the second, whatever order they came in."""
    values = {
        (place, micro): torch.randn(8, generator=torch.Generator().manual_seed(4 * place + micro)).to(dtype)
        for place in range(2)
        for micro in range(3)
    }
    results = []
    for order in (sorted(values), sorted(values, key=lambda key: (key[1], -key[0]))):
        bench = Bench(dtype, lanes=lanes)
        for place, micro in order:
            bench.collect((place, 0), a=values[place, micro])
        results.append(bench.sum_of("a").clone())
    sums = [sum(values[place, micro].float() for micro in range(3)) for place in range(2)]
    assert torch.equal(results[0], sums[0] + sums[1])
    assert torch.equal(results[1], results[0])


def test_a_place_that_comes_after_the_sum_was_looked_at():
    bench = Bench(torch.float32)
    bench.collect((0, 0), a=torch.ones(8))
    bench.collect((1, 0), a=torch.full((8,), 2.0))
    assert bench.sum_of("a")[0].item() == 3.0
    bench.collect((1, 0), a=torch.full((8,), 4.0), b=torch.ones(8))
    assert bench.sum_of("a")[0].item() == 7.0
    assert bench.slab.grad.present == {0, 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_snapshot_outlives_zero_grad_until_the_update_is_done(dtype):
    """The next landing waits for whoever reads the last one."""
    bench = Bench(dtype, lanes=ThreadLanes(seed=0, max_delay=2e-3))
    seen = []
    for step in range(20):
        for _ in range(1 + step % 2):
            bench.collect(a=torch.full((8,), float(step)))
        snapshot = bench.slab.grad.snapshot()
        bench.lanes.submit(
            "update",
            "update",
            lambda snapshot=snapshot: seen.append(snapshot.flat[0].to(dtype).item()),
            reads=[snapshot.order],
        )
        bench.slab.grad.clear()
    bench.lanes.quiesce()
    assert seen == [float(step * (1 + step % 2)) for step in range(20)]
    bench.lanes.close()


@pytest.mark.parametrize("lanes", lanes(), ids=lambda lanes: type(lanes).__name__)
def test_a_staging_buffer_that_grows_gives_the_old_one_back(lanes):
    memory = HostMemory(pin=False, threads=1)
    sizes = [5_000, 20_000, 80_000]
    slabs = [
        Slab(i, f"slab{i}", lay_out([("a", torch.Size([n]))], torch.float32), Homes.all_in(memory))
        for i, n in enumerate(sizes)
    ]
    drain = Drain(slabs, 2, Link(CPU, lanes, Counters(), 1))
    for slab in slabs:
        for micro in range(5):
            drain.collect(slab, (0, 0), {0: torch.full((slab.layout.segments[0].numel,), 2.0**micro)})
    assert [slab.grad.read().flat[0].item() for slab in slabs] == [31.0] * 3
    kept = sum(2 * slab.layout.nbytes for slab in slabs)  # weights and gradients
    assert memory.allocated_bytes == kept + 2 * slabs[-1].layout.nbytes
    assert len(memory._buffers) == 2 * len(slabs) + 2
    lanes.close()


@pytest.mark.parametrize("several", [False, True])
def test_a_sum_on_the_device_has_one_buffer(several):
    """As it landed if a step has one micro-batch, FP32 if it has more; no staging, no slot, no second buffer."""
    memory = DeviceMemory(CPU)
    slab = Slab(0, "slab", lay_out([("a", torch.Size([5000]))], torch.bfloat16), Homes.all_in(memory))
    before = memory.allocated_bytes
    drain = Drain([slab], 1, Link(CPU, SyncLanes(), Counters(), 1))
    for _ in range(2):
        for micro in range(1 + 3 * several):
            drain.collect(slab, (0, 0), {0: torch.full((5000,), 2.0**-micro)})
        assert memory.allocated_bytes == before + slab.layout.numel * (4 if several else 2)
        assert slab.grad.read().flat[0].item() == (1.875 if several else 1.0)
        slab.grad.clear()
    assert drain.unallocated_slot_bytes() == 0
    assert drain.link.counters.drains == 0


@pytest.mark.parametrize("lanes", lanes(), ids=lambda lanes: type(lanes).__name__)
def test_buffers_that_hold_nothing_can_be_given_back(lanes):
    bench = Bench(lanes=lanes)
    memory = bench.slab.homes.sums
    before = memory.allocated_bytes
    for _ in range(3):
        bench.collect(a=torch.ones(8))
    taken = memory.allocated_bytes
    bench.slab.grad.free_unused()
    assert memory.allocated_bytes == taken, "they hold a gradient"
    bench.slab.grad.clear()
    bench.slab.grad.free_unused()
    assert memory.allocated_bytes == taken - 6 * bench.slab.layout.numel > before
    for _ in range(2):
        bench.collect(a=torch.full((8,), 2.0))
    assert bench.sum_of("a").tolist() == [4.0] * 8
    assert memory.allocated_bytes == taken
    lanes.close()
