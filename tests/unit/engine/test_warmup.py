"""A Trainer with a plan compiles its layers when it is made, and changes nothing else by it."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import small
from torch._dynamo.utils import counters

import megatrain as mt
from megatrain.compute import compiled
from megatrain.engine.attach import ATTACH_STEPS
from megatrain.engine.warmup import compile_layers
from megatrain.hf import trainer as hf_trainer
from megatrain.telemetry.preparation import LEAST


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.compile` without a C compiler."""
    torch._dynamo.reset()
    counters.clear()
    plain = torch.compile
    monkeypatch.setattr(compiled.torch, "compile", lambda function, **_: plain(function, backend="eager"))


def made(directory: Path, **changes: Any) -> mt.Trainer:
    mt.init(machine="h200-128gb", compile=True)
    model = small.llama(attention_dropout=0.1).eval()
    return mt.Trainer(model=model, args=small.arguments(directory, **changes), train_dataset=small.rows(32))


def test_a_trainer_compiles_when_it_is_made(
    tmp_path: Path, announced: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = made(tmp_path / "a", max_steps=3)
    rows, length = trainer.engine.settings.plan.run.micro_batch, trainer.engine.settings.plan.run.length
    [line] = [line for line in announced.messages if line.startswith("compiled")]
    assert line.startswith(f"compiled LlamaDecoderLayer for batches of {rows} × {length} in ")
    assert [of.described for of in trainer.engine.compiled] == [{"LlamaDecoderLayer": "compiled"}]
    assert not trainer.model.training
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    graphs = compiled.graph_count()
    trainer.train()
    assert compiled.graph_count() == graphs, "the first step had nothing left to compile"
    start = json.loads((tmp_path / "a" / "run.jsonl").read_text().splitlines()[0])
    assert start["compiled"] == {"LlamaDecoderLayer": "compiled"}
    monkeypatch.setattr(hf_trainer, "compile_layers", lambda *_: None)
    other = made(tmp_path / "b", max_steps=3)
    assert [of.described for of in other.engine.compiled] == [{}]
    other.train()
    assert small.losses(trainer) == small.losses(other)
    assert small.same(small.snapshot(trainer.model), small.snapshot(other.model))


def test_the_parts_before_the_first_step_are_shown_and_recorded(
    tmp_path: Path, announced: pytest.LogCaptureFixture
) -> None:
    made(tmp_path, max_steps=2, save_strategy="steps", save_steps=1).train()
    [line] = [line for line in announced.messages if line.startswith("ready for the first step after ")]
    resumed = made(tmp_path, max_steps=3, save_strategy="no")
    resumed.train(resume_from_checkpoint=True)
    parts = {"plan", "compile_layers", "create_optimizer", *(step.__name__ for step in ATTACH_STEPS)}
    events = [json.loads(text) for text in (tmp_path / "run.jsonl").read_text().splitlines()]
    first, second = (event["prepared"] for event in events if event["event"] == "start")
    assert first["seconds"].keys() == parts
    assert second["seconds"].keys() == parts | {"load_checkpoint"}
    assert all(seconds > 0 for seconds in second["seconds"].values())
    assert first["pinning"] == 0
    for part, seconds in first["seconds"].items():
        assert (f"{part.replace('_', ' ')} {seconds:.1f}" in line) == (seconds >= LEAST)
    assert min(event["seconds"] for event in events if event["event"] == "step") > 0


def test_a_trainers_evaluation_runs_compiled(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    trainer = made(tmp_path)
    losses = {trainer.evaluate(small.rows(16))["eval_loss"] for _ in range(2)}
    assert sum("without gradients" in line for line in announced.messages if line.startswith("compiled")) == 1
    assert len(losses) == 1


class Counting(mt.Trainer):
    """Keeps state between calls, and goes on after an error in the model."""

    calls = 0

    def _prepare_inputs(self, inputs: Any) -> Any:
        self.calls += 1
        torch.rand(1)
        return super()._prepare_inputs(inputs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().compute_loss(*args, **kwargs)


def test_methods_of_a_subclass_are_not_called(tmp_path: Path) -> None:
    made(tmp_path / "a")
    expected = torch.get_rng_state()
    model = small.llama()
    inner: Any = model.model

    def forward(*args: Any, plain: Any = inner.forward, **kwargs: Any) -> Any:
        try:
            return plain(*args, **kwargs)
        except Exception:
            return plain(*args, **kwargs)

    inner.forward = forward
    trainer = Counting(model=model, args=small.arguments(tmp_path / "b"), train_dataset=small.rows(32))
    assert [of.described for of in trainer.engine.compiled] == [{"LlamaDecoderLayer": "compiled"}]
    assert trainer.calls == 0
    assert torch.equal(torch.get_rng_state(), expected)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(self.norm(self.linear(x)), 0.5, self.training)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer(), Layer()])
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            self.seen.append(1)
        return x


def test_buffers_random_numbers_and_modes_are_as_before() -> None:
    model = Model()
    model.layers[2].eval()
    with mt.Engine(model, device="cpu", compile=True) as engine:
        buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
        states = torch.get_rng_state(), random.getstate()
        compile_layers(engine, lambda: model(torch.ones(4, 8)))
        assert len(model.seen) == 1, "the forward stops after the first layer of the last structure"
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        for name, buffer in model.named_buffers():
            assert buffer is buffers[name][0]
            assert torch.equal(buffer, buffers[name][1])
        assert [layer.training for layer in model.layers] == [True, True, False]
        model(torch.randn(4, 8)).sum().backward()


def test_attributes_of_modules_are_as_before() -> None:
    """RoPE with dynamic scaling grows its frequencies, a buffer, when it first sees a length, which it remembers."""
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    plain, model = (small.llama(max_position_embeddings=16, rope_parameters=scaled) for _ in range(2))
    ids = torch.arange(80).view(2, 40) % 64
    with mt.Engine(model, device="cpu", compile=True, head_chunk=0) as engine:
        compile_layers(engine, lambda: model(input_ids=ids, labels=ids))
        assert torch.equal(model(input_ids=ids, labels=ids).loss, plain(input_ids=ids, labels=ids).loss)


@pytest.mark.parametrize(
    ("frozen", "expected", "seen"),
    [
        ([0], [["Layer, frozen"], ["Layer 2"]], 2),
        ([0, 2], [["Layer", "Layer, frozen"], ["Layer 2"]], 3),
        ([1, 2], [["Layer"], ["Layer 2"]], 2),
        ([0, 1, 2], [["Layer, frozen"]], 3),
    ],
    ids=str,
)
def test_frozen_layers_are_compiled_too(frozen: list[int], expected: list[list[str]], seen: int) -> None:
    """Layers above one that is trained have calls with gradients, those below it without."""
    model = Model()
    for layer in frozen:
        model.layers[layer].requires_grad_(False)
    model.last = torch.nn.Linear(8, 8)
    inner = model.forward
    model.forward = lambda x: model.last(inner(x))  # type: ignore[method-assign]
    with mt.Engine(model, device="cpu", compile=True) as engine:
        compile_layers(engine, lambda: model(torch.ones(4, 8)))
        assert [of.described for of in engine.compiled] == [dict.fromkeys(names, "compiled") for names in expected]
        assert len(model.seen) == seen
        model(torch.randn(4, 8)).sum().backward()
        assert [of.described for of in engine.compiled] == [dict.fromkeys(names, "compiled") for names in expected]


def test_a_forward_that_fails_leaves_the_decision_to_the_first_step(
    tmp_path: Path, announced: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no such column")

    monkeypatch.setattr(hf_trainer, "planned_batch", fail)
    trainer = made(tmp_path, max_steps=1)
    assert [line for line in announced.messages if "layers are compiled in the first step" in line]
    trainer.train()
    assert [of.described for of in trainer.engine.compiled] == [{"LlamaDecoderLayer": "compiled"}]
