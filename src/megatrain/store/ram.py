"""Host memory: anonymous pages of exactly the requested size, faulted in by several threads and registered with CUDA.

PyTorch's pinned allocator rounds up to powers of two and can waste half; `cudaHostRegister` pins existing pages. If the
driver refuses (containers, WSL, low limits), memory stays pageable and transfers use a small pinned staging ring
(stream/transfer.py).
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch

from megatrain.native import library as native
from megatrain.store import forks
from megatrain.store.memory import Buffer
from megatrain.telemetry.notices import warn

_PARALLEL_TOUCH_BYTES = 8 << 20
"""Below this size one thread faults pages in faster than several can be started."""


class HostBuffer(Buffer):
    """Page-aligned host memory."""

    def __init__(self, nbytes: int, threads: int) -> None:
        self._map = mmap.mmap(-1, max(nbytes, 1))
        super().__init__(torch.frombuffer(self._map, dtype=torch.uint8)[:nbytes], pinned=False)
        # A shared mapping: private pinned pages would be copied into every forked child.
        forks.protect(self._map, self.address, max(nbytes, 1))
        if nbytes >= _PARALLEL_TOUCH_BYTES:
            native.touch(self.address, nbytes, threads)

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()

    def pin(self) -> bool:
        """Register with CUDA; False if the driver refuses."""
        if not self.pinned and self.nbytes:
            code = torch.cuda.cudart().cudaHostRegister(self.address, self.nbytes, 0)
            if int(code) != 0:
                # The error code is sticky and PyTorch has no call to clear it: absorb it with a kernel launch.
                with suppress(RuntimeError):
                    torch.empty(1, device="cuda").fill_(0)
                return False
            self.pinned = True
            self._unregister = weakref.finalize(self, _unregister, self.address, forks.Owner())
        return True

    def unpin(self) -> None:
        if self.pinned:
            self._unregister()
            self.pinned = False


class HostMemory:
    """Allocates host buffers; stops pinning after the driver has refused once."""

    def __init__(self, *, pin: bool, threads: int, guard: Callable[[int, int], None] | None = None) -> None:
        self.tier = "ram"
        self.pinning = pin
        self._guard = guard
        """Called with (requested bytes, allocated bytes) before each allocation; raises to refuse it."""
        self.threads = threads
        self.allocated_bytes = 0
        self.pin_seconds = 0.0
        self.owner = forks.Owner()
        self._buffers: list[HostBuffer] = []

    @property
    def pinned(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers if buffer.pinned)

    def require(self, nbytes: int, kept: int | None = None) -> None:
        """Raise now if a later allocation would be refused: a peak of `nbytes`, of which `kept` stay (None: all)."""
        if self._guard is not None:
            self._guard(nbytes, self.allocated_bytes + (0 if kept is None else kept - nbytes))

    def allocate(self, nbytes: int, *, transferred: bool) -> HostBuffer:
        """Zeroed memory, pinned if it is transferred and pinning works."""
        self.owner.require("give its model more memory")
        self.require(nbytes)
        buffer = HostBuffer(nbytes, self.threads)
        if transferred and self.pinning and not self._pin(buffer):
            self.pinning = False
            warn(
                f"the driver refused to pin {nbytes / (1 << 20):.0f} MiB of host memory, so transfers use a pinned "
                "staging ring and are slower; raise the locked-memory limit (ulimit -l) to avoid this"
            )
        self.allocated_bytes += nbytes
        self._buffers.append(buffer)
        return buffer

    def _pin(self, buffer: HostBuffer) -> bool:
        began = time.perf_counter()
        pinned = buffer.pin()
        self.pin_seconds += time.perf_counter() - began
        return pinned

    def free(self, buffer: HostBuffer) -> None:
        buffer.unpin()
        self._buffers.remove(buffer)
        self.allocated_bytes -= buffer.nbytes

    def trim(self) -> None:
        """Return freed memory to the operating system."""
        native.trim()

    def unpin(self) -> None:
        """Unregister all buffers from the driver; contents stay readable."""
        for buffer in self._buffers:
            buffer.unpin()


def _unregister(address: int, owner: forks.Owner) -> None:
    # A forked child must not call CUDA for its parent's buffers.
    if owner.is_current:
        torch.cuda.cudart().cudaHostUnregister(address)
