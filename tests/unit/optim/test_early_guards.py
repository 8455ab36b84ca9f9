"""Misuse of updates that start in the backward is refused, and errors leave a consistent state."""

import time
from typing import Any

import pytest
import torch
from tests.tiny import Stack, backward, differences, engine_of, inputs, roles, started

from megatrain.errors import NonFiniteGradients, UnsupportedCall
from megatrain.stream.lanes import ThreadLanes


def test_two_optimizers_final_backward_of_one_step_of_the_other_first() -> None:
    def run(early: bool) -> Any:
        model = Stack()
        engine = engine_of(model)
        weights = [p for n, p in model.named_parameters() if "scale" in n or "weight" in n]
        rest = [p for n, p in model.named_parameters() if not ("scale" in n or "weight" in n)]
        a, b = engine.optimizer(weights, lr=0.1), engine.optimizer(rest, lr=0.1)
        for step in range(3):
            if early:
                with a.final_backward():
                    backward(model, step)
            else:
                backward(model, step)
            b.step()
            a.step()
            a.zero_grad()
        return roles(engine)

    assert differences(run(True), run(False)) == []


def test_no_update_starts_early_if_the_step_clips() -> None:
    def run(early: bool) -> Any:
        model, engine, optimizer = started()
        if early:
            optimizer.clip_next_step(1e-3)
            with optimizer.final_backward():
                backward(model, 1)
        else:
            backward(model, 1)
            optimizer.clip_next_step(1e-3)
        optimizer.step()
        return roles(engine)

    assert differences(run(True), run(False)) == []


def test_a_second_final_backward_before_the_step_is_refused() -> None:
    model, engine, optimizer = started()
    with optimizer.final_backward():
        backward(model, 1)
    again = optimizer.final_backward()
    with pytest.raises(UnsupportedCall, match="entered again before step"):
        again.__enter__()
    optimizer.step()
    assert all(slab.steps == [2] * len(slab.steps) for slab in engine.slabs)


def test_writing_a_gradient_after_its_update_started_is_refused() -> None:
    model, _engine, optimizer = started()
    with optimizer.final_backward():
        backward(model, 1)
    scale: Any = model.layers[2].scale
    with pytest.raises(UnsupportedCall, match="after its update had started"):
        scale.grad.zero_()
    with pytest.raises(UnsupportedCall, match="after its update had started"):
        scale.grad = torch.zeros(8)
    with pytest.raises(UnsupportedCall, match="after its update had started"):
        scale.grad = None


def test_a_learning_rate_changed_before_step_is_refused() -> None:
    """Slabs updated early would use the old learning rate, the others the new one."""
    model, _engine, optimizer = started()
    with optimizer.final_backward():
        backward(model, 1)
    optimizer.param_groups[0]["lr"] = 0.0
    with pytest.raises(UnsupportedCall, match="was changed between final_backward"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()


def test_after_an_error_in_the_last_backward_a_step_does_not_apply_gradients_twice() -> None:
    model, engine, optimizer = started()

    def explode(gradient: torch.Tensor) -> None:
        raise RuntimeError("in the middle")

    handle = model.layers[0].scale.register_hook(explode)
    with pytest.raises(RuntimeError, match="in the middle"), optimizer.final_backward():
        backward(model, 1)
    handle.remove()
    optimizer.step()
    engine.synchronize()
    steps = {slab.name: slab.steps for slab in engine.slabs}
    assert max(max(s) for s in steps.values()) <= 2, steps


class SlowNorm(ThreadLanes):
    """Delays the norm, so that gradients of the next step arrive before it is computed."""

    def __init__(self, pause: float) -> None:
        super().__init__()
        plain = self["update"].submit

        def submit(work: Any, after: Any = (), label: str = "", job: str = "") -> Any:
            def slow() -> None:
                if label == "norm":
                    time.sleep(pause)
                work()

            return plain(slow, after, label, job)

        self["update"].submit = submit  # type: ignore[method-assign]


def test_the_norm_of_an_early_step_ignores_gradients_of_the_next() -> None:
    def run(lanes: Any, early: bool) -> list[float]:
        model = Stack()
        # With the model's own parameter frozen, every slab is updated early and the next step waits for nothing.
        model.gain.requires_grad_(False)
        engine = engine_of(model, lanes=lanes, precision="fp32")
        optimizer = engine.optimizer(lr=0.1)
        outcomes = []
        for step in range(3):
            backward(model, 10 * step)
            if early:
                with optimizer.final_backward():
                    backward(model, 10 * step + 1)
            else:
                backward(model, 10 * step + 1)
            optimizer.step()
            outcomes.append(optimizer._outcome)
            optimizer.zero_grad()
        engine.synchronize()
        for outcome in outcomes:
            outcome.ticket.wait()
        found = [outcome.norm for outcome in outcomes]
        engine.close()
        return found

    assert run(SlowNorm(0.2), True) == run("sync", False)


class SlowGpuUpdate(ThreadLanes):
    def __init__(self, pause: float) -> None:
        super().__init__()
        plain = self["gpu_update"].submit

        def submit(work: Any, after: Any = (), label: str = "", job: str = "") -> Any:
            def slow() -> None:
                if label == self_.slow:
                    time.sleep(pause)
                work()

            return plain(slow, after, label, job)

        self_ = self
        self.slow = ""
        self["gpu_update"].submit = submit  # type: ignore[method-assign]


def test_a_bad_gradient_names_updated_resident_blocks(announced: pytest.LogCaptureFixture) -> None:
    """layers.2 is resident and updated in the backward. The norm runs on another lane and does not wait for it."""
    lanes = SlowGpuUpdate(0.3)
    model = Stack()
    engine = engine_of(model, lanes=lanes, resident=("layers.2",))
    optimizer = engine.optimizer(lr=0.1)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    engine.synchronize()
    before = roles(engine)
    model.layers[1].scale.register_hook(lambda gradient: gradient * float("nan"))
    # The update is slow, between its check of `skipped` and its writes.
    plain = engine._step.updates.kernels["vram"]
    engine._step.updates.kernels["vram"] = lambda operands: (time.sleep(0.3), plain(operands))[1]
    with optimizer.final_backward():
        backward(model, 1)
    raised = False
    try:
        optimizer.step()
        engine.synchronize()
        model(inputs(2))
    except NonFiniteGradients:
        raised = True
    engine.synchronize()
    changed = differences(before, roles(engine))
    assert raised or not changed, (changed, announced.messages)
