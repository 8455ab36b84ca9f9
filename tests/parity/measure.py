"""Numeric differences between the engine and plain PyTorch on one model. Tests check them and the table prints them.

`compare` finds key biases of zoo models by name. This module finds them by size, so it works for any model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.model import transformers_api
from megatrain.model.blocks import find_blocks

from . import compare
from .compare import Batch, Run

EPS = 1e-5
"""Adam's eps, large enough that gradients of rounding noise (see `zoo.KeyBias`) give small updates."""


@dataclass(frozen=True, kw_only=True)
class Parity:
    """The differences, and the blocks of the model."""

    layers: tuple[str, ...]
    """Names of the repeated blocks."""

    blocks: int
    """Number of all blocks: layers and the modules around them."""

    loss: float
    """Relative difference of the first step's loss."""

    gradient: float
    """‖Δg‖ / ‖g‖ of the worst parameter in the first step."""

    worst: str
    """The parameter with the largest gradient error."""

    unmatched: frozenset[str]
    """Parameters that have a gradient in only one of the runs, in any step."""

    noise: frozenset[str]
    """Parameters whose gradient is rounding noise in both runs. They are not compared."""

    weight: float
    """Largest |Δw| after the last step, without the parameters in `noise`."""

    rng: bool
    """Whether both runs drew equally many random numbers."""

    def check(self, *, rng: bool = True) -> None:
        assert not self.unmatched, f"have a gradient in one run only: {sorted(self.unmatched)[:5]}"
        assert self.loss <= 2 * compare.LOGITS, f"the losses differ by {self.loss:.1e}"
        assert self.gradient <= compare.GRADIENT, f"‖Δg‖/‖g‖ of {self.worst} is {self.gradient:.1e}"
        assert self.weight <= compare.WEIGHT, f"|Δw| after the last step is {self.weight:.1e}"
        assert self.rng or not rng, "the runs drew random numbers a different number of times"
        assert all("bias" in name for name in self.noise), (
            f"parameters with rounding noise that are not biases: {self.noise}"
        )


def measure(model: nn.Module, batches: Sequence[Batch], **settings: Any) -> Parity:
    """Train a plain copy and the attached model, one step per batch, and compare. `settings` go to the engine."""
    all_blocks = find_blocks(model, transformers_api.load())
    plain = deepcopy(model)
    windows = [[batch] for batch in batches]
    reference = compare.train(plain, compare.torch_adamw(plain, eps=EPS), windows)
    with compare.adopted(model, **settings) as engine:
        ours = compare.train(model, compare.engine_adamw(engine, eps=EPS), windows)
        blocks = len(engine.blocks)
    assert all(bool(torch.isfinite(loss)) for loss in reference.losses), "the plain run is not finite"
    layers = tuple(item.name for item in all_blocks if item.layer)
    return _differences(reference, ours, layers, blocks)


def _differences(reference: Run, ours: Run, layers: tuple[str, ...], blocks: int) -> Parity:
    unmatched: set[str] = set()
    for theirs, mine in zip(reference.gradients, ours.gradients, strict=True):
        unmatched |= set(theirs) ^ set(mine)
    errors, noise = gradient_errors(reference.gradients[0], ours.gradients[0])
    worst = max(errors, key=lambda name: errors[name])
    expected, actual = reference.losses[0].item(), ours.losses[0].item()
    return Parity(
        layers=layers,
        blocks=blocks,
        loss=abs(actual - expected) / abs(expected),
        gradient=errors[worst],
        worst=worst,
        unmatched=frozenset(unmatched),
        noise=frozenset(noise),
        weight=max(
            (ours.weights[name] - weight).abs().max().item()
            for name, weight in reference.weights.items()
            if weight.numel() and name not in noise
        ),
        rng=torch.equal(reference.rng, ours.rng),
    )


def gradient_errors(reference: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> tuple[dict[str, float], set[str]]:
    """‖Δg‖ / ‖g‖ per parameter that has a gradient in both, and the parameters where both are rounding noise.

    Parameters that are noise but agree are compared like all others.
    """
    floor = compare.NOISE * max(_largest(gradient) for gradient in reference.values())
    errors, noise = {}, set()
    for name in reference.keys() & ours.keys():
        difference = (ours[name] - reference[name]).double().norm()
        # NaN differs from itself, so a NaN gradient fails the comparison.
        error = (difference / reference[name].double().norm()).item() if difference != 0 else 0.0
        if not error <= compare.GRADIENT and max(_largest(reference[name]), _largest(ours[name])) <= floor:
            noise.add(name)
        else:
            errors[name] = error if error == error else float("inf")
    return errors, noise


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
