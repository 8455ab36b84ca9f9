"""Updating a slab: its parameters in runs of equal rule, step count and format, by one of three kernels.

`native_kernel` (csrc/update.cpp) makes one pass over weight, residual, moments and gradient; `triton_kernel`
(optim/update_triton.py) does the same for state in GPU memory; `reference_kernel` is the written sequence in PyTorch.
They agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from megatrain.native import library as native
from megatrain.native.kernels import triton_kernel
from megatrain.optim.rules import AdamW, Rule
from megatrain.store.formats import FP32, Format, round_to_bf16
from megatrain.store.gradient import Snapshot
from megatrain.store.moments import Piece
from megatrain.store.random import Draws, seed_of
from megatrain.store.slab import Slab, Span
from megatrain.store.split import join, split

PIECE = 1 << 20
"""Elements that the reference handles at once, so that its temporaries stay small."""


@dataclass(frozen=True)
class Operands:
    """One kernel call: flat tensors of `count` elements, all on one device."""

    rule: type[Rule]
    scalars: tuple[float, ...]
    weight: torch.Tensor
    residual: torch.Tensor | None
    """Low halves of a split master. None: FP32 weights are their own master, BF16 ones are rounded stochastically."""
    gradient: torch.Tensor
    gradient_dtype: torch.dtype
    """What the gradient is rounded to before use; BF16 for an FP32 sum of BF16 gradients."""
    moments: tuple[Piece, ...]
    seed: int
    first: int
    """The number of the first element in its slab, a multiple of 256: random bits are drawn by it."""

    @property
    def count(self) -> int:
        return self.weight.numel()


Kernel = Callable[[Operands], None]


def update_slab(state: Span, gradient: Snapshot, rules: Mapping[int, Rule], clip: float, kernel: Kernel) -> None:
    """One step for the parameters that have a gradient and a group; the others are left untouched."""
    slab, residual = state.slab, state.residual
    weight = slab.owned.within(state.weight)
    runs: dict[tuple[Rule, int], list[int]] = {}
    for index in sorted(gradient.present):
        if index in rules:
            slab.steps[index] += 1
            runs.setdefault((rules[index], slab.steps[index]), []).append(index)
    for (rule, step), indices in runs.items():
        scalars = rule.scalars(step, clip)
        for index, start, end in _pieces(slab, indices):
            kernel(
                Operands(
                    rule=type(rule),
                    scalars=scalars,
                    weight=weight[start:end],
                    residual=None if residual is None else residual[start:end],
                    gradient=gradient.flat[start:end],
                    gradient_dtype=gradient.dtype,
                    moments=tuple(state.moments[role].piece(index, end - start) for role in rule.moments),
                    seed=seed_of(slab.index, step),
                    first=slab.owned.begin + start,
                )
            )


def _pieces(slab: Slab, indices: list[int]) -> Iterator[tuple[int, int, int]]:
    """(first segment, start, end) of runs of neighbouring segments whose moments are stored alike."""

    def formats(index: int) -> list[Format]:
        return [moment.format(index) for moment in slab.moments.values()]

    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1 and formats(index) == formats(runs[-1][-1]):
            runs[-1].append(index)
        else:
            runs.append([index])
    segments = slab.owned.segments
    for run in runs:
        start, end = segments[run[0]].offset, segments[run[-1]].end
        if start < end:
            yield run[0], start, end


def native_kernel(threads: int) -> Kernel:
    """The native library's kernel, on this many threads."""

    def kernel(operands: Operands) -> None:
        native.update(
            rule=operands.rule.code,
            scalars=operands.scalars,
            weight=operands.weight,
            residual=operands.residual,
            gradient=operands.gradient,
            rounded=operands.gradient_dtype == torch.bfloat16,
            width=operands.moments[0].format.name,
            moments=[piece.payload for piece in operands.moments],
            scales=[piece.scales for piece in operands.moments],
            seed=operands.seed,
            first=operands.first,
            threads=threads,
        )

    return kernel


def device_kernel() -> Kernel:
    """For state in GPU memory: the fused kernel, or PyTorch's own operations where Triton does not work."""
    module = "megatrain.optim.update_triton"
    kernel: Kernel | None = triton_kernel(module, "triton_kernel", _try_out, "updates take longer")
    return kernel or reference_kernel


def _try_out(kernel: Kernel) -> None:
    """One element, so that a compiler that does not work is found out before training."""
    values = [torch.zeros(1, device="cuda") for _ in range(4)]
    rule = AdamW(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
    kernel(
        Operands(
            rule=AdamW,
            scalars=rule.scalars(1, 1.0),
            weight=values[0],
            residual=None,
            gradient=values[1],
            gradient_dtype=torch.float32,
            moments=tuple(Piece(FP32, value.view(torch.uint8), None) for value in values[2:]),
            seed=0,
            first=0,
        )
    )


def reference_kernel(operands: Operands) -> None:
    """The written sequence, in PyTorch."""
    for start in range(0, operands.count, PIECE):
        _reference(operands, start, min(start + PIECE, operands.count))


def _reference(operands: Operands, start: int, end: int) -> None:
    draws = Draws(operands.seed, operands.first + start, end - start, operands.weight.device)
    weight, residual = operands.weight[start:end], operands.residual
    master = weight.float() if residual is None else join(weight, residual[start:end])
    gradient = operands.gradient[start:end].to(operands.gradient_dtype).float()
    pieces = [_part(piece, start) for piece in operands.moments]
    moments = tuple(piece.format.decode(piece.payload, piece.scales, end - start) for piece in pieces)
    operands.rule.update(master, moments, gradient, operands.scalars)
    for number, (piece, values) in enumerate(zip(pieces, moments, strict=True)):
        piece.format.encode(values, piece.payload, piece.scales, draws.moment(number))
    if residual is not None:
        high, low = split(master)
        weight.copy_(high)
        residual[start:end].copy_(low)
    elif weight.dtype == torch.bfloat16:
        weight.copy_(round_to_bf16(master, draws.weight()))
    else:
        weight.copy_(master)


def _part(piece: Piece, start: int) -> Piece:
    chosen = piece.format
    payload = piece.payload[chosen.payload_bytes(start) :]
    return Piece(chosen, payload, None if piece.scales is None else piece.scales[start // chosen.block :])
