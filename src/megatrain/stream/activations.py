"""Policy `offload`: inputs of blocks wait in host memory for the backward pass.

They leave on the d2h lane as the forward pass produces them and return on the h2d lane one block ahead of the backward
pass, so device memory does not grow with depth.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatrain.store.ram import HostBuffer, HostMemory
from megatrain.store.ticket import DONE, Order, Ticket, Wait
from megatrain.stream.transfer import Link

MAX_COPIES_IN_FLIGHT = 2
"""Each tensor that is being copied out still occupies device memory."""


@dataclass(eq=False)
class _OffloadBuffer:
    """A host buffer that holds one offloaded tensor at a time."""

    host: HostBuffer
    order: Order
    target: torch.Tensor | None = None
    """The device tensor that the content is being copied to. An abandoned backward pass never asks for it, so the
    reference stays here until compute is ordered after the copy: the allocator would otherwise reuse memory that is
    still being written."""
    copy_back: Ticket = DONE

    def take_target(self) -> torch.Tensor | None:
        """The device tensor, if a copy back was started; compute is then ordered after that copy."""
        target, self.target = self.target, None
        if target is not None:
            self.copy_back.order_stream()
        return target


@dataclass(eq=False)
class OffloadedTensor:
    """One tensor in host memory."""

    values: torch.Tensor
    device: torch.device
    buffer: _OffloadBuffer
    previous: Callable[[], OffloadedTensor | None]
    """The one offloaded before it by the same micro-batch, which the backward pass needs next."""
    restored: bool = False


class Activations:
    """Offloads tensors to host memory and restores them. A buffer is reused once its tensor is no longer referenced."""

    def __init__(self, link: Link, memory: HostMemory) -> None:
        self._link = link
        self._memory = memory
        self._free: list[_OffloadBuffer] = []
        self._in_flight: deque[tuple[Ticket, torch.Tensor]] = deque()
        self._latest = threading.local()
        self._lock = threading.RLock()
        """Several threads may run the model."""

    def offload(self, tensor: torch.Tensor) -> OffloadedTensor:
        """Start the copy to host memory; the caller drops its own reference."""
        tensor = tensor.detach().contiguous()
        with self._lock:
            buffer = self._allocate(tensor.nbytes)
            values = buffer.host.bytes[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            offloaded = OffloadedTensor(values, tensor.device, buffer, getattr(self._latest, "tensor", lambda: None))
            weakref.finalize(offloaded, self._free.append, buffer)
            # The copy that last read this buffer must be done.
            copies = [(values, tensor, buffer.host.pinned)]
            self._link.copy("d2h", "offload", copies, writes=[buffer.order], label="activation")
            # Device memory is freed only when the copy is done; waiting here bounds it.
            self._in_flight.append((buffer.order.written, tensor))
            while len(self._in_flight) > MAX_COPIES_IN_FLIGHT:
                self._in_flight.popleft()[0].wait()
            self._latest.tensor = weakref.ref(offloaded)
            return offloaded

    def restore(self, offloaded: OffloadedTensor) -> torch.Tensor:
        """The tensor on the device; also starts the copy of the one that is needed next."""
        with self._lock:
            self._start_copy_back(offloaded)
            previous = offloaded.previous()
            if previous is not None and not previous.restored:
                self._start_copy_back(previous)
            target = offloaded.buffer.take_target()
            assert target is not None
            offloaded.restored = True
            return target

    def drop_all(self) -> None:
        """Drop device tensors that were being restored for an abandoned backward pass."""
        with self._lock:
            for buffer in self._free:
                buffer.take_target()

    def _allocate(self, nbytes: int) -> _OffloadBuffer:
        """The smallest free buffer that is large enough, or a new one that replaces the largest free one."""
        fitting = [buffer for buffer in self._free if buffer.host.nbytes >= nbytes]
        if fitting:
            buffer = min(fitting, key=lambda buffer: buffer.host.nbytes)
            self._free.remove(buffer)
            buffer.take_target()
            return buffer
        if self._free:
            small = max(self._free, key=lambda buffer: buffer.host.nbytes)
            self._free.remove(small)
            small.order.until_writable()
            self._memory.free(small.host)
        return _OffloadBuffer(self._memory.allocate(nbytes, transferred=True), Order("offloaded"))

    def _start_copy_back(self, offloaded: OffloadedTensor) -> None:
        values, buffer = offloaded.values, offloaded.buffer
        if buffer.target is not None or offloaded.restored:
            return
        buffer.target = target = torch.empty_like(values, device=offloaded.device)
        # The allocator may have given out memory that running work still uses.
        after = [Wait("compute", self._link.lanes.mark())]
        copies = [(target, values, buffer.host.pinned)]
        reads = [buffer.order]
        buffer.copy_back = self._link.copy("h2d", "restore", copies, reads=reads, after=after, label="activation")
