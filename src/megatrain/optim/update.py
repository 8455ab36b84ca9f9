"""Updating a slab: its parameters in runs of equal hyperparameters and step count, by one of two kernels.

`native_kernel` (csrc/adamw.cpp) makes one pass over weight, residual, moments and gradient; `reference_kernel` is the
same sequence in PyTorch. They agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple

import torch

from megatrain.native import library as native
from megatrain.optim.adamw import Hyper, Scalars, update
from megatrain.store.slab import Slab, Snapshot
from megatrain.store.split import join, split

Kernel = Callable[[Slab, Snapshot, int, int, Scalars], None]
"""Update elements [start, end) of a slab."""

PIECE = 1 << 20
"""Elements that the reference handles at once, so that its temporaries stay small."""


def update_slab(slab: Slab, gradient: Snapshot, hypers: Mapping[int, Hyper], clip: float, kernel: Kernel) -> None:
    """One AdamW step for the parameters that have a gradient and a group; the others are left untouched."""
    runs: dict[tuple[Hyper, int], list[int]] = {}
    for index in sorted(gradient.present):
        if index in hypers:
            slab.steps[index] += 1
            runs.setdefault((hypers[index], slab.steps[index]), []).append(index)
    for (hyper, step), indices in runs.items():
        scalars = Scalars.of(hyper, step, clip)
        for start, end in slab.layout.runs(indices):
            kernel(slab, gradient, start, end, scalars)


def native_kernel(threads: int) -> Kernel:
    """The native library's kernel, on this many threads."""

    def kernel(slab: Slab, gradient: Snapshot, start: int, end: int, scalars: Scalars) -> None:
        exp_avg, exp_avg_sq = _moments(slab)
        if gradient.flat.dtype == torch.bfloat16:
            kind = native.GRADIENT_BF16
        else:
            kind = native.GRADIENT_FP32 if gradient.dtype == torch.float32 else native.GRADIENT_FP32_TO_BF16
        residual = slab.residual if slab.split_master else None
        native.adamw(
            _address(slab.weight, start),
            None if residual is None else _address(residual, start),
            _address(exp_avg, start),
            _address(exp_avg_sq, start),
            _address(gradient.flat, start),
            kind,
            end - start,
            astuple(scalars),
            threads,
        )

    return kernel


def reference_kernel(slab: Slab, gradient: Snapshot, start: int, end: int, scalars: Scalars) -> None:
    """The written sequence, in PyTorch."""
    exp_avg, exp_avg_sq = _moments(slab)
    for begin in range(start, end, PIECE):
        piece = slice(begin, min(begin + PIECE, end))
        rounded = gradient.rounded(piece.start, piece.stop)
        weight = slab.weight[piece]
        if not slab.split_master:
            update(weight, exp_avg[piece], exp_avg_sq[piece], rounded, scalars)
            continue
        assert slab.residual is not None
        master = join(weight, slab.residual[piece])
        update(master, exp_avg[piece], exp_avg_sq[piece], rounded, scalars)
        high, low = split(master)
        weight.copy_(high)
        slab.residual[piece].copy_(low)


def _moments(slab: Slab) -> tuple[torch.Tensor, torch.Tensor]:
    assert slab.exp_avg is not None
    assert slab.exp_avg_sq is not None
    return slab.exp_avg, slab.exp_avg_sq


def _address(flat: torch.Tensor, element: int) -> int:
    return flat.data_ptr() + element * flat.element_size()
