"""Forks at random moments of training, from several threads; children read, write and exit.

Some children try to write, through parameters or directly to memory. The parent's run must be bitwise what it is
without them.
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
"""The minimum; the run lasts until all children have run."""


def train(until: Callable[[int], bool]) -> tuple[dict[str, Any], list[float], int]:
    """Train in steps of two micro-batches, every other one in a window, until `until(step)`. Returns roles, losses,
    steps.
    """
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
"""The model in training, for the threads that fork."""


def backward(model: Any, seed: int) -> float:
    loss = model(**small.batch(seed=seed)).loss
    loss.backward()
    return float(loss.item())


def read() -> int:
    """All weights are finite, even while the parent changes them."""
    engine = shared["engine"]
    flats = [slab.weight for slab in engine.slabs]
    flats += [moment.bytes.view(torch.float32) for slab in engine.slabs for moment in slab.moments.values()]
    assert all(bool(flat.isfinite().all()) for flat in flats)
    return sum(flat.numel() for flat in flats)


def write() -> None:
    next(shared["model"].parameters()).data.zero_()


def write_memory() -> None:
    read()
    shared["engine"].slabs[0].weight.zero_()


def close() -> None:
    shared["engine"].close()


def as_expected(work: Callable[[], Any], ended: forked.Ended) -> bool:
    if work is write:
        return ended.raised is not None and ended.raised[0] == "ForkedProcess"
    if work is write_memory:
        return ended.signal == signal.SIGSEGV
    return ended.raised is None and not ended.signal


@pytest.mark.parametrize("forks", FORKS)
def test_children_do_not_change_the_run(forks: int) -> None:
    stop = threading.Event()
    surprises: list[Any] = []
    finished = [0] * THREADS

    def fork_now_and_then(number: int) -> None:
        draw = random.Random(number)
        while finished[number] < forks // THREADS and not stop.is_set():
            time.sleep(draw.uniform(0, 0.01))
            if "engine" not in shared:
                continue
            work = draw.choice([read, write, write_memory, close])
            ended = forked.run(work)
            if not as_expected(work, ended):
                surprises.append((work.__name__, ended))
            finished[number] += 1

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
    assert sum(finished) == forks
    assert len(os.listdir("/proc/self/fd")) == before
    expected, expected_losses, _ = train(lambda step: step >= steps)
    shared.clear()
    assert losses == expected_losses
    assert not differences(found, expected)
