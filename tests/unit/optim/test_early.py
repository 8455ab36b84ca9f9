"""Without clipping, updates start during the last backward, as gradients become complete, with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.parity import zoo
from tests.tiny import Stack, backward, differences, engine_of, inputs, roles, started

from megatrain.errors import NonFiniteGradients, UnsupportedCall
from megatrain.stream.lanes import ThreadLanes

LANES = {"sync": lambda: "sync", "threads": lambda: ThreadLanes(seed=3, max_delay=2e-4)}


@pytest.fixture(params=LANES.values(), ids=LANES.keys())
def lanes(request: Any) -> Any:
    return request.param()


def run(lanes: Any, early: bool, precision: str = "fp32", windows: bool = False, micro: int = 2) -> Any:
    model = Stack()
    engine = engine_of(model, lanes=lanes, precision=precision)
    optimizer = engine.optimizer(lr=0.1)
    norms = []
    for step in range(4):
        tasks = [lambda seed=10 * step + k: backward(model, seed) for k in range(micro)]
        if windows and early:
            with optimizer.final_backward():
                engine.window(tasks, full_step=True)
        elif windows:
            engine.window(tasks, full_step=True)
        else:
            for task in tasks[:-1]:
                task()
            if early:
                with optimizer.final_backward():
                    tasks[-1]()
            else:
                tasks[-1]()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    seen = [norms, roles(engine), engine.counters.steps]
    engine.close()
    return seen


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("windows", [False, True])
def test_early_updates_have_the_bits_of_a_step_after_the_backward(lanes: Any, precision: str, windows: bool) -> None:
    assert differences(run(lanes, True, precision, windows), run("sync", False, precision, windows)) == []


def updates_before_step(model: Any, engine: Any, optimizer: Any, batch: Any) -> set[str]:
    """Names of the slabs whose update was submitted before the last backward ended."""
    before = {slab.index: slab.version for slab in engine.slabs}
    with optimizer.final_backward():
        batch()
    found = {slab.name for slab in engine.slabs if slab.version != before[slab.index]}
    optimizer.step()
    optimizer.zero_grad()
    return found


def test_updates_have_started_when_the_backward_ends() -> None:
    model = Stack()
    engine = engine_of(model)
    optimizer = engine.optimizer(lr=0.1)
    # The first step discovers shared weights. The model's own parameter is used outside any block, so its update waits.
    assert updates_before_step(model, engine, optimizer, lambda: backward(model, 0)) == set()
    found = updates_before_step(model, engine, optimizer, lambda: backward(model, 1))
    assert found == {"entry", "layers.0", "layers.1", "layers.2"}


def test_head_and_layers_update_early_and_shared_weights_wait() -> None:
    for tied in (False, True):
        model = zoo.build("llama", tie_word_embeddings=tied)
        engine = engine_of(model)
        optimizer = engine.optimizer(lr=1e-3)
        for step in range(2):
            loss = model(**zoo.batch("llama", step, length=6)).loss
            found = updates_before_step(model, engine, optimizer, loss.backward)
        assert {name for name in found if "layers" in name} == {b.name for b in engine.blocks if "layers" in b.name}
        assert any("lm_head" in name for name in found) is not tied
        assert not tied or not any("embed" in name for name in found)


def test_two_forwards_before_one_backward_are_one_gradient(lanes: Any) -> None:
    def train(early: bool, lanes: Any) -> Any:
        model = Stack()
        engine = engine_of(model, lanes=lanes)
        optimizer = engine.optimizer(lr=0.1)
        for step in range(3):
            loss = model(inputs(step)).square().mean() + model(inputs(step + 50)).square().mean()
            if early:
                with optimizer.final_backward():
                    loss.backward()
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return roles(engine)

    assert differences(train(True, lanes), train(False, "sync")) == []


def test_another_backward_after_the_last_one_is_refused() -> None:
    model, _engine, optimizer = started()
    with optimizer.final_backward():
        backward(model, 1)
    with pytest.raises(UnsupportedCall, match=r"got another gradient after its update had started"):
        backward(model, 2)


def test_with_clipping_nothing_starts_early() -> None:
    model, engine, optimizer = started(max_grad_norm=1.0)
    assert updates_before_step(model, engine, optimizer, lambda: backward(model, 1)) == set()


def test_a_bad_gradient_raises_and_names_updated_blocks(lanes: Any) -> None:
    model, engine, optimizer = started(lanes=lanes)
    before = roles(engine)
    # The backward runs from the last layer to the first: layer 2 is updated before layer 1's gradient becomes NaN.
    model.layers[1].scale.register_hook(lambda gradient: gradient * float("nan"))
    with optimizer.final_backward():
        backward(model, 1)

    def continue_training() -> None:
        optimizer.step()
        engine.synchronize()
        model(inputs(2))

    with pytest.raises(NonFiniteGradients, match=r"1 parts of the model had been updated in the backward \(layers.2\)"):
        continue_training()
    changed = {where.split(".")[1].split("/")[0] for where in differences(before, roles(engine))}
    assert changed == {str(next(slab.index for slab in engine.slabs if slab.name == "layers.2"))}
    optimizer.zero_grad()
    model(inputs(2))


def test_an_abandoned_step_is_announced(announced: pytest.LogCaptureFixture) -> None:
    model, _engine, optimizer = started()

    def explode(gradient: torch.Tensor) -> None:
        raise RuntimeError("in the middle")

    model.layers[0].scale.register_hook(explode)
    with pytest.raises(RuntimeError, match="in the middle"), optimizer.final_backward():
        backward(model, 1)
    assert any(
        "abandoned after the updates of 2 of" in line and "layers.2, layers.1" in line for line in announced.messages
    )
