"""The state that a recompute must restore: autocast, the backends of attention, and random number generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from megatrain.generators import Generators
from megatrain.process import SdpaState, sdpa_state, set_sdpa_state


@dataclass(frozen=True)
class AmbientState:
    """Autocast and attention backends at the start of a block's forward."""

    device: torch.device
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    attention: SdpaState

    @classmethod
    def capture(cls, device: torch.device) -> AmbientState:
        kinds = ("cpu", "cuda") if device.type == "cuda" else ("cpu",)
        autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
        return cls(device, autocast, torch.is_autocast_cache_enabled(), sdpa_state())

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
    def replayed(self, generators: Generators | None) -> Iterator[None]:
        """Run with the captured state, and with random numbers from `generators`; restore the current state afterwards.

        `generators`: the state of the generators before the forward; None if it drew nothing, so nothing is restored.
        """
        present = AmbientState.capture(self.device)
        generators_now = None if generators is None else Generators.capture(self.device)
        # Nested: if a Ctrl-C interrupts the first restore, the second completes it.
        try:
            try:
                if generators is not None:
                    generators.restore()
                if self.attention != present.attention:
                    set_sdpa_state(self.attention)
                with self.autocasting():
                    yield
            finally:
                present.restore(self, generators_now)
        finally:
            present.restore(self, generators_now)

    def restore(self, replaced: AmbientState, generators: Generators | None) -> None:
        """Restore autocast, attention backends and, if given, the random number generators."""
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        # The backends are not per thread: another thread may have set them meanwhile, so they are set only if replaced.
        if replaced.attention != self.attention:
            set_sdpa_state(self.attention)
        if generators is not None:
            generators.restore()
