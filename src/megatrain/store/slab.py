"""A slab: all parameters of one dtype that a block owns. Each role is one flat buffer in its tier.

Work accesses state through a `Span`, which declares the roles it reads and writes. An `Order` per role keeps readers
and writers apart (store/ticket.py); there are no other locks. The gradient has one order per part (store/gradient.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch

from megatrain.geometry import TIERS
from megatrain.store import forks
from megatrain.store.gradient import Gradient
from megatrain.store.layout import Layout
from megatrain.store.memory import Buffer, Homes
from megatrain.store.moments import Moment, lay_out_areas
from megatrain.store.split import split
from megatrain.store.ticket import Order

PIECE = 1 << 18
"""Elements that are split at once, to bound temporaries."""


class Slab:
    """One dtype's worth of a block's parameters and their state."""

    def __init__(
        self,
        index: int,
        name: str,
        layout: Layout,
        homes: Homes,
        *,
        master: bool = True,
        trains: bool = True,
        owned: tuple[int, int] | None = None,
    ) -> None:
        self.index, self.name, self.layout, self.homes = index, name, layout, homes
        self.on_device = TIERS[homes.weight.tier].on_device
        """Whether the weight lives on the device, so that nothing of the slab is copied."""
        self.split_master = master and layout.dtype == torch.bfloat16
        """Whether the BF16 weights are the high half of an FP32 master. False for FP32 weights, which are their own
        master, and for BF16 weights without one, which updates round stochastically."""
        self.trains = trains
        """Whether its parameters required grad when the model was attached."""
        self.owned = layout if owned is None else layout.slice(*owned)
        """The slice whose states and gradient sum this process owns and updates; by default all of it."""
        self._weight_buffer = homes.weight.allocate(layout.nbytes, transferred=True)
        self._weight_buffer.set_constant(not trains)
        self.weight = self._weight_buffer.view(layout.dtype)
        """On the meta device if it is on disk."""
        self.weight_on_disk = homes.weight.tier == "disk"
        self.residual: torch.Tensor | None = None
        """Low halves of a split master; allocated for the first that is not zero, or by an optimizer. On the meta
        device if states are on disk, as are the moments."""
        self._residual_buffer: Buffer | None = None
        self.moments: dict[str, Moment] = {}
        self.saved: list[torch.dtype] = [layout.dtype] * len(layout.segments)
        """The dtype each parameter is saved in: FP32 if it was loaded in FP32 and has a master."""
        self.steps: list[int] = [0] * len(layout.segments)
        """Optimizer steps per parameter; steps in which it had no gradient do not count."""
        self.grad = Gradient(index, name, self.owned, homes)
        self.shared = False
        """Whether several calls use it (a tied embedding): its parts then stay FP32 sums until they are merged."""
        self.version = 0
        """Incremented by every change of the weight; a slot with an older version is stale."""
        self.orders = {role: forks.wait_before_fork(Order(role)) for role in ("weight", "states")}

    def state_sizes(self, moments: Mapping[str, bool], width: str) -> dict[str, int]:
        """Bytes of the residual, if there is to be one, and of each moment (name → whether it is signed)."""
        sizes = {"residual": self.owned.numel * 2} if self.split_master else {}
        return sizes | {role: lay_out_areas(self.owned, width, signed)[1] for role, signed in moments.items()}

    def state_bytes(self, moments: Mapping[str, bool], width: str) -> int:
        """Bytes of those that are not allocated yet."""
        allocated = {*self.moments, *([] if self.residual is None else ["residual"])}
        return sum(nbytes for role, nbytes in self.state_sizes(moments, width).items() if role not in allocated)

    def _allocate_residual(self) -> None:
        self._residual_buffer = self.homes.states.allocate(self.owned.numel * 2, transferred=self.homes.streams_states)
        self._residual_buffer.set_constant(not self.trains)
        self.residual = self._residual_buffer.view(torch.int16)

    def allocate_states(self, moments: Mapping[str, bool], width: str) -> None:
        """Allocate zeroed residual and moments (name → whether it is signed), and space on disk for a gradient."""
        if not self.shared:
            self.grad.reserve()
        if self.split_master and self.residual is None:
            self._allocate_residual()
        for role, signed in moments.items():
            if role not in self.moments:
                self.moments[role] = Moment(self.owned, width, signed, self.homes.states, self.homes.streams_states)
        for buffer in (self._weight_buffer, *self.state_buffers()):
            buffer.set_constant(False)

    def state_buffers(self) -> list[Buffer]:
        """Buffers of the residual, if there is one, and of every moment."""
        residual = [] if self._residual_buffer is None else [self._residual_buffer]
        return residual + [moment.buffer for moment in self.moments.values()]

    @property
    def weight_buffer(self) -> Buffer:
        return self._weight_buffer

    def load(self, index: int, values: torch.Tensor) -> None:
        """Set one parameter from a tensor of any float dtype; a split master keeps FP32 values exactly."""
        self.before_write()
        try:
            self._load(index, values.detach().to("cpu").reshape(-1))
        finally:
            # Another thread may have fetched what was there before.
            self.version += 1

    def _load(self, index: int, values: torch.Tensor) -> None:
        segment, owned = self.layout.segments[index], self.owned.segments[index]
        if not self.split_master or values.dtype not in (torch.float32, torch.float16):
            with self.changing_weight(index) as weight:
                weight.copy_(values)
            if self._residual_buffer is not None:
                self._residual_buffer.zero(owned.offset * 2, owned.end * 2)
            return
        with ExitStack() as stack:
            weight = stack.enter_context(self.changing_weight(index))
            residual = None
            for start in range(0, segment.numel, PIECE):
                high, low = split(values[start : start + PIECE].float())
                weight[start : start + PIECE].copy_(high)
                if self.residual is None and low.any():
                    self._allocate_residual()
                if residual is None and self.residual is not None:
                    residual = stack.enter_context(self.changing_residual(index))
                if residual is not None:
                    low = low[max(0, owned.owned_start - start) : max(0, owned.owned_start + owned.numel - start)]
                    at = max(0, start - owned.owned_start)
                    residual[at : at + len(low)].copy_(low)

    @contextmanager
    def changing_weight(self, index: int) -> Iterator[torch.Tensor]:
        """The weight of one parameter, flat, to be changed in place."""
        with self._weight_buffer.changing(*self._weight_bytes(index)) as weight:
            yield weight.view(self.layout.dtype)

    def read_weight(self, index: int) -> torch.Tensor:
        """The weight of one parameter, flat: a view, or a copy of what is on disk."""
        return self._weight_buffer.read(*self._weight_bytes(index)).view(self.layout.dtype)

    def _weight_bytes(self, index: int) -> tuple[int, int]:
        segment, itemsize = self.layout.segments[index], self.layout.dtype.itemsize
        return segment.offset * itemsize, segment.end * itemsize

    @contextmanager
    def changing_residual(self, index: int) -> Iterator[torch.Tensor]:
        """The residual of one parameter, flat, to be changed in place."""
        owned = self.owned.segments[index]
        assert self._residual_buffer is not None
        with self._residual_buffer.changing(owned.offset * 2, owned.end * 2) as residual:
            yield residual.view(torch.int16)

    def read_residual(self, index: int) -> torch.Tensor:
        """The residual of one parameter, flat: a view, or a copy of what is on disk."""
        owned = self.owned.segments[index]
        assert self._residual_buffer is not None
        return self._residual_buffer.read(owned.offset * 2, owned.end * 2).view(torch.int16)

    @property
    def stays_on_device(self) -> bool:
        """Whether the weight is at the same address in every use until it changes: it is resident or held."""
        return self.on_device or self.homes.holds_weight

    @property
    def held_sum(self) -> bool:
        """Whether the gradient is summed on the device and copied to RAM for the update."""
        return self.grad.on_device and not self.on_device

    @property
    def streams_states(self) -> bool:
        """Whether states are streamed to the device for their update."""
        return self.homes.streams_states and self.homes.holds_weight and self.held_sum

    def open(self, *, reads: Sequence[str] = (), writes: Sequence[str] = ()) -> Span:
        """Open the roles "weight" and "states" for one piece of work."""
        return Span(self, reads, writes)

    def settle(self) -> None:
        """Wait for the last submitted update of weight and states."""
        for order in self.orders.values():
            order.until_readable()

    def wait_for_all_work(self) -> None:
        for order in [*self.orders.values(), *(part.order for part in list(self.grad.parts.values()))]:
            order.until_writable()

    def require_owner(self) -> None:
        """Raise in a forked child, which shares the memory. Call before changing any role."""
        self.grad.require_owner()

    def before_write(self) -> None:
        """Wait for pending work and mark slots stale. Call before writing weight or states from the user's thread."""
        self.require_owner()
        # A copy that is still reading would transfer a mix of old and new values.
        for order in self.orders.values():
            order.until_writable()
        self.version += 1


class Span:
    """Weight and states of a slab, open for one piece of work; `reads` and `writes` go to its lane."""

    def __init__(self, slab: Slab, reads: Sequence[str], writes: Sequence[str]) -> None:
        self.slab = slab
        self._open = {*reads, *writes}
        self.reads = [slab.orders[role] for role in reads]
        self.writes = [slab.orders[role] for role in writes]
        self.changed = False
        """Whether an update has changed weight and states."""

    @property
    def weight(self) -> torch.Tensor:
        self._require("weight")
        return self.slab.weight

    @property
    def pinned(self) -> bool:
        return self.slab._weight_buffer.pinned

    @property
    def residual(self) -> torch.Tensor | None:
        self._require("states")
        return self.slab.residual

    @property
    def moments(self) -> Mapping[str, Moment]:
        self._require("states")
        return self.slab.moments

    def _require(self, role: str) -> None:
        assert role in self._open, f"{self.slab.name} was not opened for {role}"
