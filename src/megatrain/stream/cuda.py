"""Lanes on CUDA: each has a stream of its own and a thread that issues work on it.

The thread lets a copy wait for a host-side update without blocking compute; the stream lets it overlap with compute. A
CUDA event that was never recorded counts as reached, so a ticket first waits until its work was *issued* and only then
makes a stream wait for the event.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from megatrain.errors import SettingsError
from megatrain.geometry import LANES
from megatrain.store.ticket import Ticket, Wait
from megatrain.stream.lanes import DiskLanes, HostTicket, Lane, Lanes, SyncLanes, ThreadLane, ThreadLanes, Work
from megatrain.stream.timeline import current_stream


class DeviceTicket(HostTicket):
    """Work on a stream: `finish` means issued; the event fires when the device is done."""

    def __init__(self, lane: StreamLane, label: str) -> None:
        super().__init__(lane, label)
        self._device = lane.device
        self.event = torch.cuda.Event()

    @property
    def done(self) -> bool:
        return super().done and self.event.query()

    def wait(self) -> None:
        super().wait()
        if threading.current_thread() is threading.main_thread():
            # Waiting inside the driver would block Ctrl-C.
            pause = 2e-5
            while not self.event.query():
                time.sleep(pause)
                pause = min(2 * pause, 1e-3)
        else:
            self.event.synchronize()

    def order_stream(self) -> None:
        super().wait()
        current_stream(self._device).wait_event(self.event)


class _ComputeMark:
    """Everything submitted to compute when the mark was created."""

    lane = "compute"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.event = torch.cuda.Event()
        # Of this device: the user's current device may be another GPU.
        stream = current_stream(device)
        self.event.record(stream)
        # Threads that share a stream may register their marks in another order than they recorded them.
        self.queue = (threading.get_ident(), stream.cuda_stream)

    @property
    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def order_stream(self) -> None:
        current_stream(self._device).wait_event(self.event)


class StreamLane(ThreadLane):
    """A lane whose thread issues work on one CUDA stream."""

    tickets = DeviceTicket
    worker = "{}-issue"

    def __init__(self, name: str, lanes: Lanes, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        super().__init__(name, lanes)

    def _do(self, work: Work, after: Sequence[Wait], ticket: HostTicket) -> None:
        assert isinstance(ticket, DeviceTicket)
        self._job = (ticket.label, time.monotonic())
        for _, earlier in after:
            # A stream waits for a stream on the device; for work of a CPU thread, this thread waits.
            with self.timeline.waiting(self.name, earlier.lane):
                earlier.order_stream()
        with self.timeline.device_span(self.name, ticket.label):
            work()
        ticket.event.record(self.stream)

    def _run(self) -> None:
        # For good: the thread is the lane's own.
        torch.cuda.set_device(self.device)
        torch.cuda.set_stream(self.stream)
        super()._run()

    def close(self, patience: float | None = None) -> None:
        super().close(patience)
        if patience is None:
            self.stream.synchronize()


class CudaLanes(Lanes):
    """Copies and device updates on CUDA streams, updates of host memory on a CPU thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        super().__init__(device)

    def _make(self, name: str) -> Lane:
        return StreamLane(name, self, self.device) if LANES[name].runs_on == "stream" else ThreadLane(name, self)

    def mark(self) -> Ticket:
        return _ComputeMark(self.device)


def choose_lanes(requested: Any, device: torch.device, *, disk: bool = False) -> Lanes:
    """The lanes that the settings name; `Lanes` objects are returned unchanged. `disk`: some states are on disk."""
    if not isinstance(requested, str):
        return requested  # type: ignore[no-any-return]
    if requested == "auto":
        if disk and device.type != "cuda":
            return DiskLanes()
        requested = "cuda" if device.type == "cuda" else "sync"
    if requested == "cuda":
        if device.type != "cuda":
            raise SettingsError("lanes='cuda' needs a CUDA device; use 'sync' or 'threads' on the CPU.")
        return CudaLanes(device)
    if device.type == "cuda":
        raise SettingsError(
            f"lanes={requested!r} copies without CUDA streams and works on the CPU only; use 'auto' on a CUDA device."
        )
    return SyncLanes() if requested == "sync" else ThreadLanes()
