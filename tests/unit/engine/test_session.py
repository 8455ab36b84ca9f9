"""The lifetime of an engine: announcements, precision, reading and writing weights, closing, memory."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import small
from torch import nn
from transformers import AutoModelForCausalLM, BatchEncoding

import megatrain as mt
from megatrain.errors import EngineClosed
from megatrain.geometry import LANES
from megatrain.hardware.machine import THREAD_BYTES
from megatrain.store.parameter import StoreTensor
from megatrain.store.split import join
from megatrain.stream.lanes import ThreadLanes


def train_a_step(model: Any, optimizer: Any, seed: int = 0) -> float:
    loss = model(**small.batch(seed=seed)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def master(parameter: Any) -> torch.Tensor:
    """The FP32 master of one parameter."""
    weight, residual = parameter.host(), parameter.slab.residual
    if residual is None:
        return weight.float()
    segment = parameter.slab.layout.segments[parameter.segment]
    return join(weight.reshape(-1), residual[segment.offset : segment.end]).view(weight.shape)


# ---- announcements


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_announcements_on_the_cpu(announced: pytest.LogCaptureFixture) -> None:
    mt.init(offload_dir=["/a", "/b"], max_vram_gb=80, optimizer_compression="8bit")
    announced.clear()
    mt.Engine(small.llama())
    lines = announced.messages
    assert any("training on the CPU" in line for line in lines)
    assert any("max_vram_gb=80 has no effect" in line for line in lines)
    assert any("offload_dir is not used" in line and "fits in RAM" in line for line in lines)
    assert any("optimizer_compression='8bit'" in line and "lose precision" in line for line in lines)
    assert len(lines) == len(set(lines)), "each notice must be printed once"


def test_defaults_announce_the_summary_only(announced: pytest.LogCaptureFixture) -> None:
    mt.Engine(small.llama(), device="cpu")
    (summary,) = announced.messages
    assert summary.startswith("LlamaForCausalLM on cpu\n  parameters  ")


def test_engine_arguments_override_init(announced: pytest.LogCaptureFixture) -> None:
    settings = mt.init(debug=mt.Debug(slots=5), precision="bf16", device="cpu")
    assert settings.debug.slots == 5
    engine = mt.Engine(small.llama(), precision="fp32")
    assert (engine.settings.debug.slots, engine.precision) == (5, "fp32")
    mt.init(device="cpu")
    assert mt.Engine(small.llama()).settings.debug.slots == 3, "a second init must replace the first"


# ---- precision


def test_precision_follows_the_model() -> None:
    assert mt.Engine(small.llama(), device="cpu").precision == "fp32"
    assert mt.Engine(small.llama().bfloat16(), device="cpu").precision == "bf16"


@pytest.mark.parametrize("requested", ["fp32", "bf16"])
@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_master_is_exact(requested: str, loaded: torch.dtype) -> None:
    model = small.llama().to(loaded)
    original = small.snapshot(model)
    engine = mt.Engine(model, device="cpu", precision=requested)
    assert {parameter.dtype for parameter in model.parameters()} == {
        torch.float32 if requested == "fp32" else torch.bfloat16
    }
    for name, parameter in model.named_parameters():
        assert torch.equal(master(parameter), original[name].float()), name
    train_a_step(model, engine.optimizer())


def test_an_fp16_model_is_trained_in_bf16(announced: pytest.LogCaptureFixture) -> None:
    model = small.llama().half()
    engine = mt.Engine(model, device="cpu")
    assert engine.precision == "bf16"
    assert any("FP16" in line and "BF16" in line for line in announced.messages)


def test_training_a_bf16_model_in_fp32_is_announced(announced: pytest.LogCaptureFixture) -> None:
    mt.Engine(small.llama().bfloat16(), device="cpu", precision="fp32")
    assert any("twice the memory" in line for line in announced.messages)


def test_fp32_parts_of_a_bf16_model_stay_in_fp32() -> None:
    """Parameters that are in FP32 in a mostly BF16 model stay in FP32, and both dtypes are trained."""
    model = small.llama().bfloat16()
    for layer in model.model.layers:
        layer.input_layernorm.float()
    engine = mt.Engine(model, device="cpu")
    kinds = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert kinds["model.layers.1.input_layernorm.weight"] == torch.float32
    assert kinds["model.layers.1.mlp.up_proj.weight"] == torch.bfloat16
    before = {name: master(parameter) for name, parameter in model.named_parameters()}
    hidden = torch.randn(1, 4, 32, dtype=torch.bfloat16)
    optimizer = engine.optimizer(lr=1e-2)
    model.model.layers[1].mlp(hidden).float().square().sum().backward()
    optimizer.step()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(master(parameter), before[name])}
    assert moved == {f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}


def test_modules_that_transformers_keeps_in_fp32() -> None:
    """An FP32 model trained in BF16 keeps the modules in FP32 that loading it in BF16 would keep."""
    model = small.llama()
    model._keep_in_fp32_modules_strict = {"norm"}
    mt.Engine(model, device="cpu", precision="bf16")
    kinds = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert kinds["model.norm.weight"] == torch.float32
    assert kinds["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16


class WithTable(nn.Module):
    """A frozen integer table and trained weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.arange(8), requires_grad=False)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[..., self.table.flip(0)]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_integers_stay_integers(precision: str) -> None:
    model, plain = WithTable(), WithTable()
    engine = mt.Engine(model, device="cpu", precision=precision)
    assert model.table.dtype == torch.int64
    assert torch.equal(model.table, torch.arange(8))
    x = torch.randn(2, 8)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model(x.to(dtype)).sum().backward()
    plain.to(dtype) if precision == "bf16" else None
    plain(x.to(dtype)).sum().backward()
    assert torch.equal(model.layers[0].weight.grad + 0, plain.layers[0].weight.grad)
    engine.optimizer().step()
    assert torch.equal(model.table, torch.arange(8))


