"""A slab: all parameters of one dtype that a block owns, every role of it one flat buffer in host memory.

Order is kept with tickets (stream/lanes.py): `written` is the last job that writes the weight, `read` the last copy
out of it, `landed` the last job that writes the gradient. Whoever touches a role waits for the tickets it conflicts
with; nothing else is locked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatrain.store.layout import Layout
from megatrain.store.ram import HostBuffer, HostMemory
from megatrain.store.split import split
from megatrain.store.ticket import DONE, Ticket


class Slab:
    """One dtype's worth of a block's parameters and their state."""

    def __init__(self, index: int, name: str, layout: Layout, memory: HostMemory) -> None:
        self.index = index
        self.name = name
        self.layout = layout
        self.memory = memory
        self.weight_buffer: HostBuffer = memory.allocate(layout.nbytes, transferred=True)
        self.weight = self.weight_buffer.view(layout.dtype)
        self.residual: torch.Tensor | None = None
        self.exp_avg: torch.Tensor | None = None
        self.exp_avg_sq: torch.Tensor | None = None
        self.steps: list[int] = [0] * len(layout.segments)
        """Optimizer steps taken, per parameter: a parameter without gradient in a step does not count it."""
        self.grad = Gradient(self)
        self.version = 0
        """Grows with every change of the weight; a slot that holds an older version is stale."""
        self.written: Ticket = DONE
        self.read: Ticket = DONE

    @property
    def split_master(self) -> bool:
        """BF16 weights are the high half of an FP32 master; FP32 weights are their own master."""
        return self.layout.dtype == torch.bfloat16

    @property
    def optimizer_bytes(self) -> int:
        """What `allocate_states` will take beside what is there already."""
        return self.layout.numel * ((2 if self.split_master and self.residual is None else 0) + 8)

    def allocate_residual(self) -> torch.Tensor:
        if self.residual is None:
            self.residual = self._allocate(torch.int16)
        return self.residual

    def allocate_states(self) -> None:
        """Residual and moments, all zero: exact for weights that were loaded in BF16."""
        if self.split_master:
            self.allocate_residual()
        if self.exp_avg is None:
            self.exp_avg = self._allocate(torch.float32)
            self.exp_avg_sq = self._allocate(torch.float32)

    def put(self, index: int, values: torch.Tensor) -> None:
        """Set one parameter from a tensor of any float dtype; FP32 into BF16 keeps its low half as the residual."""
        self.overwrite()
        segment = self.layout.segments[index]
        weight = self.weight[segment.offset : segment.end]
        values = values.detach().to("cpu").reshape(-1)
        if self.split_master and values.dtype in (torch.float32, torch.float16):
            high, low = split(values.float())
            weight.copy_(high)
            if low.any():
                self.allocate_residual()
            if self.residual is not None:
                self.residual[segment.offset : segment.end].copy_(low)
        else:
            weight.copy_(values)
            if self.residual is not None:
                self.residual[segment.offset : segment.end].zero_()

    def settle(self) -> None:
        """Wait until the weight is what the last submitted update makes it."""
        self.written.wait()

    def overwrite(self) -> None:
        """Call before changing the weight from the user's thread: pending work first, then slots are stale."""
        self.written.wait()
        # A copy still reading the old bytes would carry a mixture to the GPU.
        self.read.wait()
        self.version += 1

    def _allocate(self, dtype: torch.dtype) -> torch.Tensor:
        return self.memory.allocate(self.layout.numel * dtype.itemsize, transferred=False).view(dtype)


@dataclass(frozen=True)
class Snapshot:
    """A slab's gradient at the moment of a step."""

    layout: Layout
    flat: torch.Tensor
    dtype: torch.dtype
    present: frozenset[int]
    square_sum: torch.Tensor | None

    def rounded(self, start: int, end: int) -> torch.Tensor:
        """Elements [start, end) in FP32, after rounding to the gradient dtype."""
        return self.flat[start:end].to(self.dtype).float()


class Gradient:
    """The gradient of a slab: what landed in the gradient dtype, or an FP32 sum once a second use has landed.

    BF16 gradients are summed in FP32 and rounded once, when they are used: norm and update see the same `Snapshot`.
    """

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self.present: set[int] = set()
        """Parameters that have a gradient; the rest of the buffer is not defined."""
        self.buffer: HostBuffer | None = None
        self.partial: torch.Tensor | None = None
        """FP32 sum; allocated once a BF16 slab sees a second use in one step, kept for later steps."""
        self.summed = False
        """Whether the sum is in `partial` (else in `buffer`)."""
        self.square_sum: torch.Tensor | None = None
        """Sum of squares of the rounded gradient in FP64, if it was computed where the gradient was made."""
        self.landed: Ticket = DONE

    @property
    def dtype(self) -> torch.dtype:
        return self._slab.layout.dtype

    @property
    def landing(self) -> torch.Tensor:
        """Where a copy from the device arrives."""
        if self.buffer is None:
            self.buffer = self._slab.memory.allocate(self._slab.layout.nbytes, transferred=True)
        return self.buffer.view(self.dtype)

    def sum_buffer(self) -> torch.Tensor:
        """The FP32 accumulator."""
        if self.dtype == torch.float32:
            return self.landing
        if self.partial is None:
            memory = self._slab.memory
            self.partial = memory.allocate(self._slab.layout.numel * 4, transferred=False).view(torch.float32)
        return self.partial

    def snapshot(self) -> Snapshot:
        """What the gradient is now. It stays so while a step uses it: `zero_grad` only forgets, and whoever writes
        the buffers next waits for the update that reads them."""
        flat = self.partial if self.summed and self.partial is not None else self.landing
        return Snapshot(self._slab.layout, flat, self.dtype, frozenset(self.present), self.square_sum)

    def current(self) -> torch.Tensor:
        """The flat tensor that holds the present gradients, for reading and writing by the user."""
        self.landed.wait()
        return self.partial if self.summed and self.partial is not None else self.landing

    def drop(self, index: int) -> None:
        """Forget one parameter's gradient; the next one that lands for it replaces instead of adding."""
        self.present.discard(index)
        self.square_sum = None
        if not self.present:
            self.clear()

    def clear(self) -> None:
        self.present.clear()
        self.summed = False
        self.square_sum = None
