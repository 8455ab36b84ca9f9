"""Inputs of blocks parked in host memory until the backward needs them (policy `offload`).

They leave on the d2h lane as the forward makes them and come back on the h2d lane one block ahead of the backward, so
that device memory does not grow with depth.
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

IN_FLIGHT = 2
"""Tensors that may be on their way out at once: each is still in device memory."""


@dataclass(eq=False)
class _Loan:
    """A host buffer in use, and who works on it."""

    buffer: HostBuffer
    order: Order
    target: torch.Tensor | None = None
    """Where its content is on its way to. Nobody comes for it if the backward is given up: it must stay here until
    compute is ordered behind the copy, or the allocator would hand out memory that is still being written."""
    back: Ticket = DONE
    """The copy to the target."""

    def arrived(self) -> torch.Tensor | None:
        """What the content came back to, if it did. Compute must not use that memory before the copy has been made."""
        target, self.target = self.target, None
        if target is not None:
            self.back.order()
        return target


@dataclass(eq=False)
class Parked:
    """One tensor in host memory."""

    host: torch.Tensor
    device: torch.device
    loan: _Loan
    previous: Callable[[], Parked | None]
    """Parked before this one by the same micro-batch: needed after it in the backward."""
    taken: bool = False


class Activations:
    """Parks tensors and brings them back. Buffers of tensors that nobody comes back for are used again."""

    def __init__(self, link: Link, memory: HostMemory) -> None:
        self._link = link
        self._memory = memory
        self._free: list[_Loan] = []
        self._leaving: deque[tuple[Ticket, torch.Tensor]] = deque()
        self._latest = threading.local()
        self._lock = threading.RLock()
        """Several threads may run the model."""

    def park(self, tensor: torch.Tensor) -> Parked:
        """Send a tensor out; the caller drops its own reference."""
        tensor = tensor.detach().contiguous()
        with self._lock:
            loan = self._borrow(tensor.nbytes)
            host = loan.buffer.bytes[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            parked = Parked(host, tensor.device, loan, getattr(self._latest, "parked", lambda: None))
            weakref.finalize(parked, self._free.append, loan)
            # The copy that last brought this buffer's content back must have read it.
            copies = [(host, tensor, loan.buffer.pinned)]
            self._link.copy("d2h", "park", copies, writes=[loan.order], label="activation")
            # The device memory is free when the copy has been made, not before; waiting here keeps it bounded.
            self._leaving.append((loan.order.written, tensor))
            while len(self._leaving) > IN_FLIGHT:
                self._leaving.popleft()[0].wait()
            self._latest.parked = weakref.ref(parked)
            return parked

    def take(self, parked: Parked) -> torch.Tensor:
        """Bring a tensor back, and start the one that will be needed after it."""
        with self._lock:
            self._bring(parked)
            previous = parked.previous()
            if previous is not None and not previous.taken:
                self._bring(previous)
            target = parked.loan.arrived()
            assert target is not None
            parked.taken = True
            return target

    def forget(self) -> None:
        """Let go of what was on its way to a backward that was given up."""
        with self._lock:
            for loan in self._free:
                loan.arrived()

    def _borrow(self, nbytes: int) -> _Loan:
        """The smallest free buffer that is large enough; else a new one in place of the largest that is not."""
        fitting = [loan for loan in self._free if loan.buffer.nbytes >= nbytes]
        if fitting:
            loan = min(fitting, key=lambda loan: loan.buffer.nbytes)
            self._free.remove(loan)
            loan.arrived()
            return loan
        if self._free:
            small = max(self._free, key=lambda loan: loan.buffer.nbytes)
            self._free.remove(small)
            small.order.until_writable()
            self._memory.free(small.buffer)
        return _Loan(self._memory.allocate(nbytes, transferred=True), Order("parked"))

    def _bring(self, parked: Parked) -> None:
        host, loan = parked.host, parked.loan
        if loan.target is not None or parked.taken:
            return
        loan.target = target = torch.empty_like(host, device=parked.device)
        # The allocator may have given this memory to work that is still running.
        after = [Wait("compute", self._link.lanes.mark())]
        copies = [(target, host, loan.buffer.pinned)]
        loan.back = self._link.copy("h2d", "unpark", copies, reads=[loan.order], after=after, label="activation")