# ---- reading and writing weights


@pytest.mark.parametrize("lanes", ["sync", "threads", "slow"])
def test_reading_shows_current_weights(tmp_path: Path, lanes: str) -> None:
    """Every way to read waits for updates that are pending on a lane."""
    reference = small.llama()
    stock = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    train_a_step(reference, stock)
    expected = small.snapshot(reference)

    def close(name: str, value: torch.Tensor) -> bool:
        return torch.allclose(value, expected[name], rtol=0, atol=1e-6)

    def from_disk(model: Any) -> dict[str, torch.Tensor]:
        model.save_pretrained(tmp_path)
        return AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()

    def from_pickle(model: Any) -> Any:
        torch.save(model.state_dict(), tmp_path / "state.pt")
        return torch.load(tmp_path / "state.pt", weights_only=True)

    readers = {
        "parameters": lambda model: {name: parameter + 0 for name, parameter in model.named_parameters()},
        "clone": lambda model: {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        "state_dict": small.snapshot,
        "save_pretrained": from_disk,
        "torch.save": from_pickle,
        "numpy": lambda model: {n: torch.tensor((p.detach() + 0).numpy()) for n, p in model.named_parameters()},
        "tolist": lambda model: {n: torch.tensor(p.tolist()) for n, p in model.named_parameters()},
    }
    for name, read in readers.items():
        model = small.llama()
        chosen = ThreadLanes(seed=1, max_delay=5e-3) if lanes == "slow" else lanes
        engine = mt.Engine(model, device="cpu", debug=mt.Debug(lanes=chosen))
        optimizer = engine.optimizer(lr=1e-2, weight_decay=0.1)
        train_a_step(model, optimizer)
        results = read(model)
        assert results.keys() == expected.keys(), name
        assert all(close(key, value) for key, value in results.items()), name
        engine.close()


def test_shapes_and_counts_match_the_plain_model() -> None:
    model, plain = small.llama(), small.llama()
    mt.Engine(model, device="cpu")
    assert model.num_parameters() == plain.num_parameters()
    assert model.num_parameters(only_trainable=True) == plain.num_parameters(only_trainable=True)
    assert model.device == torch.device("cpu")
    assert model.dtype == torch.float32
    assert model.get_memory_footprint() >= plain.num_parameters() * 4
    shapes = {name: tuple(parameter.shape) for name, parameter in plain.named_parameters()}
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == shapes
    assert list(model.state_dict()) == list(plain.state_dict())


def test_writes_reach_the_store() -> None:
    model, plain = small.llama(), small.llama()
    mt.Engine(model, device="cpu")
    other = small.snapshot(small.llama(1))
    for each in (model, plain):
        each.load_state_dict(other)
        with torch.no_grad():
            each.lm_head.weight.mul_(2)
            each.model.norm.weight[3] = 5.0
        each.model.layers[0].mlp.up_proj.weight.data.zero_()
    assert small.same(small.snapshot(model), small.snapshot(plain))
    with torch.no_grad():
        results, expected = model(**small.batch()).logits, plain(**small.batch()).logits
    torch.testing.assert_close(results, expected, atol=1e-6, rtol=0)


def test_generate_equals_the_plain_model() -> None:
    model, plain = small.llama().eval(), small.llama().eval()
    mt.Engine(model, device="cpu")
    prompt, options = torch.tensor([[3, 4, 5]]), {"max_new_tokens": 10, "do_sample": False}
    assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))


