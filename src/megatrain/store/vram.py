"""GPU memory as storage: a slab whose every role stays on the compute device. Nothing of it travels.

On the CPU the "device" is plain memory: the same code, so that placement can be tested without a GPU.
"""

from __future__ import annotations

import torch

from megatrain.store.memory import Buffer


class DeviceBuffer:
    """One run of device memory."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.pinned = True
        self.nbytes = nbytes
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def view(self, dtype: torch.dtype) -> torch.Tensor:
        return self.bytes.view(dtype)


class DeviceMemory:
    """Allocates buffers on the compute device."""

    def __init__(self, device: torch.device) -> None:
        self.tier = "vram"
        self.device = device
        self.held = 0

    def allocate(self, nbytes: int, *, transferred: bool) -> Buffer:
        buffer = DeviceBuffer(nbytes, self.device)
        self.held += nbytes
        return buffer
