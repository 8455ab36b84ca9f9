"""Host memory: anonymous pages of exactly the size asked for, touched by several threads, registered with CUDA.

PyTorch's pinned allocator rounds up to powers of two and can waste half; `cudaHostRegister` pins what is there.
Where registering is refused (containers, WSL, low limits) memory stays pageable and transfers go through a small
pinned staging ring (stream/transfer.py).
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch

from megatrain.native import library as native
from megatrain.store import forks
from megatrain.store.memory import Buffer
from megatrain.telemetry.notices import warn

_PARALLEL_TOUCH_BYTES = 8 << 20
"""Below this many bytes one thread faults the pages in faster than several can be started."""


class HostBuffer(Buffer):
    """One page-aligned run of host memory."""

    def __init__(self, nbytes: int, threads: int) -> None:
        self._map = mmap.mmap(-1, max(nbytes, 1))
        super().__init__(torch.frombuffer(self._map, dtype=torch.uint8)[:nbytes], pinned=False)
        # Shared with forked children, on purpose: private pages that are pinned would be copied into every child.
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
                # A refusal leaves its code behind, and PyTorch binds no call that clears it: the next launch raises it.
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
    """Allocates host buffers and decides once whether memory can be pinned."""

    def __init__(self, *, pin: bool, threads: int, guard: Callable[[int, int], None] | None = None) -> None:
        self.tier = "ram"
        self.pinning = pin
        self._guard = guard
        """Called with (bytes wanted, bytes held) before each allocation; raises to refuse it."""
        self.threads = threads
        self.held = 0
        self.owner = forks.Owner()
        self._buffers: list[HostBuffer] = []

    @property
    def pinned(self) -> int:
        """Bytes that the GPU can reach directly."""
        return sum(buffer.nbytes for buffer in self._buffers if buffer.pinned)

    def require(self, nbytes: int, kept: int | None = None) -> None:
        """Refuse now what could not be allocated later: `nbytes` at the most, of which `kept` stay (None: all)."""
        if self._guard is not None:
            self._guard(nbytes, self.held + (0 if kept is None else kept - nbytes))

    def allocate(self, nbytes: int, *, transferred: bool) -> HostBuffer:
        """Zeroed memory; pinned if it takes part in transfers and pinning works here."""
        self.owner.require("give its model more memory")
        self.require(nbytes)
        buffer = HostBuffer(nbytes, self.threads)
        if transferred and self.pinning and not buffer.pin():
            self.pinning = False
            warn(
                f"the driver refused to pin {nbytes / (1 << 20):.0f} MiB of host memory, so transfers use a pinned "
                "staging "
                "ring and are slower; raise the locked-memory limit (ulimit -l) to avoid this"
            )
        self.held += nbytes
        self._buffers.append(buffer)
        return buffer

    def free(self, buffer: HostBuffer) -> None:
        buffer.unpin()
        self._buffers.remove(buffer)
        self.held -= buffer.nbytes

    def trim(self) -> None:
        """Freed originals go back to the system, not only to the allocator."""
        native.trim()

    def unpin(self) -> None:
        """Give the pages back to the driver; contents stay readable."""
        for buffer in self._buffers:
            buffer.unpin()


def _unregister(address: int, owner: forks.Owner) -> None:
    # A forked child ends with the same objects, and CUDA is its parent's.
    if owner.is_current:
        torch.cuda.cudart().cudaHostUnregister(address)
