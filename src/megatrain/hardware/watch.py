"""RAM while running: what the limits still leave, looked at now and then, so that nobody is killed without a word."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatrain.errors import OutOfRam
from megatrain.hardware import cgroups, inventory
from megatrain.telemetry.notices import warn

GIB = 1 << 30
INTERVAL = 0.25
"""Seconds between looks: one takes less than a millisecond."""
LOW = (GIB, 0.02)
"""Bytes left, or that share of the limit if it is less: said once, and freed memory goes back to the system."""
SHORT = (GIB // 2, 0.01)
"""The same: a Trainer saves a checkpoint and stops at the end of the step."""
CRITICAL = (GIB // 4, 0.005)
"""The same: the next block does not run any more."""


class RamWatch:
    """Looks at what is left of RAM, at most every `INTERVAL` seconds."""

    def __init__(
        self,
        held: Callable[[], int],
        trim: Callable[[], None],
        left: Callable[[], int] = inventory.available_ram,
        limit: int | None = None,
    ) -> None:
        self._held, self._trim, self._left = held, trim, left
        self._limit = cgroups.usable_ram() if limit is None else limit
        self._looked = -INTERVAL
        self._said = False

    def check(self) -> None:
        """Warn when RAM is low; raise `OutOfRam` when going on would end in a kill."""
        now = time.monotonic()
        if now - self._looked < INTERVAL:
            return
        self._looked = now
        left = self._left()
        if left >= self._threshold(LOW):
            self._said = False
            return
        self._trim()
        left = self._left()
        if left < self._threshold(CRITICAL):
            raise OutOfRam(
                f"{self._account(left)}; stopped before the system would have killed the process. Weights and "
                f"optimizer states are whole: save them, then {_ADVICE}."
            )
        if not self._said:
            self._said = True
            warn(f"{self._account(left)}; if it goes on falling the run stops: {_ADVICE}")

    def short(self) -> str | None:
        """What to tell the user if the run should end at this step; None: there is room."""
        left = self._left()
        return self._account(left) if left < self._threshold(SHORT) else None

    def _threshold(self, level: tuple[int, float]) -> int:
        nbytes, share = level
        return min(nbytes, int(share * self._limit))

    def _account(self, left: int) -> str:
        held, own = self._held(), inventory.own_ram()
        others = max(0, self._limit - left - own)
        return (
            f"RAM is running out: {left / GIB:.2f} GiB are left of {self._limit / GIB:.1f} (MegaTrain's state "
            f"{held / GIB:.1f}, the rest of this process {max(0, own - held) / GIB:.1f}, other processes and what "
            f"cannot be reclaimed {others / GIB:.1f})"
        )


_ADVICE = (
    "end other processes, use fewer dataloader workers or optimizer_compression='8bit', and resume from the checkpoint"
)
