"""Inputs of blocks on disk: they pass through staging buffers in RAM, on their way out and back.

Writes and reads have one lane, apart from the others: compute waits for them, and must not wait for optimizer states.
Reads begin where writes end, with the last blocks, so they share it. The last inputs of a forward are still in their
staging buffers when the backward begins, and need no read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import islice

from megatrain.geometry import INPUT_STAGING_SLOTS, matches
from megatrain.store.disk import DiskBuffer, DiskMemory
from megatrain.store.memory import Buffer, Memory
from megatrain.store.ticket import DONE, Order, Ticket
from megatrain.stream.disk_transfer import DiskTransfers
from megatrain.stream.lanes import Lanes
from megatrain.stream.offloaded import OffloadedTensor
from megatrain.stream.rings import HostBuffers


def _nothing() -> None:
    return None


class Staging(HostBuffers):
    """A buffer in RAM for one input."""

    def __init__(self) -> None:
        super().__init__("staged input")
        self.content: Callable[[], OffloadedTensor | None] = _nothing
        """The tensor that is or will be in the buffer, and that no copy to the device was started for."""

    @property
    def whole(self) -> Buffer:
        assert self.buffer is not None
        return self.buffer

    def release(self) -> None:
        """Say that the content is no longer needed once the work submitted so far is done."""
        self.content = _nothing


class DiskInputs:
    """Writes inputs to disk and reads them ahead. `Activations` holds its lock in every call but `wait_for_room`."""

    def __init__(
        self, patterns: Sequence[str], disk: DiskMemory, ram: Memory, lanes: Lanes, transfers: DiskTransfers
    ) -> None:
        self.memory, self._ram, self._lanes, self._transfers = disk, ram, lanes, transfers
        self._ring = [Staging() for _ in range(INPUT_STAGING_SLOTS)]
        """The one that was not used for longest comes first."""
        self._last: Ticket = DONE
        self.takes = cache(lambda block: matches(block, patterns))
        """Whether the inputs of a block go to disk."""

    def allocate(self, nbytes: int) -> DiskBuffer:
        """Reserved space for an input."""
        return self.memory.allocate(nbytes, transferred=False, inputs=True)

    def wait_for_room(self, count: int) -> None:
        """Block until as many inputs can be staged without a wait of their copies for the drive."""
        for staging in self._by_age()[:count]:
            staging.order.until_writable()

    def next_staging(self, tensor: OffloadedTensor) -> Staging:
        """The staging buffer that a tensor leaves through. It may have held one that was read ahead."""
        return self._use(self._by_age()[0], tensor)

    def write(self, tensor: OffloadedTensor, staging: Staging) -> None:
        """Submit the write of a tensor whose copy to `staging` was submitted."""
        self._submit("write input", tensor, staging, reads=[staging.order], writes=[tensor.place.order])
        self.memory.count_input(_span(tensor))

    def staged(self, tensor: OffloadedTensor) -> Staging:
        """The buffer that has the tensor once its order allows it. Submits the read if needed."""
        found = self._holding(tensor)
        return found if found is not None else self._read(tensor, self._by_age()[0])

    def read_ahead(self, upcoming: Iterable[OffloadedTensor]) -> None:
        """Submit reads of the tensors on disk that are needed first, as far as staging buffers suffice."""
        on_disk = (tensor for tensor in upcoming if tensor.place.on_disk and tensor.place.target is None)
        for tensor in islice(on_disk, len(self._ring)):
            if self._holding(tensor) is not None:
                continue
            staging = self._by_age()[0]
            if staging.content() is not None:
                return
            self._read(tensor, staging)

    def _read(self, tensor: OffloadedTensor, staging: Staging) -> Staging:
        self._use(staging, tensor)
        self._submit("read input", tensor, staging, reads=[tensor.place.order], writes=[staging.order])
        return staging

    def _submit(
        self, job: str, tensor: OffloadedTensor, staging: Staging, reads: Sequence[Order], writes: Sequence[Order]
    ) -> None:
        copies = [(staging.whole.bytes[: _span(tensor)], tensor.place.buffer)]
        block, earlier = tensor.turn.block, self._last

        def work() -> None:
            # On a lane this is done. If it failed, so does all that follows: a read could find an older input, whose
            # checksum is right, where a write has failed.
            earlier.wait()
            self._transfers.move("disk_inputs", job, block, copies)

        self._last = self._lanes.submit("disk_inputs", job, work, reads=reads, writes=writes, label=block)
        staging.content = weakref.ref(tensor)

    def _use(self, staging: Staging, tensor: OffloadedTensor) -> Staging:
        staging.release()
        staging.allocate(_span(tensor), self._ram)
        self._ring.remove(staging)
        self._ring.append(staging)
        return staging

    def _by_age(self) -> list[Staging]:
        """Buffers in the order in which they are used next: those without content first."""
        return sorted(self._ring, key=lambda staging: staging.content() is not None)

    def _holding(self, tensor: OffloadedTensor) -> Staging | None:
        return next((staging for staging in self._ring if staging.content() is tensor), None)


def _span(tensor: OffloadedTensor) -> int:
    """Bytes that a transfer of the tensor moves: whole pieces."""
    buffer = tensor.place.buffer
    assert isinstance(buffer, DiskBuffer)
    return buffer.span(tensor.nbytes)
