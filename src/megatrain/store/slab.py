"""A slab: all parameters of one dtype that a block owns, every role of it one flat buffer in one tier.

Order is kept with tickets (stream/lanes.py): `written` is the last job that writes the weight, `read` the last copy
out of it, `landed` the last job that writes the gradient. Whoever touches a role waits for the tickets it conflicts
with; nothing else is locked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch

from megatrain.store import forks
from megatrain.store.formats import Format
from megatrain.store.layout import Layout
from megatrain.store.memory import Buffer, Memory
from megatrain.store.moments import Moment, lay_out_areas
from megatrain.store.split import split
from megatrain.store.ticket import DONE, Ticket

PIECE = 1 << 18
"""Elements that are split at once, so that temporaries stay small beside a block."""
ADDED = 1 << 20
"""The same of a BF16 gradient that is added to an FP32 sum on the CPU, where PyTorch first makes an FP32 copy of it."""


class Slab:
    """One dtype's worth of a block's parameters and their state."""

    def __init__(
        self, index: int, name: str, layout: Layout, memory: Memory, *, master: bool = True, trains: bool = True
    ) -> None:
        self.index = index
        self.name = name
        self.split_master = master and layout.dtype == torch.bfloat16
        """BF16 weights are the high half of an FP32 master; FP32 weights are their own. False for BF16 weights without
        a master, which updates round stochastically."""
        self.trains = trains
        """Whether its parameters required grad when the model was attached."""
        self.layout = layout
        self.memory = memory
        self.weight_buffer: Buffer = memory.allocate(layout.nbytes, transferred=True)
        self.weight = self.weight_buffer.view(layout.dtype)
        self.residual: torch.Tensor | None = None
        self.moments: dict[str, Moment] = {}
        """The optimizer's running averages, by name."""
        self.saved: list[torch.dtype] = [layout.dtype] * len(layout.segments)
        """The dtype each parameter is saved in: FP32 if it was loaded so and both halves of its master are here."""
        self.steps: list[int] = [0] * len(layout.segments)
        """Optimizer steps taken, per parameter: a parameter without gradient in a step does not count it."""
        self.grad = Gradient(self)
        self.shared = False
        """Whether several places use it (a tied embedding): its parts must stay FP32 sums until they are merged."""
        self.version = 0
        """Grows with every change of the weight; a slot that holds an older version is stale."""
        self.written: Ticket = DONE
        self.read: Ticket = DONE
        self._owner = forks.Owner()
        forks.settle_before(self)

    def state_bytes(self, moments: Mapping[str, bool], width: str) -> int:
        """What `allocate_states` will take beside what is there already."""
        missing = [signed for role, signed in moments.items() if role not in self.moments]
        residual = self.layout.numel * 2 if self.split_master and self.residual is None else 0
        return residual + sum(lay_out_areas(self.layout, width, signed)[1] for signed in missing)

    def allocate_residual(self) -> torch.Tensor:
        if self.residual is None:
            self.residual = self.memory.allocate(self.layout.numel * 2, transferred=False).view(torch.int16)
        return self.residual

    def allocate_states(self, moments: Mapping[str, bool], width: str) -> None:
        """Residual and moments (name → whether it can be negative), all zero: exact for weights loaded in BF16."""
        if self.split_master:
            self.allocate_residual()
        for role, signed in moments.items():
            if role not in self.moments:
                self.moments[role] = Moment(self.layout, width, signed, self.memory)

    def formats(self, index: int) -> tuple[Format, ...]:
        """How one parameter's moments are stored."""
        return tuple(moment.format(index) for moment in self.moments.values())

    def put(self, index: int, values: torch.Tensor) -> None:
        """Set one parameter from a tensor of any float dtype; FP32 into BF16 keeps its low half as the residual."""
        self.overwrite()
        segment = self.layout.segments[index]
        weight = self.weight[segment.offset : segment.end]
        values = values.detach().to("cpu").reshape(-1)
        if self.split_master and values.dtype in (torch.float32, torch.float16):
            for start in range(0, segment.numel, PIECE):
                high, low = split(values[start : start + PIECE].float())
                weight[start : start + PIECE].copy_(high)
                if self.residual is None and low.any():
                    self.allocate_residual()
                if self.residual is not None:
                    self.residual[segment.offset + start : segment.offset + start + len(low)].copy_(low)
        else:
            weight.copy_(values)
            if self.residual is not None:
                self.residual[segment.offset : segment.end].zero_()

    @property
    def resident(self) -> bool:
        """Whether it lies in the compute device's memory: nothing of it travels, and it is updated there."""
        return self.memory.tier == "vram"

    def settle(self) -> None:
        """Wait until the weight is what the last submitted update makes it."""
        self.written.wait()

    def finish_work(self) -> None:
        """Wait for all that writes any role of it."""
        self.settle()
        for part in list(self.grad.parts.values()):
            part.landed.wait()

    def forget_work(self) -> list[Ticket]:
        """In a forked child: lanes are its parent's, who does what was submitted. The tickets that there were."""
        parts = self.grad.parts.values()
        had = [self.written, self.read, *(part.landed for part in parts)]
        self.written = self.read = DONE
        for part in parts:
            part.landed = DONE
        return had

    def require_owner(self) -> None:
        """Call before changing any role: raises in a forked child, which shares the memory."""
        self._owner.require("change them")

    def overwrite(self) -> None:
        """Call before changing the weight from the user's thread: pending work first, then slots are stale."""
        self.require_owner()
        self.written.wait()
        # A copy still reading the old bytes would carry a mixture to the GPU.
        self.read.wait()
        self.version += 1


