"""Sums of squares: accurate to FP64, bitwise the same everywhere, and without overflow."""

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatrain.store.gradient import Snapshot
from megatrain.store.layout import lay_out
from megatrain.stream import norm
from megatrain.stream.norm import CHUNK, combine, global_norm, snapshot_square_sum, square_sum

SIZES = [1, 2, 3, 127, 128, 129, 1000, 4095, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 200_000]


def values(size, dtype=torch.float32, scale=1.0):
    return (torch.randn(size, generator=torch.Generator().manual_seed(size)) * scale).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_against_fp64(size, dtype):
    flat = values(size, dtype)
    expected = math.fsum(np.square(flat.double().numpy()))
    got = square_sum(flat)
    assert (got.dtype, got.shape) == (torch.float64, ())
    assert got.item() == pytest.approx(expected, rel=1e-12)


def test_small_values_beside_large_ones_are_not_lost():
    flat = torch.full((100_000,), 1e-4)
    flat[0] = 1e3
    assert square_sum(flat).item() - 1e6 == pytest.approx(99_999 * float(np.float32(1e-4)) ** 2, rel=1e-6)


@pytest.mark.parametrize("size", [1000, CHUNK + 1, 200_000])
def test_same_bits_for_any_thread_count(size):
    flat = values(size)
    one = square_sum(flat)
    torch.set_num_threads(2)
    assert torch.equal(square_sum(flat), one)


