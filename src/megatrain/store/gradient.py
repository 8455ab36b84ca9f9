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
"""Elements of a BF16 gradient that are added to an FP32 sum at once on the CPU, where PyTorch first makes an FP32 copy
of them."""


@dataclass(frozen=True)
class Snapshot:
    """A slab's gradient at one moment: in a step one part, merged; for users also parts that stay apart."""

    layout: Layout
    parts: tuple[tuple[Tensor, frozenset[int]], ...]
    """Flat values, and the parameters that have some; in the order of their call ids."""
    dtype: torch.dtype
    square_sum: Tensor | None = None
    """As it lies there, not scaled."""
    scale: float = 1.0
    order: Order = field(default_factory=lambda: Order("gradient"))
    """Of the memory that it lies in."""

    @property
    def flat(self) -> Tensor:
        """Where it lies; of several parts their sum, in memory of its own."""
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
    """What one call of a block contributes to a slab's gradient: as it landed, or an FP32 sum of several.

    BF16 gradients are summed in FP32 and rounded once, when they are used: norm and update see the same `Snapshot`.
    """

    def __init__(self, gradient: Gradient) -> None:
        self._gradient = gradient
        self.dtype = gradient.layout.dtype
        self.present: set[int] = set()
        """Parameters that have a gradient; the rest of the buffers is not defined."""
        self.buffers: dict[torch.dtype, Buffer] = {}
        """For what lands, in the gradient dtype, and for an FP32 sum; allocated at first use, kept for later steps."""
        self.summed = False
        """Whether the gradient is in the FP32 sum (else as it landed); in an FP32 slab both are one buffer."""
        self.rounded = True
        """Whether it is one gradient or a rounded sum: values of the gradient dtype, whichever buffer they are in."""
        self.square_sum: Tensor | None = None
        """Sum of squares of the rounded gradient in FP64, if it was computed where the gradient was made."""
        self.order = wait_before_fork(Order("gradient"))

    @property
    def landing(self) -> Buffer:
        """Where a copy in the gradient dtype arrives."""
        return self._buffer(self.dtype)

    @property
    def sum_buffer(self) -> Buffer:
        """The FP32 accumulator."""
        return self._buffer(torch.float32)

    @property
    def flat(self) -> Tensor:
        """The buffer that holds the gradient now."""
        dtype = torch.float32 if self.summed else self.dtype
        return self._buffer(dtype).view(dtype)

    def _buffer(self, dtype: torch.dtype) -> Buffer:
        if dtype not in self.buffers:
            nbytes = self._gradient.layout.numel * dtype.itemsize
            self.buffers[dtype] = self._gradient.homes.sums.allocate(nbytes, transferred=True)
        return self.buffers[dtype]

    def _free(self, dtype: torch.dtype) -> None:
        if dtype in self.buffers:
            self._gradient.homes.sums.free(self.buffers.pop(dtype))

    def accumulator(self, indices: AbstractSet[int]) -> Tensor:
        """Where gradients of these parameters are added, if they are there, or copied. For a sum on the device, whose
        stream orders this call: an FP32 sum takes the place of what has landed, no second buffer stays."""
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
        # If there is no memory for it, nothing has changed.
        total = self.sum_buffer.view(torch.float32)
        if self.present:
            total.copy_(self.flat)
            self._free(self.dtype)
        self.summed = True

    def round(self) -> None:
        """Keep a complete sum in the gradient dtype, on the device, in the order of compute's stream."""
        if self.summed and self.dtype != torch.float32:
            self.landing.view(self.dtype).copy_(self.flat)
            self._free(torch.float32)
            self.summed = False
        self.rounded = True

    def multiply(self, factor: float) -> None:
        """By a factor, in the dtype of what it is: a single gradient is rounded again, a sum of several is not."""
        if not self.rounded:
            self._widen()
        self.flat.mul_(factor)
        if self.rounded and self.summed:
            for piece in self.flat.split(ADD_CHUNK_ELEMENTS):
                piece.copy_(piece.to(self.dtype))

    def mark_summed(self) -> None:
        """The FP32 buffer holds a sum of several from now on."""
        self.summed, self.rounded, self.square_sum = True, False, None

    def clear(self) -> None:
        self.present.clear()
        self.summed, self.rounded, self.square_sum = False, True, None

    def free_unused(self) -> None:
        """Free the buffers if they hold nothing; the next gradient allocates them again."""
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
        """Raises if an update has already started with this gradient (optim/schedule.py)."""
        self.accumulates = False
        """Whether steps have several micro-batches: sums on the device are FP32 from the first on."""
        self.scale = 1.0
        """What it is multiplied by wherever it is used: clipping takes no pass over memory, and rounds nothing."""
        self.drop_leftovers: list[Callable[[], None]] = []
        """Each drops what a backward that was interrupted left in a parameter on its way here."""

    @property
    def on_device(self) -> bool:
        """Whether compute adds to it where it lies."""
        return TIERS[self.homes.sums.tier].on_device

    def part(self, call_id: CallId) -> Part:
        if call_id not in self.parts:
            self.parts[call_id] = Part(self)
        return self.parts[call_id]

    @property
    def present(self) -> set[int]:
        return set().union(*(part.present for part in self.parts.values()))

    @property
    def allocated(self) -> bool:
        return any(part.buffers for part in self.parts.values())

    def active(self) -> list[Part]:
        """Parts that hold anything, in the order of their call ids."""
        return [part for _, part in sorted(self.parts.items()) if part.present]

    def merged(self) -> Part:
        """The one part that holds the gradient; its order says when."""
        self.merge(self)
        active = self.active()
        return active[0] if active else self.part(next(iter(self.parts), (0, 0)))

    def snapshot(self) -> Snapshot:
        """What the gradient is now. It stays so while a step uses it: `zero_grad` only forgets, and whoever writes
        the buffers next waits for the update that reads them."""
        part = self.merged()
        parts = ((part.flat, frozenset(part.present)),)
        return Snapshot(self.layout, parts, part.dtype, part.square_sum, self.scale, part.order)

    def read(self) -> Snapshot:
        """What the gradient is now, for reading. Parts stay apart: looking must not change the order of a sum."""
        for part in self.parts.values():
            part.order.until_readable()
        active = self.active()
        if len(active) < 2:
            return self.snapshot()
        parts = tuple((part.flat, frozenset(part.present)) for part in active)
        return Snapshot(self.layout, parts, active[0].dtype, scale=self.scale)

    def writable(self) -> Tensor:
        """The flat tensor that holds the present gradients, for the user to write to; an update may be reading it."""
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
        return part

    def require_owner(self) -> None:
        """Raises in a forked child, which shares the memory."""
        self._owner.require("change them")

    def drop(self, index: int) -> None:
        """Forget one parameter's gradient; the next one that lands for it replaces instead of adding."""
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
        """Free the buffers that hold nothing."""
        for part in self.parts.values():
            part.free_unused()


def add_segments(
    layout: Layout, total: Tensor, flat: Tensor, indices: frozenset[int], known: AbstractSet[int], begin: int = 0
) -> None:
    """Add the given segments; one that the sum does not have yet is copied, so that a negative zero stays one.

    `total` is the sum from element `begin` on; what lies outside of it is left out.
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
    """Sum of a gradient's parts in their order, from element `begin` on, not rounded; zeros where nobody has one."""
    total.zero_()
    known: frozenset[int] = frozenset()
    for flat, present in gradient.parts:
        add_segments(gradient.layout, total, flat, present, known, begin)
        known |= present
