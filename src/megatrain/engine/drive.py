"""What a run writes to its drives, as a share of what they are rated for.

SSDs wear out: a drive is rated for a number of bytes written (TBW). The rating is `drive_tbw`, or what the drive's own
health log implies, or 600 TB per TB of size, a common value. A run's states are written once per step.
"""

from __future__ import annotations

import os

from megatrain.errors import DriveLimit
from megatrain.hardware import smart
from megatrain.store.disk import DiskMemory
from megatrain.telemetry.notices import announce, warn

TB = 10**12
RATED_PER_BYTE = 600
"""Bytes written per byte of size."""
WARN_SHARE = 0.1


class DriveLife:
    """Bytes that one engine writes to disk; all zero without states on disk."""

    def __init__(self, disk: DiskMemory | None, drive_tbw: float | None, max_drive_tb: float | None) -> None:
        self._disk, self._limit = disk, max_drive_tb
        self._earlier = 0
        """Bytes that the run had written before it was resumed."""
        self._last = 0
        self._inputs = self._all_inputs = 0
        """Bytes of inputs written in the last step, and in all steps."""
        self._warned = False
        self.rating = 0.0
        """Bytes that the drives are rated for, all together."""
        if disk is not None:
            systems = {os.fstat(f.descriptor).st_dev: os.fstatvfs(f.descriptor) for f in disk.files}
            self.rating = sum(
                drive_tbw * TB if drive_tbw is not None else _reported(device, system.f_blocks * system.f_frsize)
                for device, system in systems.items()
            )

    @property
    def held(self) -> int | None:
        """Bytes on disk; None if nothing goes there."""
        return None if self._disk is None else self._disk.allocated_bytes

    @property
    def per_step(self) -> int:
        """Bytes that a step writes: all states once, and inputs of blocks as the last step did."""
        return 0 if self._disk is None else self._disk.step_bytes + self._inputs

    @property
    def written(self) -> int:
        """Bytes that the run has written so far, also before it was resumed."""
        return self._earlier + (0 if self._disk is None else self._disk.written_bytes)

    @property
    def settled(self) -> int:
        """Bytes that the run will have written once all steps taken so far are on disk, whatever the timing."""
        return self._earlier + (0 if self._disk is None else self._disk.settled_bytes)

    def resumed(self, written: int) -> None:
        """Count on from what a checkpoint says its run had written."""
        more = max(0, written - self.written)
        self._earlier, self._last = self._earlier + more, self._last + more

    def since_last(self) -> dict[str, float] | None:
        """For a record: bytes written since the last call, in total, and their share of the rating."""
        if self._disk is None:
            return None
        last, self._last = self._last, self.written
        return {"written": self._last - last, "total": self._last, "share": self._last / self.rating}

    def forecast(self, steps: int) -> None:
        """Announce what this many steps will write; a warning if that is more than a tenth of the rating."""
        if not self.per_step:
            return
        total = self.per_step * steps
        share = total / self.rating
        said = (
            f"{self.per_step / 1e9:.3g} GB are written to disk per step, {total / TB:.3g} TB in {steps} steps: "
            f"{share:.2%} of the {self.rating / TB:.3g} TB that the drive is rated for"
        )
        if share > WARN_SHARE:
            warn(f"{said}; use low-bit moments, more tokens per step or more RAM to write less")
        else:
            announce(said)

    def stepped(self) -> None:
        """A step is submitted."""
        if self._disk is not None:
            self._inputs, self._all_inputs = self._disk.input_bytes - self._all_inputs, self._disk.input_bytes

    def spent(self) -> str | None:
        """Why the run must end: it has written as much as `max_drive_tb` allows. None: it has not."""
        if self._disk is None:
            return None
        written = self.settled
        if not self._warned and self.rating and written > WARN_SHARE * self.rating:
            self._warned = True
            warn(
                f"this run has written {written / TB:.3g} TB to disk, {written / self.rating:.0%} of the drive's rating"
            )
        if self._limit is None or written < self._limit * TB:
            return None
        return f"{written / TB:.3g} TB were written to disk, and max_drive_tb={self._limit:g}"

    def require(self) -> None:
        """Raise `DriveLimit` if nothing more may be written."""
        if (reason := self.spent()) is not None:
            raise DriveLimit(f"{reason}, so no further step is taken; save the model, or raise max_drive_tb.")


def _reported(device: int, size: int) -> float:
    """The rating that a file system's drives report, announced; by size if they do not."""
    wear = smart.wear_of(device)
    if wear is None:
        return RATED_PER_BYTE * size
    ratings = [each.rating for each in wear]
    announce(
        f"the drive reports {sum(each.written for each in wear) / TB:.3g} TB written in its life and "
        f"{max(each.percent_used for each in wear)}% of it used"
    )
    return sum(rating for rating in ratings if rating is not None) if None not in ratings else RATED_PER_BYTE * size