@pytest.mark.parametrize("size", [2, 3, 129, 70_000])
def test_trailing_zeros_do_not_matter_within_a_chunk_tree(size):
    """A shorter tensor padded with zeros has the sum of one whose tail is zero."""
    flat = values(size)
    flat[size // 2 :] = 0
    again = torch.zeros(size)
    again[: size // 2] = flat[: size // 2]
    assert torch.equal(square_sum(flat), square_sum(again))


def test_the_order_is_a_fixed_tree():
    """Halves are added to each other, not element after element: (a + c) + (b + d)."""
    tiny = 2.0**-53
    flat = torch.tensor([1.0, tiny**0.5, tiny**0.5, tiny**0.5], dtype=torch.float64)
    a, b, c, d = (v * v for v in flat.tolist())
    assert square_sum(flat).item() == (a + c) + (b + d)
    assert combine(torch.tensor([a, b, c, d], dtype=torch.float64)).item() == (a + c) + (b + d)
    assert (a + c) + (b + d) != ((a + b) + c) + d


def test_huge_values_do_not_overflow():
    largest = torch.finfo(torch.float32).max
    assert square_sum(torch.full((1000,), largest)).item() == pytest.approx(1000 * largest**2, rel=1e-12)
    assert global_norm([square_sum(torch.tensor([largest])).item()]) == pytest.approx(largest)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("position", [0, 77, 199_999])
def test_non_finite_values_make_the_sum_non_finite(bad, position):
    flat = torch.zeros(200_000)
    flat[position] = bad
    assert not math.isfinite(global_norm([1.0, square_sum(flat).item()]))


def test_empty():
    assert square_sum(torch.empty(0)).item() == 0.0
    assert global_norm([]) == 0.0


def test_total_is_the_root_of_the_sum():
    assert global_norm([9.0, 16.0]) == 5.0
    assert math.isnan(global_norm([1.0, math.nan]))
    assert global_norm([1.0, math.inf]) == math.inf


def snapshot(flat, dtype, present, known=None):
    layout = lay_out([(name, torch.Size([100])) for name in "abc"], dtype)
    return Snapshot(layout, ((flat, frozenset(present)),), dtype, known)


def test_snapshot_ignores_absent_parameters():
    """The contents of absent parameters are undefined."""
    layout = snapshot(None, torch.float32, ()).layout
    flat = values(layout.numel)
    flat[256:356] = math.nan
    expected = flat[:100].double().square().sum() + flat[512:612].double().square().sum()
    got = snapshot_square_sum(snapshot(flat, torch.float32, {0, 2}))
    assert got == pytest.approx(expected.item(), rel=1e-12)


def test_snapshot_sum_is_of_the_rounded_gradient_as_on_the_device():
    layout = snapshot(None, torch.bfloat16, ()).layout
    flat = torch.zeros(layout.numel)
    for segment in layout.segments:
        flat[segment.offset : segment.end] = values(100, scale=segment.offset + 1.0)
    got = snapshot_square_sum(snapshot(flat, torch.bfloat16, {0, 1, 2}))
    assert got == square_sum(flat.bfloat16()).item()
    assert got != square_sum(flat).item()


def test_a_known_sum_of_squares_is_used():
    known = torch.tensor(42.0, dtype=torch.float64)
    assert snapshot_square_sum(snapshot(None, torch.float32, {0}, known)) == 42.0


def parts_of(layout, dtypes, presents):
    """Gradients of several calls, NaN where a call has none."""
    parts = []
    for number, (dtype, present) in enumerate(zip(dtypes, presents, strict=True)):
        flat = torch.zeros(layout.numel, dtype=dtype)
        for index, segment in enumerate(layout.segments):
            drawn = values(segment.numel + 10 * number)[: segment.numel].to(dtype)
            flat[segment.offset : segment.end] = drawn if index in present else math.nan
        parts.append((flat, frozenset(present)))
    return tuple(parts)


def plain_sum(layout, parts, dtype):
    """The definition: add all parts in memory, round, and sum the squares in one tree."""
    total, known = torch.zeros(layout.numel), set()
    for flat, present in parts:
        for index in present:
            segment = layout.segments[index]
            run = slice(segment.offset, segment.end)
            total[run] = total[run] + flat[run].float() if index in known else flat[run].float()
        known |= present
    return square_sum(total.to(dtype).float())


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("chunks", [1, 2, 64])
@pytest.mark.parametrize(
    ("dtype", "dtypes", "presents"),
    [
        (BF16, [BF16, BF16], [{0, 1, 2}, {0, 1, 2}]),
        (BF16, [FP32, BF16, FP32], [{0, 1}, {1, 2}, {0, 2}]),
        (BF16, [BF16, FP32], [{2}, {0}]),
        (FP32, [FP32, FP32, FP32], [{0, 2}, {0}, {2}]),
        (BF16, [BF16], [{0, 2}]),
        (BF16, [FP32], [{1}]),
        (FP32, [FP32], [{0, 1}]),
    ],
)
@pytest.mark.parametrize("sizes", [(100, 300, 200), (3 * CHUNK + 5, 70_000, 200_000)], ids=["short", "long"])
@pytest.mark.parametrize("native", [True, False])
def test_sums_in_pieces_have_the_bits_of_the_plain_sum(monkeypatch, sizes, dtype, dtypes, presents, chunks, native):
    monkeypatch.setattr(norm, "_PIECE_ELEMENTS", chunks * CHUNK)
    if not native:
        monkeypatch.setattr(norm, "_kernel_square_sum", lambda *_: None)
    layout = lay_out([(name, torch.Size([size])) for name, size in zip("abc", sizes, strict=True)], dtype)
    parts = parts_of(layout, dtypes, presents)
    expected = plain_sum(layout, parts, dtype)
    assert math.isfinite(expected)
    assert torch.equal(norm.gradient_square_sum(Snapshot(layout, parts, dtype)), expected)


class LargestTensor(TorchDispatchMode):
    """Records the size in bytes of the largest tensor that is created."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        taken = [a.untyped_storage().data_ptr() for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in taken:
                self.nbytes = max(self.nbytes, made.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("calls", [1, 2])
def test_the_full_gradient_is_not_copied(monkeypatch, calls):
    """For a tied embedding, a copy would take gigabytes that no plan counts."""
    monkeypatch.setattr(norm, "_PIECE_ELEMENTS", CHUNK)
    layout = lay_out([("a", torch.Size([10 * CHUNK])), ("b", torch.Size([CHUNK]))], BF16)
    gradient = Snapshot(layout, parts_of(layout, [BF16] * calls, [{0}] * calls), BF16)
    with LargestTensor() as largest:
        norm.gradient_square_sum(gradient)
    assert 0 < largest.nbytes <= 4 * CHUNK
