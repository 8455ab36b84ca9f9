"""Compiled blocks on the CPU. There are few tests because each compilation takes seconds."""

import copy
import os
import random
import re
import subprocess
import sys
import threading

import pytest
import sympy
import torch
from tests import small
from torch._functorch import partitioners
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.common import BackendFeature
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain as mt
from megatrain.compute import compiled, hints, partition
from megatrain.compute.compiled import graph_count
from megatrain.process import sdpa_key


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
    assert graph_count() == 1
    [message] = [m for m in announced.messages if m.startswith("compiled")]
    assert re.fullmatch(r"compiled LlamaDecoderLayer for batches of up to 8 × 4096 in \d+\.\d s", message)
    assert losses == pytest.approx(eager, rel=1e-5)
    for policy in ("store", "offload"):
        other = train(llama(), [16, 16], compile=True, policy=policy, debug=mt.Debug(slots=2))
        assert other[0] == losses
        assert all(torch.equal(a, b) for a, b in zip(other[1], weights, strict=True))


def test_varying_lengths_share_a_graph():
    lengths = [16, 17, 23, 31, 12, 40, 9, 27, 35, 22]
    losses, _ = train(llama(), lengths, compile=True)
    assert graph_count() == 1
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
    with pytest.raises(
        mt.errors.MegaTrainError, match="LlamaDecoderLayer was compiled 64 times for different arguments"
    ):
        train(llama(), [16], compile=True)


@pytest.fixture
def quick(monkeypatch):
    """`torch.compile` without a C compiler."""
    plain = torch.compile
    monkeypatch.setattr(compiled.torch, "compile", lambda function, **_: plain(function, backend="eager"))


def test_a_batch_that_no_code_can_run_decides_nothing(quick, announced):
    model, ids = llama(), torch.zeros(2, 16, dtype=torch.long)
    with mt.Engine(model, device="cpu", compile=True) as engine:
        with pytest.raises(RuntimeError, match="must match the size"):
            model(input_ids=ids, attention_mask=torch.ones(2, 1, 3, 7, dtype=torch.bool))
        assert [each.described for each in engine.compiled] == [{}]
        model(input_ids=ids, labels=ids).loss.backward()
        assert [each.described for each in engine.compiled] == [{"LlamaDecoderLayer": "compiled"}]
    assert not [message for message in announced.messages if "run eagerly" in message]


def test_an_operation_that_cannot_be_in_a_graph_makes_the_whole_structure_eager(announced):
    """The backward of grouped products in FP32 reads sizes. Dynamo would split the layer around them."""
    found = {}
    for setting in (False, True):
        model = small.qwen3_moe(output_router_logits=False)
        with mt.Engine(model, device="cpu", compile=setting) as engine:
            model(**small.batch()).loss.backward()
            found[setting] = [parameter.grad.clone() for parameter in model.parameters()]
    assert [each.described for each in engine.compiled] == [{"Qwen3MoeDecoderLayer": "eager"}]
    [message] = [message for message in announced.messages if "run eagerly" in message]
    assert "cannot be compiled here and run eagerly (RuntimeError: DataDependentOutputException" in message
    assert all(map(torch.equal, found[True], found[False]))


def test_forwards_whose_layers_record_outputs_say_that_they_run_eagerly(quick, announced):
    model = small.qwen3_moe()
    with mt.Engine(model, device="cpu", compile=True):
        for _ in range(2):
            model(**small.batch()).loss.backward()
    assert graph_count() == 0
    assert sum("run eagerly in forwards that return router logits" in message for message in announced.messages) == 1


@pytest.mark.parametrize("setting", [False, True])
def test_a_model_in_the_users_torch_compile(quick, setting):
    """Its blocks are not traced by it: they run as they do without."""
    model, ids = llama(), torch.arange(32).reshape(2, 16)
    with mt.Engine(model, device="cpu", compile=setting):
        found = []
        for call in (model, torch.compile(model, backend="eager")):
            loss = call(input_ids=ids, labels=ids).loss
            loss.backward()
            found.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
            for parameter in model.parameters():
                parameter.grad = None
        with torch.no_grad():
            assert torch.equal(call(input_ids=ids, labels=ids).loss, found[0][0])
    torch.testing.assert_close(found[1], found[0])


