"""Compiled blocks on the CPU. There are few tests because each compilation takes seconds."""

import copy
import threading

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


def test_layers_share_a_graph_and_policies_agree(announced):
    """Four layers compile once, and all policies give bitwise equal losses and weights."""
    eager, _ = train(llama(), [16, 16])
    losses, weights = train(llama(), [16, 16], compile=True)
    assert Compiled.graphs() == 1
    assert [m for m in announced.messages if m.startswith("compiled")] == [
        "compiled LlamaDecoderLayer (1 graphs so far)"
    ]
    assert losses == pytest.approx(eager, rel=1e-5)
    for policy in ("store", "offload"):
        other = train(llama(), [16, 16], compile=True, policy=policy, debug=mt.Debug(slots=2))
        assert other[0] == losses
        assert all(torch.equal(a, b) for a, b in zip(other[1], weights, strict=True))


def test_varying_lengths_compile_a_bounded_number_of_graphs():
    lengths = [16, 17, 23, 31, 12, 40, 9, 27, 35, 22]
    losses, _ = train(llama(), lengths, compile=True)
    assert Compiled.graphs() <= 3
    assert losses == pytest.approx(train(llama(), lengths)[0], rel=1e-4)


def test_a_layer_that_cannot_be_compiled_runs_eagerly_with_a_notice(announced, monkeypatch):
    def fail(*args, **kwargs):
        raise torch._dynamo.exc.BackendCompilerFailed("inductor", RuntimeError("no C compiler found"), None)

    model = llama()
    plain = copy.deepcopy(model)
    monkeypatch.setattr(compiled.torch, "compile", lambda function, **_: fail)
    assert train(model, [16, 16], compile=True)[0] == train(plain, [16, 16])[0]
    assert sum("cannot be compiled here and run eagerly" in message for message in announced.messages) == 1


def test_too_many_shapes_raise_instead_of_falling_back(monkeypatch):
    def fail(*args, **kwargs):
        raise torch._dynamo.exc.FailOnRecompileLimitHit("recompile limit")

    monkeypatch.setattr(compiled.torch, "compile", lambda function, **_: fail)
    with pytest.raises(mt.errors.MegaTrainError, match="compiled 64 times for different shapes"):
        train(llama(), [16], compile=True)


# ---- a block that ran compiled is recomputed compiled


class Dropping(torch.nn.Module):
    """Uses dropout. Compiled code draws other masks than eager code, so a mixed recompute gives wrong gradients."""

    def __init__(self, hard=False):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.hard = hard

    def forward(self, x):
        x = x + torch.dropout(self.linear(x), 0.5, self.training)
        return torch.erfinv(x.tanh() * 0.5) if self.hard else x


class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([Dropping(), Dropping(hard=True), Dropping()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def without_erfinv(graph, example_inputs):
    """Inductor without a kernel for one operation."""
    if any(node.target is torch.erfinv for node in graph.graph.nodes):
        raise RuntimeError("no kernel for erfinv")
    return torch._inductor.compile(graph, example_inputs)


@pytest.fixture
def no_erfinv(monkeypatch):
    plain = torch.compile
    monkeypatch.setattr(compiled.torch, "compile", lambda function, **_: plain(function, backend=without_erfinv))


def mixed_gradients(policy, between=lambda model: None):
    model = Mixed().train()
    with mt.Engine(model, device="cpu", compile=True, policy=policy):
        torch.manual_seed(1)
        loss = model(torch.randn(4, 16))
        between(model)
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]


def test_a_structure_that_cannot_be_compiled_leaves_the_others_compiled(no_erfinv, announced):
    """`store` keeps the forward's dropout masks. A recompute in eager code would draw other masks."""
    stored = mixed_gradients("store")
    assert len([m for m in announced.messages if "run eagerly" in m]) == 1
    for ours, theirs in zip(mixed_gradients("recompute"), stored, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_compilation_failing_between_forward_and_backward(monkeypatch, announced):
    """The next forward of the structure runs eagerly. Blocks that ran compiled are still recomputed compiled."""
    failing = []
    plain = torch.compile

    def compile(function, **options):
        inner = plain(function, **options)

        def call(module, state, args, kwargs):
            if failing and args[0].shape[0] == 7:
                raise torch._dynamo.exc.BackendCompilerFailed("inductor", RuntimeError("out of registers"), None)
            return inner(module, state, args, kwargs)

        return call

    monkeypatch.setattr(compiled.torch, "compile", compile)

    def another_shape(model):
        failing.append(True)
        model(torch.randn(7, 16))

    stored = mixed_gradients("recompute")
    actual = mixed_gradients("recompute", another_shape)
    assert len([m for m in announced.messages if "run eagerly" in m]) == 2, "expected one notice per structure"
    assert all(torch.equal(a, b) for a, b in zip(actual, stored, strict=True))


def test_a_failed_recompilation_in_the_backward_raises(monkeypatch):
    calls = []
    plain = torch.compile

    def compile(function, **options):
        inner = plain(function, **options)

        def call(*args):
            calls.append(args)
            if len(calls) > 3:
                raise torch._dynamo.exc.BackendCompilerFailed("inductor", RuntimeError("disk full"), None)
            return inner(*args)

        return call

    monkeypatch.setattr(compiled.torch, "compile", compile)
    with pytest.raises(mt.errors.MegaTrainError, match="ran compiled could not be compiled again"):
        mixed_gradients("recompute")


def test_eager_inference_in_another_thread_during_compiled_training():
    """Eager inference uses the weights of its own call while a compiled forward is traced or running."""
    alone, weights = train(llama(), [16, 16], compile=True)
    model = llama()
    stop, errors = threading.Event(), []

    def evaluate():
        try:
            while not stop.is_set():
                with torch.no_grad():
                    model(input_ids=torch.zeros(1, 4, dtype=torch.long))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=evaluate)
    plain = mt.Engine.optimizer

    def optimizer(*args, **options):
        thread.start()
        return plain(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mt.Engine, "optimizer", optimizer)
        try:
            losses, actual = train(model, [16, 16], compile=True)
        finally:
            stop.set()
            thread.join()
    assert losses == alone
    assert all(torch.equal(a, b) for a, b in zip(actual, weights, strict=True))
    assert all(isinstance(error, mt.errors.EngineClosed) for error in errors)
