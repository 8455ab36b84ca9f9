"""Gradients on disk: the bits of gradients in RAM, whatever reads or changes them before the step."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import small
from tests.invariant.test_disk_weights import all_on_disk
from tests.parity import zoo
from tests.tiny import Stack, differences, engine_of, gradients, inputs, roles

import megatrain as mt
from megatrain.errors import DiskFailed, LaneFailed, SettingsError
from megatrain.model.shapes import describe
from megatrain.planner.decision import Decision
from megatrain.planner.run import Run
from megatrain.planner.search import Search, make_plan
from megatrain.stream.lanes import SyncLanes, ThreadLanes

Between = Callable[[Stack, Any], Any]


def backward(model: Stack, seed: int) -> None:
    model(inputs(seed)).square().mean().backward()


def on_disk(engine: Any) -> list[bool]:
    """Whether each layer's gradient is on disk. A parameter outside all blocks may get several gradients, so its own
    is not."""
    return [part.on_disk for slab in engine.slabs if slab.name != "Stack" for part in slab.grad.active()]


def nothing(model: Stack, optimizer: Any) -> None:
    pass


def read(model: Stack, optimizer: Any) -> Any:
    return gradients(model)


def read_norms(model: Stack, optimizer: Any) -> Any:
    return torch.stack([p.grad.float().norm() for p in model.parameters()])


def write(model: Stack, optimizer: Any) -> None:
    model.layers[1].scale.grad.mul_(3.0)
    model.layers[0].scale.grad = torch.full((8,), 2.0)


def drop(model: Stack, optimizer: Any) -> None:
    model.layers[1].scale.grad = None


def clip(model: Stack, optimizer: Any) -> Any:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).clone()


def add(model: Stack, optimizer: Any) -> None:
    backward(model, 77)


def start_again(model: Stack, optimizer: Any) -> None:
    optimizer.zero_grad()
    backward(model, 78)


def without_a_layer(model: Stack, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(inputs(79), skip=(1,)).square().mean().backward()


def train(between: Between, max_grad_norm: float | None, **settings: Any) -> list[Any]:
    model = Stack(depth=5)
    engine = engine_of(model, precision="bf16", **settings)
    optimizer = engine.optimizer(lr=0.1, max_grad_norm=max_grad_norm)
    seen: list[Any] = []
    for step in range(4):
        backward(model, step)
        seen.append(between(model, optimizer))
        optimizer.step()
        optimizer.zero_grad()
    seen.append(roles(engine))
    engine.close()
    return seen


BETWEEN = [nothing, read, read_norms, write, drop, clip, add, start_again, without_a_layer]


@pytest.mark.parametrize("max_grad_norm", [None, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("between", BETWEEN)
def test_use_before_the_step_is_bitwise(tmp_path: Path, between: Between, max_grad_norm: float | None) -> None:
    expected = train(between, max_grad_norm, lanes=SyncLanes())
    assert differences(train(between, max_grad_norm, lanes=SyncLanes(), **all_on_disk(tmp_path)), expected) == []
    delayed = ThreadLanes(seed=1, max_delay=2e-4)
    assert differences(train(between, max_grad_norm, lanes=delayed, **all_on_disk(tmp_path)), expected) == []


def test_a_gradient_takes_no_ram_until_it_is_changed(tmp_path: Path) -> None:
    model = Stack(depth=5)
    engine = engine_of(model, **all_on_disk(tmp_path))
    optimizer = engine.optimizer(lr=0.1)
    backward(model, 0)
    assert all(on_disk(engine))
    assert [slab.name for slab in engine.slabs if slab.grad.allocated] == ["Stack"]
    seen = gradients(model)
    assert all(on_disk(engine)), "reading leaves it there"
    model.layers[1].scale.grad.mul_(2.0)
    changed = next(slab for slab in engine.slabs if slab.name == "layers.1")
    assert [slab.name for slab in engine.slabs if slab.grad.allocated] == ["Stack", changed.name]
    assert torch.equal(model.layers[1].scale.grad + 0, 2 * seen["layers.1.scale"])
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 1)
    assert all(on_disk(engine))
    assert not changed.grad.allocated, "the memory is freed when the next gradient goes to disk"
    engine.close()


@pytest.mark.parametrize("whole_model", [True, False])
def test_dropping_gradients_reads_nothing(tmp_path: Path, whole_model: bool) -> None:
    """A Trainer calls `model.zero_grad()`, which drops them parameter by parameter."""
    model = Stack(depth=5)
    engine = engine_of(model, **all_on_disk(tmp_path))
    optimizer = engine.optimizer(lr=0.1)
    for step in range(3):
        backward(model, step)
        optimizer.step()
        if whole_model:
            model.zero_grad()
        for parameter in model.parameters():
            parameter.grad = None
        assert [slab.name for slab in engine.slabs if slab.grad.allocated] == ["Stack"]
        assert not any(on_disk(engine))
    engine.close()


def test_space_is_reserved_before_the_first_step(tmp_path: Path) -> None:
    """What a step writes is then known, and a full drive is reported before training."""
    model = Stack(depth=5)
    engine = engine_of(model, **all_on_disk(tmp_path))
    engine.optimizer(lr=0.1)
    optimizer = engine.optimizer(lr=0.1)
    assert engine._placement.disk is not None
    allocated, written = engine._placement.disk.allocated_bytes, engine.drive.per_step
    for step in range(2):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    engine.synchronize()
    assert (engine._placement.disk.allocated_bytes, engine.drive.per_step) == (allocated, written)
    engine.close()


def test_tied_weights_are_summed_in_ram(tmp_path: Path) -> None:
    def run(**settings: Any) -> list[Any]:
        model = zoo.build("llama", tie_word_embeddings=True)
        engine = engine_of(model, precision="bf16", **settings)
        optimizer = engine.optimizer(lr=1e-2, max_grad_norm=1.0)
        for step in range(3):
            model(**zoo.batch("llama", step, length=6)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        seen = [roles(engine), optimizer.grad_norm]
        engine.close()
        return seen

    expected = run(lanes=SyncLanes())
    assert differences(run(lanes=ThreadLanes(seed=1, max_delay=2e-4), **all_on_disk(tmp_path)), expected) == []


def test_a_gradient_that_cannot_be_read_stops_training(tmp_path: Path) -> None:
    model = Stack(depth=5)
    engine = engine_of(model, lanes=ThreadLanes(), offload_dir=tmp_path, on_disk=["*"], gradients_on_disk=["*"],
                       allow_tmpfs=True)  # fmt: skip
    optimizer = engine.optimizer(lr=0.1, max_grad_norm=1.0)
    backward(model, 0)
    engine.synchronize()
    assert engine._placement.disk is not None
    for file in engine._placement.disk.files:
        os.ftruncate(file.descriptor, 0)
    with pytest.raises((DiskFailed, LaneFailed), match=r"the gradient of .* could not be read .*truncated"):  # noqa: PT012
        optimizer.step()
        engine.synchronize()
        optimizer.step()
    engine._attached.close(1.0)


def test_the_norm_reads_nothing_from_disk(tmp_path: Path) -> None:
    def backward_of(**settings: Any) -> mt.Engine:
        model = Stack(depth=5)
        engine = engine_of(model, precision="bf16", **settings)
        engine.optimizer(lr=0.1, max_grad_norm=1.0)
        backward(model, 0)
        engine.synchronize()
        return engine

    with backward_of() as in_ram:
        expected = in_ram.grad_norm()
    engine = backward_of(**all_on_disk(tmp_path))
    assert all(on_disk(engine))
    assert engine._placement.disk is not None
    for file in engine._placement.disk.files:
        os.ftruncate(file.descriptor, 0)
    assert engine.grad_norm() == expected
    engine._attached.close(1.0)


def test_gradients_need_their_states_on_disk(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"gradients_on_disk='\*' .* name it in on_disk too"):
        engine_of(Stack(), offload_dir=tmp_path, gradients_on_disk=["*"], allow_tmpfs=True)


def search(folder: Path, micro_batches: int, **limits: Any) -> Search:
    run = Run(micro_batch=2, length=small.LENGTH, accumulation=micro_batches)
    shape, machine = describe(small.llama(num_hidden_layers=8).bfloat16()), mt.Machine.load("h200-128gb")
    return Search(shape, machine, run, offload_dir=folder, **limits)


def least_memory(folder: Path) -> mt.Plan:
    """What the planner chooses if GPU memory and RAM suffice for nothing else."""
    limits: dict[str, float] = {}
    for tier in ("vram", "ram"):
        least = search(folder, 1, **limits, **{f"max_{tier}_gb": 1e-6}).need(tier)
        limits[f"max_{tier}_gb"] = (least + 64) / (1 << 30)
    return search(folder, 1, **limits).plan()


def one_window(folder: Path) -> mt.Plan:
    made = search(folder, 3)
    decision = Decision(disk_blocks=11, disk_gradients=9, disk_weights=2, window=3)
    return make_plan(made, decision, made.simulator.step(decision))


@pytest.mark.parametrize("made", [least_memory, one_window])
def test_a_plan_with_gradients_on_disk_is_followed(tmp_path: Path, made: Callable[[Path], mt.Plan]) -> None:
    plan = made(tmp_path)
    micro_batches = plan.run.accumulation
    assert len(plan.gradients_on_disk) > 4
    assert {*plan.gradients_on_disk} <= {*plan.on_disk}
    assert plan.windows == (micro_batches,)

    def run(**settings: Any) -> tuple[list[Any], Any]:
        model = small.llama(num_hidden_layers=8)
        engine = engine_of(model, precision="bf16", **settings)
        optimizer = engine.optimizer(lr=1e-2, max_grad_norm=0.5)
        seen: list[Any] = []
        for step in range(3):
            tasks = [
                lambda seed=10 * step + k: model(**small.batch(2, seed=seed)).loss.backward()
                for k in range(micro_batches)
            ]
            engine.window(tasks, full_step=True)
            optimizer.step()
            seen.append(optimizer.grad_norm)
            optimizer.zero_grad()
        engine.synchronize()
        return [*seen, roles(engine)], engine

    expected, _ = run(lanes=SyncLanes())
    for lanes in (SyncLanes(), ThreadLanes(seed=1, max_delay=2e-4)):
        found, engine = run(plan=plan, offload_dir=tmp_path, allow_tmpfs=True, lanes=lanes)
        assert differences(found, expected) == []
        parts = [(slab.name, part) for slab in engine.slabs for part in slab.grad.parts.values()]
        assert {name for name, part in parts if part._disk_buffer is not None} == {*plan.gradients_on_disk}
        on_disk = sum(part.disk_buffer.nbytes for _, part in parts if part._disk_buffer is not None)
        assert on_disk == plan.memory["disk"]["gradients"]
        assert plan.written is not None
        assert abs(engine.drive.per_step - plan.written) <= 3 * 4096 * len(engine.slabs)
        rings = engine._step.updates.gradients.rings
        staged = sum(staging.buffer.nbytes for staging in rings.all if staging.buffer is not None)
        in_ram = sum(buffer.nbytes for _, part in parts for buffer in part.buffers.values())
        assert staged + in_ram == plan.memory["ram"]["gradients"]