@dataclass(frozen=True)
class Snapshot:
    """A slab's gradient at the moment of a step."""

    layout: Layout
    flat: torch.Tensor
    dtype: torch.dtype
    present: frozenset[int]
    square_sum: torch.Tensor | None
    """As it lies there, not scaled."""
    scale: float = 1.0

    def rounded(self, start: int, end: int) -> torch.Tensor:
        """Elements [start, end) in FP32, after rounding to the gradient dtype."""
        return self.flat[start:end].to(self.dtype).float()

    @property
    def parts(self) -> tuple[tuple[torch.Tensor, frozenset[int]], ...]:
        return ((self.flat, self.present),)


@dataclass(frozen=True)
class Apart:
    """A slab's gradient in parts that have not been merged, in the order of their places."""

    layout: Layout
    parts: tuple[tuple[torch.Tensor, frozenset[int]], ...]
    dtype: torch.dtype
    scale: float = 1.0

    @property
    def flat(self) -> torch.Tensor:
        """The whole sum, in memory of its own."""
        total = torch.empty(self.layout.numel, dtype=torch.float32, device=self.parts[0][0].device)
        sum_of_parts(self, total)
        return total


Place = tuple[int, int]
"""A block, and which call of it in a forward."""
OUTSIDE: Place = (1 << 30, 0)
"""The place of gradients that reach a parameter outside any block; after all blocks in the order of places."""


class Part:
    """What one place in the model contributes to a slab's gradient: as it landed, or an FP32 sum of several.

    BF16 gradients are summed in FP32 and rounded once, when they are used: norm and update see the same `Snapshot`.
    """

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self.present: set[int] = set()
        """Parameters that have a gradient; the rest of the buffers is not defined."""
        self.buffer: Buffer | None = None
        self.sum: Buffer | None = None
        """FP32 sum of a BF16 slab; allocated when a second gradient lands in one step, kept for later steps."""
        self.summed = False
        """Whether the gradient is in `sum` (else in `buffer`)."""
        self.square_sum: torch.Tensor | None = None
        """Sum of squares of the rounded gradient in FP64, if it was computed where the gradient was made."""
        self.landed: Ticket = DONE

    @property
    def dtype(self) -> torch.dtype:
        return self._slab.layout.dtype

    @property
    def landing(self) -> Buffer:
        """Where a copy in the gradient dtype arrives."""
        if self.buffer is None:
            self.buffer = self._slab.memory.allocate(self._slab.layout.nbytes, transferred=True)
        return self.buffer

    @property
    def sum_buffer(self) -> Buffer:
        """The FP32 accumulator; an FP32 slab's own buffer is one."""
        if self.dtype == torch.float32:
            return self.landing
        if self.sum is None:
            self.sum = self._slab.memory.allocate(self._slab.layout.numel * 4, transferred=True)
        return self.sum

    @property
    def flat(self) -> torch.Tensor:
        """The buffer that holds the gradient now."""
        return self.sum_buffer.view(torch.float32) if self.summed else self.landing.view(self.dtype)

    def clear(self) -> None:
        self.present.clear()
        self.summed = False
        self.square_sum = None


