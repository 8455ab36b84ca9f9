"""Combinations of optimizers, widths, tiers and early updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests import small
from tests.tiny import Stack, backward, differences, engine_of, inputs, roles, started

from megatrain.errors import NonFiniteGradients
from megatrain.stream.lanes import ThreadLanes

WIDTHS: list[Any] = [False, "bf16", "8bit", "4bit"]


def language_step(engine: Any, optimizer: Any, seed: int) -> float:
    loss = engine.model(**small.batch(2, seed=seed)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def wide_llama(**changes: Any) -> Any:
    """Large enough for quantized moments of matrices."""
    return small.llama(hidden_size=64, intermediate_size=128, **changes)


@pytest.mark.parametrize("saved", WIDTHS)
@pytest.mark.parametrize("loaded", WIDTHS)
def test_a_checkpoint_loads_into_another_width(tmp_path: Path, saved: Any, loaded: Any) -> None:
    first = engine_of(wide_llama(), optimizer_compression=saved)
    optimizer = first.optimizer(lr=1e-2)
    for seed in range(2):
        language_step(first, optimizer, seed)
    first.save(tmp_path, optimizer)
    second = engine_of(wide_llama(seed=7), optimizer_compression=loaded)
    other = second.optimizer(lr=1e-2)
    second.load(tmp_path, other)
    for mine, theirs in zip(first.slabs, second.slabs, strict=True):
        assert mine.steps == theirs.steps
        for role in mine.moments:
            for index in range(len(mine.layout.segments)):
                before, after = mine.moments[role].read(index), theirs.moments[role].read(index)
                # A 4-bit second moment has powers of two only; code 0 of a signed format is zero.
                allowed = 0.0 if saved == loaded or not loaded else 0.51 * before.abs().max().item()
                assert (before - after).abs().max().item() <= allowed
    if saved == loaded:
        assert language_step(first, optimizer, 5) == language_step(second, other, 5)
        assert differences(roles(first), roles(second)) == []


@pytest.mark.parametrize(("kind", "plain"), [("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)])
@pytest.mark.parametrize("width", [False, "8bit"])
def test_training_continues_from_the_state_of_torchs_optimizer(kind: str, plain: Any, width: Any) -> None:
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.0} | ({"momentum": 0.9} if kind == "sgd" else {})
    model = wide_llama()
    theirs = plain(model.parameters(), **options)
    for seed in range(3):
        model(**small.batch(2, seed=seed)).loss.backward()
        theirs.step()
        theirs.zero_grad()
    copied = {name: value.clone() for name, value in model.state_dict().items()}
    twin = wide_llama()
    twin.load_state_dict(copied)
    engine = engine_of(twin, optimizer_compression=width)
    ours = engine.optimizer(kind=kind, **options)
    ours.load_state_dict(theirs.state_dict())
    model(**small.batch(2, seed=9)).loss.backward()
    theirs.step()
    language_step(engine, ours, 9)
    moved = small.furthest(copied, small.snapshot(model))
    apart = small.furthest(small.snapshot(model), small.snapshot(twin))
    assert apart <= (1e-5 if not width else 0.5 * moved)


def test_fp32_parameters_of_a_bf16_model_stay_exact_without_a_master() -> None:
    """`bf16-sr` rounds BF16 weights stochastically; FP32 parameters are updated exactly."""

    def build() -> Stack:
        model = Stack().bfloat16()
        model.layers[1].scale.data = model.layers[1].scale.data.float()
        return model

    model = build()
    engine = engine_of(model, precision="bf16-sr")
    optimizer = engine.optimizer(lr=1e-3)
    assert {slab.weight.dtype for slab in engine.slabs if slab.name == "layers.1"} == {torch.float32, torch.bfloat16}
    assert all(slab.residual is None for slab in engine.slabs)
    scale: Any = model.layers[1].scale
    reference: Any = build().layers[1].scale
    plain = torch.optim.AdamW([reference], lr=1e-3)
    for seed in range(3):
        model(inputs(seed)).float().square().mean().backward()
        reference.grad = (scale.grad + 0).detach()
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
        torch.testing.assert_close((scale + 0).detach(), reference.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("resident", [(), ("*",), ("layers.1",)])
def test_a_parameter_without_gradient_in_an_early_step_counts_no_step(resident: tuple[str, ...]) -> None:
    def run(early: bool, lanes: Any) -> Any:
        model = Stack()
        engine = engine_of(model, lanes=lanes, resident=resident)
        optimizer = engine.optimizer(lr=0.1)
        for step in range(4):
            skip = (1,) if step % 2 else ()
            if early:
                with optimizer.final_backward():
                    backward(model, step, skip=skip)
            else:
                backward(model, step, skip=skip)
            optimizer.step()
            optimizer.zero_grad()
        engine.synchronize()
        layer = next(slab for slab in engine.slabs if slab.name == "layers.1")
        assert layer.steps == [2, 2]
        return roles(engine)

    assert differences(run(True, ThreadLanes(seed=2, max_delay=2e-4)), run(False, "sync")) == []


def test_a_group_added_later_starts_at_its_first_step() -> None:
    model = wide_llama()
    engine = engine_of(model, optimizer_compression="8bit")
    head = [p for name, p in model.named_parameters() if "lm_head" in name]
    optimizer = engine.optimizer([p for name, p in model.named_parameters() if "lm_head" not in name], lr=1e-2)
    language_step(engine, optimizer, 0)
    before = head[0] + 0
    optimizer.add_param_group({"params": head, "lr": 1e-3})
    assert torch.equal(head[0] + 0, before)
    language_step(engine, optimizer, 1)
    engine.synchronize()
    slab = next(slab for slab in engine.slabs if "lm_head" in slab.name)
    assert slab.steps == [1]
    # The first step of AdamW moves a weight by at most the learning rate.
    assert 0.0 < (head[0] - before).abs().max().item() <= 1.1e-3


def test_frozen_and_tied_weights_in_gpu_memory() -> None:
    def run(resident: tuple[str, ...], lanes: Any) -> Any:
        model = small.llama(tie_word_embeddings=True)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("embed" in name or "layers.2" in name)
        engine = engine_of(model, resident=resident, lanes=lanes, precision="bf16")
        optimizer = engine.optimizer(lr=1e-2, max_grad_norm=1.0)
        losses = [language_step(engine, optimizer, seed) for seed in range(3)]
        return [losses, roles(engine)]

    expected = run((), "sync")
    for resident in (("*",), ("*embed*",), ("*layers.[01]",)):
        assert differences(run(resident, ThreadLanes(seed=4, max_delay=2e-4)), expected) == [], resident


def test_training_continues_after_a_bad_early_step() -> None:
    model, engine, optimizer = started()
    scale: Any = model.layers[1].scale
    handle = scale.register_hook(lambda gradient: gradient * float("inf"))
    with optimizer.final_backward():
        backward(model, 1)
    with pytest.raises(NonFiniteGradients):
        optimizer.step()
    handle.remove()
    optimizer.zero_grad()
    with optimizer.final_backward():
        backward(model, 2)
    optimizer.step()
    assert not optimizer.step_was_skipped
    engine.synchronize()
    assert {slab.name: slab.steps[0] for slab in engine.slabs} == {
        "Stack": 2, "entry": 2, "layers.0": 2, "layers.1": 2, "layers.2": 3,
    }  # fmt: skip
    assert engine.counters.skipped_steps == 1
    assert engine.counters.steps == 2


def test_training_continues_after_an_interrupted_step() -> None:
    def run(interrupted: bool, lanes: Any) -> Any:
        model = Stack()
        engine = engine_of(model, lanes=lanes, resident=("layers.1",))
        optimizer = engine.optimizer(lr=0.1, max_grad_norm=1.0)
        for step in range(3):
            if interrupted:

                def interrupt(gradient: torch.Tensor) -> None:
                    raise KeyboardInterrupt

                scale: Any = model.layers[1].scale
                handle = scale.register_hook(interrupt)
                with pytest.raises(KeyboardInterrupt):
                    backward(model, step)
                handle.remove()
                optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        return roles(engine)

    assert differences(run(True, ThreadLanes(seed=5, max_delay=2e-4)), run(False, "sync")) == []


def test_a_model_can_be_attached_again_after_an_error() -> None:
    model = Stack()

    def train() -> None:
        with engine_of(model, lanes=ThreadLanes(), resident=("layers.0",)) as engine:
            optimizer = engine.optimizer(lr=0.1)
            backward(model, 0)
            optimizer.step()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    moved = {name: value.clone() for name, value in model.state_dict().items()}
    again = engine_of(model)
    assert all(torch.equal(value + 0, moved[name]) for name, value in model.state_dict().items())
    backward(model, 1)
    again.close()
