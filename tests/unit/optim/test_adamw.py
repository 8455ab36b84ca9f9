"""The arithmetic of AdamW: one written sequence of FP32 operations, near the truth, the same for every kernel."""

import math
from dataclasses import astuple

import numpy as np
import pytest
import torch
from tests.tiny import same_bits

from megatrain.optim.adamw import Hyper, Scalars, update
from megatrain.optim.update import native_kernel, reference_kernel, update_slab
from megatrain.store.layout import lay_out
from megatrain.store.ram import HostMemory
from megatrain.store.slab import Slab, Snapshot
from megatrain.store.split import join

HYPER = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
F32 = np.float32


def start(size=1000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(size, generator=generator)
    return master, torch.zeros(size), torch.zeros(size)


def gradient(step, size=1000):
    spread = torch.logspace(-12, 4, size)
    return torch.randn(size, generator=torch.Generator().manual_seed(100 + step)) * spread


def in_numpy(w, m, v, g, s):
    """The sequence in the docstring of `update`, one rounding per operation."""
    x = g * F32(s.clip)
    m = m * F32(s.beta1) + x * F32(s.one_minus_beta1)
    v = v * F32(s.beta2) + (x * F32(s.one_minus_beta2)) * x
    denominator = np.sqrt(v) / F32(s.root_correction) + F32(s.eps)
    w = w * F32(s.decay) - (m * F32(s.step_size)) / denominator
    return w, m, v


@pytest.mark.parametrize("clip", [1.0, 0.3])
def test_the_sequence_bit_for_bit(clip):
    state = start()
    expected = [t.numpy().copy() for t in state]
    for step in range(1, 6):
        scalars = Scalars.of(HYPER, step, clip)
        update(*state, gradient(step), scalars)
        expected = in_numpy(*expected, gradient(step).numpy(), scalars)
        for ours, theirs in zip(state, expected, strict=True):
            assert ours.numpy().tobytes() == theirs.tobytes()


def test_the_gradient_is_only_read():
    g = gradient(1)
    before = g.clone()
    update(*start(), g, Scalars.of(HYPER, 1, 0.5))
    assert torch.equal(g, before)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_against_torch(weight_decay):
    hyper = Hyper(1e-3, 0.9, 0.999, 1e-8, weight_decay)
    state = start()
    parameter = torch.nn.Parameter(state[0].clone())
    theirs = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=weight_decay, foreach=False)
    for step in range(1, 11):
        parameter.grad = gradient(step)
        theirs.step()
        update(*state, gradient(step), Scalars.of(hyper, step, 1.0))
    torch.testing.assert_close(state[0], parameter.detach(), rtol=2e-6, atol=2e-7)
    moments = theirs.state[parameter]
    # Gradients of both signs cancel in the first moment, so its error is that of the addends.
    largest = torch.stack([gradient(step).abs() for step in range(1, 11)]).max(0).values
    assert ((state[1] - moments["exp_avg"]).abs() <= 1e-6 * largest).all()
    torch.testing.assert_close(state[2], moments["exp_avg_sq"], rtol=1e-5, atol=0)


def test_one_step_is_within_a_few_ulps_of_fp64():
    """Every operation is rounded once, so the error of a step is a handful of half ulps."""
    w, m, v = start()
    m, v = torch.randn(1000) * 0.1, torch.rand(1000)
    g, s = torch.randn(1000), Scalars.of(HYPER, 7, 0.5)
    W, M, V, G = (t.double() for t in (w.clone(), m.clone(), v.clone(), g))
    x = G * s.clip
    M = M * s.beta1 + x * s.one_minus_beta1
    V = V * s.beta2 + s.one_minus_beta2 * x * x
    exact = W * s.decay - s.step_size * M / (V.sqrt() / s.root_correction + s.eps)
    update(w, m, v, g, s)
    step = (exact - W).abs()
    ulps = torch.from_numpy(np.spacing(w.abs().numpy())).double()
    error = (w.double() - exact).abs()
    assert (error <= 1.5 * ulps + 8 * 2.0**-24 * step).all()
    assert ((v.double() - V).abs() <= 3 * 2.0**-23 * V).all()


@pytest.mark.parametrize("step", [1, 2, 10, 1000, 10**6])
def test_scalars_are_computed_in_fp64_and_rounded_once(step):
    s = Scalars.of(HYPER, step, 0.123456789)
    exact = {
        "clip": 0.123456789,
        "beta1": 0.9,
        "one_minus_beta1": 1 - 0.9,
        "beta2": 0.999,
        "one_minus_beta2": 1 - 0.999,
        "root_correction": math.sqrt(1 - 0.999**step),
        "eps": 1e-8,
        "decay": 1 - 1e-3 * 0.1,
        "step_size": 1e-3 / (1 - 0.9**step),
    }
    for name, value in exact.items():
        assert getattr(s, name) == float(F32(value)), name
    # Rounding β₂ first would give another 1 - β₂.
    assert s.one_minus_beta2 != float(F32(1) - F32(0.999))


def test_zero_gradients_still_decay_and_move():
    w, m, v = start()
    m.fill_(0.1)
    before = w.clone()
    update(w, m, v, torch.zeros(1000), Scalars.of(HYPER, 5, 1.0))
    assert not torch.equal(w, before)
    assert w.isfinite().all()


