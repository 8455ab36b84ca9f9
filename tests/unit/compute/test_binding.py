"""Weights bound for a call are visible inside that call only and are unbound when it ends."""

import copy
import pickle
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from tests.tiny import Layer, Stack, engine_of, inputs
from torch import Tensor, nn

from megatrain.compute.binding import Bound, call_bound
from megatrain.errors import MegaTrainError, ModelMoved
from megatrain.store.parameter import StoreTensor


@pytest.fixture
def content() -> Bound:
    return Bound({"weight": nn.Parameter(torch.zeros(2)), "bias": None})


def bind(content: Bound, weight: Tensor, function: Any) -> Any:
    return call_bound({id(content): {"weight": weight}}, function)


def test_lookups_inside_the_call_return_bound_weights(content: Bound) -> None:
    own, weight = content["weight"], torch.ones(2)

    def check() -> None:
        assert content["weight"] is weight
        assert content.get("weight") is weight
        assert dict(content.items())["weight"] is weight
        assert weight in [value for value in content.values() if value is not None]
        assert content["bias"] is None
        assert list(content) == ["weight", "bias"]
        assert len(content) == 2

    bind(content, weight, check)
    assert content["weight"] is own
    assert dict(content)["weight"] is own


def test_another_thread_sees_the_modules_own_weights(content: Bound) -> None:
    seen = []

    def check() -> None:
        thread = threading.Thread(target=lambda: seen.append(content["weight"]))
        thread.start()
        thread.join()

    bind(content, torch.ones(2), check)
    assert seen == [content.own["weight"]]


def test_nested_calls(content: Bound) -> None:
    other = Bound({"weight": None})
    outer, inner = torch.ones(2), torch.ones(3)

    def check() -> tuple[Any, Any]:
        return content["weight"], other["weight"]

    def call() -> Any:
        return bind(other, inner, check)

    assert bind(content, outer, call) == (outer, inner)
    assert bind(content, outer, check) == (outer, None)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_unbinds_the_weights(content: Bound, error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(error):
        bind(content, torch.ones(2), fail)
    assert content["weight"] is content.own["weight"]


def test_assignments_to_bound_names_end_with_the_call(content: Bound) -> None:
    def assign() -> None:
        content["weight"] = torch.full((2,), 5.0)
        content["bias"] = torch.full((2,), 7.0)
        assert content["weight"][0] == 5

    bind(content, torch.ones(2), assign)
    assert content["weight"][0] == 0, "an assignment to a bound name must end with the call"
    assert content["bias"][0] == 7, "an assignment to a name that is not bound must stay"


def test_bound_behaves_like_a_dict(content: Bound) -> None:
    plain = dict(content)
    assert isinstance(content, dict)
    assert content.copy() == plain
    assert content.own == plain
    content["new"] = 1
    content.update(other=2)
    assert content.setdefault("third", 3) == 3
    assert content.pop("new") == 1
    assert content.pop("new", None) is None
    del content["other"]
    assert content.popitem() == ("third", 3)
    assert dict(content) == plain == dict(zip(dict.keys(content), dict.values(content), strict=True))
    assert type(pickle.loads(pickle.dumps(content))) is dict
    assert type(copy.deepcopy(content)) is dict
    content.clear()
    assert not content
    assert len(content) == 0


def test_context_variables_set_by_a_layer_are_kept(content: Bound) -> None:
    variable: ContextVar[int] = ContextVar("variable", default=0)
    bind(content, torch.ones(2), lambda: variable.set(3))
    assert variable.get() == 3


# ---- inside a model


class ReadsParameters(Layer):
    """Reads its parameters in each way that modules do."""

    def forward(self, x: Tensor) -> Tensor:
        named = dict(self.named_parameters())
        assert named["scale"] is self.scale is self._parameters["scale"] is next(self.parameters())
        assert not isinstance(self.scale, StoreTensor)
        assert "scale" in self.state_dict()
        return x + torch.tanh(x * named["scale"] + self._parameters["shift"])


@pytest.fixture
def model() -> Iterator[Any]:
    stack = Stack(layer=ReadsParameters)
    with engine_of(stack):
        yield stack


def test_every_way_to_read_parameters(model: Any) -> None:
    plain = Stack(layer=ReadsParameters.__base__)  # type: ignore[arg-type]
    for each in (model, plain):
        each(inputs(0)).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(ours, StoreTensor)
        torch.testing.assert_close(ours.grad.clone(), theirs.grad)


def test_a_replaced_module_is_refused_when_it_runs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Layer()
            self.activation = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.activation(self.inner(x))

    model = Stack(layer=Two)
    with engine_of(model):
        model.layers[1].activation = nn.ReLU()
        model(inputs(0)).sum().backward()
        model.layers[1].inner = Layer()
        with pytest.raises(ModelMoved, match=r"'inner' of layers\.1 was replaced"):
            model(inputs(0))


def test_a_replaced_parameter_is_detected(model: Any, tmp_path: Any) -> None:
    model.layers[1].scale = nn.Parameter(torch.zeros(8))
    engine = model._megatrain_engine
    with pytest.raises(ModelMoved, match=r"layers\.1\.scale was replaced"):
        engine.host_state_dict()


def test_release_restores_plain_modules() -> None:
    model = Stack()
    engine = engine_of(model)
    model(inputs(0)).sum().backward()
    engine.release()
    engine._adoption.release()
    assert all(type(m._parameters) is dict and type(m._buffers) is dict for m in model.modules())
    copied = copy.deepcopy(model)
    assert torch.equal(copied(inputs(0)), model(inputs(0)))


def test_a_layer_of_an_attached_model_cannot_be_deep_copied(model: Any) -> None:
    with pytest.raises(MegaTrainError, match="cannot be deep-copied"):
        copy.deepcopy(model.layers[0])


class Averaging(Layer):
    """Assigns a buffer in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.mean.clone())
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        return super().forward(x) * (1 + self.mean)


def test_a_recompute_sees_the_buffers_of_its_forward() -> None:
    model, plain = Stack(layer=Averaging), Stack(layer=Averaging)
    with engine_of(model):
        for seed in range(3):
            for each in (model, plain):
                each(inputs(seed)).square().mean().backward()
        for layer, other in zip(model.layers, plain.layers, strict=True):
            assert torch.equal(layer.mean, other.mean)
            first, again = layer.seen[0::2], layer.seen[1::2]
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.clone(), theirs.grad)
