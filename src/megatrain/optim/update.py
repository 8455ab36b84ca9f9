"""Updates a slab: one kernel call per run of parameters with equal rule, step count and format.

`native_kernel` (csrc/update.cpp) makes one pass over weight, residual, moments and gradient; `triton_kernel`
(optim/update_triton.py) does the same in GPU memory; `reference_kernel` uses PyTorch operations. All three give the
same bits.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.native import library as native
from megatrain.native.kernels import triton_kernel
from megatrain.optim.rules import AdamW, Rule
from megatrain.store.formats import FORMATS, Format, round_to_bf16
from megatrain.store.gradient import Snapshot
from megatrain.store.moments import Piece
from megatrain.store.random import Draws, seed_of
from megatrain.store.slab import Span
from megatrain.store.split import join, split

PIECE_ELEMENTS = 1 << 20
"""Elements that the reference updates at once, to bound temporaries."""
RATE_ELEMENTS = 1 << 26
"""Elements for measuring update rates, more than fit any cache."""
RATE_SECONDS = 0.4
"""Seconds of measuring per width."""


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
    """The gradient is rounded to this before use; BF16 for an FP32 sum of BF16 gradients."""
    moments: tuple[Piece, ...]
    seed: int
    first: int
    """Index of the first element in its slab, a multiple of 256; selects the random bits."""

    @property
    def count(self) -> int:
        return self.weight.numel()


Kernel = Callable[[Operands], None]


def update_slab(state: Span, gradient: Snapshot, rules: Mapping[int, Rule], clip: float, kernel: Kernel) -> None:
    """Update the parameters that have a gradient and a rule; others are unchanged."""
    slab, residual = state.slab, state.residual
    weight, segments = slab.owned.slice_flat(state.weight), slab.owned.segments

    def kind(index: int) -> tuple[Any, ...]:
        return rules[index], slab.steps[index], *(moment.formats[index] for moment in slab.moments.values())

    runs: list[list[int]] = []
    for index in sorted(gradient.present & rules.keys()):
        slab.steps[index] += 1
        if runs and runs[-1][-1] == index - 1 and kind(index - 1) == kind(index):
            runs[-1].append(index)
        else:
            runs.append([index])
    for first, last in ((run[0], run[-1]) for run in runs):
        rule, step = rules[first], slab.steps[first]
        start, end = segments[first].offset, segments[last].end
        if start < end:
            kernel(
                Operands(
                    rule=type(rule),
                    scalars=rule.scalars(step, clip),
                    weight=weight[start:end],
                    residual=None if residual is None else residual[start:end],
                    gradient=gradient.flat[start:end],
                    gradient_dtype=gradient.dtype,
                    moments=tuple(state.moments[role].piece(first, end - start) for role in rule.moments),
                    seed=seed_of(slab.index, step),
                    first=slab.owned.begin + start,
                )
            )


def native_kernel(threads: int) -> Kernel:

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
    """The kernel for GPU memory: the fused one, or the reference where Triton does not work."""
    module = "megatrain.optim.update_triton"

    def try_out(kernel: Kernel) -> None:
        # Compiles and runs it once, so that a broken compiler shows before training.
        kernel(_sample(1, FORMATS["fp32"], torch.device("cuda")))

    kernel: Kernel | None = triton_kernel(module, "triton_kernel", try_out, "updates take longer")
    return kernel or reference_kernel


def _sample(count: int, formats: Iterable[Format], device: torch.device) -> Operands:
    """Operands of AdamW on a split master with a BF16 gradient."""
    return Operands(
        rule=AdamW,
        scalars=AdamW(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1).scalars(10, 1.0),
        weight=torch.ones(count, dtype=torch.bfloat16, device=device),
        residual=torch.ones(count, dtype=torch.int16, device=device),
        gradient=torch.ones(count, dtype=torch.bfloat16, device=device),
        gradient_dtype=torch.bfloat16,
        moments=tuple(
            Piece(
                chosen,
                torch.zeros(chosen.payload_bytes(count), dtype=torch.uint8, device=device),
                torch.ones(chosen.scale_bytes(count) // 4, device=device) if chosen.block else None,
            )
            for chosen in formats
        ),
        seed=1,
        first=0,
    )


def update_rates(device: torch.device, threads: int) -> dict[str, float]:
    """Moment width → parameters per second of AdamW on this machine, for the planner."""
    kernel = device_kernel() if device.type == "cuda" else native_kernel(threads)
    return {
        width: RATE_ELEMENTS / _seconds(kernel, _sample(RATE_ELEMENTS, formats, device))
        for width, formats in FORMATS.items()
    }


def _seconds(kernel: Kernel, operands: Operands) -> float:
    """The median time of a call, without the first."""
    times: list[float] = []
    while len(times) < 3 or sum(times[1:]) < RATE_SECONDS:
        start = time.perf_counter()
        kernel(operands)
        if operands.weight.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def reference_kernel(operands: Operands) -> None:
    """The update in PyTorch operations; defines the bits."""
    for start in range(0, operands.count, PIECE_ELEMENTS):
        end = min(start + PIECE_ELEMENTS, operands.count)
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
