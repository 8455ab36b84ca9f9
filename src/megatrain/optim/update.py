"""Updating a slab: its parameters in runs of equal hyperparameters and step count, in pieces that stay in cache."""

from __future__ import annotations

from collections.abc import Mapping

from megatrain.optim.adamw import Hyper, Scalars, update
from megatrain.store.slab import Slab, Snapshot
from megatrain.store.split import join, split

PIECE = 1 << 20
"""Elements per piece: large enough to share among threads, small enough that temporaries stay in cache."""


def update_slab(slab: Slab, gradient: Snapshot, hypers: Mapping[int, Hyper], clip: float) -> None:
    """One AdamW step for the parameters that have a gradient and a group; the others are left untouched."""
    runs: dict[tuple[Hyper, int], list[int]] = {}
    for index in sorted(gradient.present):
        if index in hypers:
            slab.steps[index] += 1
            runs.setdefault((hypers[index], slab.steps[index]), []).append(index)
    for (hyper, step), indices in runs.items():
        scalars = Scalars.of(hyper, step, clip)
        for start, end in slab.layout.runs(indices):
            for piece in range(start, end, PIECE):
                _update_piece(slab, gradient, piece, min(piece + PIECE, end), scalars)


def _update_piece(slab: Slab, gradient: Snapshot, start: int, end: int, scalars: Scalars) -> None:
    assert slab.exp_avg is not None
    assert slab.exp_avg_sq is not None
    rounded = gradient.rounded(start, end)
    weight, moments = slab.weight[start:end], (slab.exp_avg[start:end], slab.exp_avg_sq[start:end])
    if not slab.split_master:
        update(weight, *moments, rounded, scalars)
        return
    assert slab.residual is not None
    master = join(weight, slab.residual[start:end])
    update(master, *moments, rounded, scalars)
    high, low = split(master)
    weight.copy_(high)
    slab.residual[start:end].copy_(low)
