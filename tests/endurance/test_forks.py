"""Forks at random moments of training, from several threads: children read, write and end as they like.

Some children try to write, through the interface or past it. The parent's run must be bit for bit what it is without
them.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests import forked, small
from tests.tiny import differences, engine_of, roles

from megatrain.stream.lanes import ThreadLanes

FORKS = [24, pytest.param(600, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
THREADS = 3
STEPS = 12
"""At least; the run lasts until all children have come."""


def train(until: Callable[[int], bool]) -> tuple[dict[str, Any], list[float], int]:
    """Steps of two micro-batches, one of them in a window, until `until` says so; what came of it, and how many."""
    model = small.llama(num_hidden_layers=2)
    engine = engine_of(model, lanes=ThreadLanes(seed=0, max_delay=2e-3), policy={"*layers.0": "offload"})
    optimizer = engine.optimizer(lr=1e-3, max_grad_norm=1.0)
    losses: list[float] = []
    shared["model"], shared["engine"] = model, engine
    step = 0
    while not until(step):
        tasks = [lambda seed=seed: backward(model, seed) for seed in (2 * step, 2 * step + 1)]
        losses += engine.window(tasks) if step % 2 else [task() for task in tasks]
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    found = roles(engine)
    engine.close()
    return found, losses, step


shared: dict[str, Any] = {}
"""The model that is being trained, for the threads that fork."""


def backward(model: Any, seed: int) -> float:
    loss = model(**small.batch(seed=seed)).loss
    loss.backward()
    return float(loss.item())


def read() -> int:
    """The weights, while the parent may be changing them: finite numbers, all of them."""
    engine = shared["engine"]
    flats = [slab.weight for slab in engine.slabs]
    flats += [moment.bytes.view(torch.float32) for slab in engine.slabs for moment in slab.moments.values()]
    assert all(bool(flat.isfinite().all()) for flat in flats)
    return sum(flat.numel() for flat in flats)


def write() -> None:
    next(shared["model"].parameters()).data.zero_()


def write_past_it() -> None:
    read()
    shared["engine"].slabs[0].weight.zero_()


def close() -> None:
    shared["engine"].close()


def as_expected(work: Callable[[], Any], ended: forked.Ended) -> bool:
    if work is write:
        return ended.raised is not None and ended.raised[0] == "ForkedProcess"
    if work is write_past_it:
        return ended.signal == signal.SIGSEGV
    return ended.raised is None and not ended.signal


@pytest.mark.parametrize("forks", FORKS)
def test_children_come_and_go_and_the_run_is_the_same(forks: int) -> None:
    stop = threading.Event()
    surprises: list[Any] = []
    came = [0] * THREADS

    def fork_now_and_then(number: int) -> None:
        draw = random.Random(number)
        while came[number] < forks // THREADS and not stop.is_set():
            time.sleep(draw.uniform(0, 0.01))
            if "engine" not in shared:
                continue
            work = draw.choice([read, write, write_past_it, close])
            ended = forked.run(work)
            if not as_expected(work, ended):
                surprises.append((work.__name__, ended))
            came[number] += 1

    before = len(os.listdir("/proc/self/fd"))
    threads = [threading.Thread(target=fork_now_and_then, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    try:
        found, losses, steps = train(lambda step: step >= STEPS and not any(t.is_alive() for t in threads))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        shared.clear()
    assert not surprises
    assert sum(came) == forks
    assert len(os.listdir("/proc/self/fd")) == before
    expected, expected_losses, _ = train(lambda step: step >= steps)
    shared.clear()
    assert losses == expected_losses
    assert not differences(found, expected)
