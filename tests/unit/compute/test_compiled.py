"""Compiled blocks on the CPU: few tests, since every compilation takes seconds here."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain as mt
from megatrain.compute import compiled
from megatrain.compute.compiled import Compiled


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def train(model, lengths, **settings):
    with mt.Engine(model, device="cpu", **settings) as engine:
        optimizer = engine.optimizer(lr=1e-2, max_grad_norm=0.5)
        generator = torch.Generator().manual_seed(1)
        losses = []
        for length in lengths:
            ids = torch.randint(0, 64, (2, length), generator=generator)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, [slab.weight.clone() for slab in engine.slabs]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def test_layers_share_a_graph_and_policies_agree(said):
    """Four layers, one compilation; and the graph that is stored is the one that is recomputed, bit for bit."""
    eager, _ = train(llama(), [16, 16])
    losses, weights = train(llama(), [16, 16], compile=True)
    assert Compiled.graphs() == 1
    assert [m for m in said.messages if m.startswith("compiled")] == ["compiled LlamaDecoderLayer (1 graphs so far)"]
    assert losses == pytest.approx(eager, rel=1e-5)
    for policy in ("store", "offload"):
        other = train(llama(), [16, 16], compile=True, policy=policy, slots=2)
        assert other[0] == losses
        assert all(torch.equal(a, b) for a, b in zip(other[1], weights, strict=True))


def test_lengths_that_vary_are_compiled_a_bounded_number_of_times():
    lengths = [16, 17, 23, 31, 12, 40, 9, 27, 35, 22]
    losses, _ = train(llama(), lengths, compile=True)
    assert Compiled.graphs() <= 3
    assert losses == pytest.approx(train(llama(), lengths)[0], rel=1e-4)


def test_what_cannot_be_compiled_runs_eagerly_and_is_said(said, monkeypatch):
    def fail(*args, **kwargs):
        raise torch._dynamo.exc.BackendCompilerFailed("inductor", RuntimeError("no C compiler found"), None)

    model = llama()
    plain = copy.deepcopy(model)
    monkeypatch.setattr(compiled.torch, "compile", lambda function: fail)
    assert train(model, [16, 16], compile=True)[0] == train(plain, [16, 16])[0]
    assert sum("cannot be compiled here and run eagerly" in message for message in said.messages) == 1


def test_too_many_shapes_are_an_error_not_a_silent_fall_back(monkeypatch):
    def fail(*args, **kwargs):
        raise torch._dynamo.exc.FailOnRecompileLimitHit("recompile limit")

    monkeypatch.setattr(compiled.torch, "compile", lambda function: fail)
    with pytest.raises(mt.errors.MegaTrainError, match="compiled 64 times for different shapes"):
        train(llama(), [16], compile=True)
