"""The native update has the bits of the reference on every instruction set, for every size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from megatrain.native import library
from megatrain.optim.rules import RULES, SGD, AdamW, Lion, Rule
from megatrain.optim.update import Operands, native_kernel, reference_kernel
from megatrain.store.formats import FORMATS
from megatrain.store.moments import Piece
from megatrain.store.random import GROUP, Draws, seed_of

ADAMW = AdamW(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
LION = Lion(lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1)
RULE_LIST = [ADAMW, LION, SGD(lr=1e-2, momentum=0.9, weight_decay=0.1)]
WEIGHTS = ("fp32", "split", "bf16")
GRADIENTS = ("fp32", "bf16", "fp32 to bf16")
WIDTHS = tuple(FORMATS)
SIZES = [*range(1, 301), 511, 512, 513, 1000, 2047, 2049, 4095, 4096, 4097, 5555, 9999, 10000]
FEW_SIZES = [1, 2, 63, 64, 65, 127, 128, 129, 192, 255, 256, 257, 384, 511, 1000]


@pytest.fixture(autouse=True)
def best_isa() -> Iterator[None]:
    yield
    library.use_isa(library.isas()[-1])


@pytest.fixture(params=library.isas())
def isa(request: pytest.FixtureRequest) -> str:
    library.use_isa(request.param)
    return request.param


def rule_id(rule: Rule) -> str:
    return type(rule).__name__


@dataclass(frozen=True)
class State:
    """A slab's weights and moments."""

    rule: Rule
    weight: torch.Tensor
    residual: torch.Tensor | None
    moments: tuple[Piece, ...]

    def copy(self) -> State:
        moments = tuple(replace(p, payload=p.payload.clone(), scales=_clone(p.scales)) for p in self.moments)
        return replace(self, weight=self.weight.clone(), residual=_clone(self.residual), moments=moments)

    def operands(self, gradient: torch.Tensor, rounded: bool, step: int, start: int = 0, count: int = -1) -> Operands:
        """Operands of a step on elements [start, start + count); `start` is a multiple of 256."""
        end = self.weight.numel() if count < 0 else start + count
        moments = []
        for piece in self.moments:
            kind = piece.format
            full = -(-(end - start) // kind.block) * kind.block if kind.block else end - start
            payload = piece.payload[kind.payload_bytes(start) :][: kind.payload_bytes(full)]
            scales = None if piece.scales is None else piece.scales[start // kind.block :][: full // kind.block]
            moments.append(Piece(kind, payload, scales))
        return Operands(
            rule=type(self.rule),
            scalars=self.rule.scalars(step, 0.7),
            weight=self.weight[start:end],
            residual=None if self.residual is None else self.residual[start:end],
            gradient=gradient[start:end],
            gradient_dtype=torch.bfloat16 if rounded else torch.float32,
            moments=tuple(moments),
            seed=seed_of(3, step),
            first=start,
        )

    def differs(self, other: State, real: torch.Tensor | None = None) -> str:
        """The stream and element that differ, or an empty string. Elements outside `real` are ignored; NaNs are
        equal.
        """
        for (name, mine), theirs in zip(self._streams().items(), other._streams().values(), strict=True):
            wrong = _bits(mine) != _bits(theirs)
            if real is not None:
                wrong &= real
            if wrong.any():
                return f"{name}, element {int(wrong.int().argmax())}"
        return ""

    def _streams(self) -> dict[str, torch.Tensor]:
        """Everything that is stored, with one value per element."""
        count = self.weight.numel()
        found = {"weight": self.weight}
        if self.residual is not None:
            found["residual"] = self.residual
        for number, piece in enumerate(self.moments):
            found[f"moment {number}"] = piece.format.decode(piece.payload, piece.scales, count)
            if piece.scales is not None:
                found[f"scale {number}"] = piece.scales.repeat_interleave(piece.format.block)[:count]
        return found


def _clone(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    bits = tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    # Which NaN results from two NaNs depends on the instruction.
    return torch.where(tensor.isnan(), -1, bits) if tensor.is_floating_point() else bits


def state_of(rule: Rule, weight: str, width: str, count: int, seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator)
    residual = None
    if weight == "split":
        residual = torch.randint(-(2**15), 2**15, (count,), generator=generator, dtype=torch.int16)
    moments = []
    for signed in rule.moments.values():
        kind = FORMATS[width][0 if signed else 1]
        full = -(-count // kind.block) * kind.block if kind.block else count
        scales = torch.zeros(full // kind.block) if kind.block else None
        moments.append(Piece(kind, torch.zeros(kind.payload_bytes(full), dtype=torch.uint8), scales))
    return State(rule, values if weight == "fp32" else values.bfloat16(), residual, tuple(moments))


def gradient_of(kind: str, count: int, seed: int) -> torch.Tensor:
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 1e-3
    return values.bfloat16() if kind == "bf16" else values


def extreme(kind: str, starts: list[tuple[int, int]], count: int, seed: int) -> torch.Tensor:
    """Gradients whose magnitudes differ between pieces: ordinary, the full range, denormal, huge, zeros."""
    generator = torch.Generator().manual_seed(seed)
    sign = torch.randint(0, 2, (count,), generator=generator) * 2.0 - 1.0
    share = torch.rand(count, generator=generator, dtype=torch.float64)
    lows, highs = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for number, (start, size) in enumerate(starts):
        low, high = [(-5, -2), (-45, 38), (-45, -37), (30, 38.5), (-4, -3), (-30, 5)][(number + seed) % 6]
        lows[start : start + size], highs[start : start + size] = low, high
    values = (sign * 10 ** (lows + (highs - lows) * share)).float()
    special = torch.tensor([0.0, -0.0, 1e30, -3e38, 1e-45, 1.1754944e-38, -1e-40, 3.4e38])
    chosen = torch.randint(0, 200, (count,), generator=generator)
    values = torch.where(chosen < len(special), special[chosen.clamp(max=len(special) - 1)], values)
    values[torch.rand(count, generator=generator) < 0.05] = 0.0
    return values.bfloat16() if kind == "bf16" else values


def pieces_of(sizes: list[int]) -> tuple[list[tuple[int, int]], int]:
    """Start and size of consecutive runs, each starting at a multiple of 256, and the total length."""
    starts, at = [], 0
    for size in sizes:
        starts.append((at, size))
        at += -(-size // GROUP) * GROUP
    return starts, at


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("rule", RULE_LIST, ids=rule_id)
def test_every_size_on_every_instruction_set(rule, weight, width):
    """The reference updates a slab at once, the kernel each run by itself.

    The reference also updates the padding behind a run. It is zero, so it does not affect a scale.
    """
    starts, count = pieces_of(SIZES)
    real = torch.zeros(count, dtype=torch.bool)
    for start, size in starts:
        real[start : start + size] = True
    kernel = native_kernel(1)
    for gradient in GRADIENTS:
        rounded = gradient != "fp32"
        values = extreme(gradient, starts, count, 0)
        expected = state_of(rule, weight, width, count)
        expected.weight[~real] = 0
        if expected.residual is not None:
            expected.residual[~real] = 0
        found = {name: expected.copy() for name in library.isas()}
        runs = {name: [s.operands(values, rounded, 1, *piece) for piece in starts] for name, s in found.items()}
        for step in (1, 2, 3):
            values.copy_(extreme(gradient, starts, count, step)).masked_fill_(~real, 0.0)
            full = expected.operands(values, rounded, step)
            reference_kernel(full)
            for name, state in found.items():
                library.use_isa(name)
                for run in runs[name]:
                    kernel(replace(run, scalars=full.scalars, seed=full.seed))
                wrong = state.differs(expected, real)
                assert not wrong, f"{name}, {gradient} gradient, step {step}: {wrong}"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rule", RULE_LIST, ids=rule_id)
def test_tails_have_the_bits_of_the_reference(rule, width):
    """Sizes one by one, starting from random codes that include unused ones. Elements beyond the size do not change."""
    for weight, gradient, size in itertools.product(WEIGHTS, GRADIENTS, FEW_SIZES):
        expected = state_of(rule, weight, width, size + GROUP)
        for piece in expected.moments:
            if piece.scales is not None:
                piece.payload.random_(0, 256)
                piece.scales.uniform_(0.0, 1e-3)
        found = {name: expected.copy() for name in library.isas()}
        for step in (1, 2):
            values = gradient_of(gradient, size + GROUP, 10 * size + step)
            reference_kernel(expected.operands(values, gradient != "fp32", step, 0, size))
            for name, state in found.items():
                library.use_isa(name)
                native_kernel(1)(state.operands(values, gradient != "fp32", step, 0, size))
        for name, state in found.items():
            where = f"{name}, {weight}, {gradient}, {size}"
            assert torch.equal(state.weight, expected.weight), where
            assert state.residual is None or torch.equal(state.residual, expected.residual), where
            for one, two in zip(state.moments, expected.moments, strict=True):
                assert torch.equal(one.payload, two.payload), where
                assert one.scales is None or torch.equal(one.scales, two.scales), where


@pytest.mark.parametrize("width", ["8bit", "4bit"])
def test_rounding_between_zero_and_the_first_level(width, isa):
    """Magnitudes that differ from their random bits by exactly 0, 1 or 2."""
    count, seed = 16 * GROUP, seed_of(3, 1)
    kind = FORMATS[width][0]
    draws = Draws(seed, 0, count).moment(0).float()
    for more in (0.0, 1.0, 2.0):
        values = (draws + more) / kind.below
        values[:: kind.block] = 1.0
        edge = (values * kind.below == draws + more).float().mean()
        assert edge > 0.5, "too few values are on the edge"
        states = [state_of(RULE_LIST[2], "bf16", width, count) for _ in range(2)]
        for state, kernel in zip(states, (reference_kernel, native_kernel(1)), strict=True):
            # These scalars set the momentum to the gradient.
            kernel(replace(state.operands(values, False, 1), scalars=(1.0, 0.0, 0.0, 0.0)))
        assert not states[0].differs(states[1])
        assert (states[1].moments[0].payload > 0).float().mean() > (0.4 if more else 0.0)


@pytest.mark.parametrize("width", WIDTHS)
def test_streams_need_no_more_alignment_than_their_elements(width, isa):
    for weight, gradient in itertools.product(WEIGHTS, GRADIENTS):
        state = state_of(ADAMW, weight, width, 1000)
        values = gradient_of(gradient, 1000, 1)
        shifted = state.copy()
        shifted = replace(shifted, weight=_shift(state.weight), residual=_shift(state.residual))
        skip = state.moments[0].format.bits // 8 or 1
        moments = tuple(replace(p, payload=_shift(p.payload, skip), scales=_shift(p.scales)) for p in state.moments)
        shifted = replace(shifted, moments=moments)
        native_kernel(1)(state.operands(values, gradient != "fp32", 1))
        native_kernel(1)(shifted.operands(_shift(values), gradient != "fp32", 1))
        assert not state.differs(shifted)


def _shift(tensor: torch.Tensor | None, by: int = 1) -> torch.Tensor | None:
    """The same values, shifted by one element from alignment."""
    if tensor is None:
        return None
    return torch.cat([tensor[:by], tensor])[by:]


@pytest.mark.parametrize("width", WIDTHS)
def test_runs_of_one_slab_with_different_scalars(width, isa):
    """As with parameter groups: each run is updated with its own scalars, and the padding stays."""
    starts, count = pieces_of([300, 1000, 77, 512])
    slab = state_of(ADAMW, "split", width, count)
    expected, before = slab.copy(), slab.copy()
    values = gradient_of("bf16", count, 4)
    for number, (start, size) in enumerate(starts):
        rule = replace(ADAMW, weight_decay=0.1 * number, lr=1e-2 / (number + 1))
        native_kernel(2)(replace(slab, rule=rule).operands(values, True, 5, start, size))
        reference_kernel(replace(expected, rule=rule).operands(values, True, 5, start, size))
        if start + size < count:
            past = start + size
            assert torch.equal(slab.weight[past:], before.weight[past:])
    for piece, other in zip(slab.moments, expected.moments, strict=True):
        assert torch.equal(piece.payload, other.payload)
    assert not slab.differs(expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_flushing_denormals_in_the_caller_changes_nothing(width, isa):
    starts, count = pieces_of([1 << 17, 300])
    plain = state_of(ADAMW, "fp32", width, count)
    flushed = plain.copy()
    values = extreme("fp32", starts, count, 1)
    values[: 1 << 16] = torch.rand(1 << 16) * 1e-38
    native_kernel(2)(plain.operands(values, False, 1))
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no such mode")
    try:
        native_kernel(2)(flushed.operands(values, False, 1))
        still = torch.tensor([1e-40]) * 0.5
    finally:
        torch.set_flush_denormal(False)
    assert still.item() == 0.0, "the caller's mode was not restored"
    assert not plain.differs(flushed)


def test_invalid_arguments_are_refused():
    state = state_of(ADAMW, "split", "8bit", 300)
    operands = state.operands(gradient_of("bf16", 300, 0), True, 1)
    with pytest.raises(OSError, match="Invalid argument"):
        native_kernel(0)(operands)
    with pytest.raises(OSError, match="Invalid argument"):
        native_kernel(1)(replace(operands, first=100))
    without = tuple(replace(piece, scales=None) for piece in operands.moments)
    with pytest.raises(OSError, match="Bad address"):
        native_kernel(1)(replace(operands, moments=without))


def test_an_empty_update_is_allowed():
    state = state_of(ADAMW, "split", "fp32", 0)
    native_kernel(4)(state.operands(torch.zeros(0), True, 1))


def test_every_rule_is_tested():
    assert {type(rule) for rule in RULE_LIST} == set(RULES.values())
