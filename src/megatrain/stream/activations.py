"""Inputs of blocks parked in host memory until the backward needs them (policy `offload`).

They leave on the d2h lane as the forward makes them and come back on the h2d lane one block ahead of the backward, so
that device memory does not grow with depth.
"""

from __future__ import annotations

import threading
from collections import deque

import torch

from megatrain.store.ram import HostBuffer, HostMemory
from megatrain.store.ticket import DONE, Ticket
from megatrain.stream.lanes import Lanes
from megatrain.stream.transfer import Transfer

IN_FLIGHT = 2
"""Tensors that may be on their way out at once: each is still in device memory."""


class Parked:
    """One tensor in host memory."""

    def __init__(self, tensor: torch.Tensor, buffer: HostBuffer, previous: Parked | None) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.buffer = buffer
        self.previous = previous
        """Parked before this one by the same micro-batch: needed after it in the backward."""
        self.left: Ticket = DONE
        self.target: torch.Tensor | None = None
        self.arrived: Ticket = DONE
        self.taken = False

    @property
    def host(self) -> torch.Tensor:
        nbytes = self.shape.numel() * self.dtype.itemsize
        return self.buffer.bytes[:nbytes].view(self.dtype).view(self.shape)


class Activations:
    """Parks tensors and brings them back."""

    def __init__(self, device: torch.device, lanes: Lanes, out: Transfer, back: Transfer, memory: HostMemory) -> None:
        self._lanes = lanes
        self._out = out
        self._back = back
        self._memory = memory
        self._free: dict[int, list[tuple[HostBuffer, Ticket]]] = {}
        self._leaving: deque[tuple[Ticket, torch.Tensor]] = deque()
        self._last = threading.local()

    def park(self, tensor: torch.Tensor) -> Parked:
        """Send a tensor out; the caller drops its own reference."""
        tensor = tensor.detach().contiguous()
        nbytes = tensor.numel() * tensor.element_size()
        pool = self._free.setdefault(nbytes, [])
        buffer, used = pool.pop() if pool else (self._memory.allocate(nbytes, transferred=True), DONE)
        parked = Parked(tensor, buffer, getattr(self._last, "parked", None))
        # After `used`: the copy that last brought this buffer's content back must have read it.
        parked.left = self._lanes.d2h.submit(
            lambda: self._out.to_host(parked.host, tensor, buffer.pinned),
            after=(self._lanes.mark(), used),
            label="activation",
        )
        # The device memory is free when the copy has been made, not before; waiting here keeps it bounded.
        self._leaving.append((parked.left, tensor))
        while len(self._leaving) > IN_FLIGHT:
            self._leaving.popleft()[0].wait()
        self._last.parked = parked
        return parked

    def take(self, parked: Parked) -> torch.Tensor:
        """Bring a tensor back, and the one that will be needed after it."""
        self._bring(parked)
        previous = parked.previous
        if previous is not None and not previous.taken:
            self._bring(previous)
        # Compute must not read it before it is there.
        parked.arrived.order()
        target = parked.target
        assert target is not None
        parked.target, parked.taken, parked.previous = None, True, None
        if getattr(self._last, "parked", None) is parked:
            self._last.parked = None
        self._free[parked.shape.numel() * parked.dtype.itemsize].append((parked.buffer, parked.arrived))
        return target

    def _bring(self, parked: Parked) -> None:
        if parked.target is not None or parked.taken:
            return
        target = torch.empty(parked.shape, dtype=parked.dtype, device=parked.device)
        parked.target = target
        # After compute so far: the allocator may have given this memory to work that is still running.
        parked.arrived = self._lanes.h2d.submit(
            lambda: self._back.to_device(target, parked.host, parked.buffer.pinned),
            after=(parked.left, self._lanes.mark()),
            label="activation",
        )
