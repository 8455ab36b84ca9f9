"""Placement does not change bits: all state in GPU memory, some, or none. On the CPU the tiers are emulated."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import small
from tests.parity import zoo
from tests.tiny import WIDTH, Stack, backward, differences, engine_of, gradients, inputs, roles

import megatrain as mt
from megatrain.errors import SettingsError
from megatrain.stream.lanes import ThreadLanes

PLACEMENTS: dict[str, dict[str, tuple[str, ...]]] = {
    "streamed": {},
    "mixed": {"resident": ("layers.1", "entry")},
    "layers": {"resident": ("layers.*",)},
    "resident": {"resident": ("*",)},
    "held weights": {"held_weights": ("*",)},
    "held gradients": {"held_gradients": ("*",)},
    "held": {"held_weights": ("*",), "held_gradients": ("*",)},
    "all kinds": {"resident": ("layers.0",), "held_weights": ("layers.1", "entry"), "held_gradients": ("layers.2",)},
}


def train(
    placement: dict[str, tuple[str, ...]], lanes: Any = "sync", clip: float | None = 0.5, **settings: Any
) -> list[Any]:
    """Accumulation, windows, updates in the backward, and reads and writes between them."""
    model = Stack()
    engine = engine_of(model, lanes=lanes, **placement, **settings)
    optimizer = engine.optimizer(lr=0.1, max_grad_norm=clip)
    seen: list[Any] = []

    def micro_batch(seed: int) -> torch.Tensor:
        loss = model(inputs(seed)).square().mean()
        loss.backward()
        return loss.detach()

    for step in range(5):
        tasks = [lambda seed=10 * step + k: micro_batch(seed) for k in range(3)]
        if step % 2:
            with optimizer.final_backward():
                seen += engine.window(tasks, full_step=step == 1)
        else:
            seen += [task() for task in tasks[:2]]
            with optimizer.final_backward():
                seen.append(tasks[2]())
        if step == 2:
            seen.append({name: None if g is None else g.clone() for name, g in gradients(model).items()})
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            with torch.no_grad():
                model.layers[1].scale.mul_(0.5)
            seen.append({name: value + 0 for name, value in model.state_dict().items()})
    seen += [optimizer.grad_norm, roles(engine)]
    engine.close()
    return seen


@pytest.mark.parametrize("clip", [0.5, None])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-sr"])
@pytest.mark.parametrize("placement", [*PLACEMENTS][1:])
def test_placement_does_not_change_bits(placement: str, precision: str, clip: float | None) -> None:
    expected = train({}, clip=clip, precision=precision)
    assert differences(train(PLACEMENTS[placement], clip=clip, precision=precision), expected) == []


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("clip", [0.5, None])
def test_placement_does_not_change_bits_under_delays(placement: str, clip: float | None) -> None:
    expected = train({}, clip=clip, precision="bf16", slots=2)
    for seed in range(8):
        lanes = ThreadLanes(seed=seed, max_delay=3e-4)
        got = train(PLACEMENTS[placement], lanes, clip=clip, precision="bf16", slots=2, grad_slots=1 + seed % 2)
        assert differences(got, expected) == [], seed


def scaled_between(model: Any, engine: mt.Engine, optimizer: Any, step: int) -> None:
    """Scaling may round a sum or not; further gradients are added to the result."""
    for k in range(3):
        optimizer.scale_gradients(0.3)
        backward(model, 3 * step + k)


def scaled_and_written(model: Any, engine: mt.Engine, optimizer: Any, step: int) -> None:
    """Micro-batches skip layers, so that sums are complete only at the end of the window."""
    engine.window([partial(backward, model, 3 * step + k, skip=(k,)) for k in range(3)], full_step=True)
    optimizer.scale_gradients(0.3)
    model.layers[1].scale.grad.mul_(0.7)


def not_the_full_step(model: Any, engine: mt.Engine, optimizer: Any, step: int) -> None:
    """A window declared as the full step that is not."""
    backward(model, 50 + step)
    engine.window([partial(backward, model, 3 * step + k) for k in range(3)], full_step=True)
    backward(model, 60 + step)


def passed_twice(model: Any, engine: mt.Engine, optimizer: Any, step: int) -> None:
    """Every micro-batch passes all blocks twice."""

    def task(seed: int) -> None:
        backward(model, seed)
        backward(model, seed + 20)

    engine.window([partial(task, 3 * step + k) for k in range(3)], full_step=True)


def dropped_and_set(model: Any, engine: mt.Engine, optimizer: Any, step: int) -> None:
    backward(model, step)
    model.layers[0].scale.grad = None
    backward(model, step + 9, skip=(1,))
    model.layers[2].shift.grad = torch.ones(WIDTH)
    backward(model, step + 19)
    if step == 1:
        optimizer.zero_grad()
    with optimizer.final_backward():
        backward(model, step + 39, skip=(0,))


@pytest.mark.parametrize("placement", ["resident", "held gradients", "all kinds"])
@pytest.mark.parametrize(
    "gather", [scaled_between, scaled_and_written, not_the_full_step, passed_twice, dropped_and_set]
)
def test_placement_does_not_change_sums_that_are_rounded_or_dropped(gather: Any, placement: str) -> None:
    def run(placement: dict[str, tuple[str, ...]]) -> list[Any]:
        model = Stack()
        engine = engine_of(model, precision="bf16", **placement)
        optimizer = engine.optimizer(lr=0.1)
        seen: list[Any] = []
        for step in range(3):
            gather(model, engine, optimizer, step)
            seen += [gradients(model), engine.grad_norm()]
            optimizer.step()
            optimizer.zero_grad()
        return [*seen, roles(engine)]

    assert differences(run(PLACEMENTS[placement]), run({})) == []


@pytest.mark.parametrize("compression", [False, "bf16", "8bit", "4bit"])
@pytest.mark.parametrize("policy", ["recompute", "store", "offload"])
def test_a_language_model_with_every_width_and_policy(compression: Any, policy: str) -> None:
    def run(resident: tuple[str, ...], lanes: Any) -> Any:
        model = small.llama(hidden_size=64, intermediate_size=128, tie_word_embeddings=True)
        engine = engine_of(
            model, resident=resident, lanes=lanes, optimizer_compression=compression, precision="bf16", policy=policy
        )
        optimizer = engine.optimizer(lr=1e-2, max_grad_norm=1.0)
        losses = []
        for step in range(3):
            loss = model(**small.batch(2, seed=step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [losses, roles(engine)]

    expected = run((), "sync")
    for resident in (("*",), ("*layers.[01]",), ("*embed*",)):
        assert differences(run(resident, ThreadLanes(seed=1, max_delay=2e-4)), expected) == [], resident


def test_resident_blocks_are_not_copied() -> None:
    model = zoo.build("llama")
    engine = engine_of(model, resident=("*",))
    optimizer = engine.optimizer(lr=1e-3)
    for step in range(2):
        model(**zoo.batch("llama", step, length=6)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.synchronize()
    assert engine.counters.fetches == engine.counters.drains == 0
    assert engine._memory.allocated_bytes == 0
    assert engine._placement.vram.allocated_bytes > 0


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"resident='layer.7' matches no block; the nearest names are layers"):
        engine_of(Stack(), resident=("layers.0", "layer.7"))


def test_a_checkpoint_loads_into_another_placement(tmp_path: Path) -> None:
    def fresh(resident: tuple[str, ...], seed: int = 0) -> tuple[mt.Engine, Any]:
        engine = engine_of(small.llama(seed), resident=resident, precision="bf16")
        return engine, engine.optimizer(lr=1e-2)

    def run(engine: mt.Engine, optimizer: Any, steps: range) -> None:
        for step in steps:
            engine.model(**small.batch(2, seed=step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    engine, optimizer = fresh(("*layers.1*",))
    run(engine, optimizer, range(2))
    engine.save(tmp_path, optimizer)
    run(engine, optimizer, range(2, 4))
    other, other_optimizer = fresh(("*layers.0", "lm_head"), seed=5)
    other.load(tmp_path, other_optimizer)
    run(other, other_optimizer, range(2, 4))
    assert differences(roles(engine), roles(other)) == []


def test_a_model_released_from_gpu_memory_is_complete() -> None:
    engine = engine_of(Stack(), resident=("*",))
    expected = {name: value.clone() for name, value in Stack().state_dict().items()}
    model = engine.release()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert all(value.device.type == "cpu" for value in model.state_dict().values())
