"""Captured random state covers every global generator: PyTorch's, Python's and NumPy's."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from numpy.random import mtrand

from megatrain import generators
from megatrain.generators import Generators

CPU = torch.device("cpu")
DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(3).tolist(),
    "python": random.random,
    "python normal": lambda: random.gauss(0, 1),
    "numpy": numpy.random.rand,
    "numpy normal": numpy.random.randn,
}
"""Normal numbers are generated in pairs; the second is cached."""


@pytest.fixture(autouse=True)
def restore_generators() -> Iterator[None]:
    generator = mtrand.get_bit_generator()
    python, numpys = random.getstate(), numpy.random.get_state(legacy=False)
    yield
    mtrand.set_bit_generator(generator)
    random.setstate(python)
    numpy.random.set_state(numpys)


def everything() -> list[Any]:
    return [draw() for draw in DRAWS.values() for _ in range(3)]


@pytest.mark.parametrize("before", [0, 1, 2, 700])
@pytest.mark.parametrize("kind", DRAWS)
def test_a_restored_state_repeats_its_numbers(kind: str, before: int) -> None:
    generators.seed(before)
    for _ in range(before):
        DRAWS[kind]()
    state = Generators.capture(CPU)
    first = everything()
    assert everything() != first
    for _ in range(2):
        state.restore()
        assert everything() == first


@pytest.mark.parametrize("kind", DRAWS)
def test_a_single_draw_changes_the_captured_state(kind: str) -> None:
    """The second number of a pair counts too, although it does not advance the generator."""
    generators.seed(1)
    states, found = [], []
    for _ in range(5):
        states.append(Generators.capture(CPU))
        found.append(DRAWS[kind]())
    for state, expected in reversed(list(zip(states, found, strict=True))):
        state.restore()
        assert DRAWS[kind]() == expected


def test_seeds() -> None:
    seen = []
    for number in (0, 1, 2**32 + 2, 2**62 - 1, 0):
        generators.seed(number)
        seen.append(everything())
    assert seen[0] == seen[-1]
    for one in range(4):
        for other in range(one):
            assert not any(a == b for a, b in zip(seen[one], seen[other], strict=True)), (one, other)


def test_numpys_state_is_read_once_between_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading NumPy's state takes longer than all others together, and every block would keep a copy."""
    generators.seed(3)
    reads = []
    tell = numpy.random.get_state
    monkeypatch.setattr(numpy.random, "get_state", lambda **kwargs: reads.append(1) or tell(**kwargs))
    first = Generators.capture(CPU)
    assert all(Generators.capture(CPU).numpy is first.numpy for _ in range(5))
    assert len(reads) == 1
    numpy.random.rand()
    second = Generators.capture(CPU)
    first.restore()
    assert Generators.capture(CPU).numpy is first.numpy
    second.restore()
    assert Generators.capture(CPU).numpy is second.numpy
    assert len(reads) == 2


@pytest.mark.parametrize("make", [numpy.random.PCG64, numpy.random.MT19937])
def test_other_bit_generators_of_numpy(make: Any) -> None:
    Generators.capture(CPU)
    mtrand.set_bit_generator(make(5))
    state = Generators.capture(CPU)
    first = numpy.random.rand(3).tolist()
    state.restore()
    assert numpy.random.rand(3).tolist() == first
    seen = []
    for number in (8, 8, 9):
        generators.seed(number)
        seen.append([numpy.random.randn() for _ in range(3)])
    assert seen[0] == seen[1] != seen[2]


WITH_GARBAGE = """
import gc, threading, time
import torch
from megatrain.generators import Generators

class Slow:
    def __init__(self):
        self.me = self  # only a collection finds it

    def __del__(self):
        time.sleep(1e-4)  # another thread runs

def capture():
    for number in range(3000):
        gc.set_threshold(number % 10 + 1, 1000, 1000)  # some collection starts inside of PyTorch's function
        Slow()
        Generators.capture(cpu)

cpu = torch.device("cpu")
threads = [threading.Thread(target=capture) for _ in range(2)]
for thread in threads:
    thread.start()
"""


def test_two_threads_capture_while_garbage_is_collected() -> None:
    """PyTorch's own functions deadlock here, and hold the GIL."""
    subprocess.run([sys.executable, "-c", WITH_GARBAGE], check=True)
