"""Updates of slabs: parameter groups, absent parameters, mixed formats, and rounding of gradients."""

import pytest
import torch
from tests.tiny import same_bits

from megatrain.optim.rules import SGD, AdamW, Lion
from megatrain.optim.update import native_kernel, reference_kernel, update_slab
from megatrain.store.gradient import Snapshot
from megatrain.store.layout import lay_out
from megatrain.store.memory import Homes
from megatrain.store.ram import HostMemory
from megatrain.store.slab import Slab
from megatrain.store.split import join

RULE = AdamW(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
OTHER = AdamW(lr=5e-2, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.0)
KERNELS = {"reference": reference_kernel, "native 1": native_kernel(1), "native 2": native_kernel(2)}
DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]


def slab_of(dtype, shapes, moments=AdamW.moments, width="fp32", master=True):
    layout = lay_out([(f"p{i}", torch.Size(shape)) for i, shape in enumerate(shapes)], dtype)
    slab = Slab(0, "slab", layout, Homes.all_in(HostMemory(pin=False, threads=1)), master=master)
    slab.allocate_states(moments, width)
    generator = torch.Generator().manual_seed(0)
    for index, shape in enumerate(shapes):
        slab.load(index, torch.randn(shape, generator=generator))
    return slab


def opened(slab):
    return slab.open(writes=("weight", "states"))


def snapshot_of(slab, present, step, flat_dtype):
    flat = torch.randn(slab.layout.numel, generator=torch.Generator().manual_seed(50 + step)).to(flat_dtype)
    return Snapshot(slab.layout, ((flat, frozenset(present)),), slab.layout.dtype)


def roles(slab):
    found = {"weight": slab.weight.clone()}
    if slab.residual is not None:
        found["residual"] = slab.residual.clone()
    return found | {role: moment.bytes.clone() for role, moment in slab.moments.items()}


def master_of(slab, index):
    segment = slab.layout.segments[index]
    weight = slab.weight[segment.offset : segment.end]
    if slab.residual is None:
        return weight.clone()
    return join(weight, slab.residual[segment.offset : segment.end])


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_a_slab_updates_like_its_parameters_one_by_one(kernel, dtypes):
    """Each parameter has its own hyperparameters and step count. Absent parameters and padding do not change."""
    dtype, flat = dtypes
    rules = {0: RULE, 1: OTHER, 2: RULE, 4: OTHER}
    slab = slab_of(dtype, [(100,), (33,), (256,), (5,), (64,)])
    before = roles(slab)
    sizes = [segment.numel for segment in slab.layout.segments]
    expected = {i: (master_of(slab, i), (torch.zeros(n), torch.zeros(n))) for i, n in enumerate(sizes)}
    taken = dict.fromkeys(range(5), 0)
    for step, present in enumerate([{0, 1, 2, 3, 4}, {1, 2, 3}, {0, 2, 4}]):
        gradients = snapshot_of(slab, present, step, flat)
        update_slab(opened(slab), gradients, rules, 0.5, kernel)
        for index in present & rules.keys():
            taken[index] += 1
            segment = slab.layout.segments[index]
            rounded = gradients.flat[segment.offset : segment.end].to(dtype).float()
            master, moments = expected[index]
            rules[index].update(master, moments, rounded, rules[index].scalars(taken[index], 0.5))
    assert slab.steps == [2, 2, 3, 0, 2]
    for index, (master, moments) in expected.items():
        assert same_bits(master_of(slab, index), master), index
        for role, theirs in zip(slab.moments, moments, strict=True):
            assert same_bits(slab.moments[role].read(index), theirs), index
    untouched = slab.layout.segments[3]
    assert same_bits(slab.weight[untouched.offset : untouched.end], before["weight"][untouched.offset : untouched.end])


@pytest.mark.parametrize("width", ["fp32", "bf16", "8bit", "4bit"])
@pytest.mark.parametrize(
    "rule", [RULE, Lion(1e-3, 0.9, 0.99, 0.1), SGD(1e-2, 0.9, 0.01)], ids=lambda r: type(r).__name__
)
def test_mixed_formats_in_a_slab_are_independent(rule, width):
    """Two matrices and two vectors in one slab, with or without absent neighbours."""
    shapes = [(70, 65), (65,), (4096, 2), (3,)]
    together = slab_of(torch.bfloat16, shapes, rule.moments, width)
    slow = slab_of(torch.bfloat16, shapes, rule.moments, width)
    for step, present in enumerate([{0, 1, 2, 3}, {0, 2}, {1, 2}]):
        for slab, kernel in ((together, native_kernel(2)), (slow, reference_kernel)):
            gradients = snapshot_of(slab, present, step, torch.bfloat16)
            frozen = {i: [m.read(i) for m in slab.moments.values()] for i in set(range(4)) - present}
            update_slab(opened(slab), gradients, dict.fromkeys(range(4), rule), 0.5, kernel)
            for index, moments in frozen.items():
                for moment, value in zip(slab.moments.values(), moments, strict=True):
                    assert same_bits(moment.read(index), value)
    left, right = roles(together), roles(slow)
    assert left.keys() == right.keys()
    for role in left:
        assert same_bits(left[role], right[role]), role


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
@pytest.mark.parametrize("width", ["fp32", "8bit"])
def test_bf16_gradients_are_rounded_before_the_update(kernel, width):
    """An FP32 sum and the same sum rounded to BF16 give the same step."""
    slabs = [slab_of(torch.bfloat16, [(100, 100)], width=width) for _ in range(2)]
    flat = torch.randn(slabs[0].layout.numel)
    for slab, values in zip(slabs, (flat, flat.bfloat16()), strict=True):
        update_slab(
            opened(slab),
            Snapshot(slab.layout, ((values, frozenset({0})),), torch.bfloat16),
            {0: RULE},
            1.0,
            kernel,
        )
    left, right = map(roles, slabs)
    assert all(same_bits(left[role], right[role]) for role in left)


def test_random_bits_differ_by_slab_step_and_element():
    slabs = [slab_of(torch.bfloat16, [(64, 64)], master=False) for _ in range(2)]
    slabs[1].index = 7
    for slab in slabs:
        update_slab(
            opened(slab),
            snapshot_of(slab, {0}, 0, torch.bfloat16),
            {0: RULE},
            1.0,
            reference_kernel,
        )
    assert not same_bits(slabs[0].weight, slabs[1].weight)
