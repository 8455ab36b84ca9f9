"""Sums of squares in host memory: the bits of the PyTorch reference, with any number of threads and instruction set."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from megatrain.native import library
from megatrain.store.gradient import Snapshot
from megatrain.store.layout import lay_out
from megatrain.stream import norm
from megatrain.stream.norm import CHUNK, combine, gradient_square_sum, reference_square_sum, square_sum

SIZES = [1, 2, 3, 255, 1000, 65535, 65536, 65537, 200_003, 3 * 65536, 1_000_003]
KINDS = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "rounded": (torch.float32, torch.bfloat16),
}
"""Dtype of the values, and the dtype to which they are rounded before squaring."""
LARGEST = torch.finfo(torch.float32).max


@pytest.fixture(params=library.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    library.use_isa(request.param)
    yield
    library.use_isa(library.isas()[-1])


def normal(numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


def wild(numel: int) -> torch.Tensor:
    """Values with every exponent, including subnormals and zeros of both signs."""
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=torch.Generator().manual_seed(numel)).to(torch.int32)
    found = bits.view(torch.float32)
    found = torch.where(found.isfinite(), found, -0.0)
    # Rounding to BF16 would turn the largest values into infinity.
    return found.clamp_(-1e38, 1e38)


def native_sum(values: torch.Tensor, rounded: bool, threads: int, chunk: int | None = None) -> torch.Tensor:
    chunk = chunk or min(CHUNK, 1 << (values.numel() - 1).bit_length())
    partials = torch.full((-(-values.numel() // chunk),), math.nan, dtype=torch.float64)
    library.square_sums(values, partials, chunk=chunk, rounded=rounded, threads=threads)
    return combine(partials)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    assert (one.dtype, one.shape) == (other.dtype, other.shape) == (torch.float64, ())
    return bool(one.isnan() and other.isnan()) or torch.equal(one.view(torch.int64), other.view(torch.int64))


@pytest.mark.parametrize("make", [normal, wild])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", SIZES)
def test_same_bits_as_the_reference(numel, kind, make, isa):
    stored, counted = KINDS[kind]
    values = make(numel).to(stored)
    expected = reference_square_sum(values.to(counted))
    assert math.isfinite(expected)
    for threads in (1, 2, 5):
        assert same(native_sum(values, kind == "rounded", threads), expected), threads
    if kind != "rounded":
        assert same(square_sum(values), expected)


def halved(rows: torch.Tensor) -> torch.Tensor:
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [16, 1024, CHUNK])
def test_every_chunk_is_summed_in_the_reference_order(chunk, kind, isa):
    """With values so far apart that another order of addition changes the bits of some chunks."""
    stored, counted = KINDS[kind]
    numel = 40 * CHUNK
    values = (normal(numel) * normal(numel + 1)[1:].mul_(4).exp_()).to(stored)
    found = torch.empty(numel // chunk, dtype=torch.float64)
    library.square_sums(values, found, chunk=chunk, rounded=kind == "rounded", threads=2)
    squares = values.to(counted).double().square().view(-1, chunk)
    assert torch.equal(found, halved(squares))
    zero, one, two, three, *rest = squares.view(-1, 8, chunk // 8).unbind(1)
    another = ((zero + rest[0]) + (one + rest[1])) + ((two + rest[2]) + (three + rest[3]))
    assert not torch.equal(found, halved(another))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan, LARGEST, -0.0, 1e-45, 1.00390625, 1.01171875])
@pytest.mark.parametrize("position", [0, 7, 65535, 65536, 100_000])
def test_special_values(special, position, kind):
    stored, counted = KINDS[kind]
    for others in (torch.zeros(100_001), normal(100_001)):
        others[position] = special
        values = others.to(stored)
        assert same(native_sum(values, kind == "rounded", 2), reference_square_sum(values.to(counted)))


def test_rounding_to_bf16():
    """Rounding: ties, carries into the exponent and to infinity, and every upper half of a NaN."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (upper | lower).view(torch.float32)
        found = torch.empty(len(values), dtype=torch.float64)
        library.square_sums(values, found, chunk=1, rounded=True, threads=1)
        expected = values.bfloat16().double().square()
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))


