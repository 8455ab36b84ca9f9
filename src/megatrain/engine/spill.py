"""Without a plan: which blocks keep their states on disk because RAM does not hold all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatrain.errors import SettingsError
from megatrain.geometry import (
    DISK_SETTINGS,
    DISK_STAGING_SLOTS,
    MIN_COMPRESSED_NUMEL,
    OPTIMIZER_MOMENTS,
    WIDTHS,
    grad_slots,
    group_by_size,
    padded,
    weight_slots,
)
from megatrain.hardware import cgroups, inventory
from megatrain.hardware.validation import folders
from megatrain.lazy import ram_bytes
from megatrain.model.blocks import BlockSpec
from megatrain.model.dtypes import Dtypes
from megatrain.settings import Settings
from megatrain.telemetry.notices import announce

GIB = 1 << 30


@dataclass
class _Need:
    """Bytes of one block's weights, gradients and states."""

    name: str
    weights: int = 0
    gradients: int = 0
    states: int = 0


def with_states_on_disk(
    settings: Settings,
    device: torch.device,
    model: torch.nn.Module,
    specs: Sequence[BlockSpec],
    precision: str,
    kind: str,
) -> Settings:
    """The settings, with the fewest blocks in `on_disk` that make the state fit in RAM, from the last block on.

    Changes nothing without `offload_dir`, or if a plan or the user has decided.
    """
    directories = folders(settings.offload_dir)
    named = [name for name in DISK_SETTINGS if getattr(settings, name)]
    if named and not directories:
        raise SettingsError(f"{' and '.join(named)} name blocks; name a directory for them with offload_dir.")
    if not directories or settings.plan is not None or "on_disk" in settings.given:
        return settings
    needs = [need for need in _needs(settings, model, specs, precision, kind) if need.weights]
    loaded = sum(map(ram_bytes, model.parameters()))
    limit = max(0, inventory.available_ram() + loaded - inventory.level(inventory.LOW, cgroups.usable_ram()))
    limit = limit if settings.max_ram_gb is None else min(limit, int(settings.max_ram_gb * GIB))
    total = sum(need.weights + need.gradients + need.states for need in needs)
    if device.type == "cpu":
        total += _slot_bytes(needs, settings)
    chosen: list[_Need] = []
    while total - _freed(chosen) > limit and len(chosen) < len(needs):
        chosen.append(needs[-1 - len(chosen)])
    if not chosen:
        announce(f"offload_dir is not used: state of {total / GIB:.2f} GiB fits in RAM")
        return settings
    states = sum(need.states for need in chosen)
    announce(
        f"states of {len(chosen)} of {len(needs)} blocks, {states / GIB:.2f} GiB, are kept on disk: all state takes "
        f"{total / GIB:.2f} GiB, and {limit / GIB:.2f} GiB of RAM may be used"
    )
    return settings.override(on_disk=tuple(need.name for need in chosen))


def _freed(chosen: Sequence[_Need]) -> int:
    """Bytes of RAM that are freed if these blocks have their states on disk, less the staging buffers."""
    rings = group_by_size(chosen, lambda need: need.weights)
    staging = sum(min(DISK_STAGING_SLOTS, len(ring)) * max(need.states for need in ring) for ring in rings)
    return sum(need.states for need in chosen) - staging


def _slot_bytes(needs: Sequence[_Need], settings: Settings) -> int:
    """Slots for weights and gradients, which are in RAM too if that is where compute is."""
    total = 0
    for ring in group_by_size(needs, lambda need: need.weights):
        total += weight_slots(settings.debug.slots, len(ring)) * ring[0].weights
        total += grad_slots(settings.debug.grad_slots, len(ring)) * ring[0].gradients
    return total


def _needs(
    settings: Settings, model: torch.nn.Module, specs: Sequence[BlockSpec], precision: str, kind: str
) -> list[_Need]:
    dtypes, seen, needs = Dtypes(model), set[int](), []
    for spec in specs:
        need = _Need(spec.label)
        for name, parameter in spec.parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            numel, dtype = padded(parameter.numel()), dtypes.stored(f"{spec.name}.{name}", parameter, precision)
            need.weights += numel * dtype.itemsize
            if parameter.requires_grad:
                small = parameter.ndim < 2 or parameter.numel() < MIN_COMPRESSED_NUMEL
                width = WIDTHS["fp32" if small else settings.moment_width]
                residual = 2 if dtype == torch.bfloat16 and precision != "bf16-sr" else 0
                need.states += int(numel * (residual + OPTIMIZER_MOMENTS[kind] * width.nbytes))
                # A gradient in the weight's dtype and an FP32 sum.
                need.gradients += numel * (4 if dtype == torch.float32 else 4 + dtype.itemsize)
        needs.append(need)
    return needs
