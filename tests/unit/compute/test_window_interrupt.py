"""Ctrl-C in a window whose lane is stuck."""

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from tests.tiny import Stack, differences, engine_of, gradients, inputs

from megatrain.compute.window import _Baton
from megatrain.stream.lanes import ThreadLanes


@pytest.mark.parametrize("window", [False, True])
def test_ctrl_c_is_raised_within_five_seconds(window: bool) -> None:
    lanes = ThreadLanes()
    model = Stack()
    stuck = threading.Event()
    engine = engine_of(model, lanes=lanes)
    plain = lanes["h2d"].submit
    calls = []

    def submit(work: Any, after: Any = (), label: str = "", job: str = "") -> Any:
        calls.append(label)

        def slow() -> None:
            if len(calls) > 3:
                stuck.wait(60)
            work()

        return plain(slow, after, label, job)

    lanes["h2d"].submit = submit  # type: ignore[method-assign]
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with engine:
            task = lambda: model(inputs(0)).square().mean().backward()  # noqa: E731
            engine.window([task, task]) if window else [task() for _ in range(3)]
    seconds = time.monotonic() - begin
    stuck.set()
    assert seconds < 1.0 + 30.0, f"Ctrl-C was raised after {seconds:.1f} s"


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

    release = threading.Event()

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Slow.release.wait(10)
        return gradient


def test_an_abandoned_micro_batch_stops() -> None:
    """Its gradients must not be added to a later step."""

    def run(interrupted: bool) -> dict[str, torch.Tensor]:
        model = Stack()
        engine = engine_of(model)
        optimizer = engine.optimizer(lr=0.1)
        if interrupted:
            Slow.release.clear()
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                engine.window([lambda k=k: Slow.apply(model(inputs(k))).square().mean().backward() for k in range(2)])
            optimizer.zero_grad()
            Slow.release.set()
            time.sleep(0.5)
            assert not any(slab.grad.present for slab in engine.slabs)
        model(inputs(2)).square().mean().backward()
        return {name: gradient.clone() for name, gradient in gradients(model).items()}

    plain, after = run(False), run(True)
    assert all(torch.equal(plain[name], after[name]) for name in plain)
