"""Gradients out: the first is copied as it is, further ones are added in FP32 in order, and the sum is rounded once."""

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
def test_the_sum_of_300_ones_is_300(lanes, slots):
    """A BF16 sum would stop at 256."""
    bench = Bench(slots=slots, lanes=lanes)
    for _ in range(300):
        bench.collect(a=torch.ones(8, dtype=torch.bfloat16))
    assert bench.sum_of("a").tolist() == [300.0] * 8
    assert bench.sum_of("a").dtype == torch.float32
    assert bench.counters.drains == 300


def test_the_sum_is_rounded_once():
    """1 + 2^-9 + 2^-9 exceeds 1 in FP32; in BF16 each addend would vanish."""
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


def test_a_single_gradient_keeps_its_dtype():
    bench = Bench()
    value = torch.randn(8).bfloat16()
    bench.collect(a=value)
    assert bench.sum_of("a").dtype == torch.bfloat16
    assert torch.equal(bench.sum_of("a"), value)
    assert list(bench.part.buffers) == [torch.bfloat16]


def test_an_fp32_gradient_of_a_bf16_slab_is_rounded_on_arrival():
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
def test_a_first_gradient_replaces_the_old_contents(dtype):
    """The parameter gets its first gradient late in the step; its buffer still holds the previous step's sum."""
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
def test_a_dropped_gradient_is_not_added_later(dtype):
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
def test_the_transferred_sum_of_squares_equals_one_computed_in_ram(dtype, lanes):
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
def test_gradients_are_summed_by_call_then_added(dtype, lanes):
    """A tied weight: all micro-batches of the first call, plus all of the second, whatever the order of arrival."""
    values = {
        (call, micro): torch.randn(8, generator=torch.Generator().manual_seed(4 * call + micro)).to(dtype)
        for call in range(2)
        for micro in range(3)
    }
    results = []
    for order in (sorted(values), sorted(values, key=lambda key: (key[1], -key[0]))):
        bench = Bench(dtype, lanes=lanes)
        for call, micro in order:
            bench.collect((call, 0), a=values[call, micro])
        results.append(bench.sum_of("a").clone())
    sums = [sum(values[call, micro].float() for micro in range(3)) for call in range(2)]
    assert torch.equal(results[0], sums[0] + sums[1])
    assert torch.equal(results[1], results[0])


def test_a_gradient_that_arrives_after_the_sum_was_read_is_added():
    bench = Bench(torch.float32)
    bench.collect((0, 0), a=torch.ones(8))
    bench.collect((1, 0), a=torch.full((8,), 2.0))
    assert bench.sum_of("a")[0].item() == 3.0
    bench.collect((1, 0), a=torch.full((8,), 4.0), b=torch.ones(8))
    assert bench.sum_of("a")[0].item() == 7.0
    assert bench.slab.grad.present == {0, 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_snapshot_outlives_zero_grad_until_the_update_is_done(dtype):
    """The next gradient waits for readers of the previous one."""
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
def test_a_growing_staging_buffer_frees_the_old_one(lanes):
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
    """The sum has the gradient's dtype with one micro-batch per step, FP32 with more. No staging, slot or second
    buffer.
    """
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
def test_unused_buffers_can_be_freed(lanes):
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
