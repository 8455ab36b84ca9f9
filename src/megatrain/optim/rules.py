"""The reference update rules: fixed sequences of correctly rounded FP32 operations without FMA.

Scalars are computed in FP64 and rounded once. Native and GPU kernels give the same bits. A rule object holds the
hyperparameters of one parameter group at the time of `step()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch

from megatrain.geometry import OPTIMIZER_MOMENTS

Tensors = tuple[torch.Tensor, ...]
Scalars = tuple[float, ...]


@dataclass(frozen=True)
class Rule:
    """The update of one parameter."""

    code: ClassVar[int]
    """`enum mt_rule` in csrc/megatrain.h."""
    moments: ClassVar[Mapping[str, bool]]
    """Moment → whether it can be negative; named as in torch."""

    defaults: ClassVar[Mapping[str, Any]]
    """Default options of a parameter group."""

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Rule:
        """From the options of a parameter group."""
        values = {**group, **dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False))}
        return cls(*(float(values[field.name]) for field in fields(cls)))

    def scalars(self, step: int, clip: float) -> Scalars:
        """The scalars of `update`, for a step count (from 1) and a clip factor."""
        raise NotImplementedError

    @staticmethod
    def update(master: torch.Tensor, moments: Tensors, grad: torch.Tensor, scalars: Scalars) -> None:
        """One step on flat FP32 tensors, in place; `grad` is only read."""
        raise NotImplementedError


@dataclass(frozen=True)
class AdamW(Rule):
    """x = clip·g;  m = β₁m + (1-β₁)x;  v = β₂v + ((1-β₂)x)x;  w = decay·w - (step·m) / (√v / c + ε)"""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    code: ClassVar[int] = 0
    moments: ClassVar[Mapping[str, bool]] = {"exp_avg": True, "exp_avg_sq": False}
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}

    def scalars(self, step: int, clip: float) -> Scalars:
        beta1, beta2 = self.beta1, self.beta2
        root_correction, step_size = (1.0 - beta2**step) ** 0.5, self.lr / (1.0 - beta1**step)
        decay = 1.0 - self.lr * self.weight_decay
        return _fp32(clip, beta1, 1.0 - beta1, beta2, 1.0 - beta2, root_correction, self.eps, decay, step_size)

    @staticmethod
    def update(master: torch.Tensor, moments: Tensors, grad: torch.Tensor, scalars: Scalars) -> None:
        clip, beta1, one_minus_beta1, beta2, one_minus_beta2, root_correction, eps, decay, step_size = scalars
        exp_avg, exp_avg_sq = moments
        clipped = grad * clip
        exp_avg.mul_(beta1).add_(clipped * one_minus_beta1)
        exp_avg_sq.mul_(beta2).add_((clipped * one_minus_beta2).mul_(clipped))
        denominator = _root(exp_avg_sq).div_(root_correction).add_(eps)
        master.mul_(decay).sub_((exp_avg * step_size).div_(denominator))


@dataclass(frozen=True)
class Lion(Rule):
    """x = clip·g;  d = sign(β₁m + (1-β₁)x);  m = β₂m + (1-β₂)x;  w = decay·w - lr·d"""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    code: ClassVar[int] = 1
    moments: ClassVar[Mapping[str, bool]] = {"exp_avg": True}
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}

    def scalars(self, step: int, clip: float) -> Scalars:
        beta1, beta2 = self.beta1, self.beta2
        return _fp32(clip, beta1, 1.0 - beta1, beta2, 1.0 - beta2, 1.0 - self.lr * self.weight_decay, self.lr)

    @staticmethod
    def update(master: torch.Tensor, moments: Tensors, grad: torch.Tensor, scalars: Scalars) -> None:
        clip, beta1, one_minus_beta1, beta2, one_minus_beta2, decay, lr = scalars
        (exp_avg,) = moments
        clipped = grad * clip
        blend = exp_avg * beta1 + clipped * one_minus_beta1
        exp_avg.mul_(beta2).add_(clipped * one_minus_beta2)
        master.mul_(decay).sub_(((blend > 0).float() - (blend < 0).float()).mul_(lr))


@dataclass(frozen=True)
class SGD(Rule):
    """x = clip·g + λw;  m = μm + x;  w = w - lr·m  (decay is coupled, as in torch.optim.SGD)"""

    lr: float
    momentum: float
    weight_decay: float
    code: ClassVar[int] = 2
    moments: ClassVar[Mapping[str, bool]] = {"momentum_buffer": True}
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0}

    def scalars(self, step: int, clip: float) -> Scalars:
        return _fp32(clip, self.momentum, self.weight_decay, self.lr)

    @staticmethod
    def update(master: torch.Tensor, moments: Tensors, grad: torch.Tensor, scalars: Scalars) -> None:
        clip, momentum, weight_decay, lr = scalars
        (average,) = moments
        pull = (grad * clip).add_(master * weight_decay)
        average.mul_(momentum).add_(pull)
        master.sub_(average * lr)


RULES: dict[str, type[Rule]] = dict(zip(OPTIMIZER_MOMENTS, (AdamW, Lion, SGD), strict=True))


def _root(values: torch.Tensor) -> torch.Tensor:
    """Correctly rounded square root: torch's is not on every CPU, numpy's is."""
    return values.sqrt() if values.is_cuda else torch.from_numpy(np.sqrt(values.numpy()))


def _fp32(*values: float) -> Scalars:
    return tuple(float(np.float32(value)) for value in values)