def test_trace_on_the_cpu(tmp_path: Path) -> None:
    model = small.llama()
    engine = mt.Engine(model, device="cpu", debug=mt.Debug(lanes="threads"))
    optimizer = engine.optimizer()
    train_a_step(model, optimizer)
    with engine.trace() as timeline:
        train_a_step(model, optimizer)
    spans = list(timeline.spans)
    assert {span.lane for span in spans} == {"compute", "h2d", "d2h", "update"}
    assert all(0 <= span.start <= span.end for span in spans)
    computed = [span.label for span in spans if span.lane == "compute"]
    # The head may run as part of the loss. Layers run forward in order and backward in reverse.
    layers = [f"model.layers.{index}" for index in range(3)]
    expected = [f"forward {name}" for name in layers] + [f"backward {name}" for name in reversed(layers)]
    assert [label for label in computed if "layers" in label] == expected
    assert 0 <= timeline.exposed("h2d") <= timeline.busy("h2d")
    timeline.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == len(spans)
    train_a_step(model, optimizer)
    assert timeline.spans == spans, "the trace must end with its block"
    engine.close()


# ---- closing and releasing


def test_context_manager() -> None:
    model = small.llama()
    with mt.Engine(model, device="cpu") as engine:
        train_a_step(model, engine.optimizer())
        assert not engine.closed
    assert engine.closed
    with pytest.raises(EngineClosed):
        model(**small.batch())
    with pytest.raises(ZeroDivisionError):
        with mt.Engine(model, device="cpu") as engine:
            raise ZeroDivisionError
    assert engine.closed


@pytest.mark.parametrize("lanes", ["sync", "threads"])
def test_release_returns_a_plain_model(tmp_path: Path, lanes: str) -> None:
    model, plain = small.gpt2().eval(), small.gpt2().eval()
    reference = small.gpt2().eval()
    engine = mt.Engine(model, device="cpu", debug=mt.Debug(lanes=lanes))
    train_a_step(model, engine.optimizer(lr=1e-2, weight_decay=0.01))
    assert engine.release() is model
    stock = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.01)
    train_a_step(reference, stock)
    assert not any(isinstance(parameter, StoreTensor) for parameter in model.parameters())
    assert model.lm_head.weight is model.transformer.wte.weight
    assert small.furthest(small.snapshot(model), small.snapshot(reference)) < 1e-6
    own, other = set(model.__dict__), set(plain.__dict__)
    assert own == other, own ^ other
    for mine, theirs in zip(model.modules(), plain.modules(), strict=True):
        assert mine.__dict__.keys() == theirs.__dict__.keys(), type(mine)
        assert not mine._forward_pre_hooks
    # The released model trains with PyTorch, and its weights outlive the engine.
    del engine
    gc.collect()
    train_a_step(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    model.save_pretrained(tmp_path)
    assert small.same(small.snapshot(model), small.snapshot(AutoModelForCausalLM.from_pretrained(tmp_path)))
    assert mt.Engine(model, device="cpu").precision == "fp32"


def lane_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("megatrain-")]


