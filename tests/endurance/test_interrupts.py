"""After Ctrl-C at a random moment, the state is bitwise that before or after the step, and training continues.

The long test is `-m slow`; a short one runs with the suite.
"""

import _thread
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.small import batch, llama, same, snapshot
from tests.tiny import Stack, differences, engine_of, inputs, roles

import megatrain as mt
from megatrain.store.parameter import StoreTensor, states_of

State = dict[str, torch.Tensor]
ROUNDS = 3
"""The run restarts from its first state after this many steps, so that the reference stays short."""
ACTIONS = ["step", "step", "window", "final", "eval", "generate"]


class Subject:
    """A run that can be restarted, and its states without interrupts."""

    def __init__(self, lanes: str, policy: str) -> None:
        self.model: Any = llama(num_hidden_layers=2).train()
        self.engine = mt.Engine(self.model, device="cpu", debug=mt.Debug(lanes=lanes, slots=2), policy=policy)
        self.optimizer = self.engine.optimizer(lr=1e-2)
        self.batches = [batch(seed=seed) for seed in range(2 * ROUNDS)]
        self.first = self.copy_state()
        self.at = 0
        self.states = [self.state()]
        self.seconds: dict[str, float] = {}
        for action in ("step", "window", "final", "eval", "generate", "step"):
            begin = time.perf_counter()
            self.do(action)()
            self.engine.synchronize()
            self.seconds[action] = time.perf_counter() - begin
        self.restart()
        for _ in range(ROUNDS):
            self.do("step")()
            self.optimizer.zero_grad()
            self.at += 1
            self.states.append(self.state())
        self.restart()

    def losses(self) -> list[Callable[[], Any]]:
        """The two micro-batches of the current step."""

        def task(number: int) -> None:
            (self.model(**self.batches[2 * min(self.at, ROUNDS - 1) + number]).loss / 2).backward()

        return [lambda: task(0), lambda: task(1)]

    def do(self, action: str) -> Callable[[], Any]:
        return getattr(self, f"_{action}")  # type: ignore[no-any-return]

    def _step(self) -> None:
        for task in self.losses():
            task()
        self.optimizer.step()

    def _window(self) -> None:
        self.engine.window(self.losses())
        self.optimizer.step()

    def _final(self) -> None:
        first, last = self.losses()
        first()
        with self.optimizer.final_backward():
            last()
        self.optimizer.step()

    def _eval(self) -> None:
        with torch.no_grad():
            self.model(**self.batches[0])

    def _generate(self) -> None:
        self.model.generate(self.batches[0]["input_ids"][:, :3], max_new_tokens=3, do_sample=False)

    def state(self) -> State:
        self.engine.synchronize()
        found = snapshot(self.model)
        for name, parameter in self.model.named_parameters():
            assert isinstance(parameter, StoreTensor), name
            found |= {f"{name}/{role}": value.clone() for role, value in states_of(parameter).items()}
            found[f"{name}/steps"] = torch.tensor(parameter.slab.steps[parameter.segment])
        return found

    def copy_state(self) -> tuple[State, Any]:
        state = self.optimizer.state_dict()
        state["state"] = {k: {r: v.clone() for r, v in entry.items()} for k, entry in state["state"].items()}
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}, state

    def restart(self) -> None:
        self.optimizer.zero_grad()
        weights, moments = self.first
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])
        self.optimizer.load_state_dict(moments)
        self.at = 0

    def classify(self) -> int | None:
        """Which of the two states this is after an interrupt; None if neither."""
        torch.set_grad_enabled(True)
        self.optimizer.zero_grad()
        now = self.state()
        return next((at for at in (self.at, self.at + 1) if at <= ROUNDS and same(now, self.states[at])), None)


def interrupted(action: Callable[[], Any], delay: float) -> bool:
    """Whether Ctrl-C after `delay` seconds ended the action."""
    timer = threading.Timer(delay, _thread.interrupt_main)
    try:
        timer.start()
        action()
        done = True
        timer.join()
        time.sleep(0.001)
    except KeyboardInterrupt:
        timer.join()
        return "done" not in locals()
    return False


