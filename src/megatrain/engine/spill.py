"""Without a plan: what is kept on disk because RAM does not hold all of it.

Frozen weights go first, as they are only read. Residuals and moments follow, then weights that train. A ring of staging
buffers takes as much RAM as its first slabs free, so blocks of a few large slabs (embedding, head) free nothing: of
each size, the last blocks are taken, and of all such choices the one with the fewest bytes on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import product
from typing import NamedTuple

import torch

from megatrain.errors import SettingsError
from megatrain.geometry import (
    ALIGN_BYTES,
    DISK_SETTINGS,
    DISK_STAGING_SLOTS,
    MIN_COMPRESSED_NUMEL,
    OPTIMIZER_MOMENTS,
    WIDTHS,
    grad_slots,
    group_by_size,
    padded,
    round_up,
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
class _Slab:
    """Bytes of a slab's weights, gradients and states."""

    trains: bool
    weights: int = 0
    gradients: int = 0
    states: int = 0


_Staged = tuple[int, int, bool]
"""Size of a slab's weights, which determines its ring; bytes to be staged; whether it is staged at all. Rings count
frozen slabs, which have no states."""


@dataclass
class _Block:
    """The slabs of one block."""

    name: str
    slabs: list[_Slab] = field(default_factory=list)

    def total(self, role: str) -> int:
        return sum(getattr(slab, role) for slab in self.slabs)


@dataclass(frozen=True)
class _OnDisk:
    """Names of the blocks in `on_disk`, and in `weights_on_disk`."""

    states: frozenset[str] = frozenset()
    weights: frozenset[str] = frozenset()

    def nbytes(self, blocks: Sequence[_Block]) -> int:
        """Bytes on disk."""
        return sum(self._of_slab(block, slab)[0] for block in blocks for slab in block.slabs)

    def freed(self, blocks: Sequence[_Block]) -> int:
        """Bytes of RAM that are freed, less the staging buffers of stream/disk_weights.py and stream/disk.py."""
        weights: list[_Staged] = []
        states: list[_Staged] = []
        for block in blocks:
            for slab in block.slabs:
                moved, weight = self._of_slab(block, slab)
                if weight:
                    weights.append((slab.weights, weight, True))
                if block.name in self.states:
                    states.append((slab.weights, moved, slab.trains))
        return self.nbytes(blocks) - _staging_bytes(weights) - _staging_bytes(states)

    def _of_slab(self, block: _Block, slab: _Slab) -> tuple[int, int]:
        """Bytes of a slab on disk, and those of its weight among them."""
        states = block.name in self.states
        weight = slab.weights if block.name in self.weights and (states or not slab.trains) else 0
        return weight + slab.states * states, weight


def with_states_on_disk(
    settings: Settings,
    device: torch.device,
    model: torch.nn.Module,
    specs: Sequence[BlockSpec],
    precision: str,
    kind: str,
) -> Settings:
    """The settings, with the least in `on_disk` and `weights_on_disk` that makes the state fit in RAM.

    Changes nothing without `offload_dir`, or if a plan or the user has decided.
    """
    directories = folders(settings.offload_dir)
    named = [name for name in DISK_SETTINGS if getattr(settings, name)]
    if named and not directories:
        raise SettingsError(f"{' and '.join(named)} name blocks; name a directory for them with offload_dir.")
    if not directories or settings.plan is not None or "on_disk" in settings.given:
        return settings
    blocks = [block for block in _blocks(settings, model, specs, precision, kind) if block.slabs]
    loaded = sum(map(ram_bytes, model.parameters()))
    limit = max(0, inventory.available_ram() + loaded - inventory.level(inventory.LOW, cgroups.usable_ram()))
    limit = limit if settings.max_ram_gb is None else min(limit, int(settings.max_ram_gb * GIB))
    total = sum(block.total(role) for block in blocks for role in ("weights", "gradients", "states"))
    if device.type == "cpu":
        total += _slot_bytes(blocks, settings)
    given = settings.weights_on_disk if "weights_on_disk" in settings.given else None
    chosen = _choose(blocks, total - limit, given)
    if not chosen.states and not chosen.weights:
        announce(f"offload_dir is not used: state of {total / GIB:.2f} GiB fits in RAM")
        return settings
    _announce_choice(blocks, chosen, total, limit)
    names = {"on_disk": chosen.states} | ({"weights_on_disk": chosen.weights} if given is None else {})
    order = [block.name for block in blocks]
    return settings.override(**{setting: tuple(sorted(some, key=order.index)) for setting, some in names.items()})


def _announce_choice(blocks: Sequence[_Block], chosen: _OnDisk, total: int, limit: int) -> None:
    states = sum(block.total("states") for block in blocks if block.name in chosen.states)
    weights = chosen.nbytes(blocks) - states
    kept = [
        f"{what} of {len(names)} of {len(blocks)} blocks, {nbytes / GIB:.2f} GiB"
        for what, names, nbytes in (("states", chosen.states, states), ("weights", chosen.weights, weights))
        if names
    ]
    announce(
        f"{' and '.join(kept)}, are kept on disk: all state takes {total / GIB:.2f} GiB, and {limit / GIB:.2f} GiB of "
        "RAM may be used"
    )


