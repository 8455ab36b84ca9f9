"""The gradient of a slab: one part per call of a block that uses it, each as it arrived or as an FP32 sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatrain.geometry import TIERS
from megatrain.store.forks import Owner, wait_before_fork
from megatrain.store.layout import Layout
from megatrain.store.memory import Buffer, Homes
from megatrain.store.ticket import Order

ADD_CHUNK_ELEMENTS = 1 << 20
"""Elements of a BF16 gradient that are added to an FP32 sum at once on the CPU: PyTorch first makes an FP32 copy."""
RESTORE_BYTES = 64 << 20
"""Bytes of a gradient on disk that are read back to RAM at once."""


@dataclass(frozen=True)
class Snapshot:
    """A slab's gradient at one moment: one merged part in a step, possibly several parts when users read it."""

    layout: Layout
    parts: tuple[tuple[Tensor, frozenset[int]], ...]
    """Flat values and the indices of the parameters present in them, in the order of their call ids."""
    dtype: torch.dtype
    square_sum: Tensor | None = None
    """Before scaling."""
    scale: float = 1.0
    order: Order = field(default_factory=lambda: Order("gradient"))
    on_disk: Buffer | None = None
    """Where the values are, if they are on disk; `parts` then has no memory (stream/disk_gradients.py)."""

    @property
    def flat(self) -> Tensor:
        """The stored values; for several parts, their sum in new memory."""
        if len(self.parts) == 1:
            return self.parts[0][0]
        total = torch.empty(self.layout.numel, dtype=torch.float32, device=self.parts[0][0].device)
        sum_of_parts(self, total)
        return total

    @property
    def present(self) -> frozenset[int]:
        return frozenset().union(*(present for _, present in self.parts))


CallId = tuple[int, int]
"""Identifies a call of a block within a forward pass: the block's index, and which call of that block it is."""
OUTSIDE_BLOCKS: CallId = (1 << 30, 0)
"""Gradients that reach a parameter outside any block; sorts after all blocks."""


