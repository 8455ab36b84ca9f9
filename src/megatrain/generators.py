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
"""Of a Mersenne twister: a tuple of as many integers would take ten times the memory, and every block keeps one."""


@dataclass(frozen=True)
class Generators:
    """The state of all generators at one moment."""

    device: torch.device
    cpu: torch.Tensor
    cuda: torch.Tensor | None
    python: tuple[int, bytes, float | None]
    numpy: dict[str, Any]

    @classmethod
    def capture(cls, device: torch.device) -> Generators:
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device, torch.get_rng_state(), cuda, _python(), _numpy())

    @property
    def device_state(self) -> torch.Tensor:
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
        _set_numpy(self.numpy)


@contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """What is drawn inside is drawn again afterwards."""
    before = Generators.capture(device)
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


_numpy_cache: tuple[bytes, dict[str, Any]] | None = None
"""Of NumPy's generator: its bytes, and the state that it told then."""


def _numpy() -> dict[str, Any]:
    """The state of NumPy's generator.

    NumPy takes 40 µs to tell it, more than everything else a block's forward asks for: as long as the bytes of the
    generator are those of the last time, so is the answer.
    """
    global _numpy_cache
    found, last = _numpy_bytes(), _numpy_cache
    # A second normal number kept for later lies elsewhere: using it up would not show.
    if last is not None and found and found == last[0] and not last[1]["has_gauss"]:
        return last[1]
    state: dict[str, Any] = numpy.random.get_state(legacy=False)
    # Another thread may have drawn in between.
    _numpy_cache = (found, state) if _numpy_bytes() == found else None
    return state


def _set_numpy(state: dict[str, Any]) -> None:
    global _numpy_cache
    if _numpy() is not state:
        numpy.random.set_state(state)
        _numpy_cache = (_numpy_bytes(), state)


def _numpy_bytes() -> bytes:
    """What the generator's state is in memory; nothing if it is not the usual one."""
    generator: Any = mtrand.get_bit_generator()
    if type(generator) is not numpy.random.MT19937:
        return b""
    data = (generator.ctypes.state_address, True)
    interface = {"data": data, "shape": (_WORDS.size,), "typestr": "|u1", "version": 3}
    return numpy.asarray(SimpleNamespace(__array_interface__=interface)).tobytes()
