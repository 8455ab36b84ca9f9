"""A model without repeated layers is one block. It works as in plain PyTorch, with bitwise equal gradients."""

from __future__ import annotations

import threading
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

import megatrain as mt

from .compare import adopted, assert_weights_match, engine_adamw, gradients_of, torch_adamw, train, weights_of

WIDTH = 4


class Line(nn.Module):
    """Two scalar parameters on the root module, used directly in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.5))
        self.b = nn.Parameter(torch.tensor(-0.25))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = x * self.a + self.b
        return (y,) if labels is None else (F.mse_loss(y, labels), y)


class AsDict(Line):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = x * self.a + self.b
        return {"output": y} if labels is None else {"loss": F.mse_loss(y, labels), "output": y}


class AsModelOutput(Line):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = x * self.a + self.b
        return SequenceClassifierOutput(loss=None if labels is None else F.mse_loss(y, labels), logits=y)


class AsObject(Line):
    """Returns an object of a type that no library knows."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = x * self.a + self.b
        return SimpleNamespace(loss=None if labels is None else F.mse_loss(y, labels), logits=y)


class Mixture(nn.Module):
    """Root parameters, an LSTM, batch norm, dropout, a counter, a second method and an output kept as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH, max_norm=1.0)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.calls = 0

    def encode(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(ids))
        return self.norm(F.dropout(hidden, 0.2, self.training).transpose(1, 2)).transpose(1, 2) * self.scale

    def forward(self, ids: Tensor) -> SimpleNamespace:
        self.calls += 1
        self.seen += 1
        self.hidden = self.encode(ids)
        logits = self.head(self.hidden)
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits=logits)


def loss_of(output: Any) -> Tensor:
    if isinstance(output, tuple):
        return output[0]
    return output["loss"] if isinstance(output, dict) else output.loss


def assert_same(model: nn.Module, scenario: Any) -> None:
    """Run a scenario on a plain copy and with an engine, and check that results and gradients are bitwise equal."""
    plain = deepcopy(model)
    torch.manual_seed(7)
    expected = scenario(plain)
    torch.manual_seed(7)
    with adopted(model):
        actual = scenario(model)
        theirs, ours = gradients_of(plain), gradients_of(model)
        assert theirs.keys() == ours.keys()
        assert theirs
        assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
        assert all(torch.equal(a + 0, b + 0) for a, b in zip(model.buffers(), plain.buffers(), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("kind", [Line, AsDict, AsModelOutput, AsObject])
def test_any_type_of_output(kind: type[Line]):
    def scenario(model: nn.Module) -> list[Tensor]:
        losses = []
        for _ in range(3):  # accumulated
            loss = loss_of(model(torch.randn(8), labels=torch.randn(8)))
            loss.backward()
            losses.append(loss.detach())
        return losses

    assert_same(kind(), scenario)


@pytest.fixture
def mixture() -> Mixture:
    torch.manual_seed(0)
    return Mixture()


def ids() -> Tensor:
    return torch.randint(0, 7, (2, 5))


def test_side_effects_of_a_forward_happen_once(mixture: Mixture):
    def scenario(model: Mixture) -> list[Tensor]:
        loss = model(ids()).loss + model.hidden.square().mean()  # `hidden` is an attribute set by the forward
        loss.backward()
        return [loss.detach(), model.embed.weight.detach() + 0, torch.tensor(model.calls)]

    assert_same(mixture, scenario)
    assert mixture.calls == 1


def test_other_methods_and_submodules_can_be_called(mixture: Mixture):
    def scenario(model: Mixture) -> list[Tensor]:
        loss = model.encode(ids()).square().sum() + model.head(torch.randn(3, WIDTH)).sum()
        loss.backward()
        return [loss.detach()]

    assert_same(mixture, scenario)


def test_gradient_penalty():
    def scenario(model: nn.Module) -> list[Tensor]:
        x = torch.randn(3, WIDTH, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [slope.detach()]

    assert_same(nn.Linear(WIDTH, WIDTH), scenario)


def test_sparse_gradients():
    model = nn.Embedding(5, WIDTH, sparse=True)
    plain = deepcopy(model)
    rows = torch.tensor([1, 1, 3])
    with adopted(model):
        for _ in range(2):
            model(rows).square().sum().backward()
            plain(rows).square().sum().backward()
        assert torch.equal(model.weight.grad + 0, plain.weight.grad.to_dense())


def test_a_lazy_module_is_refused_by_name():
    with pytest.raises(mt.errors.UnsupportedModel, match=r"0\.weight has no shape yet"):
        mt.Engine(nn.Sequential(nn.LazyLinear(2)), device="cpu")


def test_two_backwards_through_one_graph():
    def scenario(model: nn.Module) -> list[Tensor]:
        loss = model(torch.randn(3, WIDTH)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [loss.detach()]

    assert_same(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), scenario)


def test_hooks_get_the_same_values(mixture: Mixture):
    def scenario(model: Mixture) -> list[Tensor]:
        seen: list[Tensor] = []
        model.head.register_forward_hook(lambda *args: seen.append(args[2].detach()))
        model.register_forward_hook(lambda *args: seen.append(args[2].loss.detach()))
        model.head.register_full_backward_hook(lambda *args: seen.append(args[2][0]))
        model.scale.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
        model(ids()).loss.backward()
        assert len(seen) == 4
        return seen

    assert_same(mixture, scenario)


def test_other_threads_can_run_the_model():
    model = Line()
    x = torch.randn(64)
    expected = model(x)[0].detach()
    outputs: list[Tensor] = []
    with adopted(model):
        threads = [threading.Thread(target=lambda: outputs.append(model(x)[0].detach())) for _ in range(4)]
        for thread in threads:
            thread.start()
        model(x)[0].sum().backward()
        for thread in threads:
            thread.join()
    assert len(outputs) == 4
    assert all(torch.equal(result, expected) for result in outputs)


def test_training_saving_and_resuming(mixture: Mixture, tmp_path: Path):
    batches = [[{"ids": ids()}, {"ids": ids()}] for _ in range(5)]
    plain, again = deepcopy(mixture), deepcopy(mixture)
    reference = train(plain, torch_adamw(plain), batches)
    with adopted(mixture) as engine:
        optimizer = engine_adamw(engine)
        ours = train(mixture, optimizer, batches)
        assert_weights_match(None, reference, ours)
        engine.save(tmp_path, optimizer)
        train(mixture, optimizer, batches[:1])
        uninterrupted = weights_of(mixture)
        state = {name: tensor + 0 for name, tensor in mixture.state_dict().items()}
        released = engine.release()
    assert all(torch.equal(released.state_dict()[name], state[name]) for name in state)
    assert not any("flatten_parameters" in vars(module) for module in released.modules())
    with adopted(again) as engine:
        optimizer = engine_adamw(engine)
        engine.load(tmp_path, optimizer)
        train(again, optimizer, batches[:1])
        resumed = weights_of(again)
    assert all(torch.equal(resumed[name], uninterrupted[name]) for name in resumed)


def test_bf16_keeps_an_exact_master():
    """Updates far below the spacing of BF16 add up as in FP32."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    with adopted(model, precision="bf16") as engine:
        optimizer = engine.optimizer(kind="sgd", lr=2.0**-12)
        for _ in range(8):
            model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.release()
    assert torch.equal(model.weight.detach(), torch.full((WIDTH, WIDTH), 1 - 8 * 2.0**-12))


def test_a_frozen_model():
    model = Line().requires_grad_(False)
    x = torch.randn(3)
    expected = model(x)[0]
    with adopted(model) as engine:
        assert torch.equal(model(x)[0], expected)
        with pytest.raises(mt.errors.SettingsError, match="nothing to optimize"):
            engine.optimizer()


def test_one_block_is_announced(caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", logger="megatrain"), adopted(Line()):
        pass
    notices = [record.getMessage() for record in caplog.records if "one block" in record.getMessage()]
    assert len(notices) == 1
    assert "Line has no repeated layers" in notices[0]


def test_no_parameters():
    model = nn.ReLU()
    with pytest.raises(mt.errors.NothingToStream, match="ReLU has no parameters"):
        mt.Engine(model, device="cpu")
    assert torch.equal(model(torch.ones(2)), torch.ones(2))


def test_residents_are_checked_by_name():
    with pytest.raises(mt.errors.SettingsError, match="matches no block; the nearest names are Linear"):
        mt.Engine(nn.Linear(2, 2), device="cpu", resident=["layers.*"])


def test_root_parameters_are_placed_by_the_name_of_the_class():
    with adopted(Line(), resident=["Line"]) as engine:
        assert all(slab.on_device for slab in engine.slabs)
