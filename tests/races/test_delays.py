"""Lanes on threads with random delays give the bits of inline lanes. Removing any single wait changes the result.

Layers do almost no arithmetic, so compute is never behind the copies and a missing wait shows.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from tests.parity import zoo
from tests.tiny import Stack, differences, engine_of, gradients, inputs, roles

from megatrain.errors import MegaTrainError, NonFiniteGradients
from megatrain.geometry import LANES
from megatrain.store.gradient import Gradient
from megatrain.store.slab import Slab
from megatrain.store.ticket import Order, Ticket
from megatrain.store.ticket import Wait as Named
from megatrain.stream.lanes import Lanes, SyncLanes, ThreadLanes, Work

MAX_DELAY = 3e-4
ON_DISK: dict[str, Any] = {"offload_dir": tempfile.gettempdir(), "on_disk": ("*",), "allow_tmpfs": True}
ALL_ON_DISK: dict[str, Any] = {**ON_DISK, "weights_on_disk": ("*",), "gradients_on_disk": ("*",)}
INPUTS_ON_DISK: dict[str, Any] = {
    "offload_dir": tempfile.gettempdir(), "inputs_on_disk": ("layers.*",), "allow_tmpfs": True,
}  # fmt: skip
SEEDS = 200
CHUNK = 20
QUICK = 2
"""Chunks of seeds that run without `-m slow`."""


# ---- scenarios: what a user may do, in an order that leaves work pending at every point


def train(lanes: Lanes, precision: str = "fp32", **settings: Any) -> list[Any]:
    """Returns everything observed. Only reading a value waits for the lanes."""
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


def interfere(lanes: Lanes, **settings: Any) -> list[Any]:
    """Abandoned steps, gradients and weights written by hand while updates are pending, graphs that outlive a step."""
    model = Stack()
    engine = engine_of(model, lanes=lanes, slots=3, grad_slots=1, **settings)
    optimizer = engine.optimizer(lr=0.1, max_grad_norm=0.5)
    seen: list[Any] = []
    # Gradients dropped while they are being summed.
    for seed in range(3):
        model(inputs(seed)).square().mean().backward()
    optimizer.zero_grad()
    model(inputs(3)).square().mean().backward()
    seen.append(gradients(model))
    # A graph from before the step, whose gradient arrives after it without passing any block.
    penalty = (model.gain * torch.arange(8.0)).sum() + model.layers[0].scale.sum()
    optimizer.step()
    optimizer.zero_grad()
    penalty.backward()
    seen.append(gradients(model))
    # A gradient and a weight written right after a step.
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


def not_updated(lanes: Lanes) -> list[Any]:
    """No optimizer updates `gain`, but its gradient counts in the norm, so the next gradient must wait for the norm."""
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
    """Micro-batches in one window, in two, and after others that ran one by one."""
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
            seen += engine.window(tasks, full_step=True)
        else:
            seen += [tasks[0](), tasks[1](), *engine.window(tasks[2:])]
        optimizer.step()
        optimizer.zero_grad()
    seen.append(roles(engine))
    engine.close()
    return seen


def windows_ahead(lanes: Lanes) -> list[Any]:
    """Windows whose sums are fetched while other blocks are computed."""
    model = Stack()
    engine = engine_of(model, lanes=lanes, precision="bf16", slots=2, grad_slots=2)
    optimizer = engine.optimizer(lr=0.1, max_grad_norm=0.5)
    seen: list[Any] = []

    def micro_batch(seed: int) -> None:
        model(inputs(seed)).square().mean().backward()

    for step in range(2):
        for window in range(3):
            engine.window([partial(micro_batch, 6 * step + 2 * window + number) for number in range(2)])
        seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    seen.append(roles(engine))
    engine.close()
    return seen


def held(lanes: Lanes) -> list[Any]:
    """Held weights of all blocks, and held sums of the layers."""
    return train(lanes, "bf16", held_weights=("*",), held_gradients=("layers.*",), grad_slots=1)


def streamed_states(lanes: Lanes) -> list[Any]:
    """Streamed states of all layers but one."""
    held = dict.fromkeys(("held_weights", "held_gradients"), ("*",))
    return train(lanes, "bf16", streamed_states=("entry", "layers.[02]"), **held)


def rewritten(lanes: Lanes) -> list[Any]:
    """Streamed states, with a weight that the user writes between a backward and its step."""
    model = Stack()
    everything = dict.fromkeys(("held_weights", "held_gradients", "streamed_states"), ("*",))
    engine = engine_of(model, lanes=lanes, precision="bf16", **everything)
    optimizer = engine.optimizer(lr=0.1)
    for step in range(3):
        model(inputs(step)).square().mean().backward()
        with torch.no_grad():
            model.layers[1].scale.mul_(0.5)
        optimizer.step()
    seen = [roles(engine), model(inputs(99)).detach()]
    engine.close()
    return seen


def interfere_streamed(lanes: Lanes) -> list[Any]:
    return interfere(lanes, **dict.fromkeys(("held_weights", "held_gradients", "streamed_states"), ("*",)))


def interfere_held(lanes: Lanes) -> list[Any]:
    return interfere(lanes, held_gradients=("*",))


def disk(lanes: Lanes) -> list[Any]:
    """States on disk of all blocks, more than there are staging buffers; held sums of some."""
    return train(lanes, "bf16", held_gradients=("layers.1",), **ON_DISK)


def interfere_disk(lanes: Lanes) -> list[Any]:
    return interfere(lanes, **ON_DISK)


def early_disk(lanes: Lanes) -> list[Any]:
    return early(lanes, **ON_DISK)


def all_on_disk(lanes: Lanes) -> list[Any]:
    """Weights, states and gradients on disk of all blocks; a held weight and a held sum."""
    return train(lanes, "bf16", held_weights=("layers.0",), held_gradients=("layers.1",), **ALL_ON_DISK)


def interfere_all_on_disk(lanes: Lanes) -> list[Any]:
    return interfere(lanes, **ALL_ON_DISK)


def more_slots_than_staging(lanes: Lanes) -> list[Any]:
    """Everything on disk of more layers than there are staging buffers, and a slot for each."""
    model = Stack(depth=8)
    engine = engine_of(model, lanes=lanes, slots=7, grad_slots=4, **ALL_ON_DISK)
    optimizer = engine.optimizer(lr=0.1, max_grad_norm=0.5)
    for step in range(3):
        model(inputs(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    seen = [roles(engine)]
    engine.close()
    return seen


def offloaded(lanes: Lanes, **settings: Any) -> list[Any]:
    """Inputs of more layers than there are staging buffers, longer and shorter; a forward and a backward that are
    abandoned, the older of two graphs first, and windows."""
    model = Stack(depth=6)
    engine = engine_of(model, lanes=lanes, policy="offload", **settings)
    optimizer = engine.optimizer(lr=0.1, max_grad_norm=0.5)
    seen: list[Any] = []

    def forward(seed: int, rows: int = 64) -> torch.Tensor:
        return model(inputs(seed, rows)).square().mean()

    def micro_batch(seed: int) -> None:
        forward(seed, 48).backward()

    def interrupted(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    for step in range(2):
        forward(100 + step)
        hidden = model.entry(inputs(200 + step, 64).to(model.gain.dtype))
        for number, layer in enumerate(model.layers):
            hidden = layer(hidden)
            if number == 3:
                hidden.register_hook(interrupted)
        with suppress(ZeroDivisionError):
            hidden.square().mean().backward()
        optimizer.zero_grad()
        losses = [forward(10 * step), forward(10 * step + 1, 80 + 40 * step)]
        for loss in losses:
            loss.backward()
        engine.window([partial(micro_batch, 10 * step + micro) for micro in range(2, 5)])
        seen += [*map(torch.Tensor.detach, losses), gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    seen.append(roles(engine))
    engine.close()
    return seen


def inputs_on_disk(lanes: Lanes) -> list[Any]:
    return offloaded(lanes, **INPUTS_ON_DISK)


def partial_step(lanes: Lanes) -> list[Any]:
    """A gradient is not finite in a backward in which updates have started."""
    model = Stack()
    engine = engine_of(model, lanes=lanes, **ON_DISK)
    optimizer = engine.optimizer(lr=0.1)
    seen: list[Any] = []
    for step in range(2):
        with optimizer.final_backward():
            hidden = model.layers[0](model.entry(inputs(step)))
            if step == 1:
                hidden.register_hook(lambda gradient: gradient * float("nan"))
            (model.layers[2](model.layers[1](hidden)) * model.gain).square().mean().backward()
        try:
            optimizer.step()
            engine.synchronize()
            engine._step.raise_errors()
        except NonFiniteGradients as error:
            seen.append(str(error))
        optimizer.zero_grad()
    engine.close()
    return seen


def resident(lanes: Lanes) -> list[Any]:
    """A resident layer, a layer with a held sum, and one that streams."""
    return train(lanes, "bf16", resident=("layers.0",), held_gradients=("layers.1",), grad_slots=1)


def tied(lanes: Lanes) -> list[Any]:
    """A weight used by two calls; its gradients are merged on the device."""
    return language_model(lanes, held_gradients=("*",))


def early(lanes: Lanes, **settings: Any) -> list[Any]:
    """Without clipping: updates start in the backward, in windows and outside them."""
    model = Stack()
    engine = engine_of(model, lanes=lanes, precision="bf16", slots=2, grad_slots=1, **settings)
    optimizer = engine.optimizer(lr=0.1)
    seen: list[Any] = []

    def micro_batch(seed: int) -> None:
        model(inputs(seed)).square().mean().backward()

    for step in range(5):
        if step % 2:
            with optimizer.final_backward():
                engine.window([partial(micro_batch, 3 * step + micro) for micro in range(3)], full_step=step == 1)
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


def one_layer(lanes: Lanes) -> list[Any]:
    """Runs one layer before every other step. In the other steps its prefetch is wrong and still pending."""
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


def language_model(lanes: Lanes, **settings: Any) -> list[Any]:
    model = zoo.build("llama", tie_word_embeddings=True)
    engine = engine_of(model, lanes=lanes, precision="bf16", **settings)
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


def chunks(count: int) -> list[Any]:
    """Ranges of seeds; those after the first `QUICK` are slow."""
    ranges = [range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]
    return [
        pytest.param(each, marks=[pytest.mark.slow] if n >= QUICK else [], id=str(each))
        for n, each in enumerate(ranges)
    ]


@pytest.fixture(scope="module")
def expected() -> Callable[[Callable[..., list[Any]]], list[Any]]:
    known: dict[Any, list[Any]] = {}

    def of(scenario: Callable[..., list[Any]], **settings: Any) -> list[Any]:
        key = (scenario, *settings.items())
        if key not in known:
            known[key] = scenario(SyncLanes(), **settings)
        return known[key]

    return of


@pytest.mark.parametrize("seeds", chunks(SEEDS))
def test_training_does_not_depend_on_delays(seeds: range, expected: Any):
    for seed in seeds:
        settings = {"precision": ("fp32", "bf16")[seed % 2], "grad_slots": 1 + seed // 2 % 3}
        got = train(ThreadLanes(seed=seed, max_delay=MAX_DELAY), **settings)
        assert differences(got, expected(train, **settings)) == [], seed


@pytest.mark.parametrize("seeds", chunks(SEEDS // 2))
def test_interference_does_not_depend_on_delays(seeds: range, expected: Any):
    for seed in seeds:
        got = interfere(ThreadLanes(seed=seed, max_delay=MAX_DELAY))
        assert differences(got, expected(interfere)) == [], seed


@pytest.mark.parametrize(
    "scenario",
    [
        language_model, not_updated, windows, windows_ahead, one_layer, early, held, resident, tied, streamed_states,
        rewritten, interfere_streamed, disk, interfere_disk, early_disk, all_on_disk, interfere_all_on_disk,
        more_slots_than_staging, offloaded, inputs_on_disk,
    ],
)  # fmt: skip
@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 40), marks=pytest.mark.slow)], ids=str)
def test_other_scenarios_do_not_depend_on_delays(scenario: Any, seeds: range, expected: Any):
    for seed in seeds:
        got = scenario(ThreadLanes(seed=seed, max_delay=MAX_DELAY))
        assert differences(got, expected(scenario)) == [], seed


def test_threads_without_delays(expected: Any):
    assert differences(train(ThreadLanes()), expected(train)) == []
    assert differences(interfere(ThreadLanes()), expected(interfere)) == []


def test_the_scenario_changes_every_state(expected: Any):
    """An update without effect would hide every race: weights, moments and losses must change."""
    seen = expected(train)
    losses = [value for value in seen if isinstance(value, torch.Tensor) and value.ndim == 0]
    assert len(set(map(float, losses))) == len(losses)
    for slab in range(5):
        assert seen[-1][f"{slab}/exp_avg"].any()
    assert seen[-1]["3/steps"] == [4, 4]
    assert seen[-1]["2/steps"] == [4, 4]
    assert seen[-2] > 0.5, "the gradient must be clipped"


# ---- each wait, removed


@dataclass(frozen=True)
class MissingWait:
    """A wait of the source, identified by who waits (a lane, or compute), in which job, and for what."""

    who: str
    job: str
    """Empty for compute."""
    wait: str
    slow: str
    """The lane that must lag for the wait to matter."""
    scenario: Callable[[Lanes], list[Any]]
    lag: float = 2e-3


NEEDED = [
    MissingWait("h2d", "fetch", "weight written", "update", train),
    MissingWait("refresh", "fetch", "weight written", "update", held),
    MissingWait("h2d", "resume", "gradient written", "update", windows, lag=1e-2),
    MissingWait("h2d", "resume", "gradient slot read", "d2h", windows_ahead, lag=1e-2),
    MissingWait("d2h", "land", "gradient read", "update", interfere),
    MissingWait("d2h", "land", "gradient written", "update", interfere, lag=1e-2),
    MissingWait("d2h", "stage", "staging read", "update", train),
    MissingWait("sums_out", "send sum", "sum buffer read", "update", held),
    MissingWait("sums_out", "send sum", "gradient written", "gpu_update", tied, lag=1e-2),
    MissingWait("update", "add", "staging written", "d2h", train),
    MissingWait("update", "merge", "gradient written", "d2h", language_model),
    MissingWait("update", "norm", "gradient written", "d2h", train),
    MissingWait("update", "norm", "measured", "gpu_update", held),
    MissingWait("update", "update", "gradient written", "d2h", early, lag=5e-3),
    MissingWait("update", "update", "sum buffer written", "sums_out", held),
    MissingWait("gpu_update", "update", "norm", "update", resident),
    MissingWait("gpu_update", "update", "state slot written", "states_in", streamed_states),
    MissingWait("gpu_update", "update", "slot written", "refresh", rewritten, lag=1e-2),
    MissingWait("states_in", "fetch states", "state slot read", "states_out", streamed_states),
    MissingWait("states_in", "fetch states", "states written", "states_out", interfere_streamed, lag=1e-2),
    MissingWait("states_out", "send states", "state slot written", "gpu_update", streamed_states),
    MissingWait("disk_in", "read states", "staged states read", "disk_out", disk, lag=1e-2),
    MissingWait("disk_update", "update", "staged states written", "disk_in", disk, lag=1e-2),
    MissingWait("disk_update", "update", "norm", "update", disk, lag=1e-2),
    MissingWait("disk_update", "update", "gradient written", "d2h", early_disk, lag=1e-2),
    MissingWait("disk_update", "update", "sum buffer written", "sums_out", disk, lag=1e-2),
    MissingWait("disk_out", "write states", "staged states written", "disk_update", disk, lag=1e-2),
    MissingWait("disk_weights", "read weight", "weight written", "disk_out", all_on_disk, lag=1e-2),
    MissingWait("disk_weights", "read weight", "staged weight read", "h2d", more_slots_than_staging),
    MissingWait("h2d", "fetch", "staged weight written", "disk_weights", all_on_disk),
    MissingWait("refresh", "fetch", "staged weight written", "disk_weights", all_on_disk),
    MissingWait("d2h", "land", "staged gradient read", "disk_out", more_slots_than_staging, lag=1e-2),
    MissingWait("disk_out", "write gradient", "staged gradient written", "d2h", all_on_disk, lag=1e-2),
    MissingWait("disk_in", "read gradient", "gradient written", "disk_out", all_on_disk, lag=1e-2),
    MissingWait("disk_update", "update", "staged gradient written", "disk_in", all_on_disk, lag=1e-2),
    MissingWait("update", "norm", "update", "disk_update", partial_step, lag=1e-2),
    MissingWait("h2d", "restore", "offloaded written", "d2h", offloaded, lag=1e-2),
    MissingWait("disk_inputs", "write input", "staged input written", "d2h", inputs_on_disk, lag=1e-2),
    MissingWait("disk_inputs", "read input", "staged input read", "h2d", inputs_on_disk, lag=1e-2),
    MissingWait("h2d", "restore", "staged input written", "disk_inputs", inputs_on_disk, lag=1e-2),
    MissingWait("compute", "", "slot written", "h2d", train),
    MissingWait("compute", "", "gradient slot read", "d2h", train),
    MissingWait("compute", "", "gradient slot written", "h2d", windows, lag=1e-2),
    MissingWait("compute", "", "gradient read", "sums_out", interfere_held, lag=1e-2),
    MissingWait("compute", "", "weight written", "gpu_update", resident, lag=1e-2),
]
IMPLIED = {
    # Compute has waited for what it continued from, and the copy out waits for compute.
    ("d2h", "land", "gradient slot written"),
    ("d2h", "land sum", "gradient slot written"),
    # The sum was copied back for this window before any part of it is sent, and compute has waited for that.
    ("d2h", "land sum", "gradient read"),
    ("d2h", "land sum", "gradient written"),
    # Staging is filled on the same lane, after the gradient.
    ("update", "add", "gradient written"),
    # Parts are merged for an update, which the next forward waits for, or for the user, who waits.
    ("compute", "", "gradient written"),
    # A write to a weight waits until the weight is back in RAM, so nothing reads or writes the old copy any more.
    ("refresh", "fetch", "slot read"),
    ("refresh", "fetch", "slot written"),
    # States are written back after the update, which waited for them to arrive; the next ones arrive after that.
    ("states_in", "fetch states", "state slot written"),
    ("states_out", "send states", "states read"),
    # A weight is written back after its states on the same lane, and its copy was filled before the update.
    ("states_out", "send weight", "slot written"),
    ("states_out", "send weight", "weight read"),
    # A weight whose write-back an update overtakes is written back again after the update.
    ("gpu_update", "update", "slot read"),
    # States are written after their update, and the buffer is read into again after that write.
    ("disk_in", "read states", "staged states written"),
    # A slab's states stay in the buffer that they were written from, until a read that waits for the write.
    ("disk_in", "read states", "states written"),
    ("disk_in", "read states", "weight written"),
    # The update waited for the read.
    ("disk_out", "write states", "states read"),
    # A read of a weight that its write can overtake was a wrong prefetch, and its slot is stale.
    ("disk_out", "write states", "weight read"),
    # The buffers of gradients are used in the order of those of states, and states are read first on the same lane.
    ("disk_in", "read gradient", "staged gradient read"),
    ("disk_in", "read gradient", "staged gradient written"),
    # A gradient that was copied to the buffer was written from it, or read from it by the update.
    ("d2h", "land", "staged gradient written"),
    # The next forward waits for the update, which waited for the gradient.
    ("disk_out", "write gradient", "gradient read"),
    ("disk_out", "write gradient", "gradient written"),
    # The user's thread waits before it reuses memory of offloaded inputs, and staging buffers for more of them.
    ("d2h", "offload", "offloaded read"),
    ("d2h", "offload", "staged input read"),
    ("d2h", "offload", "staged input written"),
    # What was copied to the buffer was written from it, on this lane.
    ("disk_inputs", "read input", "staged input written"),
    # A write that an update overtakes is followed by another one.
    ("disk_update", "update", "staged states read"),
    ("disk_update", "update", "weight read"),
    # A copy that an update can overtake was a wrong prefetch, and its slot is stale (see the end of this file).
    ("update", "update", "weight read"),
}
"""Waits that others already imply. One that becomes necessary must move to NEEDED."""
SCENARIOS = (train, interfere, not_updated, windows, windows_ahead, one_layer, early, language_model, held,
             interfere_held, resident, tied, streamed_states, rewritten, interfere_streamed, disk, early_disk,
             all_on_disk, more_slots_than_staging, partial_step, offloaded, inputs_on_disk)  # fmt: skip


def tampered(missing: MissingWait, seed: int, seen: set[tuple[str, str, str]] | None = None) -> ThreadLanes:
    """Lanes with random delays, one lane that lags by more than these, and one wait without_missing out."""
    lanes = ThreadLanes(seed=seed, max_delay=MAX_DELAY)

    def without_missing(who: str, job: str, waits: Sequence[Named]) -> list[Named]:
        if seen is not None:
            seen.update((who, job, wait.name) for wait in waits if wait.ticket.lane)
        left_out = (missing.who, missing.job, missing.wait)
        return [wait for wait in waits if (who, job, wait.name) != left_out]

    def tamper(name: str, lane: Any) -> None:
        submit = lane.submit

        def without_waiting(work: Work, after: Sequence[Named] = (), label: str = "", job: str = "") -> Ticket:
            return submit(work, without_missing(name, job, after), label, job)  # type: ignore[no-any-return]

        lane.submit = without_waiting

    order = lanes.order_compute
    lanes.order_compute = lambda waits, *measured: order(without_missing("compute", "", list(waits)), *measured)  # type: ignore[method-assign]
    for name, lane in lanes._by_name.items():
        tamper(name, lane)
    slow: Any = lanes[missing.slow]
    slow._delay = lambda: missing.lag
    return lanes


def lagging(lane: str, seed: int) -> ThreadLanes:
    return tampered(MissingWait("nobody", "", "", lane, train), seed)


def is_detected(run: Callable[[int], list[Any]], reference: list[Any], seeds: int = 10) -> bool:
    """Whether any seed gives different bits, or raises."""
    for seed in range(seeds):
        try:
            got = run(seed)
        except (RuntimeError, MegaTrainError):
            return True
        if differences(got, reference):
            return True
    return False


@pytest.mark.parametrize("missing", NEEDED, ids=lambda m: f"{m.who} {m.job}: {m.wait}")
def test_a_missing_wait_is_detected(missing: MissingWait, expected: Any):
    def run(seed: int) -> list[Any]:
        # On a loaded machine the other lanes are slow too, so the lag grows until it is seen.
        return missing.scenario(tampered(replace(missing, lag=missing.lag * 2 ** (seed / 2)), seed))

    assert is_detected(run, expected(missing.scenario))


@cache
def waits_of(scenario: Callable[[Lanes], list[Any]]) -> set[tuple[str, str, str]]:
    """The waits that occur in a scenario."""
    seen: set[tuple[str, str, str]] = set()
    scenario(tampered(MissingWait("nobody", "", "", "update", scenario, lag=1e-4), 0, seen))
    return seen


def test_every_wait_is_listed():
    """A new wait must be added to NEEDED or to IMPLIED."""
    assert set().union(*map(waits_of, SCENARIOS)) == {(m.who, m.job, m.wait) for m in NEEDED} | IMPLIED


@cache
def lanes_of(scenario: Callable[[Lanes], list[Any]]) -> set[str]:
    """The lanes that work in a scenario."""
    lanes, used = ThreadLanes(), set[str]()

    def observe(name: str, submit: Any) -> Any:
        def observed(work: Work, after: Sequence[Named] = (), label: str = "", job: str = "") -> Ticket:
            used.update([name] if job else [])
            return submit(work, after, label, job)  # type: ignore[no-any-return]

        return observed

    for name, lane in lanes._by_name.items():
        lane.submit = observe(name, lane.submit)  # type: ignore[method-assign]
    scenario(lanes)
    return used


@pytest.mark.parametrize("lane", [name for name, lane in LANES.items() if lane.runs_on])
def test_a_lagging_lane_alone_changes_nothing(lane: str, expected: Any):
    """The tests above detect the missing wait, not the lag."""
    assert any(lane in lanes_of(scenario) for scenario in SCENARIOS)
    for scenario in (scenario for scenario in SCENARIOS if lane in lanes_of(scenario)):
        assert differences(scenario(lagging(lane, seed=0)), expected(scenario)) == []


@pytest.mark.parametrize("implied", sorted(IMPLIED), ids=" ".join)
def test_implied_waits_can_be_left_out(implied: tuple[str, str, str], expected: Any):
    # In the others, leaving it out changes nothing.
    for scenario in (scenario for scenario in SCENARIOS if implied in waits_of(scenario)):
        for slow in ("d2h", "update"):
            lanes = tampered(MissingWait(*implied, slow, scenario), 0)
            assert differences(scenario(lanes), expected(scenario)) == []


# ---- each wait of the user's thread, removed


def read_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slab, "settle", lambda slab: None)


def write_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def before_write(slab: Slab) -> None:
        slab.version += 1

    monkeypatch.setattr(Slab, "before_write", before_write)


def read_gradient_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gradient, "read", Gradient.snapshot)


def write_gradient_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    until_writable = Order.until_writable

    def without_waiting(order: Order) -> None:
        if order.name != "gradient":
            until_writable(order)

    monkeypatch.setattr(Order, "until_writable", without_waiting)


@pytest.mark.parametrize(
    ("tamper", "slow", "scenario"),
    [
        (read_without_waiting, "update", train),
        (write_without_waiting, "update", interfere),
        (read_gradient_without_waiting, "d2h", train),
        (write_gradient_without_waiting, "update", interfere),
    ],
)
def test_a_missing_wait_of_the_users_thread_is_detected(
    tamper: Callable[..., None], slow: str, scenario: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
):
    reference = expected(scenario)
    tamper(monkeypatch)
    assert is_detected(lambda seed: scenario(lagging(slow, seed)), reference)


# ---- copies see exactly the update they were submitted after


class UpdateCounter:
    """Counts submitted and completed updates per slab, and checks which update each copy reads."""

    def __init__(self, lanes: ThreadLanes) -> None:
        self.submitted: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.copies = self.updates = 0
        h2d: Any = lanes["h2d"]
        update: Any = lanes["update"]
        h2d.submit, update.submit = partial(self._copy, h2d.submit), partial(self._update, update.submit)

    def _copy(self, submit: Any, work: Work, after: Sequence[Named] = (), label: str = "", job: str = "") -> Ticket:
        due = self.submitted[label]

        def checked_copy() -> None:
            self.copies += 1
            work()
            if self.done[label] != due:
                self.wrong.append(f"{label}: a copy of update {due} found update {self.done[label]}")

        return submit(checked_copy, after, label, job)  # type: ignore[no-any-return]

    def _update(self, submit: Any, work: Work, after: Sequence[Named] = (), label: str = "", job: str = "") -> Ticket:
        if job != "update":
            return submit(work, after, label, job)  # type: ignore[no-any-return]
        self.submitted[label] += 1

        def count() -> None:
            self.updates += 1
            work()
            self.done[label] += 1

        return submit(count, after, label, job)  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(5))
def test_a_copy_reads_the_update_it_was_submitted_after(seed: int):
    lanes = lagging("h2d", seed)
    counter = UpdateCounter(lanes)
    one_layer(lanes)
    assert counter.wrong == []
    assert counter.copies > 20
    assert counter.updates == 20


@pytest.mark.parametrize("number", [0, 1])
def test_a_copy_at_the_wrong_time_is_detected(number: int):
    """Without the fetch's wait for the update, copies are too early; without the update's wait for the copy, too late.

    The second does not change results on the CPU: a copy that an update can overtake was a wrong prefetch, and its slot
    is stale by then. On CUDA, compute may still be reading it.
    """
    missing = (
        MissingWait("h2d", "fetch", "weight written", "update", one_layer),
        MissingWait("update", "update", "weight read", "h2d", one_layer, lag=1.5e-2),
    )[number]

    def is_wrong(seed: int) -> bool:
        lanes = tampered(missing, seed)
        counter = UpdateCounter(lanes)
        one_layer(lanes)
        return bool(counter.wrong)

    assert any(is_wrong(seed) for seed in range(10))
