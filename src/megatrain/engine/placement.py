"""Where blocks keep their state, what updates it there, and whether it will fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from functools import partial

import torch

from megatrain.errors import SettingsError
from megatrain.hardware import inventory
from megatrain.hardware.watch import RamWatch
from megatrain.optim.rules import Rule
from megatrain.optim.update import Kernel, device_kernel, native_kernel, reference_kernel
from megatrain.settings import Settings
from megatrain.store.memory import Memory
from megatrain.store.ram import HostMemory
from megatrain.store.slab import Slab
from megatrain.store.vram import DeviceMemory


class Placement:
    """The tiers of one engine."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._settings = settings
        self._device = device
        self.ram = HostMemory(
            pin=device.type == "cuda" and settings.pin,
            threads=inventory.cores(),
            guard=partial(_require_ram, settings.max_ram_gb),
        )
        self.vram = DeviceMemory(device)
        self.watch = RamWatch(held=lambda: self.ram.held, trim=self.ram.trim)

    def tier(self, block: str) -> Memory:
        """Where the block of this name keeps its state."""
        return self.vram if any(fnmatch(block, pattern) for pattern in self._settings.resident) else self.ram

    def check(self, blocks: Sequence[str]) -> None:
        """A pattern that matches nothing is a mistake, not a wish."""
        for pattern in self._settings.resident:
            if not any(fnmatch(name, pattern) for name in blocks):
                raise SettingsError(
                    f"resident={pattern!r} matches no block; blocks are {blocks[0]}, {blocks[1]}, … {blocks[-1]}."
                )

    def kernels(self) -> dict[str, Kernel]:
        """What updates the state of each tier."""
        if self._settings.kernels == "reference":
            return {"ram": reference_kernel, "vram": reference_kernel}
        native = native_kernel(inventory.update_threads())
        resident = bool(self._settings.resident) and self._device.type == "cuda"
        return {"ram": native, "vram": device_kernel() if resident else native}

    def require_states(self, slabs: Iterable[Slab], rule: type[Rule], width: str) -> None:
        """Refuse before the first allocation what the optimizer's states and the gradients would not leave room for."""
        needed = {"ram": 0, "vram": 0}
        for slab in slabs:
            gradient = 0 if slab.grad.allocated else slab.layout.nbytes
            needed[slab.memory.tier] += slab.state_bytes(rule.moments, width) + gradient
        if needed["vram"]:
            inventory.require_vram(self._device, needed["vram"], "moments, residuals and gradients of resident blocks")
        inventory.require_ram(
            needed["ram"], f"{rule.__name__} (moments in {width}, residual, gradient)",
            self._settings.max_ram_gb, self.ram.held,
        )  # fmt: skip


def _require_ram(max_ram_gb: float | None, nbytes: int, held: int) -> None:
    inventory.require_ram(nbytes, "the next part of the model's state", max_ram_gb, held)
