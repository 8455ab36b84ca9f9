"""Accuracy of the native update: FP32 states within a few ulps, quantized moments within one level and unbiased.

u = 2^-24 is the unit roundoff. The relative error of an operation is at most u, which is at most one ulp; its absolute
error is at most half an ulp of the result. The reference is the same formula in FP64 from the same FP32 inputs and
scalars; its own error is 2^-29 of an FP32 ulp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.unit.native.test_update import ADAMW, RULE_LIST, gradient_of, state_of

from megatrain.native import library
from megatrain.optim.update import native_kernel
from megatrain.store.formats import FORMATS
from megatrain.store.random import seed_of
from megatrain.store.split import join

COUNT = 20_000
U = 2.0**-24
CODES = [(width, signed) for width in ("8bit", "4bit") for signed in (True, False)]


@pytest.fixture(params=library.isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    library.use_isa(request.param)
    yield
    library.use_isa(library.isas()[-1])


def ulp(values: np.ndarray) -> np.ndarray:
    return np.spacing(np.abs(values).astype(np.float32)).astype(np.float64)


def one_step(rule, weight, step=7):
    """Inputs and results in FP64: (w, m, v, g), (w, m, v), scalars. Moments are nonzero, as after some steps."""
    generator = torch.Generator().manual_seed(1)
    state = state_of(rule, weight, "fp32", COUNT)
    for number, piece in enumerate(state.moments):
        values = torch.randn(COUNT, generator=generator) * 10 ** (torch.rand(COUNT, generator=generator) * 6 - 5)
        piece.payload.view(torch.float32).copy_(values.square() if number else values)
    gradient = torch.randn(COUNT, generator=generator) * 10 ** (torch.rand(COUNT, generator=generator) * 6 - 5)

    def read():
        master = state.weight if state.residual is None else join(state.weight, state.residual)
        moments = [piece.payload.view(torch.float32) for piece in state.moments]
        return [t.double().numpy().copy() for t in (master, *moments)]

    before = [*read(), gradient.double().numpy()]
    operands = state.operands(gradient, False, step)
    native_kernel(1)(operands)
    return before, read(), operands.scalars


@pytest.mark.parametrize("weight", ["fp32", "split"])
def test_adamw_in_ulps(weight):
    (w, m, v, g), (new_w, new_m, new_v), scalars = one_step(ADAMW, weight)
    clip, beta1, one_minus_beta1, beta2, one_minus_beta2, root_correction, eps, decay, step_size = scalars
    x = g * clip
    true_m, true_v = m * beta1 + x * one_minus_beta1, v * beta2 + one_minus_beta2 * x * x
    # m: half an ulp for m β₁; one and a half for x (1-β₁), since x is rounded too. The sum is at most twice the larger
    # addend, so half an ulp of the sum is at most one of the addend.
    addend = np.maximum(np.abs(m * beta1), np.abs(x * one_minus_beta1))
    assert (np.abs(new_m - true_m) <= 3.0 * ulp(addend)).all()
    # v: both addends are positive, so their ulps are at most the sum's. Half an ulp for v β₂; three u (x twice, and its
    # first product) and half an ulp for the other addend; half an ulp for the sum.
    assert (np.abs(new_v - true_v) <= 4.5 * ulp(true_v)).all()
    # w: half an ulp for decay · w, half an ulp for the difference. The numerator of the step has the error of m (6u of
    # the addend) and one product; the denominator 2.5u for the root of v and u each for √, / and +; the quotient u.
    denominator = np.sqrt(true_v) / root_correction + eps
    true_w = w * decay - step_size * true_m / denominator
    size = step_size * addend / denominator
    bound = ulp(np.maximum(np.abs(w), np.abs(true_w))) + (6 + 2 * 7.5) * U * size
    error = np.abs(new_w - true_w)
    assert (error <= bound).all()
    assert np.median(error / ulp(true_w)) < 0.5, "typical errors must be well below the bound"


@pytest.mark.parametrize("weight", ["fp32", "split"])
def test_lion_in_ulps(weight):
    (w, m, g), (new_w, new_m), scalars = one_step(RULE_LIST[1], weight)
    clip, beta1, one_minus_beta1, beta2, one_minus_beta2, decay, lr = scalars
    x = g * clip
    blend, true_m = m * beta1 + x * one_minus_beta1, m * beta2 + x * one_minus_beta2
    # Same bound as for AdamW's first moment.
    addend = np.maximum(np.abs(m * beta2), np.abs(x * one_minus_beta2))
    assert (np.abs(new_m - true_m) <= 3.0 * ulp(addend)).all()
    # The sign is right unless the blend cancels to within its error; lr · sign is exact; two roundings remain.
    certain = np.abs(blend) > 3.0 * ulp(np.maximum(np.abs(m * beta1), np.abs(x * one_minus_beta1)))
    assert certain.mean() > 0.999
    true_w = w * decay - lr * np.sign(blend)
    bound = ulp(np.maximum(np.abs(w), np.abs(true_w)))
    assert (np.abs(new_w - true_w) <= bound)[certain].all()


@pytest.mark.parametrize("weight", ["fp32", "split"])
def test_sgd_in_ulps(weight):
    (w, m, g), (new_w, new_m), (clip, momentum, weight_decay, lr) = one_step(RULE_LIST[2], weight)
    true_m = m * momentum + (g * clip + w * weight_decay)
    # Three products at half an ulp of the largest each; the sum of two has at most twice its ulp, the sum of three at
    # most four times.
    addend = np.maximum.reduce([np.abs(m * momentum), np.abs(g * clip), np.abs(w * weight_decay)])
    assert (np.abs(new_m - true_m) <= 4.5 * ulp(addend)).all()
    true_w = w - lr * true_m
    # The error of the momentum, the product and the difference.
    bound = lr * 4.5 * ulp(addend) + 0.5 * ulp(lr * true_m) + 0.5 * ulp(true_w)
    assert (np.abs(new_w - true_w) <= 1.01 * bound).all()


# ---- quantized moments


def encoded(values: torch.Tensor, width: str, signed: bool, seed: int) -> torch.Tensor:
    """Values after quantization. The scalars make the moment equal to the gradient."""
    rule = RULE_LIST[2] if signed else ADAMW
    state = state_of(rule, "bf16", width, values.numel())
    # Positive values are squares: v = 0 · v + (1 · x) · x.
    scalars = (1.0, 0.0, 0.0, 0.0) if signed else (1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0)
    gradient = values if signed else values.sqrt()
    native_kernel(1)(replace(state.operands(gradient, False, 1), scalars=scalars, seed=seed_of(5, seed)))
    piece = state.moments[-1]
    return piece.format.decode(piece.payload, piece.scales, values.numel())


def levels_of(width: str, signed: bool) -> torch.Tensor:
    """All magnitudes of a code in ascending order, for a scale of one."""
    kind = FORMATS[width][0 if signed else 1]
    codes = torch.arange(kind.levels).repeat_interleave(kind.block).to(torch.uint8)
    if kind.bits == 4:
        codes = codes.view(-1, 2, kind.block // 2)
        codes = (codes[:, 0] | codes[:, 1] << 4).reshape(-1)
    values = kind.decode(codes, torch.ones(kind.levels), kind.levels * kind.block)
    return values.view(kind.levels, kind.block)[:, 0].double()


def gaps(values: torch.Tensor, scales: torch.Tensor, width: str, signed: bool) -> torch.Tensor:
    """The distance between the two levels around each value."""
    levels = levels_of(width, signed)
    above = torch.searchsorted(levels, (values.abs() / scales).double().clamp(max=1.0)).clamp(1, levels.numel() - 1)
    return (levels[above] - levels[above - 1]) * scales


def samples(signed: bool) -> tuple[torch.Tensor, int]:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(1024, generator=generator, dtype=torch.float64) * 1e-3
    return (values if signed else values.square()).float(), 1024


def scales_of(values: torch.Tensor, width: str) -> torch.Tensor:
    block = FORMATS[width][0].block
    return values.abs().view(-1, block).amax(1).double().repeat_interleave(block)


@pytest.mark.parametrize(("width", "signed"), CODES)
def test_a_code_is_one_of_the_two_levels_around_the_value(width, signed):
    values, _ = samples(signed)
    scales = scales_of(values, width)
    lowest = 0.0 if signed else levels_of(width, signed)[0] * scales
    for seed in range(20):
        error = (encoded(values, width, signed, seed).double() - values).abs()
        # 2^-20: the squares, the roots and the inverse of the scale are rounded.
        assert (error <= gaps(values, scales, width, signed) + lowest + 2.0**-20 * values.abs()).all()


@pytest.mark.parametrize(("width", "signed"), CODES)
def test_codes_are_unbiased(width, signed):
    values, _ = samples(signed)
    scales = scales_of(values, width)
    draws = 2000
    total = torch.zeros(values.numel(), dtype=torch.float64)
    for seed in range(draws):
        total += encoded(values, width, signed, seed).double()
    gap = gaps(values, scales, width, signed)
    # A random choice between two levels has a standard deviation of at most half their gap; 16 random bits add 2^-16.
    within = 5 * 0.5 * gap / draws**0.5 + 2.0**-16 * gap + 2.0**-20 * values.abs()
    error = (total / draws - values).abs()
    # A positive format has no level below its lowest: smaller values become that level.
    inside = values.abs() >= (0.0 if signed else levels_of(width, signed)[0]) * scales
    assert (error <= within)[inside].all()
    assert inside.float().mean() > 0.9


@pytest.mark.parametrize(("width", "signed"), CODES)
def test_zero_stays_zero(width, signed):
    values = torch.zeros(600)
    assert (encoded(values, width, signed, 1) <= (0.0 if signed else 2.0**-126)).all()
    if signed:
        values[::3] = 1.0
        assert (encoded(values, width, signed, 2)[1::3] == 0.0).all()


@pytest.mark.parametrize("width", ["8bit", "4bit"])
def test_second_moments_never_become_zero(width):
    values = torch.logspace(-37, 30, 2048)[torch.randperm(2048, generator=torch.Generator().manual_seed(0))]
    values[::7] = 0.0
    assert (encoded(values, width, False, 0) > 0).all()


def test_a_decaying_average_is_not_frozen():
    """Random rounding is needed here: 200 steps of 0.1% each, less than half the distance between levels."""
    state = state_of(ADAMW, "bf16", "8bit", 2560)
    gradient = torch.full((2560,), 1e-2)
    native_kernel(1)(state.operands(gradient, False, 1))
    piece = state.moments[1]
    start = piece.format.decode(piece.payload, piece.scales, 2560).double().mean()
    gradient = gradient_of("fp32", 2560, 0).fill_(0.0)
    gradient[::256] = 1e-2  # keeps the scales unchanged
    for step in range(2, 202):
        native_kernel(1)(state.operands(gradient, False, step))
    values = piece.format.decode(piece.payload, piece.scales, 2560).double()
    kept = torch.arange(2560) % 256 != 0
    assert values[kept].mean() / start == pytest.approx(0.999**200, rel=0.01)
