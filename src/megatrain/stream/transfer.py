"""Copies between host memory and the device: direct if memory is pinned, else through a pinned staging ring."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain.geometry import LANES
from megatrain.native import library as native
from megatrain.store.ticket import Order, Ticket, Wait
from megatrain.stream.lanes import Lanes
from megatrain.telemetry.counters import Counters

CHUNK_BYTES = 32 << 20
"""Staging chunk: 16 MiB already reach the link's full rate."""
CHUNKS = 3


class Transfer:
    """Copies of one lane, with staging chunks of its own, allocated at first use."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self._device = device
        self._threads = threads
        self._staging: list[tuple[torch.Tensor, torch.cuda.Event]] = []

    def to_device(self, target: torch.Tensor, source: torch.Tensor, pinned: bool) -> None:
        """Host → device on the current stream."""
        if pinned or self._device.type == "cpu":
            target.copy_(source, non_blocking=True)
            return
        for chunk, event, start, end in self._pieces(target):
            event.synchronize()
            size = end - start
            native.copy(chunk.data_ptr(), source.data_ptr() + start, size, self._threads)
            target.view(-1).view(torch.uint8)[start:end].copy_(chunk[:size], non_blocking=True)
            event.record()

    def to_host(self, target: torch.Tensor, source: torch.Tensor, pinned: bool) -> None:
        """Device → host on the current stream."""
        if pinned or self._device.type == "cpu":
            target.copy_(source, non_blocking=True)
            return
        for chunk, event, start, end in self._pieces(source):
            size = end - start
            chunk[:size].copy_(source.view(-1).view(torch.uint8)[start:end], non_blocking=True)
            event.record()
            # The chunk must have arrived before this thread copies it.
            event.synchronize()
            native.copy(target.data_ptr() + start, chunk.data_ptr(), size, self._threads)

    def _pieces(self, tensor: torch.Tensor) -> list[tuple[torch.Tensor, torch.cuda.Event, int, int]]:
        if not self._staging:
            chunks = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(CHUNKS)]
            self._staging = [(chunk, torch.cuda.Event()) for chunk in chunks]
        return [
            (*self._staging[i % CHUNKS], start, min(start + CHUNK_BYTES, tensor.nbytes))
            for i, start in enumerate(range(0, tensor.nbytes, CHUNK_BYTES))
        ]


class Link:
    """The connection between host memory and one device: lanes, their copies, and counters."""

    def __init__(self, device: torch.device, lanes: Lanes, counters: Counters, threads: int) -> None:
        self.device, self.lanes, self.counters = device, lanes, counters
        self.transfers = {name: Transfer(device, threads) for name, lane in LANES.items() if lane.link}

    def copy(
        self,
        lane: str,
        job: str,
        copies: Sequence[tuple[torch.Tensor, torch.Tensor, bool]],
        *,
        reads: Sequence[Order] = (),
        writes: Sequence[Order] = (),
        after: Sequence[Wait] = (),
        label: str = "",
    ) -> Ticket:
        """Submit copies, each (target, source, whether the host memory is pinned); see `Lanes.submit`."""
        transfer = self.transfers[lane]
        move = transfer.to_device if LANES[lane].link == "in" else transfer.to_host

        def work() -> None:
            for target, source, pinned in copies:
                move(target, source, pinned)

        return self.lanes.submit(lane, job, work, reads=reads, writes=writes, after=after, label=label)
