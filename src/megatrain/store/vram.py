"""GPU memory as a tier for state. On the CPU it is plain memory, so that placement is testable without a GPU.

Persistent memory (state, slots) is allocated on a stream of its own, apart from activations: PyTorch's allocator keeps
a pool per stream, and in a shared pool persistent blocks would fragment it.
"""

from __future__ import annotations

from functools import cache

import torch

from megatrain.store.memory import Buffer


@cache
def _persistent_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream whose pool holds persistent memory; shared by all engines, so that later ones reuse it."""
    return torch.cuda.Stream(device)


def allocate_persistent(nbytes: int, device: torch.device, *, zeroed: bool = False) -> torch.Tensor:
    """Persistent bytes on the device, ready for the current stream."""
    make = torch.zeros if zeroed else torch.empty
    if device.type != "cuda":
        return make(nbytes, dtype=torch.uint8, device=device)
    persistent, current = _persistent_stream(device), torch.cuda.current_stream(device)
    # Both ways: the current stream used these bytes before, and uses them next.
    persistent.wait_stream(current)
    with torch.cuda.device(device), torch.cuda.stream(persistent):
        memory = make(nbytes, dtype=torch.uint8, device=device)
    current.wait_stream(persistent)
    return memory


class DeviceMemory:
    """Allocates buffers on the compute device."""

    def __init__(self, device: torch.device) -> None:
        self.tier = "vram"
        self.device = device
        self.allocated_bytes = 0

    def allocate(self, nbytes: int, *, transferred: bool) -> Buffer:
        buffer = Buffer(allocate_persistent(nbytes, self.device, zeroed=True), pinned=True)
        self.allocated_bytes += nbytes
        return buffer

    def free(self, buffer: Buffer) -> None:
        # When the last reference is dropped, PyTorch reuses the bytes. It only knows the allocating stream, so order
        # that stream after the current one, which used them.
        if self.device.type == "cuda":
            _persistent_stream(self.device).wait_stream(torch.cuda.current_stream(self.device))
        self.allocated_bytes -= buffer.nbytes
