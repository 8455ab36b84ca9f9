"""The split FP32 master is lossless, and its high half is the nearest BF16 value."""

import numpy as np
import pytest
import torch

from megatrain.store.split import join, split

LOWS = [0x0000, 0x0001, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF]


def floats(bits):
    return torch.from_numpy(np.asarray(bits, dtype=np.uint32).view(np.float32).copy())


def bits(values):
    return values.numpy().view(np.uint32)


def halves(high, low):
    return high.view(torch.int16).numpy().view(np.uint16), low.numpy()


@pytest.mark.parametrize("low", LOWS)
def test_every_high_half(low):
    master = floats((np.arange(1 << 16, dtype=np.uint32) << 16) | low)
    back = join(*split(master))
    number = ~master.isnan()
    assert np.array_equal(bits(back)[number.numpy()], bits(master)[number.numpy()])
    assert back[~number].isnan().all()
    assert number.sum() > 65000


def test_random_patterns():
    master = floats(np.random.default_rng(0).integers(0, 1 << 32, 1 << 22, dtype=np.uint32))
    number = (~master.isnan()).numpy()
    assert np.array_equal(bits(join(*split(master)))[number], bits(master)[number])


def test_high_half_is_round_to_nearest_with_ties_away_from_zero():
    patterns = (np.arange(0, 1 << 16, 7, dtype=np.uint32)[:, None] << 16) | np.array(LOWS, dtype=np.uint32)
    master = floats(patterns.reshape(-1))
    master = master[master.isfinite()]
    high, _ = split(master)
    tie = torch.from_numpy((bits(master) & 0xFFFF) == 0x8000)
    assert torch.equal(high[~tie].view(torch.int16), master[~tie].bfloat16().view(torch.int16))
    assert tie.any()
    away = floats(bits(master[tie]) + 0x8000).bfloat16()
    assert torch.equal(high[tie].view(torch.int16), away.view(torch.int16))


def test_infinities_are_themselves():
    master = torch.tensor([torch.inf, -torch.inf])
    high, low = split(master)
    assert torch.equal(high.float(), master)
    assert low.tolist() == [0, 0]


def test_the_largest_numbers_round_to_infinity_and_come_back():
    master = torch.tensor([torch.finfo(torch.float32).max, torch.finfo(torch.float32).min])
    high, low = split(master)
    assert high.isinf().all()
    assert torch.equal(join(high, low), master)


@pytest.mark.parametrize("pattern", [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF])
def test_nan_is_canonical(pattern):
    high, low = halves(*split(floats([pattern])))
    assert (high[0], low[0]) == (0x7FC0, 0)


def test_residual_of_a_bf16_value_is_zero():
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    every = every[~every.isnan()]
    high, low = split(every.float())
    assert torch.equal(high.view(torch.int16), every.view(torch.int16))
    assert not low.any()


def test_a_strided_master():
    master = torch.randn(6, 4).t()
    assert torch.equal(join(*split(master)), master)