def test_zero_everything_is_decay_alone():
    w, m, v = start()
    expected = w.numpy() * F32(1 - 1e-4)
    update(w, m, v, torch.zeros(1000), Scalars.of(HYPER, 1, 1.0))
    assert np.array_equal(w.numpy(), expected)


# ---- slabs: groups, absent parameters, and the two kernels


def slab_of(dtype, sizes, seed=0):
    layout = lay_out([(f"p{i}", torch.Size([n])) for i, n in enumerate(sizes)], dtype)
    slab = Slab(0, "slab", layout, HostMemory(pin=False, threads=1))
    slab.allocate_states()
    generator = torch.Generator().manual_seed(seed)
    for index, size in enumerate(sizes):
        slab.put(index, torch.randn(size, generator=generator))
    return slab


def snapshot_of(slab, present, step, flat_dtype):
    flat = torch.randn(slab.layout.numel, generator=torch.Generator().manual_seed(50 + step)).to(flat_dtype)
    return Snapshot(slab.layout, flat, slab.layout.dtype, frozenset(present), None)


def roles(slab):
    return {
        role: getattr(slab, role).clone()
        for role in ("weight", "residual", "exp_avg", "exp_avg_sq")
        if getattr(slab, role) is not None
    } | {"steps": list(slab.steps)}


KERNELS = {"reference": reference_kernel, "native 1": native_kernel(1), "native 2": native_kernel(2)}
DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["native 1", "native 2"])
def test_kernels_agree_bit_for_bit(name, dtypes):
    dtype, flat = dtypes
    slabs = [slab_of(dtype, (1, 7, 1000, 70_001, 3)) for _ in range(2)]
    for step in range(3):
        for slab, kernel in zip(slabs, (reference_kernel, KERNELS[name]), strict=True):
            gradients = snapshot_of(slab, {0, 1, 3, 4}, step, flat)
            update_slab(slab, gradients, dict.fromkeys(range(5), HYPER), 0.7, kernel)
    left, right = map(roles, slabs)
    assert left.pop("steps") == right.pop("steps") == [3, 3, 0, 3, 3]
    assert left.keys() == right.keys()
    for role in left:
        assert same_bits(left[role], right[role]), role


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_a_slab_is_its_parameters_one_by_one(kernel, dtypes):
    """Groups and absent parameters: each has its own hyperparameters and count, neighbours and padding stay."""
    dtype, flat = dtypes
    sizes = (100, 33, 128, 5, 64)
    other = Hyper(5e-2, 0.8, 0.95, 1e-6, 0.0)
    hypers = {0: HYPER, 1: other, 2: HYPER, 4: other}
    slab = slab_of(dtype, sizes)
    before = roles(slab)
    masters = {}
    for index, segment in enumerate(slab.layout.segments):
        piece = slice(segment.offset, segment.end)
        weight = slab.weight[piece]
        master = weight.clone() if slab.residual is None else join(weight, slab.residual[piece])
        masters[index] = (master, torch.zeros(segment.numel), torch.zeros(segment.numel))
    taken = dict.fromkeys(range(5), 0)
    for step, present in enumerate([{0, 1, 2, 3, 4}, {1, 2, 3}, {0, 2, 4}]):
        gradients = snapshot_of(slab, present, step, flat)
        update_slab(slab, gradients, hypers, 0.5, kernel)
        for index in present & hypers.keys():
            taken[index] += 1
            segment = slab.layout.segments[index]
            rounded = gradients.flat[segment.offset : segment.end].to(dtype).float()
            update(*masters[index], rounded, Scalars.of(hypers[index], taken[index], 0.5))
    assert slab.steps == [2, 2, 3, 0, 2]
    for index, segment in enumerate(slab.layout.segments):
        piece = slice(segment.offset, segment.end)
        weight = slab.weight[piece]
        master = weight if slab.residual is None else join(weight, slab.residual[piece])
        for ours, theirs in zip((master, slab.exp_avg[piece], slab.exp_avg_sq[piece]), masters[index], strict=True):
            assert same_bits(ours, theirs), index
    untouched = slab.layout.segments[3]
    for role in ("weight", "exp_avg"):
        piece = slice(untouched.offset, untouched.end)
        assert same_bits(getattr(slab, role)[piece], before[role][piece])


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_bf16_gradients_are_rounded_before_they_are_used(kernel):
    """A sum in FP32 and the same sum rounded to BF16 give the same step."""
    slabs = [slab_of(torch.bfloat16, (1000,)) for _ in range(2)]
    flat = torch.randn(slabs[0].layout.numel)
    for slab, values in zip(slabs, (flat, flat.bfloat16()), strict=True):
        update_slab(slab, Snapshot(slab.layout, values, torch.bfloat16, frozenset({0}), None), {0: HYPER}, 1.0, kernel)
    assert all(same_bits(a, b) for a, b in zip(*(list(roles(s).values())[:4] for s in slabs), strict=True))


def test_scalars_keep_the_order_that_native_code_reads():
    s = Scalars.of(HYPER, 3, 0.5)
    assert astuple(s) == (
        s.clip, s.beta1, s.one_minus_beta1, s.beta2, s.one_minus_beta2, s.root_correction, s.eps, s.decay, s.step_size,
    )  # fmt: skip