class Part:
    """What one call of a block contributes to a slab's gradient: one gradient, or an FP32 sum of several.

    BF16 gradients are summed in FP32 and rounded once, when they are used; norm and update see the same `Snapshot`.
    """

    def __init__(self, gradient: Gradient) -> None:
        self._gradient = gradient
        self.dtype = gradient.layout.dtype
        self.present: set[int] = set()
        """Parameters that have a gradient; the rest of the buffers is undefined."""
        self.buffers: dict[torch.dtype, Buffer] = {}
        """One in the gradient dtype and one for an FP32 sum; allocated at first use and kept for later steps."""
        self.summed = False
        """Whether the gradient is in the FP32 sum, not in `landing`; in an FP32 slab both are one buffer."""
        self.rounded = True
        """Whether the values are representable in the gradient dtype: a single gradient, or a rounded sum."""
        self.square_sum: Tensor | None = None
        """FP64 sum of squares of the rounded gradient, if the device computed it."""
        self.order = wait_before_fork(Order("gradient"))
        self.writes = 0
        """How often users may have written to it."""
        self.on_disk = False
        """Whether the gradient is in `disk_buffer`. Whatever uses `landing` or `flat` reads it back to RAM first."""
        self._disk_buffer: Buffer | None = None

    @property
    def landing(self) -> Buffer:
        """The buffer in the gradient dtype that copies from the device arrive in."""
        buffer = self._buffer(self.dtype)
        if self.on_disk:
            for start in range(0, buffer.nbytes, RESTORE_BYTES):
                end = min(start + RESTORE_BYTES, buffer.nbytes)
                buffer.bytes[start:end].copy_(self.values_on_disk(start, end))
            self.on_disk = False
        return buffer

    @property
    def disk_buffer(self) -> Buffer:
        if self._disk_buffer is None:
            self._disk_buffer = self._gradient.take_disk_buffer()
        return self._disk_buffer

    def move_to_disk(self) -> Buffer:
        """The buffer on disk that is about to be written with the whole gradient. Frees the one in RAM."""
        buffer = self.disk_buffer
        if self.dtype in self.buffers:
            self.order.until_writable()
            self._free(self.dtype)
        self.on_disk = True
        return buffer

    def values_on_disk(self, start: int = 0, end: int | None = None) -> Tensor:
        """A copy of some bytes of a gradient on disk; all by default."""
        self.order.until_readable()
        return self.disk_buffer.read(start, self.disk_buffer.nbytes if end is None else end)

    @property
    def sum_buffer(self) -> Buffer:
        return self._buffer(torch.float32)

    @property
    def flat(self) -> Tensor:
        return self.sum_buffer.view(torch.float32) if self.summed else self.landing.view(self.dtype)

    def _buffer(self, dtype: torch.dtype) -> Buffer:
        if dtype not in self.buffers:
            nbytes = self._gradient.layout.numel * dtype.itemsize
            self.buffers[dtype] = self._gradient.homes.sums.allocate(nbytes, transferred=True)
        return self.buffers[dtype]

    def _free(self, dtype: torch.dtype) -> None:
        if dtype in self.buffers:
            self._gradient.homes.sums.free(self.buffers.pop(dtype))

    def accumulator(self, indices: AbstractSet[int]) -> Tensor:
        """The tensor that gradients of these parameters are added or copied to, for a sum on the device. An FP32 sum
        replaces the buffer in the gradient dtype, so that only one of them stays allocated."""
        self._gradient.accumulates = self._gradient.accumulates or bool(self.present & indices)
        if self._gradient.accumulates:
            self._widen()
        self.rounded = self.rounded and not self.present
        return self.flat

    def _widen(self) -> None:
        if self.dtype == torch.float32 or self.summed:
            return
        if not self.present:
            self._free(self.dtype)
        # Allocated first: if it fails, nothing has changed.
        total = self.sum_buffer.view(torch.float32)
        if self.present:
            total.copy_(self.flat)
            self._free(self.dtype)
        self.summed = True

    def round(self) -> None:
        """Convert a complete sum on the device to the gradient dtype, on compute's stream."""
        if self.summed and self.dtype != torch.float32:
            self.landing.view(self.dtype).copy_(self.flat)
            self._free(torch.float32)
            self.summed = False
        self.rounded = True

    def multiply(self, factor: float) -> None:
        """Multiply in place; values in the gradient dtype are rounded to it again, FP32 sums are not."""
        if not self.rounded:
            self._widen()
        self.flat.mul_(factor)
        if self.rounded and self.summed:
            for piece in self.flat.split(ADD_CHUNK_ELEMENTS):
                piece.copy_(piece.to(self.dtype))

    def mark_summed(self) -> None:
        """Record that the FP32 buffer now holds a sum of several gradients."""
        self.summed, self.rounded, self.square_sum = True, False, None

    def clear(self) -> None:
        self.present.clear()
        self.summed, self.rounded, self.square_sum, self.on_disk = False, True, None, False

    def free_unused(self) -> None:
        """Free the buffers if no gradient is present; the next gradient allocates them again."""
        if not self.present:
            # The last update may still be reading them.
            self.order.until_writable()
            for dtype in list(self.buffers):
                self._free(dtype)


