"""Ctrl-C in a window whose lane is stuck."""

import os
import signal
import threading
from typing import Any

import pytest
import torch
from tests.tiny import Stack, differences, engine_of, gradients, inputs

from megatrain.compute.window import _Baton
from megatrain.stream.lanes import ThreadLanes

LONGEST = 300
"""Seconds after which what waits for Ctrl-C goes on, so that a test fails instead of hanging."""


def ctrl_c_after(event: threading.Event) -> threading.Thread:
    def work() -> None:
        event.wait()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("window", [False, True])
def test_ctrl_c_is_raised_while_a_lane_is_stuck(window: bool) -> None:
    lanes = ThreadLanes()
    model = Stack()
    stuck, raised = threading.Event(), threading.Event()
    in_time = []
    engine = engine_of(model, lanes=lanes)
    plain = lanes["h2d"].submit
    calls = []

    def submit(work: Any, after: Any = (), label: str = "", job: str = "") -> Any:
        calls.append(label)

        def slow() -> None:
            if len(calls) > 3:
                stuck.set()
                in_time.append(raised.wait(LONGEST))
            work()

        return plain(slow, after, label, job)

    lanes["h2d"].submit = submit  # type: ignore[method-assign]
    ctrl_c_after(stuck)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with engine:
            task = lambda: model(inputs(0)).square().mean().backward()  # noqa: E731
            engine.window([task, task]) if window else [task() for _ in range(3)]
    assert not in_time, "Ctrl-C was raised only after the lane went on"
    raised.set()


def test_ctrl_c_just_before_the_wait_for_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run already: what they would add later would belong to no window."""
    plain, calls = _Baton.join, []

    def join(baton: _Baton) -> bool:
        calls.append(baton)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return plain(baton)

    monkeypatch.setattr(_Baton, "join", join)
    model = Stack()
    with engine_of(model) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.window([lambda k=k: model(inputs(k)).square().mean().backward() for k in range(2)])
        assert not calls[0].positions, "a micro-batch is still running"
        assert all(gradient is None for gradient in gradients(model).values())
        engine.window([lambda: model(inputs(2)).square().mean().backward()])
        again = gradients(model)
    with engine_of(fresh := Stack()):
        fresh(inputs(2)).square().mean().backward()
        assert differences(again, gradients(fresh)) == []


class Slow(torch.autograd.Function):
    """Waits in the backward, outside any block."""

    entered, release = threading.Event(), threading.Event()

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Slow.entered.set()
        Slow.release.wait(LONGEST)
        return gradient


def test_an_abandoned_micro_batch_stops() -> None:
    """Its gradients must not be added to a later step."""

    def run(interrupted: bool) -> dict[str, torch.Tensor]:
        model = Stack()
        engine = engine_of(model)
        optimizer = engine.optimizer(lr=0.1)
        if interrupted:
            before = threading.enumerate()
            Slow.release.clear()
            Slow.entered.clear()
            ctrl_c_after(Slow.entered)
            with pytest.raises(KeyboardInterrupt):
                engine.window([lambda k=k: Slow.apply(model(inputs(k))).square().mean().backward() for k in range(2)])
            optimizer.zero_grad()
            Slow.release.set()
            for thread in set(threading.enumerate()) - {*before}:
                thread.join(LONGEST)
                assert not thread.is_alive()
            assert not any(slab.grad.present for slab in engine.slabs)
        model(inputs(2)).square().mean().backward()
        return {name: gradient.clone() for name, gradient in gradients(model).items()}

    plain, after = run(False), run(True)
    assert all(torch.equal(plain[name], after[name]) for name in plain)


def test_ctrl_c_before_the_wait_for_micro_batches_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would go on and add their gradients to the next step."""
    join, joined, running, proceed = _Baton.join, threading.Event(), threading.Event(), threading.Event()
    model, ended = Stack(), []

    def interrupted(baton: _Baton) -> bool:
        if not joined.is_set():
            joined.set()
            assert running.wait(60)
            raise KeyboardInterrupt
        proceed.set()
        return join(baton)

    def task() -> None:
        running.set()
        try:
            assert proceed.wait(60)
            model(inputs(0)).square().mean().backward()
        finally:
            ended.append(True)

    monkeypatch.setattr(_Baton, "join", interrupted)
    with engine_of(model) as engine:
        try:
            with pytest.raises(KeyboardInterrupt):
                engine.window([task])
            assert ended
            assert not any(gradient is not None for gradient in gradients(model).values())
        finally:
            proceed.set()