class Gradient:
    """The gradient of a slab: one part per place that uses it, so that the order of a sum never depends on timing.

    Almost every slab has one place. A tied embedding has two, a shared layer as many as calls. `merge` makes one part
    of them, in the order of their places.
    """

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self.parts: dict[Place, Part] = {}
        self.merge: Callable[[Slab], None] = lambda slab: None
        """Submits the sum of all parts into the first (stream/drain.py)."""
        self.late: Callable[[Slab], None] = lambda slab: None
        """Raises if an update has already started with this gradient (optim/schedule.py)."""
        self.scale = 1.0
        """What it is multiplied by wherever it is used: clipping takes no pass over memory, and rounds nothing."""
        self.left_behind: list[Callable[[], None]] = []
        """Each drops what a backward that was interrupted left in a parameter on its way here."""

    def part(self, place: Place) -> Part:
        if place not in self.parts:
            self.parts[place] = Part(self._slab)
        return self.parts[place]

    @property
    def present(self) -> set[int]:
        return set().union(*(part.present for part in self.parts.values()))

    @property
    def allocated(self) -> bool:
        return any(part.buffer is not None for part in self.parts.values())

    def active(self) -> list[Part]:
        """Parts that hold anything, in the order of their places."""
        return [self.parts[place] for place in sorted(self.parts) if self.parts[place].present]

    def merged(self) -> Part:
        """The one part that holds the gradient; its `landed` says when."""
        self.merge(self._slab)
        active = self.active()
        if active:
            return active[0]
        return self.part(next(iter(self.parts), (0, 0)))

    def snapshot(self) -> Snapshot:
        """What the gradient is now. It stays so while a step uses it: `zero_grad` only forgets, and whoever writes
        the buffers next waits for the update that reads them."""
        part = self.merged()
        present = frozenset(part.present)
        return Snapshot(self._slab.layout, part.flat, part.dtype, present, part.square_sum, self.scale)

    def look(self) -> Snapshot | Apart:
        """What the gradient is now, for reading. Parts stay apart: looking must not change the order of a sum."""
        for part in self.parts.values():
            part.landed.wait()
        active = self.active()
        if len(active) < 2:
            return self.snapshot()
        parts = tuple((part.flat, frozenset(part.present)) for part in active)
        return Apart(self._slab.layout, parts, active[0].dtype, self.scale)

    def writable(self) -> torch.Tensor:
        """The flat tensor that holds the present gradients, for the user to write to."""
        self._slab.require_owner()
        self.late(self._slab)
        part = self.merged()
        part.landed.wait()
        self.changed()
        if self.scale != 1.0:
            # An update that reads it has its factor already.
            self._slab.settle()
            part.flat.mul_(self.scale)
            self.scale = 1.0
        return part.flat

    def changed(self) -> None:
        """The user wrote to it: sums of squares are no longer known."""
        for part in self.parts.values():
            part.square_sum = None

    def drop(self, index: int) -> None:
        """Forget one parameter's gradient; the next one that lands for it replaces instead of adding."""
        self.late(self._slab)
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
        for drop in self.left_behind:
            drop()

    def give_back(self) -> None:
        """Free the buffers that hold nothing; the next gradient allocates them again."""
        for part in self.parts.values():
            if not part.present:
                # The last update may still be reading them.
                self._slab.settle()
                part.landed.wait()
                for buffer in (part.buffer, part.sum):
                    if buffer is not None:
                        self._slab.memory.free(buffer)
                part.buffer = part.sum = None


def add_segments(
    layout: Layout,
    total: torch.Tensor,
    flat: torch.Tensor,
    indices: frozenset[int],
    known: AbstractSet[int],
    begin: int = 0,
) -> None:
    """Add the given segments; one that the sum does not have yet is copied, so that a negative zero stays one.

    `total` is the sum from element `begin` on; what lies outside of it is left out.
    """

    def within(chosen: AbstractSet[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for start, end in layout.runs(sorted(chosen)):
            start, end = max(start, begin), min(end, begin + total.numel())
            if start < end:
                yield total[start - begin : end - begin], flat[start:end]

    for target, values in within(indices & known):
        size = target.numel() if target.is_cuda or target.dtype == values.dtype else ADDED
        for part, piece in zip(target.split(size), values.split(size), strict=True):
            part.add_(piece)
    for target, values in within(indices - known):
        target.copy_(values)


def sum_of_parts(gradient: Snapshot | Apart, total: torch.Tensor, begin: int = 0) -> None:
    """Sum of a gradient's parts in their order, from element `begin` on, not rounded; zeros where nobody has one."""
    total.zero_()
    known: frozenset[int] = frozenset()
    for flat, present in gradient.parts:
        add_segments(gradient.layout, total, flat, present, known, begin)
        known |= present