class Untraced(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    @torch.compiler.disable
    def forward(self, x):
        return x + torch.dropout(self.linear(x), 0.5, True)


def test_layers_that_are_marked_not_to_be_compiled_are_said_to_run_eagerly(quick, announced):
    gradients = {}
    for compile in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Module()
        model.layers = torch.nn.ModuleList([Untraced(), Untraced()])
        model.forward = lambda x, layers=model.layers: layers[1](layers[0](x)).sum()
        with mt.Engine(model, device="cpu", compile=compile) as engine:
            model(torch.ones(3, 4)).backward()
            assert [each.described for each in engine.compiled] == [{"Untraced": "eager"}] * compile
            gradients[compile] = [parameter.grad.clone() for parameter in model.parameters()]
    assert sum("Untraced blocks cannot be compiled here and run eagerly" in line for line in announced.messages) == 1
    assert all(map(torch.equal, gradients[False], gradients[True]))


class Numbered(torch.nn.Module):
    """Computes with its own number, so that every layer has a graph of its own."""

    def __init__(self, number):
        super().__init__()
        self.linear, self.number = torch.nn.Linear(4, 4), number

    def forward(self, x):
        return x + self.linear(x) / (self.number + 1)


def test_every_layer_may_have_a_graph_of_its_own(quick, monkeypatch):
    monkeypatch.setattr(compiled, "MAX_GRAPHS", 20)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(map(Numbered, range(32)))
    model.forward = lambda x: torch.nn.Sequential(*model.layers)(x).sum()
    with mt.Engine(model, device="cpu", compile=True):
        model(torch.randn(3, 4).requires_grad_()).backward()
    assert graph_count() == 32


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


class Varied(Dropping):
    def __init__(self, window, frozen=False):
        super().__init__()
        self.window = window
        self.linear.weight.requires_grad_(not frozen)

    def forward(self, x):
        self.hard = self.window is None or not self.linear.weight.requires_grad
        return super().forward(x)


@pytest.mark.parametrize(
    "layers", [lambda: [Varied(8), Varied(None), Varied(8)], lambda: [Varied(8), Varied(8, frozen=True), Varied(9)]],
    ids=["None", "frozen"],
)  # fmt: skip
def test_layers_that_differ_in_what_is_none_or_frozen_are_structures(no_erfinv, announced, layers):
    """Each is decided for itself: the second one cannot be compiled. Numbers are positions."""
    model = Mixed()
    model.layers = torch.nn.ModuleList(layers())
    with mt.Engine(model, device="cpu", compile=True) as engine:
        model(torch.randn(4, 16)).backward()
        assert [each.described for each in engine.compiled] == [{"Varied": "compiled"}, {"Varied 2": "eager"}]
    assert len([m for m in announced.messages if "run eagerly" in m]) == 1


def test_a_shape_that_fails_to_compile_raises_and_changes_nothing(monkeypatch, announced):
    """The blocks stay compiled, also between a forward and its backward."""
    plain = torch.compile

    def compile(function, **options):
        inner = plain(function, **options)

        def call(module, state, args, kwargs, attention):
            if args[0].shape[0] == 7:
                raise torch._dynamo.exc.BackendCompilerFailed("inductor", RuntimeError("out of registers"), None)
            return inner(module, state, args, kwargs, attention)

        return call

    monkeypatch.setattr(compiled.torch, "compile", compile)

    def another_shape(model):
        with pytest.raises(mt.errors.MegaTrainError, match=r"Dropping ran compiled, but could not be compiled for"):
            model(torch.randn(7, 16))

    expected = mixed_gradients("recompute")
    actual = mixed_gradients("recompute", another_shape)
    assert not [m for m in announced.messages if "run eagerly" in m]
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_running_out_of_memory_while_compiling_is_not_a_reason_to_run_eagerly(monkeypatch, announced):
    def fail(*args):
        raise torch._dynamo.exc.BackendCompilerFailed("inductor", RuntimeError("autotuning"), None) from (
            torch.OutOfMemoryError("CUDA out of memory")
        )

    monkeypatch.setattr(compiled.torch, "compile", lambda function, **_: fail)
    with pytest.raises(torch.OutOfMemoryError):
        mixed_gradients("recompute")
    assert not [m for m in announced.messages if "run eagerly" in m]


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
    with pytest.raises(
        mt.errors.MegaTrainError, match="Dropping ran compiled, but could not be compiled for batches of up to 8 × 4096"
    ):
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


# ---- lengths map to graphs by a fixed rule


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.up, self.down = torch.nn.RMSNorm(16), *(torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        hidden = self.norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(hidden)) * self.up(hidden))


