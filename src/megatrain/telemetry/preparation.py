"""How long what comes before the first step takes, part by part."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

LEAST = 0.05
"""Seconds of a part that is named."""


class Preparation:
    """Seconds of the parts of planning, attaching, compiling and creating an optimizer."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Add the time inside to a part."""
        began = time.perf_counter()
        yield
        self.add(part, time.perf_counter() - began)

    def add(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def described(self, pinning: float) -> str:
        """The total, and the parts that take long. `pinning`: seconds that are in them."""
        longest = sorted(self.seconds.items(), key=lambda item: -item[1])
        parts = [f"{part.replace('_', ' ')} {took:.1f}" for part, took in longest if took >= LEAST]
        said = f"ready for the first step after {sum(self.seconds.values()):.1f} s"
        said += f": {', '.join(parts)}" if parts else ""
        return said + (f"; pinning RAM took {pinning:.1f} of them" if pinning >= LEAST else "")
