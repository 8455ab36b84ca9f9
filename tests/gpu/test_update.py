"""On the GPU: the fused update has the bits of the reference, for every rule, weight, gradient and width."""

import itertools

import pytest
import torch
from tests.tiny import same_bits

from megatrain.optim.rules import RULES, SGD, AdamW, Lion
from megatrain.optim.update import Operands, reference_kernel
from megatrain.store.formats import FORMATS
from megatrain.store.moments import Piece
from megatrain.store.random import seed_of
from megatrain.stream import add

pytest.importorskip("triton")

SIZES = (1, 2, 255, 256, 257, 511, 4095, 4096, 4097, 9999, 10_000)
HYPER = {
    "adamw": AdamW(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1),
    "lion": Lion(lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.1),
    "sgd": SGD(lr=1e-2, momentum=0.9, weight_decay=1e-4),
}
SPECIAL = (0.0, -0.0, 1e-45, -1e-42, 1.1754944e-38, 1e-30, -1e-20, 1e18, -1e25)
"""Denormals, zeros, and numbers whose square is infinite. None of them produces a NaN."""
SPARE = 64


def triton_kernel(operands):
    from megatrain.optim.update_triton import triton_kernel

    triton_kernel(operands)


def values(numel, generator, spread, special=SPECIAL):
    """Magnitudes over `spread` powers of two, with runs of zeros and special values."""
    flat = torch.randn(numel, generator=generator)
    flat *= torch.exp2(spread * (torch.rand(numel, generator=generator) - 1))
    flat[torch.rand(numel, generator=generator) < 0.05] = 0.0
    flat[numel // 2 : numel // 2 + 300] = 0.0
    for value in special:
        flat[torch.randint(numel, (1 + numel // 500,), generator=generator)] = value
    return flat


class State:
    """Everything an update reads and writes, with spare elements behind that must not change."""

    def __init__(self, numel, rule, weight, gradient, width, seed=0, special=SPECIAL):
        generator = torch.Generator().manual_seed(seed)
        self.numel, self.rule, self.kind = numel, rule, (weight, gradient)
        self.generator, self.special = generator, special
        master = values(numel + SPARE, generator, 8, special)
        self.tensors = {"weight": master if weight == "fp32" else master.bfloat16()}
        if weight == "split":
            self.tensors["residual"] = torch.randint(-(1 << 15), 1 << 15, (numel + SPARE,), generator=generator).short()
        self.formats = {name: FORMATS[width][0 if signed else 1] for name, signed in RULES[rule].moments.items()}
        for name, chosen in self.formats.items():
            large = -(-numel // 256) * 256
            self.tensors[name] = torch.zeros(chosen.payload_bytes(large) + SPARE, dtype=torch.uint8)
            if chosen.block:
                self.tensors[f"{name}/scales"] = torch.zeros(large // chosen.block + SPARE)
            start = values(numel, generator, 20)
            if not RULES[rule].moments[name]:
                start = start.abs()
            chosen.encode(start, self.tensors[name], self.tensors.get(f"{name}/scales"), None)
        self.draw_gradient()

    def draw_gradient(self):
        flat = values(self.numel + SPARE, self.generator, 30, self.special)
        self.tensors["gradient"] = flat.bfloat16() if self.kind[1] == "bf16" else flat

    def copy(self, device):
        return {name: tensor.clone().to(device) for name, tensor in self.tensors.items()}

    def operands(self, tensors, step, clip, first, numel=None):
        length = slice(self.numel if numel is None else numel)
        return Operands(
            rule=RULES[self.rule],
            scalars=HYPER[self.rule].scalars(step, clip),
            weight=tensors["weight"][length],
            residual=tensors["residual"][length] if "residual" in tensors else None,
            gradient=tensors["gradient"][length],
            gradient_dtype=torch.float32 if self.kind[1] == "fp32" else torch.bfloat16,
            moments=tuple(
                Piece(chosen, tensors[name], tensors.get(f"{name}/scales")) for name, chosen in self.formats.items()
            ),
            seed=seed_of(3, step),
            first=first,
        )


def check(numel, rule, weight, gradient, width, first=0, special=SPECIAL, device="cuda"):
    state = State(numel, rule, weight, gradient, width, seed=numel + first, special=special)
    expected, found = state.copy("cpu"), state.copy(device)
    for step in (1, 2, 3):
        state.draw_gradient()
        expected["gradient"], found["gradient"] = state.tensors["gradient"], state.tensors["gradient"].to(device)
        clip = (1.0, 0.37, 1e-3)[step % 3]
        reference_kernel(state.operands(expected, step, clip, first))
        triton_kernel(state.operands(found, step, clip, first))
        for name, tensor in expected.items():
            left, right = comparable(tensor, width), comparable(found[name].cpu(), width)
            assert same_bits(left, right), f"{name} of {numel} elements in step {step}: {where(left, right)}"


def comparable(tensor, width):
    """All NaNs in FP32 tensors become one, since processors produce different ones."""
    if width == "fp32" and tensor.dtype == torch.uint8:
        tensor = tensor.view(torch.float32)
    return torch.where(tensor.isnan(), torch.nan, tensor) if tensor.dtype == torch.float32 else tensor


def where(left, right):
    if left.is_floating_point():
        left, right = (t.view(torch.int32 if t.dtype == torch.float32 else torch.int16) for t in (left, right))
    different = (left != right).nonzero().flatten()
    some = different[:4].tolist()
    return f"{different.numel()} differ, as {[(i, hex(left[i].item()), hex(right[i].item())) for i in some]}"


ALL = tuple(itertools.product(RULES, ("fp32", "split", "bf16"), ("fp32", "bf16", "rounded"), FORMATS))
PAIRS = (
    *((("adamw", "split", "bf16", width)) for width in FORMATS),
    ("adamw", "fp32", "fp32", "fp32"),
    ("adamw", "fp32", "rounded", "8bit"),
    ("adamw", "fp32", "bf16", "4bit"),
    ("adamw", "bf16", "rounded", "fp32"),
    ("adamw", "bf16", "fp32", "bf16"),
    ("adamw", "bf16", "bf16", "8bit"),
    ("adamw", "bf16", "rounded", "4bit"),
    ("adamw", "split", "rounded", "bf16"),
    ("adamw", "split", "fp32", "4bit"),
    ("lion", "split", "rounded", "fp32"),
    ("lion", "fp32", "fp32", "bf16"),
    ("lion", "split", "bf16", "8bit"),
    ("lion", "bf16", "rounded", "4bit"),
    ("sgd", "split", "fp32", "fp32"),
    ("sgd", "bf16", "bf16", "bf16"),
    ("sgd", "bf16", "fp32", "8bit"),
    ("sgd", "fp32", "rounded", "4bit"),
)
"""Every rule, weight and gradient with every width, and every rule with every weight and gradient. The kernel handles
these parts separately, and each combination takes seconds to compile, so the others are slow tests.
"""


@pytest.mark.parametrize("combination", [pytest.param(c, marks=[] if c in PAIRS else pytest.mark.slow) for c in ALL])
def test_fused_update_equals_the_reference(combination):
    for number, numel in enumerate(SIZES):
        check(numel, *combination, first=256 * (number * 77 % 1000))
    check(300_000, *combination, first=1 << 33)


@pytest.mark.parametrize("combination", [c for c in PAIRS if c[2] != "rounded"])
def test_infinities_and_nan(combination):
    # Codes of signed moments keep the sign of a NaN, which differs between processors, so these get no NaN.
    special = (*SPECIAL, torch.inf, -torch.inf, *((torch.nan,) if combination[3] in ("fp32", "bf16") else ()))
    check(4097, *combination, special=special)


def test_more_elements_than_32_bits_count():
    chosen, numel, tail = FORMATS["4bit"][0], (1 << 31) + 10_000, (1 << 31) - 512
    state = State(numel - tail, "lion", "bf16", "bf16", "4bit")
    ahead = {"exp_avg": chosen.payload_bytes(tail), "exp_avg/scales": tail // chosen.block}
    large = {}
    for name, tensor in state.tensors.items():
        large[name] = torch.zeros(ahead.get(name, tail) + tensor.numel(), dtype=tensor.dtype, device="cuda")
        large[name][-tensor.numel() :] = tensor
    triton_kernel(state.operands(large, 1, 1.0, 0, numel))
    reference_kernel(state.operands(state.tensors, 1, 1.0, tail))
    for name, tensor in state.tensors.items():
        assert same_bits(tensor, large[name][-tensor.numel() :].cpu()), name


@pytest.mark.parametrize("numel", [1 << 16, (1 << 20) + 4096 + 17])
def test_a_bf16_gradient_is_added_as_pytorch_adds_it(numel):
    generator = torch.Generator("cuda").manual_seed(0)
    total = torch.randn(numel, device="cuda", generator=generator) * 100
    values = torch.randn(numel, device="cuda", generator=generator).bfloat16()
    values[:4] = torch.tensor([torch.inf, -0.0, torch.nan, 1e-40], device="cuda").bfloat16()
    total[1:5] = torch.tensor([-0.0, 1.0, 1e-42, torch.inf], device="cuda")
    expected = total.clone().add_(values)
    assert add._fused_kernel() is not None
    add.add_to(total, values)
    assert torch.equal(total.view(torch.int32), expected.view(torch.int32))
