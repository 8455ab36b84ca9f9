"""What a recomputed forward must see again: random numbers and autocast, as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from megatrain.generators import Generators


@dataclass(frozen=True)
class AmbientState:
    """Random number generators and autocast at the moment a block's forward began."""

    generators: Generators
    device: torch.device
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool

    @classmethod
    def capture(cls, device: torch.device, generators: Generators | None = None) -> AmbientState:
        """The present state; `generators` if where they stand is not of interest."""
        kinds = ("cpu", "cuda") if device.type == "cuda" else ("cpu",)
        autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
        generators = Generators.capture(device) if generators is None else generators
        return cls(generators, device, autocast, torch.is_autocast_cache_enabled())

    @property
    def cast_dtype(self) -> torch.dtype | None:
        """What autocast computes matrix products in on the device; None if it is off."""
        return next((dtype for kind, enabled, dtype in self.autocast if kind == self.device.type and enabled), None)

    @contextmanager
    def autocasting(self) -> Iterator[None]:
        """Run with the captured autocast state alone."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=self.autocast_cache)
                )
            yield

    @contextmanager
    def replayed(self, generators_after: Generators | None) -> Iterator[None]:
        """Run with the captured state, and put the present one back afterwards.

        `generators_after`: the generators after the original forward; None if it drew nothing, so nothing is restored.
        """
        present = AmbientState.capture(self.device, self.generators if generators_after is None else None)
        # Twice: a Ctrl-C that ends the first leaves the second to finish.
        try:
            try:
                if generators_after is not None:
                    self.generators.restore()
                with self.autocasting():
                    yield
            finally:
                present.restore(generators_after is not None)
        finally:
            present.restore(generators_after is not None)

    def restore(self, generators: bool) -> None:
        """Put autocast, and the generators if they were set, to the captured state."""
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        if generators:
            self.generators.restore()
