"""GPU memory as storage: a slab whose every role stays on the compute device. Nothing of it travels.

On the CPU the "device" is plain memory: the same code, so that placement can be tested without a GPU.

What stays (state, slots) is allocated apart from what comes and goes (activations): PyTorch's allocator keeps a pool
per stream, and in one pool what stays would lie scattered between holes that nothing fits into.
"""

from __future__ import annotations

from functools import cache

import torch

from megatrain.store.memory import Buffer


@cache
def _persistent_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream whose pool holds what stays; one for all engines, so that a later one uses it again."""
    return torch.cuda.Stream(device)


def allocate_persistent(nbytes: int, device: torch.device, *, zeroed: bool = False) -> torch.Tensor:
    """Bytes on the device that are kept for long. The current stream may use them at once, another after it."""
    make = torch.zeros if zeroed else torch.empty
    if device.type != "cuda":
        return make(nbytes, dtype=torch.uint8, device=device)
    home, current = _persistent_stream(device), torch.cuda.current_stream(device)
    # Both ways: what used these bytes before was on the current stream, and so is what uses them next.
    home.wait_stream(current)
    with torch.cuda.device(device), torch.cuda.stream(home):
        found = make(nbytes, dtype=torch.uint8, device=device)
    current.wait_stream(home)
    return found


class DeviceMemory:
    """Allocates buffers on the compute device."""

    def __init__(self, device: torch.device) -> None:
        self.tier = "vram"
        self.device = device
        self.held = 0

    def allocate(self, nbytes: int, *, transferred: bool) -> Buffer:
        buffer = Buffer(allocate_persistent(nbytes, self.device, zeroed=True), pinned=True)
        self.held += nbytes
        return buffer

    def free(self, buffer: Buffer) -> None:
        # PyTorch takes the bytes back when nobody has the buffer any more, for whoever asks next on any stream, or for
        # the driver. It knows of one stream that used them: that one comes after the current one, which did.
        if self.device.type == "cuda":
            _persistent_stream(self.device).wait_stream(torch.cuda.current_stream(self.device))
        self.held -= buffer.nbytes
