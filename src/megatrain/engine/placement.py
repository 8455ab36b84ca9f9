"""Chooses the memory tier of each block's state and the kernels that update it, and checks that it fits."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch

import torch

from megatrain.engine.drive import DriveLife
from megatrain.engine.memory_limit import Policies
from megatrain.errors import SettingsError
from megatrain.geometry import DISK_SETTINGS, TIERS, in_pages, matches
from megatrain.hardware import inventory
from megatrain.hardware.ram_monitor import RamMonitor
from megatrain.hardware.validation import folders
from megatrain.optim.rules import Rule
from megatrain.optim.schedule import Updates
from megatrain.optim.update import Kernel, device_kernel, native_kernel, reference_kernel
from megatrain.settings import Settings
from megatrain.store.backend import choose_backend
from megatrain.store.coding import choose_coding
from megatrain.store.disk import DiskMemory
from megatrain.store.memory import Homes
from megatrain.store.ram import HostMemory
from megatrain.store.slab import Slab
from megatrain.store.vram import DeviceMemory
from megatrain.stream.disk import update_bytes
from megatrain.stream.disk_gradients import gradient_bytes


class Placement:
    """The memory tiers of one engine."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._settings = settings
        self._device = device
        self.ram = HostMemory(
            pin=device.type == "cuda" and settings.debug.pin,
            threads=inventory.cores(),
            guard=lambda nbytes, held: inventory.require_ram(
                nbytes, "the next part of the model's state", settings.max_ram_gb, held
            ),
        )
        self.vram = DeviceMemory(device)
        self.disk = self._open_disk() if any(getattr(settings, name) for name in DISK_SETTINGS) else None
        self.drive = DriveLife(self.disk, settings.drive_tbw, settings.max_drive_tb)
        self.ram_monitor = RamMonitor(held=lambda: self.ram.allocated_bytes, trim=self.ram.trim)

    def _open_disk(self) -> DiskMemory:
        directories, debug = folders(self._settings.offload_dir), self._settings.debug
        lossless = self._settings.optimizer_compression == "lossless"
        backend = choose_backend(directories, debug.disk_io, debug.allow_tmpfs)
        ratio = choose_coding(directories, debug.disk_coding, debug.allow_tmpfs, backend) if lossless else None
        return DiskMemory(directories, allow_tmpfs=debug.allow_tmpfs, ratio=ratio, backend=backend)

    def homes(self, block: str, trains: bool = True) -> Homes:
        """The tiers of a block's weights that train, or of those that do not, of their states and gradient sums."""
        if matches(block, self._settings.resident):
            return Homes.all_in(self.vram)
        held, summed = matches(block, self._settings.held_weights), matches(block, self._settings.held_gradients)
        streams_states = matches(block, self._settings.streamed_states)
        if streams_states and not (summed and held) and self._settings.plan is None:
            raise SettingsError(
                f"streamed_states matches {block}, whose {'gradients are' if held else 'weights are'} not held: its "
                "states are updated on the GPU, so name it in held_weights and held_gradients too."
            )
        on_disk = self.disk is not None and matches(block, self._settings.on_disk)
        if on_disk and streams_states:
            raise SettingsError(f"{block} is named in on_disk and in streamed_states; name it in one of them.")
        sums = self.vram if summed else self.ram
        # Reading a weight for its update costs as much as reading its states, so these go first.
        far = matches(block, self._settings.weights_on_disk) and (on_disk or not trains)
        weight = self.disk if self.disk is not None and far else self.ram
        # A frozen weight may be unfrozen later.
        states = self.disk if self.disk is not None and (on_disk or far) else self.ram
        waits = trains and on_disk and not summed and matches(block, self._settings.gradients_on_disk)
        gradients = self.disk if waits else None
        return Homes(
            weight, states, sums, holds_weight=held, streams_states=streams_states, ram=self.ram, gradients=gradients
        )

    def check(self, blocks: Sequence[str], slabs: Sequence[Slab]) -> None:
        """Raise if a pattern matches nothing that can be on disk."""
        for setting, what, on_disk in (
            ("weights_on_disk", "weights", {slab.name for slab in slabs if slab.weight_on_disk}),
            ("gradients_on_disk", "gradients", {slab.name for slab in slabs if slab.homes.gradients is not None}),
        ):
            for pattern in getattr(self._settings, setting):
                found = [s.name for s in slabs if fnmatch(s.name, pattern) and s.trains and not s.on_device]
                if found and not any(fnmatch(name, pattern) for name in on_disk):
                    raise SettingsError(
                        f"{setting}={pattern!r} matches {found[0]}, which trains: its {what} can be on disk only "
                        "together with its states, so name it in on_disk too"
                        + ("." if what == "weights" else ", and not in held_gradients.")
                    )
        policies = Policies(self._settings.policy, blocks)
        for pattern in self._settings.inputs_on_disk:
            found = [name for name in blocks if fnmatch(name, pattern)]
            if found and all(policies[name] != "offload" for name in found):
                raise SettingsError(
                    f"inputs_on_disk={pattern!r} matches {found[0]}, whose policy is {policies[found[0]]!r}: only "
                    "policy 'offload' takes inputs off the device, so set that for it."
                )

    def kernels(self) -> dict[str, Kernel]:
        """The update kernel of each tier."""
        if self._settings.debug.kernels == "reference":
            return dict.fromkeys(TIERS, reference_kernel)
        native = native_kernel(inventory.update_threads())
        on_gpu = bool(self._settings.resident or self._settings.streamed_states) and self._device.type == "cuda"
        return {"ram": native, "vram": device_kernel() if on_gpu else native, "disk": native}

    def require_states(self, slabs: Sequence[Slab], updates: Updates, rule: type[Rule], width: str, slots: int) -> None:
        """Raise if optimizer states and gradients will not fit. `slots`: bytes of slots that are not in memory yet."""
        needed = dict.fromkeys(TIERS, 0) | {"ram": slots if self._device.type == "cpu" else 0}
        for slab in slabs:
            needed[slab.homes.states.tier] += slab.state_bytes(rule.moments, width)
            reserved = slab.grad.allocated or slab.grad.reserved
            needed[slab.homes.complete_gradients.tier] += 0 if reserved else slab.owned.nbytes
        # Where states are allocated, so are their slots and staging buffers.
        new = [slab for slab in slabs if slab.state_bytes(rule.moments, width)]
        for tier, nbytes in staged_bytes(new, updates, rule, width).items():
            needed[tier] += nbytes
        if self.disk is not None:
            self.disk.require(needed["disk"])
        if needed["vram"]:
            inventory.require_vram(self._device, needed["vram"], "moments, residuals and gradients that stay there")
        inventory.require_ram(
            needed["ram"], f"{rule.__name__} (moments in {width}, residual, gradient, slots)",
            self._settings.max_ram_gb, self.ram.allocated_bytes, 0 if self.disk is None else self.disk.transit_bytes,
        )  # fmt: skip


def staged_bytes(slabs: Sequence[Slab], updates: Updates, rule: type[Rule], width: str) -> dict[str, int]:
    """Tier → bytes of slots and staging buffers for updates of the slabs."""
    states = {slab.index: in_pages(slab.state_sizes(rule.moments, width).values()) for slab in slabs}
    rings = updates.disk.rings.values()
    on_disk = sum(ring.nbytes(lambda slab: update_bytes(slab, states.get(slab.index, 0))) for ring in rings)
    return {
        "vram": updates.states.rings.nbytes(lambda slab: states.get(slab.index, 0)),
        "ram": on_disk + updates.gradients.rings.nbytes(gradient_bytes),
    }