@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 16, 1024])
def test_other_chunks(chunk):
    for numel in (1, chunk, 5 * chunk, 5 * chunk + chunk // 2 + 1):
        values = wild(numel)
        expected = combine(torch.stack([reference_square_sum(piece) for piece in values.split(chunk)]))
        assert same(native_sum(values, False, 1, chunk), expected)


@pytest.mark.parametrize("shift", [1, 3])
def test_any_alignment(shift):
    for dtype in (torch.float32, torch.bfloat16):
        values = normal(200_003).to(dtype)[shift:]
        assert same(square_sum(values), reference_square_sum(values.clone()))


def test_modes_of_the_calling_thread_do_not_matter():
    values = torch.full((100_000,), 1e-40)
    expected = reference_square_sum(values)
    assert expected > 0
    assert torch.set_flush_denormal(True)
    try:
        found = native_sum(values, False, 2)
        assert not torch.full((1,), 1e-40).mul(2.0).any()  # the mode is still set
    finally:
        torch.set_flush_denormal(False)
    assert same(found, expected)


# ---- a slab's gradient


def snapshot(kind: str, present: set[int], sizes: tuple[int, ...] = (100, 70_001, 3, 130_000)) -> Snapshot:
    """Zeros between parameters; undefined values in absent parameters and after the last one."""
    stored, counted = KINDS[kind]
    layout = lay_out([(str(number), torch.Size([size])) for number, size in enumerate(sizes)], counted)
    flat = torch.zeros(layout.numel)
    for index, segment in enumerate(layout.segments):
        flat[segment.offset : segment.end] = normal(segment.numel) if index in present else math.nan
    flat[layout.segments[-1].end :] = math.nan
    return Snapshot(layout, ((flat.to(stored), frozenset(present)),), counted)


def reference(gradient: Snapshot) -> torch.Tensor:
    flat = torch.zeros(gradient.layout.numel)
    for index in gradient.present:
        segment = gradient.layout.segments[index]
        flat[segment.offset : segment.end] = gradient.flat[segment.offset : segment.end].to(gradient.dtype)
    return reference_square_sum(flat)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("present", [{0, 1, 2, 3}, {1, 3}, {0, 1}, {2}, set()], ids=str)
def test_snapshot(present, kind):
    gradient = snapshot(kind, present)
    assert same(gradient_square_sum(gradient), reference(gradient))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(1,), (300,), (CHUNK - 1,), (CHUNK + 1,), (CHUNK, 1), (0,), (0, 5)], ids=str)
def test_snapshot_lengths(sizes, kind):
    gradient = snapshot(kind, set(range(len(sizes))), sizes)
    expected = reference(gradient) if gradient.layout.numel else torch.zeros((), dtype=torch.float64)
    assert same(gradient_square_sum(gradient), expected)


def test_a_complete_gradient_is_not_copied(monkeypatch):
    gradient = snapshot("rounded", {0, 1, 2, 3})
    expected = gradient_square_sum(gradient)
    monkeypatch.setattr(norm, "_piecewise", None)
    monkeypatch.setattr(norm, "reference_square_sum", None)
    assert same(gradient_square_sum(gradient), expected)


def test_unsupported_tensors_use_the_reference(monkeypatch):
    monkeypatch.setattr(library, "square_sums", None)
    for values in (normal(1000).double(), normal(1000).half(), normal(2000)[::2]):
        assert same(square_sum(values), reference_square_sum(values.clone()))


def test_invalid_arguments_are_refused():
    values, sums = torch.zeros(100), torch.zeros(2, dtype=torch.float64)

    def call(values=values, partials=sums, chunk=64, threads=1):
        library.square_sums(values, partials, chunk=chunk, rounded=False, threads=threads)

    call()
    for wrong in ({"values": values.double()}, {"values": values[::2]}, {"values": values.to("meta")}):
        with pytest.raises(ValueError, match="only contiguous FP32 or BF16"):
            call(**wrong)
    for wrong in ({"partials": values}, {"partials": torch.zeros(4, dtype=torch.float64)[::2]}):
        with pytest.raises(ValueError, match="only into FP64"):
            call(**wrong)
    for wrong in ({"chunk": 32}, {"chunk": 0}, {"chunk": -64}, {"partials": sums[:1]}):
        with pytest.raises(ValueError, match="do not fit"):
            call(**wrong)
    for wrong in ({"chunk": 96}, {"chunk": 2 * CHUNK}, {"threads": 0}):
        with pytest.raises(OSError, match="Invalid argument"):
            call(**wrong)