def interrupt_at_random(lanes: str, policy: str, interrupts: int, seed: int, announced: Any) -> None:
    source = random.Random(seed)
    subject = Subject(lanes, policy)
    torn = hit = 0
    with subject.engine:
        while hit < interrupts:
            action = source.choice(ACTIONS)
            announced.clear()
            if interrupted(subject.do(action), source.uniform(0, 1.1 * subject.seconds[action])):
                hit += 1
            at = subject.classify()
            if at is None:
                # Updates that started in the backward remain, and this is announced. Nothing else may split a step.
                assert action == "final", (action, hit)
                assert any("a step was abandoned after the updates of" in message for message in announced.messages)
                torn += 1
                subject.restart()
                continue
            subject.at = at
            if subject.at == ROUNDS or source.random() < 0.2:
                # Finish the round without interrupts.
                while subject.at < ROUNDS:
                    subject.do(source.choice(["step", "window"]))()
                    subject.optimizer.zero_grad()
                    subject.at += 1
                    assert same(subject.state(), subject.states[subject.at]), action
                subject.restart()
        subject.restart()
        last = subject.state()
    assert torn <= hit // 3
    released = dict(subject.engine.release().named_parameters())
    assert all(type(p) is torch.nn.Parameter for p in released.values())
    assert all(torch.equal(p.detach(), last[name]) for name, p in released.items())


@pytest.mark.parametrize(("lanes", "policy"), [("sync", "recompute"), ("threads", "offload")])
def test_state_after_an_interrupt_is_before_or_after_the_step(lanes: str, policy: str, announced: Any) -> None:
    interrupt_at_random(lanes, policy, 20, seed=1, announced=announced)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", ["sync", "threads"])
@pytest.mark.parametrize("policy", ["recompute", "store", "offload"])
def test_state_after_many_interrupts_is_before_or_after_the_step(lanes: str, policy: str, announced: Any) -> None:
    interrupt_at_random(lanes, policy, 300, seed=2, announced=announced)


# ---- every call of a step


CODE = ("/megatrain/", "/torch/nn/")
"""Calls that PyTorch makes on modules matter here; its context managers do not."""


class InterruptAt:
    """Raises SIGINT at the n-th point where the interpreter handles signals: when a call starts, or a C call ends."""

    def __init__(self, number: int) -> None:
        self.number, self.count = number, 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_return") and any(part in frame.f_code.co_filename for part in CODE):
            self.count += 1
            if self.count == self.number:
                signal.raise_signal(signal.SIGINT)

    def run(self, action: Callable[[], Any]) -> None:
        sys.setprofile(self)
        try:
            action()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)


def layers(lanes: str) -> tuple[Any, mt.Engine, Any, Callable[[], Any]]:
    model = Stack(depth=2)
    engine = engine_of(model, lanes=lanes, slots=2)
    optimizer = engine.optimizer(lr=0.1)

    def step() -> None:
        model(inputs(0)).square().mean().backward()
        optimizer.step()

    return model, engine, optimizer, step


def sweep(lanes: str, stride: int) -> None:
    model, engine, optimizer, step = layers(lanes)
    before = roles(engine)
    step()
    optimizer.zero_grad()
    after = roles(engine)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    counting = InterruptAt(-1)
    counting.run(step)
    for number in range(1 + random.Random(stride).randrange(stride), counting.count, stride):
        model, engine, optimizer, step = layers(lanes)
        with engine:
            InterruptAt(number).run(step)
            optimizer.zero_grad()
            plain = [name for name, parameter in model.named_parameters() if not isinstance(parameter, StoreTensor)]
            assert not plain, (number, plain)
            rings = engine._step.fetcher._rings.values()
            assert not any(slot.pins for ring in rings for slot in ring.slots), number
            now = roles(engine)
            assert not differences(now, before) or not differences(now, after), number
            if not differences(now, before):
                step()
                optimizer.zero_grad()
            assert not differences(roles(engine), after), number
        for name, parameter in engine.release().named_parameters():
            assert type(parameter) is torch.nn.Parameter, (number, name)
            assert torch.equal(parameter, weights[name]), (number, name)


@pytest.mark.parametrize("lanes", ["sync", "threads"])
def test_interrupts_at_sampled_calls_of_a_step(lanes: str) -> None:
    sweep(lanes, stride=89)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", ["sync", "threads"])
def test_interrupts_at_many_calls_of_a_step(lanes: str) -> None:
    sweep(lanes, stride=3)
