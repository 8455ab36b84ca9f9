"""What an engine's steps move to and from disk, and how long compute waits for it; the peak of a process's RAM."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatrain as mt
from benchmarks.step import resident_ram
from megatrain.geometry import LANES
from megatrain.stream.timeline import StepTimes

DISK_LANES = tuple(name for name, lane in LANES.items() if lane.tier == "disk")
POLL = 0.1


@dataclass(frozen=True)
class Moved:
    """Between two moments at which all transfers were done."""

    steps: int
    seconds: float
    read: int
    written: int
    """Bytes."""
    waited: dict[str, float]
    """Seconds that compute waited for each disk lane, without the first step, which no transfer precedes."""
    timed: float
    """Seconds of those steps."""

    @property
    def rate(self) -> float:
        """Bytes per second, read and written."""
        return (self.read + self.written) / self.seconds

    @property
    def read_share(self) -> float:
        """Bytes read, as a share of all that moved."""
        return self.read / max(1, self.read + self.written)

    @property
    def stall_share(self) -> float:
        """Share of the steps' time in which compute waited for a disk lane."""
        return sum(self.waited.values()) / self.timed if self.timed else 0.0


class Traffic:
    """Counts what an engine moves. Begin and end between two steps; both wait for all transfers."""

    def __init__(self, engine: mt.Engine) -> None:
        self._engine, self._timeline = engine, engine._lanes.timeline
        self._pages: list[StepTimes] = []
        self._settle()
        self._timeline.restart_step()
        self._timeline.listeners.append(self._add)
        self._before, self._began = self._bytes(), time.perf_counter()

    def _add(self, times: StepTimes, *_: Any) -> None:
        self._pages.append(times)

    def end(self) -> Moved:
        self._settle()
        seconds = time.perf_counter() - self._began
        self._timeline.listeners.remove(self._add)
        read, written = (now - before for now, before in zip(self._bytes(), self._before, strict=True))
        steady = self._pages[1:]
        waited = {lane: sum(page.waited.get(lane, 0.0) for page in steady) for lane in DISK_LANES}
        return Moved(len(self._pages), seconds, read, written, waited, sum(page.seconds for page in steady))

    def _settle(self) -> None:
        self._engine.synchronize()
        self._timeline.settle(wait=True)

    def _bytes(self) -> tuple[int, int]:
        return self._engine.counters.bytes_disk_in, self._engine.counters.bytes_disk_out


def process_io(process: int | str = "self") -> tuple[int, int] | None:
    """Bytes that a process has read from and written to drives; None where the system does not count them."""
    try:
        lines = Path(f"/proc/{process}/io").read_text().splitlines()
        fields = dict(line.split(": ", 1) for line in lines)
        return int(fields["read_bytes"]), int(fields["write_bytes"])
    except (OSError, KeyError, ValueError):
        return None


@contextmanager
def sampled_peak(found: dict[str, float]) -> Iterator[None]:
    """Keep the peak of this process's RAM in `found["peak"]`, in GiB, while the body runs."""
    done = threading.Event()

    def sample() -> None:
        while not done.wait(POLL):
            found["peak"] = max(found["peak"], resident_ram())

    found["peak"] = resident_ram()
    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        found["peak"] = max(found["peak"], resident_ram())