def _choose(blocks: Sequence[_Block], over: int, given: Sequence[str] | None) -> _OnDisk:
    """What goes to disk to free `over` bytes. `given`: the user's `weights_on_disk`."""
    if given is not None:
        named = frozenset(block.name for block in blocks if any(fnmatch(block.name, pattern) for pattern in given))
        return _least(blocks, over, blocks, lambda names: _OnDisk(names, named))
    frozen = [block for block in blocks if not all(slab.trains for slab in block.slabs)]
    found = _least(blocks, over, frozen, lambda names: _OnDisk(weights=names))
    if found.freed(blocks) < over:
        weights = found.weights
        found = _least(blocks, over, blocks, lambda names: _OnDisk(names, weights))
    if found.freed(blocks) < over:
        states, weights = found.states, found.weights
        others = [block for block in blocks if block.name in states - weights]
        found = _least(blocks, over, others, lambda names: _OnDisk(states, weights | names))
    return found


def _least(
    blocks: Sequence[_Block], over: int, among: Sequence[_Block], made_of: Callable[[frozenset[str]], _OnDisk]
) -> _OnDisk:
    """Some blocks of `among`, the last ones of each size: those that free `over` bytes with the fewest bytes on disk,
    or else those that free most."""
    none = made_of(frozenset())
    start = _Option(none.freed(blocks), none.nbytes(blocks), ())
    found = [start]
    for alike in group_by_size(among, lambda block: block.total("weights")):
        # Stable: blocks of one size are in their order, but sizes of a ring may differ.
        names = [block.name for block in reversed(among) if any(block is one for one in alike)]
        options = []
        for count in range(len(names) + 1):
            some = made_of(frozenset(names[:count]))
            freed, nbytes = some.freed(blocks) - start.freed, some.nbytes(blocks) - start.nbytes
            options.append(_Option(freed, nbytes, tuple(names[:count])))
        found = _undominated(one.plus(other) for one, other in product(found, options))
    enough = [option for option in found if option.freed >= over]
    best = min(enough, key=lambda option: option.nbytes) if enough else found[-1]
    return made_of(frozenset(best.names))


class _Option(NamedTuple):
    """Bytes of RAM that some blocks free, and their bytes on disk."""

    freed: int
    nbytes: int
    names: tuple[str, ...]

    def plus(self, other: _Option) -> _Option:
        return _Option(self.freed + other.freed, self.nbytes + other.nbytes, self.names + other.names)


def _undominated(options: Iterable[_Option]) -> list[_Option]:
    """Those that free more than all others with no more bytes on disk, in increasing order."""
    kept: list[_Option] = []
    for option in sorted(options, key=lambda option: (option.nbytes, -option.freed)):
        if not kept or option.freed > kept[-1].freed:
            kept.append(option)
    return kept


def _staging_bytes(slabs: Sequence[_Staged]) -> int:
    return sum(
        min(DISK_STAGING_SLOTS, len(ring)) * max(round_up(nbytes, ALIGN_BYTES) for _, nbytes, _ in ring)
        for ring in group_by_size(slabs, lambda slab: slab[0])
        if any(staged for _, _, staged in ring)
    )


def _slot_bytes(blocks: Sequence[_Block], settings: Settings) -> int:
    """Slots for weights and gradients, which are in RAM too if that is where compute is."""
    total = 0
    for ring in group_by_size([slab for block in blocks for slab in block.slabs], lambda slab: slab.weights):
        total += weight_slots(settings.debug.slots, len(ring)) * ring[0].weights
        total += grad_slots(settings.debug.grad_slots, len(ring)) * max(slab.gradients for slab in ring)
    return total


def _blocks(
    settings: Settings, model: torch.nn.Module, specs: Sequence[BlockSpec], precision: str, kind: str
) -> list[_Block]:
    dtypes, seen, blocks = Dtypes(model), set[int](), []
    for spec in specs:
        slabs: dict[tuple[torch.dtype, bool], _Slab] = {}
        for name, parameter in spec.parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            numel, dtype = padded(parameter.numel()), dtypes.stored(f"{spec.name}.{name}", parameter, precision)
            slab = slabs.setdefault((dtype, parameter.requires_grad), _Slab(parameter.requires_grad))
            slab.weights += numel * dtype.itemsize
            if parameter.requires_grad:
                small = parameter.ndim < 2 or parameter.numel() < MIN_COMPRESSED_NUMEL
                width = WIDTHS["fp32" if small else settings.moment_width]
                residual = 2 if dtype == torch.bfloat16 and precision != "bf16-sr" else 0
                slab.states += int(numel * (residual + OPTIMIZER_MOMENTS[kind] * width.nbytes))
                # A gradient in the weight's dtype and an FP32 sum.
                slab.gradients += numel * (4 if dtype == torch.float32 else 4 + dtype.itemsize)
        for slab in slabs.values():
            slab.weights = round_up(slab.weights, ALIGN_BYTES)
        blocks.append(_Block(spec.label, [*slabs.values()]))
    return blocks
