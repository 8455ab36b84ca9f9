"""RAM while running: what the limits still leave, looked at as it gets less, so that no run is killed unawares."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from megatrain.errors import OutOfRam
from megatrain.hardware import cgroups, inventory
from megatrain.hardware.inventory import CRITICAL, GIB, LOW, SHORT, level
from megatrain.telemetry.notices import warn

INTERVAL = 0.25
"""Seconds between looks while there is plenty: one takes less than a millisecond."""
REMEMBERED = 16
"""Steps whose needs are expected of the next one."""
PLENTY = 2
"""Times `LOW`: with less than that left, every block looks."""
PORTION = 4
"""A save takes at most this part of what is left for a copy of what it writes."""
LEAST_PORTION = 16 << 20
SAVE_BYTES = 64 << 20
"""A save takes this much beside: pieces of files that are read again, headers, buffers."""


class RamMonitor:
    """Looks at what is left of RAM before every block, after every step and before a save."""

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
        self._looked = -INTERVAL
        self._found = 0
        """What the last look found."""
        self._begins = False
        """Whether no block of this step has looked yet."""
        self._top = 0
        """The most that a look has seen this process hold in this step."""
        self._swings: deque[int] = deque(maxlen=REMEMBERED)
        """What the last steps took for a while, above what they ended with."""
        self._block = 0
        """What a block was estimated to take between two looks."""
        self._said = False

    def check(self) -> None:
        """Warn when RAM is low; raise `OutOfRam` when going on would end in a kill."""
        now = time.monotonic()
        critical = self._critical
        if now - self._looked < INTERVAL and self._found >= PLENTY * self._low + self._swing + self._block:
            return
        self._looked = now
        if self._begins:
            critical += self._swing
        self._begins = False
        left = self._look()
        if left >= max(self._low, critical):
            self._said = False
            return
        left = self._look_after_trimming()
        if left < critical:
            raise OutOfRam(
                f"{self._account(left)}; stopped before the system would have killed the process. Weights and "
                f"optimizer states are intact: save them, then {_ADVICE}."
            )
        if not self._said:
            self._said = True
            warn(f"{self._account(left)}; if less is left, the run will stop: {_ADVICE}")

    def require(self, nbytes: int, block: int, what: str) -> None:
        """Raise `OutOfRam` if so many bytes, which are wanted now, would leave too little.

        `block`: what of them may come between two looks.
        """
        self._block = max(self._block, block)
        wanted = nbytes + self._least
        if self._look() < wanted and (left := self._look_after_trimming()) < wanted:
            raise OutOfRam(
                f"{self._account(left)}, and {what} takes about {nbytes / GIB:.2f}; stopped before starting it. "
                "Weights "
                f"and optimizer states are intact: save them, then {_ADVICE}, or use fewer tokens at a time."
            )

    def after_step(self) -> None:
        """A step has ended: the next one will take again what it took for a while."""
        if self._left() < PLENTY * self._low + self._swing:
            self._trim()
        own = self._own()
        self._swings.append(max(0, self._top - own))
        self._top, self._begins = own, True

    @property
    def _swing(self) -> int:
        """What the next step will take for a while, if it is like the last ones."""
        return max(self._swings, default=0)

    @property
    def own(self) -> int:
        """Bytes that this process held when the last step ended, or at the peak of the one under way."""
        return self._top

    @property
    def left(self) -> int:
        """Bytes that are left now."""
        return self._left()

    def short(self) -> str | None:
        """What to tell the user if the run should end at this step; None: there is room for another one."""
        wanted = max(self._short, self._swing + self._critical, SAVE_BYTES + LEAST_PORTION)
        if self._left() < wanted and (left := self._look_after_trimming()) < wanted:
            return self._account(left)
        return None

    def portion(self, most: int) -> int:
        """Bytes that a save may hold at once as copies of what it writes: `most`, or less if little is left."""
        left = self._left()
        if left < self._low:
            left = self._look_after_trimming()
        return min(most, max(LEAST_PORTION, (left - SAVE_BYTES) // PORTION))

    @property
    def low(self) -> bool:
        """Whether so little is left that memory should be given back."""
        return self._left() < self._low

    @property
    def _critical(self) -> int:
        return self._least + self._block

    def _look(self) -> int:
        self._found = left = self._left()
        self._top = max(self._top, self._own())
        return left

    def _look_after_trimming(self) -> int:
        # The C library keeps what was freed, in an arena for each thread.
        self._trim()
        return self._look()

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
