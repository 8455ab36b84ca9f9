"""The state of the global random number generators of PyTorch, Python and NumPy.

Models and losses may draw from any of them; layer drop, for example, uses `random.random()`.
"""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from numpy.random import mtrand

_WORDS = struct.Struct("625I")
"""A packed Mersenne twister state. A tuple of integers takes ten times the memory, and every block keeps one."""

_lock = threading.Lock()
"""One thread at a time reads or writes the state of PyTorch's generators.

`torch.get_rng_state` locks the generator and then allocates its result. If that starts a garbage collection, a
finalizer may release the GIL, and another thread's `get_rng_state` takes the GIL and waits for the generator: PyTorch
deadlocks.
"""


@dataclass(frozen=True)
class Generators:
    """The captured state of all generators."""

    device: torch.device
    cpu: torch.Tensor
    cuda: torch.Tensor | None
    python: tuple[int, bytes, float | None]
    numpy: dict[str, Any]

    @classmethod
    def capture(cls, device: torch.device) -> Generators:
        with _lock:
            cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
            cpu = torch.get_rng_state()
        return cls(device, cpu, cuda, _python(), _numpy())

    @property
    def device_state(self) -> torch.Tensor:
        """The state of the generator that the device draws from."""
        return self.cpu if self.cuda is None else self.cuda

    def same(self, other: Generators) -> bool:
        """Whether no random number was drawn between the two. May return False for an unchanged NumPy generator."""
        return (
            torch.equal(self.cpu, other.cpu)
            and (self.cuda is None or other.cuda is None or torch.equal(self.cuda, other.cuda))
            and self.python == other.python
            and self.numpy is other.numpy
        )

    def restore(self) -> None:
        """Restore all generators."""
        with _lock:
            torch.set_rng_state(self.cpu)
            if self.cuda is not None:
                torch.cuda.set_rng_state(self.cuda, self.device)
        if _python() != self.python:
            version, words, gauss = self.python
            random.setstate((version, _WORDS.unpack(words), gauss))
        _set_numpy(self.numpy)


@contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Restore the generators at the end of the context."""
    before = Generators.capture(device)
    try:
        yield
    finally:
        before.restore()


def seed(number: int) -> None:
    """Seed all generators with one 62-bit number."""
    with _lock:
        torch.manual_seed(number)
    random.seed(number)
    # `numpy.random.seed` works only with the default bit generator, which users may have replaced.
    fresh = type(mtrand.get_bit_generator())(number).state
    numpy.random.set_state({**fresh, "has_gauss": 0, "gauss": 0.0})


def _python() -> tuple[int, bytes, float | None]:
    version, words, gauss = random.getstate()
    return version, _WORDS.pack(*words), gauss


_numpy_cache: tuple[bytes, dict[str, Any]] | None = None
"""The generator's bytes in memory, and the state that NumPy returned for them."""


def _numpy() -> dict[str, Any]:
    """The state of NumPy's generator, cached while the generator's bytes are unchanged.

    `get_state` takes 40 µs, longer than the rest of `capture`, which runs in every block's forward.
    """
    global _numpy_cache
    now, last = _numpy_bytes(), _numpy_cache
    # The cached second normal number is stored elsewhere, so drawing it would not change the bytes.
    if last is not None and now and now == last[0] and not last[1]["has_gauss"]:
        return last[1]
    state: dict[str, Any] = numpy.random.get_state(legacy=False)
    # Another thread may have drawn a number in between.
    _numpy_cache = (now, state) if _numpy_bytes() == now else None
    return state


def _set_numpy(state: dict[str, Any]) -> None:
    global _numpy_cache
    if _numpy() is not state:
        numpy.random.set_state(state)
        _numpy_cache = (_numpy_bytes(), state)


def _numpy_bytes() -> bytes:
    """The generator's state as bytes; empty if it is not a Mersenne twister."""
    generator: Any = mtrand.get_bit_generator()
    if type(generator) is not numpy.random.MT19937:
        return b""
    data = (generator.ctypes.state_address, True)
    interface = {"data": data, "shape": (_WORDS.size,), "typestr": "|u1", "version": 3}
    return numpy.asarray(SimpleNamespace(__array_interface__=interface)).tobytes()
