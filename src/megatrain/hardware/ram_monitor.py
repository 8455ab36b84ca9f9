"""Monitors free RAM during a run, so that the run stops with an error before the system kills it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from megatrain.errors import OutOfRam
from megatrain.geometry import GIB
from megatrain.hardware import cgroups, inventory
from megatrain.hardware.inventory import CRITICAL, LOW, SHORT, level
from megatrain.telemetry.notices import warn

INTERVAL = 0.25
"""Seconds between measurements while RAM is plentiful. One takes less than a millisecond."""
REMEMBERED_STEPS = 16
"""Number of past steps whose temporary use is expected of the next step."""
PLENTY = 2
"""With less than this multiple of `LOW` free, RAM is measured before every block."""
SAVE_DIVISOR = 4
"""A save buffers at most one part in this many of the free RAM."""
MIN_SAVE_BUFFER = 16 << 20
SAVE_BYTES = 64 << 20
"""RAM that a save needs beside its buffer: parts of files that are read back, headers."""


class RamMonitor:
    """Measures free RAM before every block, after every step and before a save."""

    def __init__(
        self,
        held: Callable[[], int],
        trim: Callable[[], None],
        left: Callable[[], int] = inventory.available_ram,
        limit: int | None = None,
        own: Callable[[], int] = inventory.own_ram,
    ) -> None:
        self._held, self._trim, self._left, self._own = held, trim, left, own
        self._limit = cgroups.usable_ram() if limit is None else limit
        self._low, self._short, self._least = (level(threshold, self._limit) for threshold in (LOW, SHORT, CRITICAL))
        self._measured_at = -INTERVAL
        self._free = 0
        """Free RAM at the last measurement."""
        self._step_begins = False
        """Whether RAM has not been measured in this step yet."""
        self._peak = 0
        """The most RAM of this process that was measured in this step."""
        self._temporary: deque[int] = deque(maxlen=REMEMBERED_STEPS)
        """RAM that each of the last steps took and released again."""
        self._block = 0
        """The estimated RAM of one block between two measurements."""
        self._warned = False

    def check(self) -> None:
        """Warn if RAM is low. Raise `OutOfRam` if the system might otherwise kill the process."""
        now = time.monotonic()
        critical = self._critical
        plenty = PLENTY * self._low + self._expected_temporary + self._block
        if now - self._measured_at < INTERVAL and self._free >= plenty:
            return
        self._measured_at = now
        if self._step_begins:
            critical += self._expected_temporary
        self._step_begins = False
        left = self._measure()
        if left >= max(self._low, critical):
            self._warned = False
            return
        left = self._measure_after_trimming()
        if left < critical:
            raise OutOfRam(
                f"{self._account(left)}; stopped before the system would have killed the process. Weights and "
                f"optimizer states are intact: save them, then {_ADVICE}."
            )
        if not self._warned:
            self._warned = True
            warn(f"{self._account(left)}; if less is left, the run will stop: {_ADVICE}")

    def require(self, nbytes: int, block: int, what: str) -> None:
        """Raise `OutOfRam` if an allocation of `nbytes` would leave too little RAM.

        `block`: the part of it that may be allocated between two measurements.
        """
        self._block = max(self._block, block)
        wanted = nbytes + self._least
        if self._measure() < wanted and (left := self._measure_after_trimming()) < wanted:
            raise OutOfRam(
                f"{self._account(left)}, and {what} takes about {nbytes / GIB:.2f}; stopped before starting it. "
                f"Weights and optimizer states are intact: save them, then {_ADVICE}, or use fewer tokens at a time."
            )

    def after_step(self) -> None:
        """Record the temporary RAM of the step that has ended."""
        if self._left() < PLENTY * self._low + self._expected_temporary:
            self._trim()
        own = self._own()
        self._temporary.append(max(0, self._peak - own))
        self._peak, self._step_begins = own, True

    @property
    def _expected_temporary(self) -> int:
        """RAM that the next step is expected to take temporarily."""
        return max(self._temporary, default=0)

    @property
    def own(self) -> int:
        """Bytes that this process held when the last step ended, or at the peak of the one under way."""
        return self._peak

    @property
    def left(self) -> int:
        """Free bytes."""
        return self._left()

    def short(self) -> str | None:
        """A description of the shortage if the run should stop after this step, else None."""
        wanted = max(self._short, self._expected_temporary + self._critical, SAVE_BYTES + MIN_SAVE_BUFFER)
        if self._left() < wanted and (left := self._measure_after_trimming()) < wanted:
            return self._account(left)
        return None

    def portion(self, most: int) -> int:
        """Bytes that a save may buffer: `most`, or less if little RAM is free."""
        left = self._left()
        if left < self._low:
            left = self._measure_after_trimming()
        return min(most, max(MIN_SAVE_BUFFER, (left - SAVE_BYTES) // SAVE_DIVISOR))

    @property
    def low(self) -> bool:
        """Whether so little RAM is free that memory should be given back to the system."""
        return self._left() < self._low

    @property
    def _critical(self) -> int:
        return self._least + self._block

    def _measure(self) -> int:
        self._free = left = self._left()
        self._peak = max(self._peak, self._own())
        return left

    def _measure_after_trimming(self) -> int:
        # The C library caches freed memory, in an arena for each thread.
        self._trim()
        return self._measure()

    def _account(self, left: int) -> str:
        held, own = self._held(), self._own()
        others = max(0, self._limit - left - own)
        return (
            f"RAM is running out: {left / GIB:.2f} GiB are left of {self._limit / GIB:.1f} (MegaTrain's state "
            f"{held / GIB:.1f}, the rest of this process {max(0, own - held) / GIB:.1f}, other processes and what "
            f"cannot be reclaimed {others / GIB:.1f})"
        )


_ADVICE = (
    "end other processes, use fewer dataloader workers or optimizer_compression='8bit', and resume from the checkpoint"
)
