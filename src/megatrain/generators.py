"""Where the global random number generators stand: PyTorch's, Python's and NumPy's.

Models and losses draw from all three (layer drop with `random.random()`, say), so all three are carried along.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from numpy.random import mtrand

_WORDS = struct.Struct("625I")
"""Of Python's generator: a tuple of as many integers would take ten times the memory, and every block keeps one."""
_MT19937_BYTES = 625 * 4


@dataclass(frozen=True)
class Generators:
    """The state of all generators at one moment."""

    device: torch.device
    cpu: torch.Tensor
    cuda: torch.Tensor | None
    python: tuple[int, bytes, float | None]
    numpy: dict[str, Any]

    @classmethod
    def now(cls, device: torch.device) -> Generators:
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device, torch.get_rng_state(), cuda, _python(), _numpy.read())

    @property
    def of_device(self) -> torch.Tensor:
        """The generator that operations on the device draw from."""
        return self.cpu if self.cuda is None else self.cuda

    def same(self, other: Generators) -> bool:
        """Whether nobody has drawn between the two; may say False of a NumPy generator that nobody has used."""
        return (
            torch.equal(self.cpu, other.cpu)
            and (self.cuda is None or other.cuda is None or torch.equal(self.cuda, other.cuda))
            and self.python == other.python
            and self.numpy is other.numpy
        )

    def restore(self) -> None:
        """Put all generators back where they were."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
        if _python() != self.python:
            version, words, gauss = self.python
            random.setstate((version, _WORDS.unpack(words), gauss))
        _numpy.write(self.numpy)


@contextmanager
def untouched(device: torch.device) -> Iterator[None]:
    """What is drawn inside is drawn again afterwards."""
    before = Generators.now(device)
    try:
        yield
    finally:
        before.restore()


def seed(number: int) -> None:
    """Start all generators from one number of 62 bits."""
    torch.manual_seed(number)
    random.seed(number)
    # `numpy.random.seed` knows the usual generator alone; users may have put another one in its place.
    fresh = type(mtrand.get_bit_generator())(number).state
    numpy.random.set_state({**fresh, "has_gauss": 0, "gauss": 0.0})


def _python() -> tuple[int, bytes, float | None]:
    version, words, gauss = random.getstate()
    return version, _WORDS.pack(*words), gauss


class _Numpy:
    """The state of NumPy's global generator.

    NumPy takes 40 µs to tell it, more than everything else a block's forward asks for: as long as the bytes of the
    generator are those of the last time, so is the answer.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._memory = numpy.empty(0, numpy.uint8)
        self._last: tuple[bytes, dict[str, Any]] | None = None

    def read(self) -> dict[str, Any]:
        generator = mtrand.get_bit_generator()
        if generator is not self._generator:
            self._generator, self._memory, self._last = generator, _memory_of(generator), None
        found, last = self._memory.tobytes(), self._last
        # A second normal number kept for later lies elsewhere: using it up would not show.
        if last is not None and found and found == last[0] and not last[1]["has_gauss"]:
            return last[1]
        state: dict[str, Any] = numpy.random.get_state(legacy=False)
        # Another thread may have drawn in between.
        self._last = (found, state) if self._memory.tobytes() == found else None
        return state

    def write(self, state: dict[str, Any]) -> None:
        if self.read() is not state:
            numpy.random.set_state(state)
            self._last = (self._memory.tobytes(), state)


def _memory_of(generator: Any) -> numpy.ndarray[Any, Any]:
    """The bytes of the generator's state; none if it is not the usual one."""
    if type(generator) is not numpy.random.MT19937:
        return numpy.empty(0, numpy.uint8)
    data = (generator.ctypes.state_address, True)
    interface = {"data": data, "shape": (_MT19937_BYTES,), "typestr": "|u1", "version": 3}
    # The array keeps what it was made of alive, and so the generator.
    return numpy.asarray(SimpleNamespace(owner=generator, __array_interface__=interface))


_numpy = _Numpy()