@pytest.mark.parametrize("closed", [False, True])
def test_deleting_model_and_engine_frees_threads_and_memory(closed: bool) -> None:
    """Threads end and memory is freed whether or not the engine was closed."""
    gc.collect()
    before = set(lane_threads())
    model = small.llama()
    engine = mt.Engine(model, device="cpu", debug=mt.Debug(lanes="threads"))
    optimizer = engine.optimizer()
    train_a_step(model, optimizer)
    assert len(set(lane_threads()) - before) == sum(lane.runs_on is not None for lane in LANES.values())
    buffers = [weakref.ref(slab._weight_buffer) for slab in engine.slabs]
    references = [weakref.ref(engine), weakref.ref(model), *buffers]
    if closed:
        engine.close()
    del model, engine, optimizer
    gc.collect()
    for thread in set(lane_threads()) - before:
        thread.join(timeout=300)
    assert set(lane_threads()) - before == set()
    gc.collect()  # a job that was still queued at the first collection held its slab
    assert [reference() for reference in references] == [None] * len(references)


def test_the_model_keeps_its_engine_alive() -> None:
    """`mt.Engine(model)` need not be assigned to a variable."""
    model = small.llama()
    optimizer = mt.Engine(model, device="cpu", debug=mt.Debug(lanes="threads")).optimizer()
    gc.collect()
    train_a_step(model, optimizer)


# ---- memory

MEASURE = """
import gc, json, os, sys
from pathlib import Path

import torch
from torch import nn

import megatrain as mt

WIDTH, LAYERS, precision = 3968, 16, sys.argv[1]  # blocks of 60 MiB, a model of 0.94 GiB


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def rss(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) * 1024


torch.set_num_threads(1)
with torch.device("meta"):
    model = Stack()
warm = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2048, 2048) for _ in range(2))})
mt.Engine(warm, device="cpu", precision=precision)  # what the first engine of a process loads is not the model's
del warm
gc.collect()
empty = rss("VmRSS")
for layer in model.layers:
    layer.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.1))
del layer
before = rss("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
engine = mt.Engine(model, device="cpu", precision=precision)
peak, after = rss("VmHWM"), rss("VmRSS")
slots = engine._step.fetcher.slot_bytes()
print(json.dumps({"model": before - empty, "peak": peak - empty, "after": after - empty, "block": WIDTH * WIDTH * 4,
                  "parameters": sum(p.numel() for p in model.parameters()), "slots": slots}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_attaching_needs_memory_for_the_model_and_one_block(precision: str) -> None:
    """Each original parameter is freed once it has been copied to the store."""
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, precision], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    margin = 48 << 20
    assert margin < results["block"], "the margin must be smaller than a second block"
    assert results["model"] == pytest.approx(results["parameters"] * 4, rel=0.02)
    # In BF16, the high and low halves together are as large as the FP32 originals.
    assert results["peak"] <= results["model"] + results["block"] + margin
    assert results["after"] <= results["model"] + margin


def test_the_window_size_depends_on_memory_and_not_on_the_batch_type(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = mt.Engine(small.llama(), device="cpu")
    monkeypatch.setattr("megatrain.hardware.inventory.free_memory", lambda _: 1 << 18)
    batch = small.batch(2)
    sizes = {engine.window_size(each) for each in (batch, BatchEncoding(batch), [batch], tuple(batch.values()))}
    assert len(sizes) == 1
    assert 1 < sizes.pop() < 64
    # On a GPU each micro-batch has a thread, and libraries allocate GPU memory per thread.
    monkeypatch.setattr("megatrain.hardware.inventory.free_memory", lambda _: 8 * THREAD_BYTES + (1 << 20))
    assert engine.window_size(batch) == 64
    monkeypatch.setattr(engine._headroom, "device", torch.device("cuda", 0))
    assert engine.window_size(batch) == 4


def test_a_window_reports_its_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap on GPU memory includes the memory of these threads."""
    engine, sizes = mt.Engine(small.llama(), device="cpu"), []
    monkeypatch.setattr(engine.memory_limit, "set_window_size", sizes.append)
    engine.window([lambda: None] * 3)
    assert sizes == [3]


def test_the_old_keyword_of_a_window_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, requested = mt.Engine(small.llama(), device="cpu"), []
    monkeypatch.setattr(engine._step, "window", lambda tasks, full_step: requested.append(full_step) or [])
    for whole in (True, False):
        with pytest.warns(FutureWarning, match=r"Engine\.window\(whole=\.\.\.\) is now full_step") as caught:
            engine.window([], whole=whole)
        assert caught[0].filename == __file__
    assert requested == [True, False]
