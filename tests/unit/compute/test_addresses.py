"""Slots can be parts of one storage. Each saved weight is bound to the slot it belongs to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tiny import Stack, differences, engine_of, inputs, roles
from torch import Tensor

from megatrain.compute import rebind
from megatrain.compute.rebind import Addresses, Rebinder
from megatrain.stream import rings


def test_slots_of_one_storage_are_distinguished() -> None:
    storage = torch.zeros(12)
    addresses = Addresses({"left": storage[:6], "right": storage[6:]})
    assert addresses.find(storage[5:6]) == "left"
    assert addresses.find(storage[6:].view(2, 3).T) == "right"
    assert addresses.find(torch.zeros(3)) is None


def test_a_saved_weight_is_bound_to_its_new_slot() -> None:
    """The forward and the backward use different slots of the same storage."""
    storage = torch.arange(40.0)
    first_views, second_views = {0: storage[:8], 1: storage[8:16]}, {0: storage[24:32], 1: storage[32:40]}
    rebinder = Rebinder(first_views, "a block")
    leaves = {slab: view.view(2, 4).T.detach().requires_grad_() for slab, view in first_views.items()}
    x = torch.ones(3, 4, requires_grad=True)
    result = rebinder.run(lambda: (x @ leaves[0]) * (x @ leaves[1]))
    storage[24:40] = storage[:16].clone()
    storage[:24] = torch.nan
    rebinder.views = second_views
    (actual,) = torch.autograd.grad(result.sum(), [x])
    weights = [storage[24 + 8 * i : 32 + 8 * i].view(2, 4).T for i in range(2)]
    plain = torch.ones(3, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(((plain @ weights[0]) * (plain @ weights[1])).sum(), [plain])
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("policy", ["recompute", "store"])
def test_all_slots_of_an_engine_in_one_storage(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> list[Any]:
        model = Stack()
        engine = engine_of(model, policy=policy, held_weights=("layers.1",), precision="bf16")
        optimizer = engine.optimizer(lr=0.1)
        losses = []
        for seed in range(3):
            loss = model(inputs(seed)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [losses, roles(engine)]

    expected = train()
    storage, allocated = torch.zeros(1 << 20, dtype=torch.uint8), [0]

    def carve(nbytes: int, device: torch.device, *, zeroed: bool = False) -> Tensor:
        allocated[0] += nbytes
        return storage[allocated[0] - nbytes : allocated[0]]

    monkeypatch.setattr(rings, "allocate_persistent", carve)
    assert differences(train(), expected) == []
    assert allocated[0] > 0


@pytest.mark.parametrize("settings", [{"resident": ("*",)}, {"held_weights": ("*",)}], ids=["resident", "held"])
def test_weights_that_stay_on_the_device_are_saved_as_they_are(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(placement: dict[str, Any], release_held: bool = False) -> list[Any]:
        model = Stack()
        engine = engine_of(model, policy="store", precision="bf16", **placement)
        optimizer = engine.optimizer(lr=0.1)
        for seed in range(3):
            loss = model(inputs(seed)).square().mean()
            if release_held and seed == 2:
                engine._step.fetcher.stop_holding()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [roles(engine)]

    streamed = train({})
    monkeypatch.setattr(rebind, "Rebinder", None)
    assert differences(train(settings), streamed) == []
    # A stored graph outlives the slots that its weights were held in.
    assert differences(train(settings, release_held=True), streamed) == []
    with pytest.raises(TypeError):
        train({})
