"""Train one model with plain transformers and torch and with the engine, and compare the two runs.

Both runs use the same `train`. They differ only in the optimizer and in where the weights are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import megatrain as mt

from . import zoo

LR = 1e-3
STEPS = 5

LOGITS = 1e-6
"""Relative and absolute tolerance."""

GRADIENT = 1e-5
"""‖Δg‖ / ‖g‖, for every parameter."""

WEIGHT = 5e-5
"""Largest |Δw| after `STEPS` steps at `LR`."""

NOISE = 1e-7
"""Gradients below this share of the largest element of all gradients are rounding noise. See `zoo.KeyBias`."""

Batch = Mapping[str, Tensor]
LossOf = Callable[[Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The recorded values of a training run."""

    losses: list[Tensor]
    """Per micro-batch."""

    logits: list[Tensor]
    """Per micro-batch."""

    gradients: list[dict[str, Tensor]]
    """Per step, for the parameters that have a gradient."""

    weights: dict[str, Tensor]
    """After the last step."""

    rng: Tensor
    """State of the generator after the last step. It is equal if both runs drew equally many numbers."""


def loss_of_output(output: Any) -> Tensor:
    return output.loss


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    # `+ 0` turns the engine's tensor into a plain one.
    return {name: p.grad + 0 for name, p in model.named_parameters() if p.grad is not None}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() + 0 for name, p in model.named_parameters()}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    windows: Sequence[Sequence[Batch]],
    *,
    loss_of: LossOf = loss_of_output,
    seed: int = 7,
) -> Run:
    """Run one optimizer step per window. The loss of a window is the mean over its micro-batches."""
    losses, logits, gradients = [], [], []
    torch.manual_seed(seed)
    for window in windows:
        for batch in window:
            output = model(**batch)
            loss = loss_of(output)
            (loss / len(window)).backward()
            losses.append(loss.detach() + 0)
            logits.append(output.logits.detach() + 0)
        gradients.append(gradients_of(model))
        optimizer.step()
        optimizer.zero_grad()
    return Run(
        losses=losses,
        logits=logits,
        gradients=gradients,
        weights=weights_of(model),
        rng=torch.get_rng_state(),
    )


