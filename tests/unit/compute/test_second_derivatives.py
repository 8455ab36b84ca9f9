"""Gradients of streamed blocks have no graph, so `create_graph=True` is refused."""

import copy
from typing import Any

import pytest
import torch
from tests.small import batch, llama
from tests.tiny import Stack, engine_of, inputs

import megatrain as mt
from megatrain.errors import UnsupportedCall

POLICIES = ["recompute", "store", "offload"]
REFUSED = "create_graph=True was passed to a backward through"


def penalty(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


def wide(seed: int) -> torch.Tensor:
    """Inputs large enough to be offloaded under policy `offload`."""
    return inputs(seed, rows=64)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ask", ["grad", "backward", "parameters", "hessian"])
def test_create_graph_is_refused_and_training_goes_on(policy: str, ask: str) -> None:
    plain = Stack()
    model = copy.deepcopy(plain)
    with engine_of(model, policy=policy) as engine:
        optimizer = engine.optimizer(lr=0.1)
        reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
        for seed in range(3):
            x = wide(seed).requires_grad_()
            loss = model(x).square().mean()
            with pytest.raises((UnsupportedCall, RuntimeError), match=f"{REFUSED}|to not have been used in the graph"):  # noqa: PT012
                if ask == "grad":
                    penalty(loss, x)
                elif ask == "backward":
                    loss.backward(create_graph=True)
                elif ask == "hessian":
                    torch.autograd.functional.hessian(lambda v: model(v).square().mean(), wide(seed))
                else:
                    torch.autograd.grad(loss, list(model.layers.parameters()), create_graph=True)
            optimizer.zero_grad()
            # The refused call must not free the graph.
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            plain(wide(seed)).square().mean().backward()
            reference.step()
            reference.zero_grad()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.detach().clone(), theirs.detach())


def test_a_run_after_a_refusal_is_bitwise_equal() -> None:
    def run(refused: bool) -> list[torch.Tensor]:
        model = Stack()
        with engine_of(model) as engine:
            optimizer = engine.optimizer(lr=0.1)
            for seed in range(3):
                if refused:
                    x = inputs(seed).requires_grad_()
                    with pytest.raises(UnsupportedCall, match=REFUSED):
                        penalty(model(x).square().mean(), x)
                    optimizer.zero_grad()
                model(inputs(seed)).square().mean().backward()
                with optimizer.final_backward():
                    model(inputs(seed + 9)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


@pytest.mark.parametrize("head_chunk", [None, 0])
@pytest.mark.parametrize("frozen", [False, True])
def test_embeddings_of_a_language_model(head_chunk: int | None, frozen: bool) -> None:
    model = llama().requires_grad_(not frozen)
    ids = batch()["input_ids"]
    with mt.Engine(model, device="cpu", head_chunk=head_chunk):
        x = model.get_input_embeddings()(ids).detach().requires_grad_()
        loss = model(inputs_embeds=x, labels=ids).loss
        with pytest.raises(UnsupportedCall, match=REFUSED):
            penalty(loss, x)
        (slope,) = torch.autograd.grad(loss, x)
        assert slope.abs().sum() > 0


def test_create_graph_is_refused_in_a_window() -> None:
    model = Stack()
    with engine_of(model) as engine:

        def task() -> None:
            x = inputs(0).requires_grad_()
            penalty(model(x).square().mean(), x).backward()

        with pytest.raises(UnsupportedCall, match=REFUSED):
            engine.window([task, task])
        engine.window([lambda: model(inputs(0)).square().mean().backward()] * 2)


def test_a_parameter_used_outside_blocks() -> None:
    """`backward` is refused because the store keeps no graph. `autograd.grad` of the parameter works as in PyTorch."""
    model = Stack()
    with engine_of(model):
        loss: Any = model.gain.pow(3).sum()
        with pytest.raises(UnsupportedCall, match=f"{REFUSED} gain"):
            loss.backward(create_graph=True)
        assert model.gain.grad is None
        (slope,) = torch.autograd.grad(model.gain.pow(3).sum(), model.gain, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), model.gain)
        torch.testing.assert_close(curvature, 6 * model.gain.detach().clone())


def test_create_graph_works_without_a_block_in_the_graph() -> None:
    model = Stack()
    with engine_of(model):
        x = inputs(0).requires_grad_()
        own = torch.nn.Linear(8, 1)
        with torch.no_grad():
            offset = model(x).sum()
        penalty((own(x).tanh() + offset).sum(), x).backward()
        assert x.grad is not None
        assert own.weight.grad is not None
