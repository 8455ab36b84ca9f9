"""AdamW, the reference: one written sequence of FP32 operations, each correctly rounded, in fixed order, without FMA.

Scalars are computed in FP64 and rounded once. Every later implementation must give the same bits. `torch.sqrt` on the
CPU is not correctly rounded everywhere; numpy's is, so the root is taken there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters of one parameter group, as they were when `step()` was called."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class Scalars:
    """What the elementwise sequence needs, in FP32."""

    clip: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    root_correction: float
    eps: float
    decay: float
    step_size: float

    @classmethod
    def of(cls, hyper: Hyper, step: int, clip: float) -> Scalars:
        """For the given step count (from 1) and clip factor."""
        values = (
            clip,
            hyper.beta1,
            1.0 - hyper.beta1,
            hyper.beta2,
            1.0 - hyper.beta2,
            (1.0 - hyper.beta2**step) ** 0.5,
            hyper.eps,
            1.0 - hyper.lr * hyper.weight_decay,
            hyper.lr / (1.0 - hyper.beta1**step),
        )
        return cls(*(float(np.float32(value)) for value in values))


def update(
    master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, grad: torch.Tensor, scalars: Scalars
) -> None:
    """One step on flat FP32 tensors, in place (`grad` is read only).

    x = clip·g;  m = β₁m + (1-β₁)x;  v = β₂v + ((1-β₂)x)x;  w = decay·w - (step·m) / (√v / c + ε)
    """
    clipped = grad * scalars.clip
    exp_avg.mul_(scalars.beta1).add_(clipped * scalars.one_minus_beta1)
    exp_avg_sq.mul_(scalars.beta2).add_((clipped * scalars.one_minus_beta2).mul_(clipped))
    denominator = torch.from_numpy(np.sqrt(exp_avg_sq.numpy())).div_(scalars.root_correction).add_(scalars.eps)
    master.mul_(scalars.decay).sub_((exp_avg * scalars.step_size).div_(denominator))
