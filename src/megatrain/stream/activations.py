"""Policy `offload`: inputs of blocks wait in host memory, or on disk, for the backward pass.

They leave on the d2h lane as the forward pass produces them and return on the h2d lane one block ahead of the backward
pass, so device memory does not grow with depth. Those on disk pass through staging buffers, and are read further ahead
(stream/disk_inputs.py).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import islice

import torch

from megatrain.store.memory import Buffer
from megatrain.store.ram import HostMemory
from megatrain.store.ticket import Order, Ticket, Wait
from megatrain.stream.disk_inputs import DiskInputs
from megatrain.stream.offloaded import OffloadedTensor, Place, Turn
from megatrain.stream.transfer import Link

MAX_COPIES_IN_FLIGHT = 2
"""Each tensor that is being copied out still occupies device memory."""


class Activations:
    """Offloads tensors and restores them. A place is reused once its tensor is no longer referenced."""

    def __init__(self, link: Link, memory: HostMemory, disk: DiskInputs | None = None) -> None:
        self._link, self._memory, self._disk = link, memory, disk
        self._free: list[Place] = []
        self._in_flight: deque[tuple[Ticket, torch.Tensor]] = deque()
        self._turn = Turn()
        """That of the last call."""
        self._coming: weakref.WeakSet[OffloadedTensor] = weakref.WeakSet()
        """Tensors whose copy to the device was started, and that were not taken yet."""
        self._lock = threading.RLock()
        """Several threads may run the model."""

    def wait_for_room(self, count: int, block: str) -> None:
        """Block until a call with this many tensors may be offloaded: device memory is freed only when a copy is done,
        so waiting here bounds it. It may take as long as the drive does, so call it where Ctrl-C is not deferred."""
        while True:
            with self._lock:
                if not self._in_flight or len(self._in_flight) + count <= MAX_COPIES_IN_FLIGHT:
                    break
                # It is removed after the wait: if a Ctrl-C ends that, the copy goes on, and must keep its tensor.
                oldest = self._in_flight[0]
            oldest[0].wait()
            with self._lock:
                if self._in_flight and self._in_flight[0] is oldest:
                    self._in_flight.popleft()
        if self._disk is not None and self._disk.takes(block):
            self._disk.wait_for_room(count)

    def offload(self, tensors: Sequence[torch.Tensor], block: str) -> list[OffloadedTensor]:
        """Start the copies of a call's inputs to host memory; the caller drops its own references."""
        caller = threading.get_ident()
        with self._lock:
            if self._turn.block != block or caller in self._turn.callers:
                self._turn = Turn(block, self._turn)
            self._turn.callers.add(caller)
            return [self._offload(tensor.detach().contiguous(), self._turn) for tensor in tensors]

    def start(self, wanted: Sequence[OffloadedTensor]) -> None:
        """Start the copies of a call's inputs to the device, and of those that are needed next."""
        if not wanted:
            return
        with self._lock:
            for offloaded in wanted:
                self._start_copy_back(offloaded)
            upcoming, ahead = wanted[-1].upcoming(), len(wanted[-1].turn.tensors)
            for offloaded in islice(upcoming, ahead):
                # If the order is another one, those that were started too early must not fill device memory.
                if len(self._coming) < len(wanted) + ahead:
                    self._start_copy_back(offloaded)
            if self._disk is not None:
                self._disk.read_ahead(upcoming)

    def take(self, offloaded: OffloadedTensor) -> torch.Tensor:
        """The tensor on the device, once; its copy was started. Compute is ordered after that."""
        with self._lock:
            offloaded.restored = True
            self._coming.discard(offloaded)
            target = offloaded.place.take_target()
            assert target is not None
            return target

    def drop_all(self) -> None:
        """Drop device tensors that were being restored for an abandoned backward pass."""
        with self._lock:
            for place in self._free:
                place.take_target()

    def _offload(self, tensor: torch.Tensor, turn: Turn) -> OffloadedTensor:
        disk = self._disk if self._disk is not None and self._disk.takes(turn.block) else None
        place = self._allocate(tensor.nbytes, disk)
        offloaded = OffloadedTensor(tensor.shape, tensor.dtype, tensor.device, place, turn)
        weakref.finalize(offloaded, self._free.append, place)
        if disk is None:
            # The copy that last read this memory must be done.
            self._copy_out(offloaded, tensor, place.buffer, place.order)
            return offloaded
        staging = disk.next_staging(offloaded)
        self._copy_out(offloaded, tensor, staging.whole, staging.order)
        disk.write(offloaded, staging)
        return offloaded

    def _copy_out(self, offloaded: OffloadedTensor, tensor: torch.Tensor, buffer: Buffer, order: Order) -> None:
        copies = [(offloaded.view(buffer.bytes), tensor, buffer.pinned)]
        ticket = self._link.copy("d2h", "offload", copies, writes=[order], label=offloaded.turn.block)
        self._in_flight.append((ticket, tensor))

    def _allocate(self, nbytes: int, disk: DiskInputs | None) -> Place:
        """The smallest free place that is large enough, or a new one that replaces the largest free one."""
        free = [place for place in self._free if place.on_disk == (disk is not None)]
        fitting = [place for place in free if place.buffer.nbytes >= nbytes]
        if fitting:
            place = min(fitting, key=lambda place: place.buffer.nbytes)
            self._free.remove(place)
            place.take_target()
            return place
        if free:
            small = max(free, key=lambda place: place.buffer.nbytes)
            self._free.remove(small)
            small.take_target()
            small.order.until_writable()
            small.memory.free(small.buffer)
        if disk is None:
            return Place(self._memory, self._memory.allocate(nbytes, transferred=True), Order("offloaded"))
        return Place(disk.memory, disk.allocate(nbytes), Order("offloaded"))

    def _start_copy_back(self, offloaded: OffloadedTensor) -> None:
        place = offloaded.place
        if place.target is not None or offloaded.restored:
            return
        target = torch.empty(offloaded.shape, dtype=offloaded.dtype, device=offloaded.device)
        staging = self._disk.staged(offloaded) if self._disk is not None and place.on_disk else None
        buffer, order = (place.buffer, place.order) if staging is None else (staging.whole, staging.order)
        # The allocator may have given out memory that running work still uses.
        after = [Wait("compute", self._link.lanes.mark())]
        copies = [(target, offloaded.view(buffer.bytes), buffer.pinned)]
        ticket = self._link.copy("h2d", "restore", copies, reads=[order], after=after, label=offloaded.turn.block)
        place.target, place.copy_back = target, ticket
        self._coming.add(offloaded)
        if staging is not None:
            staging.release()
