"""Hyperparameters are checked at every use, so that a bad value never reaches a weight."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tests import small

import megatrain as mt
from megatrain.errors import SettingsError

INF, NAN = math.inf, math.nan
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    "lion": {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1},
    "sgd": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
}
BAD = {
    "nan": NAN, "infinite": INF, "negative": -1e-3, "none": None, "text": "0.1", "truth": True,
    "complex": 1j, "tensor nan": torch.tensor(NAN), "tensor of two": torch.ones(2),
}  # fmt: skip
BAD_BETAS = {
    "nan": (0.9, NAN), "infinite": (INF, 0.9), "negative": (-0.1, 0.9), "one": (0.9, 1.0), "none": None, "number": 0.9,
    "three": (0.9, 0.9, 0.9), "text": ("0.9", 0.9),
}  # fmt: skip
CASES = [
    (kind, option, value, f"{kind}-{option}-{name}")
    for kind, options in KINDS.items()
    for option in options
    for name, value in (BAD_BETAS if option == "betas" else BAD).items()
]


def made(kind: str = "adamw", **changes: Any) -> tuple[Any, Any, Any]:
    model = small.llama(num_hidden_layers=1)
    engine = mt.Engine(model, device="cpu")
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    return model, engine, engine.optimizer(groups, kind=kind, **(KINDS[kind] | changes))


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_value_stops_the_step(kind: str) -> None:
    model, engine, optimizer = made(kind)
    model(**small.batch()).loss.backward()
    before = small.snapshot(model)
    for _, option, value, case in [c for c in CASES if c[0] == kind]:
        good = optimizer.param_groups[1][option]
        optimizer.param_groups[1][option] = value
        with pytest.raises(SettingsError, match=rf"parameter group 1 has {option}=") as error:
            optimizer.step()
        assert "no update used it" in str(error.value), case
        optimizer.param_groups[1][option] = good
    engine.synchronize()
    assert small.same(before, small.snapshot(model))
    # The gradients are kept, and a step with good values uses them.
    optimizer.step()
    assert not small.same(before, small.snapshot(model))


def test_values_are_checked_before_early_updates() -> None:
    model, engine, optimizer = made()
    before = small.snapshot(model)
    optimizer.param_groups[0]["lr"] = NAN
    with pytest.raises(SettingsError, match="parameter group 0 has lr=nan"), optimizer.final_backward():
        model(**small.batch()).loss.backward()
    engine.synchronize()
    assert small.same(before, small.snapshot(model))


def test_values_that_overflow_in_combination_are_refused() -> None:
    model, engine, optimizer = made()
    model(**small.batch()).loss.backward()
    before = small.snapshot(model)
    for changes in ({"lr": 1e30, "weight_decay": 1e30}, {"lr": 1e39}, {"eps": 1e39}):
        good = dict(optimizer.param_groups[0])
        optimizer.param_groups[0].update(changes)
        with pytest.raises(SettingsError, match="overflow FP32"):
            optimizer.step()
        optimizer.param_groups[0].update(good)
    engine.synchronize()
    assert small.same(before, small.snapshot(model))


@pytest.mark.parametrize("value", [NAN, -1.0, 0.0, "1"])
def test_a_bad_max_grad_norm_stops_the_step(value: Any) -> None:
    model, _, optimizer = made(max_grad_norm=1.0)
    model(**small.batch()).loss.backward()
    before = small.snapshot(model)
    optimizer.max_grad_norm = value
    with pytest.raises(SettingsError, match="max_grad_norm must be positive"):
        optimizer.step()
    assert small.same(before, small.snapshot(model))


@pytest.mark.parametrize(("option", "value"), [("lr", NAN), ("betas", (0.9, INF)), ("weight_decay", -1.0)])
def test_a_state_dict_with_bad_values_changes_nothing(option: str, value: Any) -> None:
    model, _, optimizer = made()
    model(**small.batch()).loss.backward()
    optimizer.step()
    stored = copy.deepcopy(optimizer.state_dict())
    stored["param_groups"][1][option] = value
    stored["param_groups"][0]["lr"] = 0.5
    with pytest.raises(SettingsError, match=f"parameter group 1 of the stored state has {option}="):
        optimizer.load_state_dict(stored)
    assert optimizer.param_groups[0]["lr"] == KINDS["adamw"]["lr"]


def test_a_scheduler_may_write_tensors_and_numpy_numbers() -> None:
    import numpy

    model, _, optimizer = made()
    for value in (torch.tensor(1e-2), numpy.float32(1e-2), numpy.float64(1e-2), 0, 1):
        model(**small.batch()).loss.backward()
        optimizer.param_groups[0]["lr"] = value
        optimizer.step()
        optimizer.zero_grad()