class Gradient:
    """The gradient of a slab: one part per call that uses it, so that the order of a sum never depends on timing.

    Almost every slab has one part. A tied embedding has two, a shared layer one for each of its calls. They are merged
    into one part, in the order of their call ids, when the gradient is used or written.
    """

    def __init__(self, index: int, name: str, layout: Layout, homes: Homes) -> None:
        self.index, self.name, self.layout, self.homes = index, name, layout, homes
        self._owner = Owner()
        self.parts: dict[CallId, Part] = {}
        self.merge: Callable[[Gradient], None] = lambda _: None
        """Submits the sum of all parts into the first one, in the order of their call ids (stream/drain.py)."""
        self.refuse_late: Callable[[Gradient], None] = lambda _: None
        """Raises if an update with this gradient has already started (optim/schedule.py)."""
        self.accumulates = False
        """Whether steps have several micro-batches: device sums are then FP32 from the first one."""
        self.scale = 1.0
        """Applied wherever the gradient is used, so that clipping needs no pass over memory and no rounding."""
        self._reserved: Buffer | None = None
        self._disk_buffers = 0
        self.drop_leftovers: list[Callable[[], None]] = []
        """Called by `clear`; each drops what an interrupted backward left in a parameter's autograd field."""

    @property
    def on_device(self) -> bool:
        return TIERS[self.homes.sums.tier].on_device

    def part(self, call_id: CallId) -> Part:
        if call_id not in self.parts:
            self.parts[call_id] = Part(self)
        return self.parts[call_id]

    @property
    def reserved(self) -> bool:
        """Whether a gradient that goes to disk has its space there."""
        return self._reserved is not None or self._disk_buffers > 0

    def reserve(self) -> None:
        """Reserve space on disk, if the gradient goes there."""
        if self.homes.gradients is not None and not self.reserved:
            self._reserved = self.homes.gradients.allocate(self.layout.nbytes, transferred=False)

    def take_disk_buffer(self) -> Buffer:
        """Space on disk for one more part: the first is reserved with the states."""
        assert self.homes.gradients is not None
        reserved, self._reserved = self._reserved, None
        self._disk_buffers += 1
        return reserved or self.homes.gradients.allocate(self.layout.nbytes, transferred=False)

    @property
    def present(self) -> set[int]:
        return set().union(*(part.present for part in self.parts.values()))

    @property
    def allocated(self) -> bool:
        return any(part.buffers for part in self.parts.values())

    def active(self) -> list[Part]:
        """Parts with a gradient, in the order of their call ids."""
        return [part for _, part in sorted(self.parts.items()) if part.present]

    def merged(self) -> Part:
        """The single part that holds the gradient, once its order allows reading."""
        self.merge(self)
        active = self.active()
        return active[0] if active else self.part(next(iter(self.parts), (0, 0)))

    def snapshot(self) -> Snapshot:
        """The gradient, merged. It stays valid while a step uses it: `zero_grad` frees no buffer, and later writers
        wait for the update that reads them."""
        part = self.merged()
        if part.on_disk and part.square_sum is None:
            part.landing  # noqa: B018  # The norm is computed from values in RAM.
        on_disk = part.disk_buffer if part.on_disk else None
        flat = part.flat if on_disk is None else on_disk.view(part.dtype)
        parts = ((flat, frozenset(part.present)),)
        return Snapshot(self.layout, parts, part.dtype, part.square_sum, self.scale, part.order, on_disk)

    def read(self) -> Snapshot:
        """The gradient for users to read. Parts are not merged, since reading must not change the order of a sum."""
        for part in self.parts.values():
            part.order.until_readable()
        active = self.active()
        if len(active) < 2 and not any(part.on_disk for part in active):
            return self.snapshot()
        # Of a gradient on disk a copy, so that reading all gradients does not fill RAM.
        flats = (part.values_on_disk().view(part.dtype) if part.on_disk else part.flat for part in active)
        parts = tuple((flat, frozenset(part.present)) for part, flat in zip(active, flats, strict=True))
        square_sum = active[0].square_sum if len(active) == 1 else None
        return Snapshot(self.layout, parts, active[0].dtype, square_sum, self.scale)

    def writable(self) -> Tensor:
        """The flat gradient for users to write to; waits for updates that read it."""
        part = self.writable_part()
        part.square_sum = None
        if self.scale != 1.0:
            part.multiply(self.scale)
            self.scale = 1.0
        return part.flat

    def writable_part(self) -> Part:
        self.require_owner()
        self.refuse_late(self)
        part = self.merged()
        part.order.until_writable()
        part.writes += 1
        return part

    def require_owner(self) -> None:
        """Raise in a forked child, which shares the memory."""
        self._owner.require("change them")

    def drop(self, index: int) -> None:
        """Remove one parameter's gradient; the next one replaces it instead of being added."""
        self.refuse_late(self)
        for part in self.parts.values():
            part.present.discard(index)
            part.square_sum = None
            if not part.present:
                part.clear()
        self.scale = self.scale if self.active() else 1.0

    def clear(self) -> None:
        for part in self.parts.values():
            part.clear()
        self.scale = 1.0
        for drop in self.drop_leftovers:
            drop()

    def free_unused(self) -> None:
        for part in self.parts.values():
            part.free_unused()


def add_segments(
    layout: Layout, total: Tensor, flat: Tensor, indices: frozenset[int], known: AbstractSet[int], begin: int = 0
) -> None:
    """Add the given segments. One that is not in `known` is copied, which preserves a negative zero.

    `total` is the sum from element `begin` on; values outside it are ignored.
    """

    def within(chosen: AbstractSet[int]) -> Iterator[tuple[Tensor, Tensor]]:
        for start, end in layout.runs(sorted(chosen)):
            start, end = max(start, begin), min(end, begin + total.numel())
            if start < end:
                yield total[start - begin : end - begin], flat[start:end]

    for target, values in within(indices & known):
        size = target.numel() if target.is_cuda or target.dtype == values.dtype else ADD_CHUNK_ELEMENTS
        for part, piece in zip(target.split(size), values.split(size), strict=True):
            part.add_(piece)
    for target, values in within(indices - known):
        target.copy_(values)


def sum_of_parts(gradient: Snapshot, total: Tensor, begin: int = 0) -> None:
    """Sum a gradient's parts in order, from element `begin` on, without rounding; zeros where no part has a value."""
    total.zero_()
    known: frozenset[int] = frozenset()
    for flat, present in gradient.parts:
        add_segments(gradient.layout, total, flat, present, known, begin)
        known |= present
