"""The state that a recompute must restore: random number generators, autocast and the backends of attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from megatrain.generators import Generators
from megatrain.process import SdpaState, sdpa_state, set_sdpa_state


@dataclass(frozen=True)
class AmbientState:
    """Random number generators, autocast and attention backends at the start of a block's forward."""

    generators: Generators
    device: torch.device
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    attention: SdpaState

    @classmethod
    def capture(cls, device: torch.device, generators: Generators | None = None) -> AmbientState:
        """The current state, with `generators` instead of the current ones if given."""
        kinds = ("cpu", "cuda") if device.type == "cuda" else ("cpu",)
        autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
        generators = Generators.capture(device) if generators is None else generators
        return cls(generators, device, autocast, torch.is_autocast_cache_enabled(), sdpa_state())

    @property
    def cast_dtype(self) -> torch.dtype | None:
        """The autocast dtype on the device; None if autocast is off."""
        return next((dtype for kind, enabled, dtype in self.autocast if kind == self.device.type and enabled), None)

    @contextmanager
    def autocasting(self) -> Iterator[None]:
        """Run with the captured autocast state only."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=self.autocast_cache)
                )
            yield

    @contextmanager
    def replayed(self, generators_after: Generators | None) -> Iterator[None]:
        """Run with the captured state and restore the current one afterwards.

        `generators_after`: the generators after the original forward; None if it drew nothing, so nothing is restored.
        """
        present = AmbientState.capture(self.device, self.generators if generators_after is None else None)
        # Nested: if a Ctrl-C interrupts the first restore, the second completes it.
        try:
            try:
                if generators_after is not None:
                    self.generators.restore()
                if self.attention != present.attention:
                    set_sdpa_state(self.attention)
                with self.autocasting():
                    yield
            finally:
                present.restore(self, generators_after is not None)
        finally:
            present.restore(self, generators_after is not None)

    def restore(self, replaced: AmbientState, generators: bool) -> None:
        """Restore autocast, attention backends and, if `generators`, the random number generators."""
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        # The backends are not per thread: another thread may have set them meanwhile, so they are set only if replaced.
        if replaced.attention != self.attention:
            set_sdpa_state(self.attention)
        if generators:
            self.generators.restore()
