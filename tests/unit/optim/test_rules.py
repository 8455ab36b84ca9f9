"""Arithmetic of the update rules: a fixed sequence of FP32 operations that matches torch's optimizer of that name."""

import math

import numpy as np
import pytest
import torch

from megatrain.optim.rules import RULES, SGD, AdamW, Lion

ADAMW = AdamW(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
LION = Lion(lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1)
PLAIN_SGD = SGD(lr=1e-2, momentum=0.9, weight_decay=0.1)
ALL = [ADAMW, LION, PLAIN_SGD]
SIZE = 1000
F32 = np.float32


def name(rule):
    return type(rule).__name__


def start(rule, seed=0):
    """Master and moments; the moments are zero, as before the first step."""
    master = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
    return master, tuple(torch.zeros(SIZE) for _ in rule.moments)


def gradient(step):
    spread = torch.logspace(-12, 4, SIZE)
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 + step)) * spread


def adamw_in_numpy(w, moments, g, scalars):
    clip, beta1, one_minus_beta1, beta2, one_minus_beta2, root_correction, eps, decay, step_size = map(F32, scalars)
    m, v = moments
    x = g * clip
    m = m * beta1 + x * one_minus_beta1
    v = v * beta2 + (x * one_minus_beta2) * x
    return w * decay - (m * step_size) / (np.sqrt(v) / root_correction + eps), (m, v)


def lion_in_numpy(w, moments, g, scalars):
    clip, beta1, one_minus_beta1, beta2, one_minus_beta2, decay, lr = map(F32, scalars)
    (m,) = moments
    x = g * clip
    direction = np.sign(m * beta1 + x * one_minus_beta1)
    return w * decay - direction * lr, (m * beta2 + x * one_minus_beta2,)


def sgd_in_numpy(w, moments, g, scalars):
    clip, momentum, weight_decay, lr = map(F32, scalars)
    m = moments[0] * momentum + (g * clip + w * weight_decay)
    return w - m * lr, (m,)


IN_NUMPY = {AdamW: adamw_in_numpy, Lion: lion_in_numpy, SGD: sgd_in_numpy}


@pytest.mark.parametrize("clip", [1.0, 0.3])
@pytest.mark.parametrize("rule", ALL, ids=name)
def test_each_rule_follows_its_formula_bitwise(rule, clip):
    """The formulas of the docstrings, with one rounding per operation."""
    master, moments = start(rule)
    w, expected = master.numpy().copy(), tuple(m.numpy().copy() for m in moments)
    for step in range(1, 6):
        scalars = rule.scalars(step, clip)
        rule.update(master, moments, gradient(step), scalars)
        w, expected = IN_NUMPY[type(rule)](w, expected, gradient(step).numpy(), scalars)
        assert master.numpy().tobytes() == w.tobytes()
        for ours, theirs in zip(moments, expected, strict=True):
            assert ours.numpy().tobytes() == theirs.tobytes()


@pytest.mark.parametrize("rule", ALL, ids=name)
def test_the_gradient_is_only_read(rule):
    g = gradient(1)
    before = g.clone()
    rule.update(*start(rule), g, rule.scalars(1, 0.5))
    assert torch.equal(g, before)


def run(rule, steps):
    master, moments = start(rule)
    for step in range(1, steps + 1):
        rule.update(master, moments, gradient(step), rule.scalars(step, 1.0))
    return master, moments


def run_torch(make, steps):
    parameter = torch.nn.Parameter(start(ADAMW)[0].clone())
    optimizer = make([parameter])
    for step in range(1, steps + 1):
        parameter.grad = gradient(step)
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


