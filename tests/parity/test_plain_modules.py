"""Modules that are not from transformers. The engine finds only a ModuleList of repeated layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import compare, zoo
from .compare import adopted, assert_runs_match, backward_in_both, engine_adamw, train, train_both, weights_of

WIDTH = 16


class Layer(nn.Module):
    """`extra` is used only if requested, and lies between two parameters that are always used."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.extra = nn.Parameter(torch.randn(WIDTH))
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, with_extra: bool) -> Tensor:
        if with_extra:
            hidden = hidden * self.extra
        return hidden + self.down(F.silu(self.up(hidden)))


class Stack(nn.Module):
    """Repeated layers in a ModuleList and a parameter on the root module."""

    def __init__(self, layer: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.embed = nn.Embedding(zoo.VOCAB, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, zoo.VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor, with_extra: bool = True) -> SimpleNamespace:
        hidden = self.through_layers(self.embed(input_ids) * self.scale, with_extra)
        logits = self.head(hidden)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)

    def through_layers(self, hidden: Tensor, with_extra: bool) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, with_extra)
        return hidden


class Twice(Stack):
    """Every layer runs twice per forward with the same weights."""

    def through_layers(self, hidden: Tensor, with_extra: bool) -> Tensor:
        return super().through_layers(super().through_layers(hidden, with_extra), with_extra)


class InPlace(Stack):
    """The caller changes a layer's output in place."""

    def through_layers(self, hidden: Tensor, with_extra: bool) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, with_extra)
            hidden += 0.5
            hidden.mul_(1.1)
        return hidden


class LayerWithDict(Layer):
    def forward(self, hidden: Tensor, with_extra: bool) -> dict[str, Any]:
        return {"hidden": super().forward(hidden, with_extra), "penalty": self.extra.square().sum(), "note": "text"}


class Dicts(Stack):
    """Layers return a dict with a scalar that is used in the loss."""

    def __init__(self) -> None:
        super().__init__(LayerWithDict)

    def through_layers(self, hidden: Tensor, with_extra: bool) -> Tensor:
        for layer in self.layers:
            output = layer(hidden, with_extra)
            assert output["note"] == "text"
            hidden = output["hidden"] * output["penalty"].rsqrt()
        return hidden


class LayerThatPasses(nn.Module):
    """Returns its input twice and does not use its only weight."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.randn(WIDTH))

    def forward(self, hidden: Tensor, with_extra: bool) -> tuple[Tensor, Tensor]:
        return hidden, hidden


class PassedOn(Stack):
    def __init__(self) -> None:
        super().__init__(LayerThatPasses)

    def through_layers(self, hidden: Tensor, with_extra: bool) -> Tensor:
        for layer in self.layers:
            first, second = layer(hidden, with_extra)
            hidden = first + 0.5 * second
        return hidden


class LayerWithStatistics(Layer):
    """Its buffers change once per forward and not in the recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: Tensor, with_extra: bool) -> Tensor:
        return self.norm(super().forward(hidden, with_extra).transpose(1, 2)).transpose(1, 2)


class Statistics(Stack):
    def __init__(self) -> None:
        super().__init__(LayerWithStatistics)


@pytest.mark.parametrize("kind", [Stack, Twice, InPlace, Dicts, PassedOn, Statistics])
def test_gradients(kind: type[Stack]):
    def scenario(model: nn.Module) -> list[Tensor]:
        loss = model(**zoo.batch("llama", 0)).loss
        loss.backward()
        return [loss.detach(), *(buffer + 0 for buffer in model.buffers())]

    torch.manual_seed(0)
    backward_in_both(None, kind(), scenario)


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack()


def test_training():
    model = stack()
    reference, ours = train_both(model, zoo.windows("llama", compare.STEPS))
    assert len(ours.gradients[0]) == len(ours.weights)
    assert_runs_match(None, reference, ours)


@pytest.mark.parametrize("used", [(1, 0, 0, 1, 1), (0, 0, 1, 0, 1), (0, 0, 0, 0, 0)], ids=str)
def test_parameter_without_gradient(used: tuple[int, ...]):
    """A step without a gradient changes neither weight, moments nor step count, as in torch.

    No decay is applied, bias correction counts only steps with a gradient, and neighbours in the block stay correct."""
    windows = [[{**zoo.batch("llama", step), "with_extra": bool(with_extra)}] for step, with_extra in enumerate(used)]
    model = stack()
    before = weights_of(model)
    reference, ours = train_both(model, windows, weight_decay=0.5)
    for step, with_extra in enumerate(used):
        assert ("layers.1.extra" in ours.gradients[step]) == bool(with_extra)
    assert_runs_match(None, reference, ours)
    if not any(used):
        assert torch.equal(ours.weights["layers.1.extra"], before["layers.1.extra"])


def test_a_weight_without_a_gradient_is_not_changed():
    model = stack()
    with adopted(model) as engine:
        optimizer = engine_adamw(engine, weight_decay=0.5)
        train(model, optimizer, zoo.windows("llama", 2))
        before = weights_of(model)
        train(model, optimizer, [[{**zoo.batch("llama", 2), "with_extra": False}]])
        after = weights_of(model)
    for key in before:
        assert torch.equal(before[key], after[key]) == key.endswith("extra"), key
