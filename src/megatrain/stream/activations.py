"""Inputs of blocks parked in host memory until the backward needs them (policy `offload`).

They leave on the d2h lane as the forward makes them and come back on the h2d lane one block ahead of the backward, so
that device memory does not grow with depth.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass

import torch

from megatrain.store.ram import HostBuffer, HostMemory
from megatrain.store.ticket import DONE, Order, Ticket, Wait
from megatrain.stream.lanes import Lanes
from megatrain.stream.transfer import Transfer

IN_FLIGHT = 2
"""Tensors that may be on their way out at once: each is still in device memory."""


class Parked:
    """One tensor in host memory."""

    def __init__(self, tensor: torch.Tensor, loan: _Loan, previous: Parked | None) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.loan = loan
        self.previous = weakref.ref(previous) if previous is not None else None
        """Parked before this one by the same micro-batch: needed after it in the backward."""
        self.taken = False

    @property
    def host(self) -> torch.Tensor:
        return self.loan.buffer.bytes[: self.nbytes].view(self.dtype).view(self.shape)

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


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


class Activations:
    """Parks tensors and brings them back. Buffers of tensors that nobody comes back for are used again."""

    def __init__(self, device: torch.device, lanes: Lanes, out: Transfer, back: Transfer, memory: HostMemory) -> None:
        self._lanes = lanes
        self._out = out
        self._back = back
        self._memory = memory
        self._free: list[_Loan] = []
        self._leaving: deque[tuple[Ticket, torch.Tensor]] = deque()
        self._latest = threading.local()
        self._lock = threading.RLock()
        """Several threads may run the model."""

    def park(self, tensor: torch.Tensor) -> Parked:
        """Send a tensor out; the caller drops its own reference."""
        with self._lock:
            return self._park(tensor.detach().contiguous())

    def _park(self, tensor: torch.Tensor) -> Parked:
        nbytes = tensor.numel() * tensor.element_size()
        loan = self._borrow(nbytes)
        latest = getattr(self._latest, "parked", None)
        parked = Parked(tensor, loan, latest() if latest is not None else None)
        weakref.finalize(parked, self._free.append, loan)
        host, pinned = parked.host, loan.buffer.pinned
        # The copy that last brought this buffer's content back must have read it.
        self._lanes.submit(
            "d2h", "park", lambda: self._out.to_host(host, tensor, pinned), writes=[loan.order], label="activation"
        )
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
            previous = parked.previous() if parked.previous is not None else None
            if previous is not None and not previous.taken:
                self._bring(previous)
            target = _arrived(parked.loan)
            assert target is not None
            parked.taken = True
            return target

    def forget(self) -> None:
        """Let go of what was on its way to a backward that was given up."""
        with self._lock:
            for loan in self._free:
                _arrived(loan)

    def _borrow(self, nbytes: int) -> _Loan:
        """The smallest free buffer that is large enough; else a new one in place of the largest that is not."""
        fitting = [loan for loan in self._free if loan.buffer.nbytes >= nbytes]
        if fitting:
            loan = min(fitting, key=lambda loan: loan.buffer.nbytes)
            self._free.remove(loan)
            _arrived(loan)
            return loan
        if self._free:
            small = max(self._free, key=lambda loan: loan.buffer.nbytes)
            self._free.remove(small)
            small.order.until_writable()
            self._memory.free(small.buffer)
        return _Loan(self._memory.allocate(nbytes, transferred=True), Order("parked"))

    def _bring(self, parked: Parked) -> None:
        if parked.loan.target is not None or parked.taken:
            return
        target = torch.empty(parked.shape, dtype=parked.dtype, device=parked.device)
        parked.loan.target = target
        host, pinned = parked.host, parked.loan.buffer.pinned
        # After compute so far: the allocator may have given this memory to work that is still running.
        parked.loan.back = self._lanes.submit(
            "h2d",
            "unpark",
            lambda: self._back.to_device(target, host, pinned),
            reads=[parked.loan.order],
            after=[Wait("compute", self._lanes.mark())],
            label="activation",
        )


def _arrived(loan: _Loan) -> torch.Tensor | None:
    """What a loan's content came back to, if it did. Compute must not use that memory before the copy has been made."""
    target, loan.target = loan.target, None
    if target is not None:
        loan.back.order()
    return target
