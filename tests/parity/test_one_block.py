"""Models without repeated layers are one block: all that plain PyTorch allows works, with bitwise its own gradients."""

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
    """Two scalars on the root, and arithmetic in the forward."""

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
    """What it returns is unknown to every library."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = x * self.a + self.b
        return SimpleNamespace(loss=None if labels is None else F.mse_loss(y, labels), logits=y)


class Mixture(nn.Module):
    """Weights on the root and in modules, an LSTM, statistics, dropout, a count, a second method, a side door."""

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


def play(model: nn.Module, scenario: Any) -> None:
    """The same on a plain copy and in an engine: results and gradients are equal in every bit."""
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
def test_whatever_the_forward_returns(kind: type[Line]):
    def scenario(model: nn.Module) -> list[Tensor]:
        losses = []
        for _ in range(3):  # accumulated
            loss = loss_of(model(torch.randn(8), labels=torch.randn(8)))
            loss.backward()
            losses.append(loss.detach())
        return losses

    play(kind(), scenario)


@pytest.fixture
def mixture() -> Mixture:
    torch.manual_seed(0)
    return Mixture()


def ids() -> Tensor:
    return torch.randint(0, 7, (2, 5))


def test_what_a_forward_does_beside_is_done_once(mixture: Mixture):
    def scenario(model: Mixture) -> list[Tensor]:
        loss = model(ids()).loss + model.hidden.square().mean()  # kept as an attribute, and used
        loss.backward()
        return [loss.detach(), model.embed.weight.detach() + 0, torch.tensor(model.calls)]

    play(mixture, scenario)
    assert mixture.calls == 1


def test_a_second_method_and_a_part_alone(mixture: Mixture):
    def scenario(model: Mixture) -> list[Tensor]:
        loss = model.encode(ids()).square().sum() + model.head(torch.randn(3, WIDTH)).sum()
        loss.backward()
        return [loss.detach()]

    play(mixture, scenario)


def test_gradient_penalty():
    def scenario(model: nn.Module) -> list[Tensor]:
        x = torch.randn(3, WIDTH, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [slope.detach()]

    play(nn.Linear(WIDTH, WIDTH), scenario)


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

    play(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), scenario)


def test_hooks_see_what_they_would(mixture: Mixture):
    def scenario(model: Mixture) -> list[Tensor]:
        seen: list[Tensor] = []
        model.head.register_forward_hook(lambda *args: seen.append(args[2].detach()))
        model.register_forward_hook(lambda *args: seen.append(args[2].loss.detach()))
        model.head.register_full_backward_hook(lambda *args: seen.append(args[2][0]))
        model.scale.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
        model(ids()).loss.backward()
        assert len(seen) == 4
        return seen

    play(mixture, scenario)


def test_other_threads_may_run_it_meanwhile():
    model = Line()
    x = torch.randn(64)
    expected = model(x)[0].detach()
    found: list[Tensor] = []
    with adopted(model):
        threads = [threading.Thread(target=lambda: found.append(model(x)[0].detach())) for _ in range(4)]
        for thread in threads:
            thread.start()
        model(x)[0].sum().backward()
        for thread in threads:
            thread.join()
    assert len(found) == 4
    assert all(torch.equal(result, expected) for result in found)


def test_training_saving_and_going_on(mixture: Mixture, tmp_path: Path):
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
        kept = {name: tensor + 0 for name, tensor in mixture.state_dict().items()}
        released = engine.release()
    assert all(torch.equal(released.state_dict()[name], kept[name]) for name in kept)
    assert not any("flatten_parameters" in vars(module) for module in released.modules())
    with adopted(again) as engine:
        optimizer = engine_adamw(engine)
        engine.load(tmp_path, optimizer)
        train(again, optimizer, batches[:1])
        resumed = weights_of(again)
    assert all(torch.equal(resumed[name], uninterrupted[name]) for name in resumed)


def test_bf16_keeps_an_exact_master():
    """Steps far below BF16's spacing add up, as they do in FP32."""
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


def test_frozen():
    model = Line().requires_grad_(False)
    x = torch.randn(3)
    expected = model(x)[0]
    with adopted(model) as engine:
        assert torch.equal(model(x)[0], expected)
        with pytest.raises(mt.errors.SettingsError, match="nothing to optimize"):
            engine.optimizer()


def test_it_is_announced(caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", logger="megatrain"), adopted(Line()):
        pass
    said = [record.getMessage() for record in caplog.records if "one block" in record.getMessage()]
    assert len(said) == 1
    assert "Line has no repeated layers" in said[0]


def test_no_parameters():
    model = nn.ReLU()
    with pytest.raises(mt.errors.NothingToStream, match="ReLU has no parameters"):
        mt.Engine(model, device="cpu")
    assert torch.equal(model(torch.ones(2)), torch.ones(2))


def test_residents_are_checked_by_name():
    with pytest.raises(mt.errors.SettingsError, match="blocks are Linear"):
        mt.Engine(nn.Linear(2, 2), device="cpu", resident=["layers.*"])


def test_what_lies_on_the_root_is_placed_by_its_class():
    with adopted(Line(), resident=["Line"]) as engine:
        assert all(slab.on_device for slab in engine.slabs)
