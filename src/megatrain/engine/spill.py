"""Without a plan: what is kept on disk because RAM does not hold all of it.

Frozen weights go first, as they are only read. Residuals and moments follow, then gradients, then weights that train. A
gradient on disk takes no RAM only if a step is one micro-batch or one window, because sums are in RAM.

A ring of staging buffers takes as much RAM as its first slabs free, so blocks of a few large slabs (embedding, head)
free nothing: of each size, the last blocks are taken, and of all such choices the one with the fewest bytes on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from operator import itemgetter
from typing import NamedTuple

import torch

from megatrain.errors import SettingsError
from megatrain.geometry import (
    ALIGN_BYTES,
    DISK_SETTINGS,
    GIB,
    OPTIMIZER_MOMENTS,
    WIDTHS,
    compresses_moments,
    disk_staging_slots,
    grad_slots,
    group_by_size,
    in_pages,
    matches,
    padded,
    round_up,
    staging_bytes,
    weight_slots,
)
from megatrain.hardware import cgroups, inventory
from megatrain.hardware.validation import folders
from megatrain.lazy import ram_bytes
from megatrain.model.blocks import BlockSpec
from megatrain.model.dtypes import Dtypes, has_low_bits
from megatrain.settings import Settings
from megatrain.telemetry.notices import announce


@dataclass
class _Slab:
    """Bytes of a slab's weights, gradients and states."""

    trains: bool
    weights: int = 0
    gradients: int = 0
    """A gradient in the weight's dtype and an FP32 sum."""
    states: int = 0
    shared: bool = False
    """Whether its gradient is a sum of several calls, which stays in RAM."""
    low_bits: bool = False
    """Whether it is frozen and has a residual, which has as many bytes as its BF16 weights."""


@dataclass
class _Block:
    """The slabs of one block."""

    name: str
    slabs: list[_Slab] = field(default_factory=list)

    @property
    def has_frozen(self) -> bool:
        return not all(slab.trains for slab in self.slabs)

    def total(self, role: str) -> int:
        return sum(getattr(slab, role) for slab in self.slabs)


@dataclass(frozen=True)
class _OnDisk:
    """Names of the blocks in `on_disk`, `weights_on_disk` and `gradients_on_disk`."""

    states: frozenset[str] = frozenset()
    weights: frozenset[str] = frozenset()
    gradients: frozenset[str] = frozenset()

    def nbytes(self, blocks: Sequence[_Block]) -> int:
        """Bytes on disk."""
        return sum(map(sum, (self._of_slab(block, slab) for block in blocks for slab in block.slabs)))

    def freed(self, blocks: Sequence[_Block]) -> int:
        """Bytes of RAM that are freed, less the staging buffers of stream/disk*.py."""
        staged: tuple[list[tuple[int, int]], ...] = [], [], []
        freed = 0
        for block in blocks:
            for slab in block.slabs:
                states, weight, gradient = self._of_slab(block, slab)
                freed += states + weight + (slab.gradients if gradient else 0)
                if weight:
                    staged[0].append((slab.weights, weight))
                if block.name in self.states and slab.trains:
                    staged[1].append((slab.weights, states + weight))
                if gradient:
                    staged[2].append((gradient, gradient))
        # Weights, and so gradients, are whole pages.
        return freed - sum(
            staging_bytes(some, disk_staging_slots, itemgetter(0), lambda slab: in_pages([slab[1]])) for some in staged
        )

    def _of_slab(self, block: _Block, slab: _Slab) -> tuple[int, int, int]:
        """Bytes of a slab's states, weight and gradient on disk."""
        states = block.name in self.states
        weight = slab.weights if block.name in self.weights and (states or not slab.trains) else 0
        goes = states and slab.trains and not slab.shared and block.name in self.gradients
        # The residual of a frozen weight goes with it. A gradient has the weight's dtype.
        return slab.states * (states or weight > 0), weight, slab.weights * goes


def with_states_on_disk(
    settings: Settings,
    device: torch.device,
    dtypes: Dtypes,
    model: torch.nn.Module,
    specs: Sequence[BlockSpec],
    precision: str,
    kind: str,
) -> Settings:
    """The settings, with the least on disk that makes the state fit in RAM.

    Changes nothing without `offload_dir`, or if a plan or the user has decided.
    """
    directories = folders(settings.offload_dir)
    named = [name for name in DISK_SETTINGS if getattr(settings, name)]
    if named and not directories:
        raise SettingsError(f"{' and '.join(named)} name blocks; name a directory for them with offload_dir.")
    if not directories or settings.plan is not None or "on_disk" in settings.given:
        return settings
    stored = [block for block in _blocks(settings, dtypes, specs, precision, kind) if block.slabs]
    blocks = [block for block in stored if not matches(block.name, settings.resident)]
    loaded = sum(map(ram_bytes, model.parameters()))
    limit = max(0, inventory.available_ram() + loaded - inventory.level(inventory.LOW, cgroups.usable_ram()))
    limit = limit if settings.max_ram_gb is None else min(limit, int(settings.max_ram_gb * GIB))
    in_ram = stored if device.type == "cpu" else blocks
    total = sum(block.total(role) for block in in_ram for role in ("weights", "gradients", "states"))
    if device.type == "cpu":
        total += _slot_bytes(blocks, settings)
    given: dict[str, frozenset[str]] = {
        name: frozenset(block.name for block in blocks if matches(block.name, getattr(settings, name)))
        for name in ("weights_on_disk", "gradients_on_disk")
        if name in settings.given
    }
    chosen = _choose(blocks, total - limit, given)
    if not chosen.states and not chosen.weights:
        unused = "holds no state" if settings.inputs_on_disk else "is not used"
        announce(f"offload_dir {unused}: state of {total / GIB:.2f} GiB fits in RAM")
        return settings
    _announce_choice(blocks, chosen, total, limit)
    names = {"on_disk": chosen.states, "weights_on_disk": chosen.weights, "gradients_on_disk": chosen.gradients}
    order = [block.name for block in blocks]
    return settings.override(
        **{name: tuple(sorted(some, key=order.index)) for name, some in names.items() if name not in given}
    )