def largest_gradient(steps):
    return torch.stack([gradient(step).abs() for step in range(1, steps + 1)]).max(0).values


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_matches_torch(weight_decay):
    rule = AdamW(1e-3, 0.9, 0.999, 1e-8, weight_decay)
    master, (m, v) = run(rule, 10)
    theirs, state = run_torch(lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=weight_decay, foreach=False), 10)
    torch.testing.assert_close(master, theirs, rtol=2e-6, atol=2e-7)
    # Gradients of both signs cancel in the first moment, so the bound is the rounding error of the addends.
    assert ((m - state["exp_avg"]).abs() <= 1e-6 * largest_gradient(10)).all()
    torch.testing.assert_close(v, state["exp_avg_sq"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_matches_torch(momentum, weight_decay):
    rule = SGD(1e-2, momentum, weight_decay)
    master, (m,) = run(rule, 10)
    theirs, state = run_torch(
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=momentum, weight_decay=weight_decay, foreach=False), 10
    )
    size = largest_gradient(10) + master.abs()
    assert ((master - theirs).abs() <= 2e-6 * size).all()
    if momentum:
        assert ((m - state["momentum_buffer"]).abs() <= 1e-5 * size).all()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lion_matches_the_paper(weight_decay):
    """Algorithm 2 of "Symbolic Discovery of Optimization Algorithms", in FP64."""
    rule = Lion(1e-3, 0.9, 0.99, weight_decay)
    master, (m,) = run(rule, 10)
    w, average = start(rule)[0].double(), torch.zeros(SIZE, dtype=torch.float64)
    for step in range(1, 11):
        g = gradient(step).double()
        direction = torch.sign(0.9 * average + (1 - 0.9) * g)
        w = w - 1e-3 * (direction + weight_decay * w)
        average = 0.99 * average + (1 - 0.99) * g
    torch.testing.assert_close(master.double(), w, rtol=1e-6, atol=1e-6)
    assert ((m - average).abs() <= 1e-6 * largest_gradient(10)).all()


@pytest.mark.parametrize("step", [1, 2, 10, 1000, 10**6])
def test_scalars_are_computed_in_fp64_and_rounded_once(step):
    clip = 0.123456789
    root_correction, step_size = math.sqrt(1 - 0.999**step), 1e-3 / (1 - 0.9**step)
    exact = {
        ADAMW: (clip, 0.9, 1 - 0.9, 0.999, 1 - 0.999, root_correction, 1e-8, 1 - 1e-3 * 0.1, step_size),
        LION: (clip, 0.9, 1 - 0.9, 0.99, 1 - 0.99, 1 - 1e-3 * 0.1, 1e-3),
        PLAIN_SGD: (clip, 0.9, 0.1, 1e-2),
    }
    for rule, numbers in exact.items():
        assert rule.scalars(step, clip) == tuple(float(F32(number)) for number in numbers)
    # Rounding β₂ before subtracting would give a different 1 - β₂.
    assert ADAMW.scalars(step, clip)[4] != float(F32(1) - F32(0.999))


def test_zero_gradients_still_decay_and_move():
    master, moments = start(ADAMW)
    moments[0].fill_(0.1)
    before = master.clone()
    ADAMW.update(master, moments, torch.zeros(SIZE), ADAMW.scalars(5, 1.0))
    assert not torch.equal(master, before)
    assert master.isfinite().all()


@pytest.mark.parametrize("rule", [ADAMW, LION], ids=name)
def test_without_gradient_and_moments_only_decay_applies(rule):
    master, moments = start(rule)
    expected = master.numpy() * F32(1 - 1e-4)
    rule.update(master, moments, torch.zeros(SIZE), rule.scalars(1, 1.0))
    assert np.array_equal(master.numpy(), expected)


def test_groups_become_rules():
    group = {"lr": 2e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.01, "momentum": 0.7}
    assert AdamW.of(group) == AdamW(2e-3, 0.8, 0.95, 1e-6, 0.01)
    assert Lion.of(group) == Lion(2e-3, 0.8, 0.95, 0.01)
    assert SGD.of(group) == SGD(2e-3, 0.7, 0.01)


def test_rule_codes_match_the_library():
    assert {key: rule.code for key, rule in RULES.items()} == {"adamw": 0, "lion": 1, "sgd": 2}
