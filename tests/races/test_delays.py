"""Lanes on threads with random delays give the bits of lanes that run inline; and each wait that makes it so, taken
away, is missed.

Layers do almost no arithmetic, so that compute is always on the heels of the copies: a missing wait fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from tests.parity import zoo
from tests.tiny import Stack, differences, engine_of, gradients, inputs, roles

from megatrain.errors import MegaTrainError
from megatrain.store.parameter import StoreTensor
from megatrain.store.slab import Gradient, Slab
from megatrain.store.ticket import DONE, Ticket
from megatrain.stream.lanes import Lane, Lanes, SyncLanes, ThreadLanes, Work

MAX_DELAY = 3e-4
SEEDS = 200
CHUNK = 20


# ---- what a user may do, in an order that leaves work pending at every turn


def train(lanes: Lanes, precision: str = "fp32", **settings: Any) -> list[Any]:
    """Everything that was seen on the way. Nothing here waits for the lanes but what reads a value."""
    model = Stack()
    engine = engine_of(model, lanes=lanes, precision=precision, slots=2, **settings)
    scales = [p for name, p in model.named_parameters() if "scale" in name]
    others = [p for name, p in model.named_parameters() if "scale" not in name]
    optimizer = engine.optimizer(
        [{"params": scales, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}], lr=0.1, max_grad_norm=0.5
    )
    seen: list[Any] = []
    for step in range(4):
        for micro in range(1 + step % 3):
            skip = (1,) if (step, micro) == (2, 0) else ()
            loss = model(inputs(10 * step + micro), skip=skip).square().mean()
            loss.backward()
            seen.append(loss.detach())
        if step == 1:
            seen.append(gradients(model))
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        optimizer.zero_grad()
        if step == 0:
            with torch.no_grad():
                seen.append(model(inputs(99)))
        if step == 2:
            seen.append({name: value + 0 for name, value in model.state_dict().items()})
    seen.append(optimizer.grad_norm)
    seen.append(roles(engine))
    engine.close()
    return seen


def interfere(lanes: Lanes) -> list[Any]:
    """Steps abandoned half-way, gradients and weights set by hand while updates are pending, graphs that outlive a
    step."""
    model = Stack()
    engine = engine_of(model, lanes=lanes, slots=3, grad_slots=1)
    optimizer = engine.optimizer(lr=0.1, max_grad_norm=0.5)
    seen: list[Any] = []
    # Gradients thrown away while they are being summed.
    for seed in range(3):
        model(inputs(seed)).square().mean().backward()
    optimizer.zero_grad()
    model(inputs(3)).square().mean().backward()
    seen.append(gradients(model))
    # A graph made before the step whose gradient arrives after it, without passing any block.
    penalty = (model.gain * torch.arange(8.0)).sum() + model.layers[0].scale.sum()
    optimizer.step()
    optimizer.zero_grad()
    penalty.backward()
    seen.append(gradients(model))
    # A gradient and a weight set right after a step.
    optimizer.step()
    model.layers[0].scale.grad = torch.full((8,), 3.0)
    optimizer.step()
    model.layers[0].scale.data = torch.linspace(-1, 1, 8)
    with torch.no_grad():
        model.layers[1].scale.mul_(0.5)
    optimizer.zero_grad()
    loss = model(inputs(4)).square().mean()
    loss.backward()
    seen += [loss.detach(), gradients(model), roles(engine)]
    engine.close()
    return seen


def bystander(lanes: Lanes) -> list[Any]:
    """A parameter with gradients that no optimizer updates: they count for the norm, so the next one must not land
    before the norm is taken."""
    model = Stack()
    engine = engine_of(model, lanes=lanes)
    optimizer = engine.optimizer(list(model.layers.parameters()), lr=0.1, max_grad_norm=0.5)
    seen: list[Any] = []
    for step in range(3):
        for micro in range(2):
            model(inputs(2 * step + micro)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        (model.gain * torch.full((8,), 1e3)).sum().backward()
        seen.append(optimizer.grad_norm)
        optimizer.zero_grad()
    seen.append(roles(engine))
    engine.close()
    return seen


def windows(lanes: Lanes) -> list[Any]:
    """Micro-batches that pass each layer together, in one window, in two, and after others that came alone."""
    model = Stack()
    engine = engine_of(model, lanes=lanes, precision="bf16", slots=2, grad_slots=1)
    optimizer = engine.optimizer(lr=0.1, max_grad_norm=0.5)
    seen: list[Any] = []

    def micro_batch(seed: int) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            loss = model(inputs(seed), skip=(1,) if seed == 3 else ()).square().mean()
            loss.backward()
            return loss.detach()

        return run

    for step in range(3):
        tasks = [micro_batch(4 * step + micro) for micro in range(4)]
        if step == 0:
            seen += engine.window(tasks[:3]) + engine.window(tasks[3:])
        elif step == 1:
            seen += engine.window(tasks, whole=True)
        else:
            seen += [tasks[0](), tasks[1](), *engine.window(tasks[2:])]
        optimizer.step()
        optimizer.zero_grad()
    seen.append(roles(engine))
    engine.close()
    return seen


def early(lanes: Lanes) -> list[Any]:
    """Without clipping: updates that start in the backward, in windows and outside them."""
    model = Stack()
    engine = engine_of(model, lanes=lanes, precision="bf16", slots=2, grad_slots=1)
    optimizer = engine.optimizer(lr=0.1)
    seen: list[Any] = []

    def micro_batch(seed: int) -> None:
        model(inputs(seed)).square().mean().backward()

    for step in range(5):
        if step % 2:
            with optimizer.final_backward():
                engine.window([partial(micro_batch, 3 * step + micro) for micro in range(3)], whole=step == 1)
        else:
            micro_batch(3 * step)
            with optimizer.final_backward():
                micro_batch(3 * step + 1)
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.7
        optimizer.zero_grad()
    seen += [optimizer.grad_norm, roles(engine)]
    engine.close()
    return seen


def peek(lanes: Lanes) -> list[Any]:
    """A look at one layer before every other step: in the steps between, its fetch is a wrong guess, under way when
    the step comes."""
    model = Stack()
    engine = engine_of(model, lanes=lanes, slots=2)
    optimizer = engine.optimizer(lr=0.1)
    seen: list[Any] = []
    for step in range(4):
        model(inputs(step)).square().mean().backward()
        if step % 2 == 0:
            with torch.no_grad():
                seen.append(model.layers[2](inputs(99)))
        optimizer.step()
        optimizer.zero_grad()
    seen.append(roles(engine))
    engine.close()
    return seen


def language_model(lanes: Lanes) -> list[Any]:
    model = zoo.build("llama", tie_word_embeddings=True)
    engine = engine_of(model, lanes=lanes, precision="bf16")
    optimizer = engine.optimizer(lr=1e-2, max_grad_norm=1.0)
    seen: list[Any] = []
    for step in range(2):
        for micro in range(1 + step):
            loss = model(**zoo.batch("llama", 2 * step + micro, length=6)).loss
            loss.backward()
            seen.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    seen.append(roles(engine))
    engine.close()
    return seen


def chunks(count: int) -> list[range]:
    return [range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]


@pytest.fixture(scope="module")
def expected() -> Callable[[Callable[..., list[Any]]], list[Any]]:
    known: dict[Any, list[Any]] = {}

    def of(scenario: Callable[..., list[Any]], **settings: Any) -> list[Any]:
        key = (scenario, *settings.items())
        if key not in known:
            known[key] = scenario(SyncLanes(), **settings)
        return known[key]

    return of


@pytest.mark.parametrize("seeds", chunks(SEEDS), ids=str)
def test_training_does_not_depend_on_delays(seeds: range, expected: Any):
    for seed in seeds:
        settings = {"precision": ("fp32", "bf16")[seed % 2], "grad_slots": 1 + seed // 2 % 3}
        got = train(ThreadLanes(seed=seed, max_delay=MAX_DELAY), **settings)
        assert differences(got, expected(train, **settings)) == [], seed


@pytest.mark.parametrize("seeds", chunks(SEEDS // 2), ids=str)
def test_interference_does_not_depend_on_delays(seeds: range, expected: Any):
    for seed in seeds:
        got = interfere(ThreadLanes(seed=seed, max_delay=MAX_DELAY))
        assert differences(got, expected(interfere)) == [], seed


@pytest.mark.parametrize("scenario", [language_model, bystander, windows, peek, early])
def test_other_scenarios_do_not_depend_on_delays(scenario: Any, expected: Any):
    for seed in range(20):
        got = scenario(ThreadLanes(seed=seed, max_delay=MAX_DELAY))
        assert differences(got, expected(scenario)) == [], seed


def test_threads_without_delays(expected: Any):
    assert differences(train(ThreadLanes()), expected(train)) == []
    assert differences(interfere(ThreadLanes()), expected(interfere)) == []


def test_the_scenarios_change_everything(expected: Any):
    """An update that does nothing would hide every race: weights, moments and losses must move."""
    seen = expected(train)
    losses = [value for value in seen if isinstance(value, torch.Tensor) and value.ndim == 0]
    assert len(set(map(float, losses))) == len(losses)
    for slab in range(5):
        assert seen[-1][f"{slab}/exp_avg"].any()
    assert seen[-1]["3/steps"] == [4, 4]
    assert seen[-1]["2/steps"] == [4, 4]
    assert seen[-2] > 0.5, "the clip factor must bite"


# ---- each wait of a lane, taken away


class NoOrder:
    """A ticket that compute does not wait for; lanes still do."""

    def __init__(self, ticket: Ticket) -> None:
        self.wait = ticket.wait
        self.lane = ticket.lane

    def order(self) -> None:
        return None


class Tampered:
    """A lane that forgets some of what its work should come after."""

    def __init__(self, lane: Any, forget: Callable[[Sequence[Ticket], str], Sequence[Ticket]], unordered: bool) -> None:
        self.lane, self.forget, self.unordered = lane, forget, unordered

    def submit(self, work: Work, after: Sequence[Ticket] = (), label: str = "") -> Ticket:
        ticket = self.lane.submit(work, self.forget(after, label), label)
        return NoOrder(ticket) if self.unordered else ticket


@dataclass(frozen=True)
class Wait:
    """One wait of the code: the lane, how many tickets the submission names, and which of them are forgotten."""

    lane: str
    named: int | None
    """None: not a wait of the lane, but of compute for what the lane hands out."""
    places: tuple[int, ...]
    slow: str
    """The lane that has to lag for the wait to matter."""
    scenario: Callable[[Lanes], list[Any]]
    lag: float = 2e-3
    label: str = ""
    """What the label of the submission begins with."""


NEEDED = {
    "a fetch waits for the slab's update": Wait("h2d", 2, (0,), "update", train),
    "compute waits for the copy to its slot": Wait("h2d", None, (), "h2d", train),
    "compute waits until its gradient slot is drained": Wait("d2h", None, (), "d2h", train),
    "a landing waits for the update that reads its buffer": Wait("d2h", 3, (2,), "update", interfere),
    "a landing waits for the sum that is going on there": Wait("d2h", 3, (1,), "update", interfere, lag=1e-2),
    "staging waits for the sum that reads it": Wait("d2h", 2, (1,), "update", train),
    "a sum waits for the copy to staging": Wait("update", 3, (0,), "d2h", train),
    "the norm waits for the gradients to land": Wait("update", 5, (0, 1, 2, 3, 4), "d2h", train, label="norm"),
    "a tied gradient is merged when its parts have landed": Wait(
        "update", 3, (0, 1, 2), "d2h", language_model, label="merge"
    ),
    "an update in the backward waits for its gradient": Wait("update", 2, (0,), "d2h", early, lag=5e-3),
    "a window goes on with a sum that is complete": Wait("h2d", 2, (0,), "update", windows, lag=1e-2, label="sum of"),
}

IMPLIED = {
    # On the CPU compute is finished when it returns.
    "a fetch waits for the compute that used its slot": Wait("h2d", 2, (1,), "h2d", train),
    # The copy to staging comes after the landing on the same lane; sums and updates share a lane.
    "a sum waits for the landing and the update": Wait("update", 3, (1, 2), "d2h", train),
    # They share a lane.
    "an update waits for the norm": Wait("update", 2, (0,), "update", train),
}
"""Waits that the order inside a lane already implies. One that is needed some day must move up."""


def tampered(wait: Wait, seed: int) -> ThreadLanes:
    """Delays as in the tests above, and one lane that lags by more than all of them."""
    lanes = ThreadLanes(seed=seed, max_delay=MAX_DELAY)

    def forget(after: Sequence[Ticket], label: str) -> Sequence[Ticket]:
        if len(after) != wait.named or not label.startswith(wait.label):
            return after
        return [ticket for place, ticket in enumerate(after) if place not in wait.places]

    slow: Any = getattr(lanes, wait.slow)
    slow._delay = lambda: wait.lag
    lane: Lane = Tampered(getattr(lanes, wait.lane), forget, unordered=wait.named is None)
    setattr(lanes, wait.lane, lane)
    return lanes


def lagging(lane: str, seed: int) -> ThreadLanes:
    return tampered(Wait(lane, -1, (), lane, train), seed)


def noticed(run: Callable[[int], list[Any]], reference: list[Any], seeds: int = 10) -> bool:
    """Whether any seed gives other bits, or raises."""
    for seed in range(seeds):
        try:
            got = run(seed)
        except (RuntimeError, MegaTrainError):
            return True
        if differences(got, reference):
            return True
    return False


@pytest.mark.parametrize("wait", NEEDED.values(), ids=NEEDED.keys())
def test_a_missing_wait_is_noticed(wait: Wait, expected: Any):
    assert noticed(lambda seed: wait.scenario(tampered(wait, seed)), expected(wait.scenario))


@pytest.mark.parametrize("lane", ["h2d", "d2h", "update"])
def test_a_lagging_lane_alone_is_not(lane: str, expected: Any):
    """What the test above notices is the missing wait, not the lag."""
    for scenario in (train, interfere, bystander, windows, peek, early):
        assert differences(scenario(lagging(lane, seed=0)), expected(scenario)) == []


@pytest.mark.parametrize("wait", IMPLIED.values(), ids=IMPLIED.keys())
def test_waits_that_the_order_of_a_lane_implies(wait: Wait, expected: Any):
    for seed in range(3):
        assert differences(wait.scenario(tampered(wait, seed)), expected(wait.scenario)) == []


# ---- each wait of the user's thread, taken away


def read_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slab, "settle", lambda slab: None)


def write_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def overwrite(slab: Slab) -> None:
        slab.version += 1

    monkeypatch.setattr(Slab, "overwrite", overwrite)


def read_gradient_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gradient, "look", Gradient.snapshot)


def write_gradient_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    write = StoreTensor.write

    def hasty(tensor: StoreTensor, values: torch.Tensor) -> None:
        written, tensor.slab.written = tensor.slab.written, DONE if tensor.role == "grad" else tensor.slab.written
        try:
            write(tensor, values)
        finally:
            tensor.slab.written = written

    monkeypatch.setattr(StoreTensor, "write", hasty)


@pytest.mark.parametrize(
    ("tamper", "slow", "scenario"),
    [
        (read_without_waiting, "update", train),
        (write_without_waiting, "update", interfere),
        (read_gradient_without_waiting, "d2h", train),
        (write_gradient_without_waiting, "update", interfere),
    ],
)
def test_a_hasty_user_is_noticed(
    tamper: Callable[..., None], slow: str, scenario: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
):
    reference = expected(scenario)
    tamper(monkeypatch)
    assert noticed(lambda seed: scenario(lagging(slow, seed)), reference)


# ---- copies see exactly the update they were submitted after


class Watched:
    """Counts updates per slab as they are submitted and as they are done, and looks what each copy finds."""

    def __init__(self, lanes: ThreadLanes) -> None:
        self.submitted: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.copies = self.updates = 0
        h2d, update = lanes.h2d.submit, lanes.update.submit
        lanes.h2d.submit = partial(self._copy, h2d)  # type: ignore[method-assign]
        lanes.update.submit = partial(self._update, update)  # type: ignore[method-assign]

    def _copy(self, submit: Any, work: Work, after: Sequence[Ticket] = (), label: str = "") -> Ticket:
        due = self.submitted[label]

        def look() -> None:
            self.copies += 1
            work()
            if self.done[label] != due:
                self.wrong.append(f"{label}: a copy of update {due} found update {self.done[label]}")

        return submit(look, after, label)  # type: ignore[no-any-return]

    def _update(self, submit: Any, work: Work, after: Sequence[Ticket] = (), label: str = "") -> Ticket:
        if len(after) != 2:  # a sum of gradients, or the norm
            return submit(work, after, label)  # type: ignore[no-any-return]
        self.submitted[label] += 1

        def count() -> None:
            self.updates += 1
            work()
            self.done[label] += 1

        return submit(count, after, label)  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(5))
def test_a_copy_finds_the_update_it_was_submitted_after(seed: int):
    lanes = lagging("h2d", seed)
    watched = Watched(lanes)
    peek(lanes)
    assert watched.wrong == []
    assert watched.copies > 20
    assert watched.updates == 20


@pytest.mark.parametrize("place", [0, 1])
def test_a_copy_that_is_overtaken_is_noticed(place: int):
    """Without the fetch's wait for `written`, copies come too early; without the update's wait for `read`, too late.

    The second never shows in results on the CPU: a copy that an update can overtake was guessed wrong, and its slot is
    stale by the time. On CUDA compute may still be reading it.
    """
    wait = (Wait("h2d", 2, (0,), "update", peek), Wait("update", 2, (1,), "h2d", peek, lag=1.5e-2))[place]

    def overtaken(seed: int) -> bool:
        lanes = tampered(wait, seed)
        watched = Watched(lanes)
        peek(lanes)
        return bool(watched.wrong)

    assert any(overtaken(seed) for seed in range(10))
