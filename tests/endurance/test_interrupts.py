"""Ctrl-C at random moments: the state is that before the step or after it, bit for bit, and training goes on.

The long walk is `-m slow`; a short one runs with the suite.
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
"""Steps after which the run starts again from its first state, so that the reference stays short."""
ACTIONS = ["step", "step", "window", "final", "eval", "generate"]


class Subject:
    """A run that can be put back, and the states that it has if nobody interrupts it."""

    def __init__(self, lanes: str, policy: str) -> None:
        self.model: Any = llama(num_hidden_layers=2).train()
        self.engine = mt.Engine(self.model, device="cpu", debug=mt.Debug(lanes=lanes, slots=2), policy=policy)
        self.optimizer = self.engine.optimizer(lr=1e-2)
        self.batches = [batch(seed=seed) for seed in range(2 * ROUNDS)]
        self.first = self.take()
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
        """The two micro-batches of the step that is due."""

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

    def take(self) -> tuple[State, Any]:
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

    def settle(self) -> int | None:
        """After an interrupt: which of the two states this is; None if it is neither."""
        torch.set_grad_enabled(True)
        self.optimizer.zero_grad()
        now = self.state()
        return next((at for at in (self.at, self.at + 1) if at <= ROUNDS and same(now, self.states[at])), None)


def interrupted(action: Callable[[], Any], delay: float) -> bool:
    """Whether a Ctrl-C after `delay` seconds ended the action."""
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


def walk(lanes: str, policy: str, interrupts: int, seed: int, said: Any) -> None:
    source = random.Random(seed)
    subject = Subject(lanes, policy)
    torn = hit = 0
    with subject.engine:
        while hit < interrupts:
            action = source.choice(ACTIONS)
            said.clear()
            if interrupted(subject.do(action), source.uniform(0, 1.1 * subject.seconds[action])):
                hit += 1
            at = subject.settle()
            if at is None:
                # Updates that had started in the backward stay; nothing else may tear a step, nor this in silence.
                assert action == "final", (action, hit)
                assert any("a step was abandoned after the updates of" in message for message in said.messages)
                torn += 1
                subject.restart()
                continue
            subject.at = at
            if subject.at == ROUNDS or source.random() < 0.2:
                # From here on as if there had been no interrupt.
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
def test_interrupts(lanes: str, policy: str, said: Any) -> None:
    walk(lanes, policy, 20, seed=1, said=said)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", ["sync", "threads"])
@pytest.mark.parametrize("policy", ["recompute", "store", "offload"])
def test_many_interrupts(lanes: str, policy: str, said: Any) -> None:
    walk(lanes, policy, 300, seed=2, said=said)


# ---- every call of a step


CODE = ("/megatrain/", "/torch/nn/")
"""What PyTorch does to a module is of interest here; how it builds a context manager is not."""


class Ending:
    """Raises Ctrl-C at the n-th point at which the interpreter looks for signals: a call begins, or one of C ends."""

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
    counting = Ending(-1)
    counting.run(step)
    for number in range(1 + random.Random(stride).randrange(stride), counting.count, stride):
        model, engine, optimizer, step = layers(lanes)
        with engine:
            Ending(number).run(step)
            optimizer.zero_grad()
            plain = [name for name, parameter in model.named_parameters() if not isinstance(parameter, StoreTensor)]
            assert not plain, (number, plain)
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
def test_calls_of_a_step(lanes: str) -> None:
    sweep(lanes, stride=89)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", ["sync", "threads"])
def test_many_calls_of_a_step(lanes: str) -> None:
    sweep(lanes, stride=3)
