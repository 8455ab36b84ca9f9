"""Gradient slots: sized by what trains, as the plan counts them; what is unfrozen later gets its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import small
from tests.tiny import differences, engine_of

from megatrain.model import shapes
from megatrain.planner.decision import STREAMED
from megatrain.planner.memory import Ledger
from megatrain.planner.run import Run


def slot_bytes(engine: Any) -> int:
    """What the slots of all rings hold on the device."""
    return sum(slot.bytes.numel() for rings in engine._step.drain.rings.values() for slot in rings.all)


def llama(frozen: str) -> Any:
    """The embedding's slab is within a factor of two of a layer's, so that both would share a ring."""
    model = small.llama(vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    return model


def train(model: Any, engine: Any, optimizer: Any) -> None:
    for seed in range(3):
        model(**small.batch(seed=seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("frozen", ["nothing", "embed", "layers", "layers.1", "mlp", "head"])
@pytest.mark.parametrize("slots", [1, 2])
def test_rings_are_what_the_plan_counts(frozen: str, slots: int) -> None:
    model = llama(frozen)
    planned = Ledger(shapes.describe(model), Run(precision="fp32"))._ring_sizes(STREAMED, 0, 0, slots)[0]
    engine = engine_of(model, grad_slots=slots)
    train(model, engine, engine.optimizer(lr=1e-2))
    assert slot_bytes(engine) == planned


@pytest.mark.parametrize("frozen", ["embed", "layers.1", "mlp"])
def test_what_is_unfrozen_later_trains_as_before(frozen: str) -> None:
    runs = []
    for unfrozen_at_attach in (True, False):
        model = llama("nothing" if unfrozen_at_attach else frozen)
        engine = engine_of(model)
        model.requires_grad_(True)
        train(model, engine, engine.optimizer(lr=1e-2))
        runs.append(small.snapshot(model))
    assert not differences(*runs)
    assert not torch.equal(runs[0]["model.embed_tokens.weight"], llama("nothing").model.embed_tokens.weight)