def torch_adamw(model: nn.Module, params: Any = None, **options: Any) -> torch.optim.AdamW:
    defaults = {"lr": LR, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    return torch.optim.AdamW(model.parameters() if params is None else params, foreach=False, **{**defaults, **options})


def engine_adamw(engine: mt.Engine, params: Any = None, **options: Any) -> torch.optim.Optimizer:
    defaults = {"lr": LR, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "max_grad_norm": None}
    return engine.optimizer(params=params, **{**defaults, **options})


@contextmanager
def adopted(model: nn.Module, **options: Any) -> Iterator[mt.Engine]:
    engine = mt.Engine(model, **{"device": "cpu", "precision": "fp32", **options})
    try:
        yield engine
    finally:
        engine.close()


def train_both(
    model: nn.Module,
    windows: Sequence[Sequence[Batch]],
    *,
    loss_of: LossOf = loss_of_output,
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
    **options: Any,
) -> tuple[Run, Run]:
    """Return (reference, ours), from the same weights, batches and seed. `groups` makes the parameter groups."""
    plain = deepcopy(model)
    reference = train(plain, torch_adamw(plain, groups and groups(plain), **options), windows, loss_of=loss_of)
    with adopted(model) as engine:
        optimizer = engine_adamw(engine, groups and groups(model), **options)
        ours = train(model, optimizer, windows, loss_of=loss_of)
    return reference, ours


def backward_in_both(
    family: str | None, model: nn.Module, scenario: Callable[[nn.Module], Any], *, seed: int = 7
) -> Any:
    """Run a scenario on a plain copy and on the attached model, and check that results and gradients match.

    Returns the result of the plain copy."""
    plain = deepcopy(model)
    torch.manual_seed(seed)
    expected = scenario(plain)
    torch.manual_seed(seed)
    with adopted(model):
        actual = scenario(model)
        torch.testing.assert_close(actual, expected, rtol=LOGITS, atol=LOGITS)
        assert_gradients_match(family, gradients_of(plain), gradients_of(model))
    return expected


def assert_runs_match(family: str | None, reference: Run, ours: Run) -> None:
    """`family` is the model's name in the zoo, which lists its key biases."""
    assert_outputs_match(reference, ours)
    assert_gradients_match(family, reference.gradients[0], ours.gradients[0])
    for step, (theirs, mine) in enumerate(zip(reference.gradients, ours.gradients, strict=True)):
        assert set(mine) == set(theirs), f"step {step}: different parameters have gradients"
    assert torch.equal(ours.rng, reference.rng), "the runs drew random numbers a different number of times"
    assert_weights_match(family, reference, ours)


def assert_outputs_match(reference: Run, ours: Run) -> None:
    """Compare the first step only. After an update the weights differ in the last bit."""
    torch.testing.assert_close(ours.losses[0], reference.losses[0], rtol=LOGITS, atol=LOGITS)
    torch.testing.assert_close(ours.logits[0], reference.logits[0], rtol=LOGITS, atol=LOGITS)


def assert_gradients_match(
    family: str | None, reference: Mapping[str, Tensor], ours: Mapping[str, Tensor], tolerance: float = GRADIENT
) -> None:
    """Check that the same parameters have gradients and that each is within the tolerance of the reference.

    Key biases must only be noise in both runs, because the order of a sum over several uses changes the noise."""
    assert set(ours) == set(reference), "different parameters have gradients"
    assert reference, "nothing to compare"
    off = {}
    for name, expected in reference.items():
        assert ours[name].shape == expected.shape, name
        not_compared = key_biases(family, name, expected)
        assert_noise(reference, name, not_compared)
        assert_noise(ours, name, not_compared)
        difference = (ours[name] - expected).double()[~not_compared].norm()
        error = (difference / expected.double()[~not_compared].norm()).item() if difference else 0.0
        if not error <= tolerance:
            off[name] = error
    assert not off, f"‖Δg‖/‖g‖ above {tolerance}: {worst(off)}"


def assert_weights_match(family: str | None, reference: Run, ours: Run, tolerance: float = WEIGHT) -> None:
    """Check that every element is within the tolerance, except key biases whose gradient is noise in every step.

    Those may differ by as much as Adam can move two runs in opposite directions."""
    assert set(ours.weights) == set(reference.weights)
    reach = 2 * LR * len(reference.gradients)
    off = {}
    for name, expected in reference.weights.items():
        not_compared = key_biases(family, name, expected)
        for gradients in reference.gradients:
            assert_noise(gradients, name, not_compared)
        difference = (ours.weights[name] - expected).abs()
        limit = torch.where(not_compared, torch.tensor(reach), torch.tensor(tolerance))
        if not bool((difference <= limit).all()):
            off[name] = difference.max().item()
    assert not off, f"|Δw| above {tolerance}: {worst(off)}"


def key_biases(family: str | None, name: str, parameter: Tensor) -> Tensor:
    """A mask of the elements that are not compared. It is empty for a model that is not in the zoo."""
    if family is None:
        return torch.zeros(parameter.shape, dtype=torch.bool)
    return zoo.key_bias_elements(family, name, parameter)


def assert_noise(gradients: Mapping[str, Tensor], name: str, elements: Tensor) -> None:
    """Check that these elements of a gradient, if it exists, are rounding noise."""
    if name not in gradients or not elements.any():
        return
    floor = NOISE * max(gradient.abs().max().item() for gradient in gradients.values())
    largest = gradients[name][elements].abs().max().item()
    assert largest <= floor, f"{name} has a real gradient, {largest:.1e}"


def worst(off: Mapping[str, float], count: int = 4) -> str:
    """The largest errors as text."""
    ranked = sorted(off.items(), key=lambda item: -item[1])
    more = f" and {len(ranked) - count} more" if len(ranked) > count else ""
    return ", ".join(f"{name} {error:.1e}" for name, error in ranked[:count]) + more