def _announce_choice(blocks: Sequence[_Block], chosen: _OnDisk, total: int, limit: int) -> None:
    states, weights, gradients = (
        sum(each)
        for each in zip(*(chosen._of_slab(block, slab) for block in blocks for slab in block.slabs), strict=True)
    )
    kept = [
        f"{what} of {len(names)} of {len(blocks)} blocks, {nbytes / GIB:.2f} GiB"
        for what, names, nbytes in (
            ("states", chosen.states, states),
            ("gradients", chosen.gradients, gradients),
            ("weights", chosen.weights, weights),
        )
        if names
    ]
    announce(
        f"{' and '.join(kept)}, are kept on disk: all state takes {total / GIB:.2f} GiB, and {limit / GIB:.2f} GiB of "
        f"RAM may be used{'; a step of several micro-batches needs one window' if gradients else ''}"
    )


def _choose(blocks: Sequence[_Block], over: int, given: Mapping[str, frozenset[str]]) -> _OnDisk:
    """What goes to disk to free `over` bytes. `given`: blocks that the user's settings name."""
    weights, gradients = given.get("weights_on_disk"), given.get("gradients_on_disk")
    found = _OnDisk(weights=weights or frozenset(), gradients=gradients or frozenset())
    frozen = [block for block in blocks if block.has_frozen]
    for role, among in (
        ("weights", frozen if weights is None else []),
        ("states", blocks),
        ("gradients", blocks if gradients is None else []),
        ("weights", blocks if weights is None else []),
    ):
        if found.freed(blocks) < over:
            found = _least(blocks, over, found, role, among)
    return found


def _least(blocks: Sequence[_Block], over: int, before: _OnDisk, role: str, among: Sequence[_Block]) -> _OnDisk:
    """What is on disk before, and one role of some blocks of `among`, the last ones of each size: those that free
    `over` bytes with the fewest bytes on disk, or else those that free most."""
    known: frozenset[str] = getattr(before, role)

    def made_of(names: Iterable[str]) -> _OnDisk:
        return replace(before, **{role: known.union(names)})

    start = _Option(before.freed(blocks), before.nbytes(blocks), ())
    found = [start]
    # Gradients, and weights that train, go to disk only with their states.
    among = [b for b in among if b.name not in known and (role == "states" or b.name in before.states or b.has_frozen)]
    for alike in group_by_size(among, lambda block: block.total("weights")):
        # Stable: blocks of one size are in their order, but sizes of a ring may differ.
        names = [block.name for block in reversed(among) if any(block is one for one in alike)]
        options = []
        for count in range(len(names) + 1):
            some = made_of(names[:count])
            freed, nbytes = some.freed(blocks) - start.freed, some.nbytes(blocks) - start.nbytes
            options.append(_Option(freed, nbytes, tuple(names[:count])))
        found = _undominated(one.plus(other) for one, other in product(found, options))
    enough = [option for option in found if option.freed >= over]
    best = min(enough, key=lambda option: option.nbytes) if enough else found[-1]
    return made_of(best.names)


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


def _slot_bytes(blocks: Sequence[_Block], settings: Settings) -> int:
    """Slots for weights and gradients, which are in RAM too if that is where compute is."""
    total = 0
    for ring in group_by_size([slab for block in blocks for slab in block.slabs], lambda slab: slab.weights):
        total += weight_slots(settings.debug.slots, len(ring)) * ring[0].weights
        total += grad_slots(settings.debug.grad_slots, len(ring)) * max(slab.gradients for slab in ring)
    return total


def _blocks(settings: Settings, dtypes: Dtypes, specs: Sequence[BlockSpec], precision: str, kind: str) -> list[_Block]:
    seen, blocks = dict[int, _Slab](), []
    for spec in specs:
        slabs: dict[tuple[torch.dtype, bool], _Slab] = {}
        for name, parameter in spec.parameters():
            if id(parameter) in seen:
                seen[id(parameter)].shared = True
                continue
            numel = padded(parameter.numel())
            dtype = dtypes.stored(f"{spec.name}.{name}".lstrip("."), parameter, precision)
            slab = slabs.setdefault((dtype, parameter.requires_grad), _Slab(parameter.requires_grad))
            seen[id(parameter)] = slab
            slab.weights += numel * dtype.itemsize
            split = dtype == torch.bfloat16 and precision != "bf16-sr"
            if not parameter.requires_grad:
                slab.low_bits = slab.low_bits or (split and has_low_bits(parameter))
            else:
                width = WIDTHS[settings.moment_width if compresses_moments(parameter.shape) else "fp32"]
                slab.states += int(numel * (2 * split + OPTIMIZER_MOMENTS[kind] * width.nbytes))
                slab.gradients += numel * (4 if dtype == torch.float32 else 4 + dtype.itemsize)
        for slab in slabs.values():
            slab.weights = round_up(slab.weights, ALIGN_BYTES)
            slab.states += slab.weights * slab.low_bits
        blocks.append(_Block(spec.label, [*slabs.values()]))
    return blocks