class Sequence(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([Gated(), Gated()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def gradients_by_length(lengths, rows=2):
    """Gradients of a batch of each length, in a new engine."""
    model, found = Sequence().train(), {}
    with mt.Engine(model, device="cpu", compile=True):
        for length in lengths:
            x = torch.randn(rows, length, 16, generator=torch.Generator().manual_seed(length))
            model(x.requires_grad_()).backward()
            gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            assert torch.equal(found.setdefault(length, gradients), gradients)
            for parameter in model.parameters():
                parameter.grad = None
    return found


def test_results_do_not_depend_on_the_order_of_lengths():
    """Nor on what the process has run: each engine starts with other lengths, as after a restart."""
    runs = [gradients_by_length(lengths) for lengths in ((40, 9, 40), (9, 40, 9), (3000, 9), (40,))]
    assert graph_count() == 5, "a graph per engine, and one more for a batch of 2 × 3000 on the CPU"
    for run in runs[1:]:
        for length in runs[0].keys() & run.keys():
            assert torch.equal(run[length], runs[0][length])


class Chosen(torch.nn.Module):
    """Computes some of the rows, as experts do. How many is known only when it runs, so there are two graphs."""

    def __init__(self):
        super().__init__()
        self.all, self.some = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x, scale):
        rows = (x + self.all(x).relu() * scale).reshape(-1, 16)
        chosen = rows.mean(-1).gt(0).nonzero().flatten()
        torch._dynamo.graph_break()
        return rows.index_add(0, chosen, self.some(rows[chosen])).reshape(x.shape)


def test_sizes_and_numbers_are_dynamic_after_a_graph_break_too(announced):
    gradients, graphs = {}, []
    for compile in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Module()
        model.layers = torch.nn.ModuleList([Chosen(), Chosen()])
        model.forward = lambda x, n, layers=model.layers: layers[1](layers[0](x, n), n).square().mean()
        with mt.Engine(model, device="cpu", compile=compile):
            for number, length in enumerate((9, 17, 31, 12)):
                x = torch.randn(2, length, 16, generator=torch.Generator().manual_seed(length)).requires_grad_()
                model(x, number + 2).backward()
                graphs.append(graph_count())
            gradients[compile] = [parameter.grad.clone() for parameter in model.parameters()]
    assert graphs[4] > 1
    assert graphs[4:] == [graphs[4]] * 4
    assert sum(line.endswith("parts with eager code between them") for line in announced.messages) == 1
    for ours, theirs in zip(gradients[True], gradients[False], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_inductor_optimizes_for_the_largest_sizes_of_a_class_and_guards_the_actual_ones():
    """Otherwise its choices would depend on the length that comes first."""
    found, guards = [], []

    def backend(traced, inputs):
        size = next(node for node in traced.graph.nodes if node.op == "placeholder").meta["example_value"]
        three = (3 * size).node
        with hints.largest_sizes(traced) as sizes:
            allocator = SizeVarAllocator(three.shape_env)
            # Renamed between versions of PyTorch.
            of_partitioner = getattr(partitioners, "optimization_hint", None) or partitioners.size_hint
            found.append((sizes, allocator.optimization_hint(three.expr), of_partitioner(3 * size)))
            guards.append((bool(size < 10), allocator.evaluate_min(three.expr, sympy.Integer(40))))
        return traced.forward

    for length in (9, 17):
        torch._dynamo.reset()
        x = torch.zeros(length)
        torch._dynamo.mark_dynamic(x, 0)
        torch.compile(lambda x: x + 1, backend=backend)(x)
    assert found == [((4096,), 3 * 4096, 3 * 4096)] * 2
    assert [small for small, _ in guards] == [True, False]
    assert [str(least).isdigit() for _, least in guards] == [False, True]


def test_sums_are_split_for_the_largest_sizes_of_a_class(monkeypatch):
    """In how many parts a sum is computed changes its bits."""
    lengths = {9: set(), 40: set()}

    class Choices(InductorChoices):
        @staticmethod
        def reduction_split_factor(device, reduction_numel_hint, numel_hint, inner_reduction):
            lengths[length].add(int(reduction_numel_hint))
            return 1

    # As on a GPU.
    splitting = CppScheduling.backend_features - {BackendFeature.REDUCE_TO_SINGLE_ELEMENT}
    monkeypatch.setattr(CppScheduling, "backend_features", splitting)
    with V.set_choices_handler(Choices()), torch._inductor.config.patch(force_disable_caches=True):
        for length in lengths:
            gradients_by_length([length])
    assert lengths[9] == lengths[40]
    assert 8 * 4096 in lengths[9]


def test_planned_batches_have_static_sizes():
    """The planned one has a graph of its own, whatever ran before it."""
    planned = compiled.Compiled("Layer", torch.device("cpu"), (2, 512), recomputes=True)
    shapes = [(torch.Size((2, length, 16)), torch.Size((1, length))) for length in (512, 511, 512, 5000)]
    classes = [planned._class_of(of) for of in shapes]
    assert [static for _, _, static in classes] == [True, False, True, False]
    assert classes[0] == classes[2]
    assert [words for _, words, _ in classes] == [
        "batches of 2 × 512", "batches of up to 8 × 4096", "batches of 2 × 512", "batches of up to 8 × 8192",
    ]  # fmt: skip


def test_a_decoder_whose_length_varies_has_dynamic_sizes():
    """Its encoder may have the planned length in every batch."""
    layer = compiled.Compiled("Layer", torch.device("cpu"), (2, 512), recomputes=True)
    encoded, mask = torch.Size((2, 512, 16)), torch.Size((2, 1, 512))
    assert not layer._class_of((torch.Size((2, 9, 16)), encoded))[2]
    assert layer._class_of((torch.Size((2, 512, 16)), encoded, mask))[2]


def test_packed_documents_have_dynamic_sizes():
    """A static graph for every number of documents would be compiled until there are too many."""
    layer = compiled.Compiled("Layer", torch.device("cpu"), (1, 512), recomputes=True)
    hidden, positions = torch.Size((1, 512, 16)), torch.Size((512,))
    found = [layer._class_of((hidden, positions, torch.Size((documents + 1,)))) for documents in (3, 9)]
    assert [planned for _, _, planned in found] == [False, False]
    assert found[0] == found[1]
    assert layer._class_of((hidden, positions, torch.Size(())))[2]


def test_evaluation_runs_compiled_and_is_decided_on_its_own(announced):
    model, losses = Sequence().eval(), set()
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))
    with mt.Engine(model, device="cpu", compile=True):
        for context in (torch.no_grad, torch.no_grad, torch.inference_mode):
            with context():
                losses.add(model(x).item())
    lines = {m.split(" in ")[0] for m in announced.messages if m.startswith("compiled")}
    assert lines == {"compiled Gated for batches of up to 8 × 4096, without gradients"}
    assert len(losses) == 1
    assert losses.pop() == pytest.approx(Sequence()(x).item(), rel=1e-5)


@pytest.mark.parametrize("frozen", [(0, 1, 2, 3), (0, 1, 2)], ids=["all", "all but the last"])
def test_frozen_layers_are_decided_and_compiled_once(quick, announced, frozen):
    model, ids = llama(), torch.arange(32).reshape(2, 16)
    model.model.embed_tokens.requires_grad_(False)
    for layer in frozen:
        model.model.layers[layer].requires_grad_(False)
    expected = [{"LlamaDecoderLayer, frozen": "compiled"}, {"LlamaDecoderLayer 2": "compiled"}][: 5 - len(frozen)]
    with mt.Engine(model, device="cpu", compile=True) as engine:
        for _ in range(2):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert [each.described for each in engine.compiled] == expected
        assert graph_count() == len(expected)
        with torch.no_grad():
            model(input_ids=ids, labels=ids, use_cache=False)
        assert [each.described for each in engine.compiled] == expected
        assert graph_count() == 2 * len(expected)
    first, second = (f"compiled LlamaDecoderLayer{number} for batches of up to 8 × 4096" for number in ("", " 2"))
    assert [m.split(" in ")[0] for m in announced.messages if m.startswith("compiled")] == [
        f"{first}, frozen", second, f"{first}, without gradients", f"{second}, without gradients",
    ][:: 1 if len(expected) == 2 else 2]  # fmt: skip


def test_frozen_layers_have_no_graph_for_a_recompute(monkeypatch):
    graphs = []
    plain = partition.compile_fx
    monkeypatch.setattr(partition, "compile_fx", lambda *args, **options: graphs.append(1) or plain(*args, **options))
    model, x = Sequence().requires_grad_(False), torch.randn(2, 9, 16)
    with mt.Engine(model, device="cpu", compile=True) as engine:
        model(x)
        assert [each.described for each in engine.compiled] == [{"Gated, frozen": "compiled"}]
    assert len(graphs) == 1


CACHED = """
import sys
import torch
import megatrain as mt
from tests.unit.compute.test_compiled import Sequence

model = Sequence().train()
with mt.Engine(model, device="cpu", compile=True):
    model(torch.randn(2, int(sys.argv[1]), 16, requires_grad=True)).backward()
counters = torch._dynamo.utils.counters
print(*[counters["inductor"][f"fxgraph_cache_{kind}"] for kind in ("hit", "miss", "bypass")])
print(*[counters["aot_autograd"][f"autograd_cache_{kind}"] for kind in ("hit", "miss", "bypass")])
"""


def test_graphs_are_cached_between_processes(tmp_path):
    """Those of a forward, its recompute and both backwards; for another length of the class too."""

    def run(length):
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", CACHED, str(length)]
        return subprocess.check_output(command, env=environment, text=True).splitlines()

    assert run(9) == ["0 4 0", "0 2 0"]
    assert run(11) == ["4 0 0", "2 0 0"]


# ---- the backend of attention


def attend(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(torch.nn.Module):
    def forward(self, *states):
        return attend(*states)


def queries():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 64, 16, generator=generator).requires_grad_() for _ in range(3)]


def test_another_attention_backend_is_another_graph():
    """Dynamo does not guard on the backends of attention."""
    compiled_for = []

    def count(graph, inputs):
        compiled_for.append(sdpa_key())
        return graph.forward

    call, states = torch.compile(compiled._call, backend=count), queries()
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(backend):
            call(Attention(), {}, tuple(states), {}, sdpa_key())
    assert len(compiled_for) == len({*compiled_for}) == 2


def test_a_graph_cached_on_disk_is_not_used_for_another_attention_backend():
    # No earlier run has cached this function. Other tests seed Python's own generator.
    scale, hits = random.SystemRandom().random(), []

    def scaled(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)

    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        torch._dynamo.reset()
        with sdpa_kernel(backend):
            # The cache is written in the backward.
            torch.compile(scaled, backend=partition.backend(scaled.__code__, lambda: False, recomputes=False))(
                *queries()
            ).sum().backward()
        hits.append(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 0, 1]
