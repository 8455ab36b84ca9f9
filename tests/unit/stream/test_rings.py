"""Gradient slots are sized by what trains, as the plan counts them. Blocks unfrozen later get their own."""

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
    """Bytes of the slots of all rings on the device."""
    return sum(slot.bytes.numel() for rings in engine._step.drain.rings.values() for slot in rings.all)


def llama(frozen: str) -> Any:
    """The embedding's slab is at most twice as large as a layer's, so they would share a ring."""
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
def test_rings_have_the_planned_size(frozen: str, slots: int) -> None:
    model = llama(frozen)
    planned = Ledger(shapes.describe(model), Run(precision="fp32"))._ring_sizes(STREAMED, 0, 0, slots)[0]
    engine = engine_of(model, grad_slots=slots)
    train(model, engine, engine.optimizer(lr=1e-2))
    assert slot_bytes(engine) == planned


@pytest.mark.parametrize("frozen", ["embed", "layers.1", "mlp"])
def test_blocks_unfrozen_later_train_bitwise(frozen: str) -> None:
    runs = []
    for unfrozen_at_attach in (True, False):
        model = llama("nothing" if unfrozen_at_attach else frozen)
        engine = engine_of(model)
        model.requires_grad_(True)
        train(model, engine, engine.optimizer(lr=1e-2))
        runs.append(small.snapshot(model))
    assert not differences(*runs)
    assert not torch.equal(runs[0]["model.embed_tokens.weight"], llama("nothing").model.embed_tokens.weight)
