"""Gradients that reach a block's graph otherwise than through its outputs are refused, never lost."""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.tiny import WIDTH, Stack, engine_of, inputs
from torch import Tensor, nn

from megatrain.compute import node
from megatrain.errors import ModelMoved, UnsupportedCall


class Probed(nn.Module):
    """Keeps a tensor as an attribute, for an auxiliary loss. A linear probe saves weights for its backward; with `bare`
    nothing of the hidden part does."""

    bare = False

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.probe = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.aux = self.probe.bias.sum() if self.bare else self.probe(x).square().mean()
        return x + torch.tanh(self.lin(x))


class Bare(Probed):
    bare = True


PLACEMENTS: list[dict[str, Any]] = [{}, {"resident": ("*",)}, {"held_weights": ("*",), "held_gradients": ("*",)}]


@pytest.mark.parametrize("main", [True, False], ids=["beside the outputs", "alone"])
@pytest.mark.parametrize("layer", [Probed, Bare])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=["streamed", "resident", "held"])
@pytest.mark.parametrize("policy", ["recompute", "store"])
def test_a_tensor_kept_as_an_attribute_is_refused(
    policy: str, placement: dict[str, Any], layer: type[Probed], main: bool
) -> None:
    model = Stack(layer=layer)
    with engine_of(model, policy=policy, **placement) as engine:
        out = model(inputs(0)).square().mean()
        hidden = sum(layer.aux for layer in model.layers)
        with pytest.raises(UnsupportedCall, match=r"without being returned by its forward"):
            (out + hidden if main else hidden).backward()
        engine.optimizer(lr=0.1).zero_grad()


class Conditioned(nn.Module):
    """Reads a tensor that the model has set as an attribute."""

    condition: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.lin(x) * self.condition)


class Conditioning(Stack):
    """Sets it to the output of another block, or to a parameter of its own."""

    def __init__(self, own: bool) -> None:
        super().__init__(layer=Conditioned)
        self.own = own

    def forward(self, x: Tensor, skip: Sequence[int] = ()) -> Tensor:
        condition = self.gain if self.own else self.entry(x)
        for layer in self.layers:
            object.__setattr__(layer, "condition", condition)
        return super().forward(x, skip)


@pytest.mark.parametrize("policy", ["recompute", "store"])
@pytest.mark.parametrize("own", [True, False], ids=["parameter", "output"])
def test_a_tensor_that_is_not_an_argument_is_refused(own: bool, policy: str) -> None:
    model = Conditioning(own)
    with engine_of(model, policy=policy):
        with pytest.raises(UnsupportedCall, match=r"layers\.0 used a tensor that requires grad and was not passed"):
            model(inputs(0))
        for parameter in (model.gain, *model.entry.parameters()):
            parameter.requires_grad_(False)
        model(inputs(0)).square().mean().backward()
        assert all(parameter.grad is not None for parameter in model.layers.parameters())


class Makes(nn.Module):
    """Makes a leaf of its own, as MRA does without its CUDA kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + torch.zeros_like(x).requires_grad_()


def test_a_leaf_that_the_forward_makes_is_not_refused() -> None:
    model = Stack(layer=Makes)
    with engine_of(model):
        model(inputs(0)).square().mean().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_refusing_keeps_no_graph_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that referred to its call would form a cycle that the garbage collector may not see."""
    graphs: list[weakref.ref[Any]] = []

    class Seen(node._Graph):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            graphs.append(weakref.ref(self))

    monkeypatch.setattr(node, "_Graph", Seen)
    model = Stack()
    with engine_of(model, policy="store", resident=("*",)):
        gc.disable()
        try:
            model(inputs(0))
            assert len(graphs) > 1
            assert [graph() for graph in graphs] == [None] * len(graphs)
        finally:
            gc.enable()


@pytest.mark.parametrize("placement", PLACEMENTS[:2], ids=["streamed", "resident"])
@pytest.mark.parametrize("policy", ["recompute", "store"])
def test_a_backward_after_a_release_is_refused(policy: str, placement: dict[str, Any]) -> None:
    """Its gradients would go to a store that no parameter refers to any more."""
    model = Stack()
    engine = engine_of(model, policy=policy, **placement)
    loss = model(inputs(0)).square().mean()
    engine.release()
    with pytest.raises(ModelMoved):
        loss.backward()
