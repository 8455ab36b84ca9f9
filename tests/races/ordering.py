"""Lanes that check the order of work instead of its results.

Work runs inline, and every access to a buffer of the engine is recorded with a vector clock. Compute and the lanes with
a stream count as CUDA streams that may run arbitrarily late, while the user's thread runs ahead: two accesses, of which
one writes, are a race unless a wait orders them. That depends on no timing, and needs no run in which the race shows.

Accesses are those of PyTorch operators, of native updates and norms, and of transfers to and from disk.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatrain.engine.step import Step
from megatrain.geometry import LANES
from megatrain.native import library
from megatrain.store.memory import Buffer
from megatrain.store.ram import HostBuffer
from megatrain.store.ticket import Ticket, Wait
from megatrain.store.vram import DeviceMemory
from megatrain.stream import disk_transfer
from megatrain.stream.drain import GradSlot
from megatrain.stream.lanes import Lane, Lanes, Work
from megatrain.stream.rings import DeviceBuffers

HOST, COMPUTE = "host", "compute"
"""The user's threads, of which one runs at a time, and the stream of compute."""
METADATA_ONLY = {
    "detach_", "empty_like", "empty_strided", "full_like", "is_pinned", "new_empty", "new_empty_strided", "new_zeros",
    "ones_like", "set_", "sym_numel", "sym_size", "sym_stride", "zeros_like",
}  # fmt: skip
"""Operators that read no values of their arguments."""
Clock = Counter[str]


class Access(NamedTuple):
    """A use of the bytes from `start` to `end` by a thread or stream, at a time of its clock."""

    start: int
    end: int
    writes: bool
    by: str
    time: int
    what: str


@dataclass
class Region:
    """A buffer of the engine."""

    memory: torch.Tensor
    """Kept, so that no other buffer gets the same address."""
    on_device: bool
    name: str
    accesses: list[Access] = field(default_factory=list)


class Ordering:
    """What happened before what."""

    def __init__(self) -> None:
        self.races: set[str] = set()
        self.regions: list[Region] = []
        self.count = 0
        """Accesses to buffers of the engine."""
        self._clocks: defaultdict[str, Clock] = defaultdict(Counter)
        self._current = threading.local()

    def add(self, memory: torch.Tensor, on_device: bool, name: str) -> None:
        if memory.numel() and not memory.is_meta:
            self.regions.append(Region(memory, on_device, name))

    def clock(self, of: str) -> Clock:
        return Counter(self._clocks[of])

    def tick(self, by: str) -> Clock:
        """The clock after all work of `by` so far."""
        self._clocks[by][by] += 1
        return self.clock(by)

    def follow(self, by: str, clock: Clock) -> None:
        """What `by` does from now on comes after `clock`."""
        self._clocks[by] |= clock

    @property
    def thread(self) -> str:
        """The thread that runs now."""
        return getattr(self._current, "thread", HOST)

    @property
    def stream(self) -> str | None:
        """The stream on which the present thread issues work; None for a lane without one."""
        return getattr(self._current, "stream", COMPUTE)

    @contextmanager
    def running(self, thread: str, stream: str | None, job: str) -> Iterator[None]:
        now = self._current
        before = dict(vars(now))
        now.thread, now.stream, now.job = thread, stream, job
        try:
            yield
        finally:
            vars(now).clear()
            vars(now).update(before)

    def access(self, tensors: Iterable[tuple[torch.Tensor, bool]], what: str) -> None:
        """Record that the present work uses tensors; each with whether it is written."""
        found = [(region, *span, writes) for t, writes in tensors for region, span in self._regions(t)]
        if not found:
            return
        by, on_device = self.thread, any(region.on_device for region, *_ in found)
        # A lane with a stream does everything on it, the user's thread what uses device memory.
        if self.stream is not None and (on_device or by != HOST):
            self.follow(self.stream, self.clock(by))
            by = self.stream
        time = self.tick(by)[by]
        job = getattr(self._current, "job", "user")
        for region, start, end, writes in found:
            self.count += 1
            access = Access(start, end, writes, by, time, f"{what} ({job})")
            self._compare(region, access)
        if by == COMPUTE and not all(region.on_device for region, *_ in found):
            # A copy between pageable memory and the device waits for it.
            self.follow(HOST, self.clock(COMPUTE))

    def _regions(self, tensor: torch.Tensor) -> Iterator[tuple[Region, tuple[int, int]]]:
        if tensor.is_meta or not tensor.numel() or not (start := tensor.data_ptr()):
            return
        elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        end = start + elements * tensor.element_size()
        for region in self.regions:
            first = region.memory.data_ptr()
            last = first + region.memory.nbytes
            if start < last and first < end:
                yield region, (max(start, first), min(end, last))

    def _compare(self, region: Region, access: Access) -> None:
        now, kept = self._clocks[access.by], []
        for earlier in region.accesses:
            ordered = now[earlier.by] >= earlier.time
            overlaps = earlier.start < access.end and access.start < earlier.end
            if overlaps and (access.writes or earlier.writes) and not ordered:
                self.races.add(f"{region.name}: {earlier.by} {earlier.what}, then {access.by} {access.what}")
            covered = access.start <= earlier.start and earlier.end <= access.end
            if not (access.writes and ordered and covered):
                kept.append(earlier)
        region.accesses = [*kept, access]


class _Mode(TorchDispatchMode):
    """Records what PyTorch operators use. A mode belongs to one thread."""

    def __init__(self, ordering: Ordering) -> None:
        super().__init__()
        self._ordering = ordering

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if not func.is_view and name not in METADATA_ONLY:
            used = []
            for number, argument in enumerate(func._schema.arguments):
                value = kwargs.get(argument.name, args[number] if number < len(args) else None)
                writes = argument.alias_info is not None and argument.alias_info.is_write
                used += [(leaf, writes) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            self._ordering.access(used, name)
        return func(*args, **kwargs)


class _Ticket:
    done = False

    def __init__(self, ordering: Ordering, lane: str, by: str, on_stream: bool) -> None:
        self.lane = self.queue = lane
        self._ordering, self._on_stream, self._clock = ordering, on_stream, ordering.tick(by)

    def wait(self) -> None:
        self._ordering.follow(self._ordering.thread, self._clock)

    def order_stream(self) -> None:
        stream = self._ordering.stream
        if not self._on_stream or stream is None:
            self.wait()
        else:
            self._ordering.follow(stream, self._clock)


class OrderedLane(Lane):
    def __init__(self, name: str, lanes: OrderedLanes) -> None:
        super().__init__(name, lanes.timeline)
        self._lanes = lanes

    def submit(self, work: Work, after: Sequence[Wait] = (), label: str = "", job: str = "") -> Ticket:
        order = self._lanes.ordering
        thread = f"{self.name} thread"
        stream = f"{self.name} stream" if LANES[self.name].runs_on == "stream" else None
        order.follow(thread, order.tick(HOST))
        with order.running(thread, stream, f"{self.name} {job} {label}"):
            for wait in after:
                if (self.name, job, wait.name) not in self._lanes.without:
                    wait.ticket.order_stream() if stream else wait.ticket.wait()
            if stream:
                order.follow(stream, order.clock(thread))
            with _Mode(order):
                work()
        return _Ticket(order, self.name, stream or thread, stream is not None)


class OrderedLanes(Lanes):
    """`without`: waits that are left out, by who waits (a lane, or compute), in which job, and for what."""

    def __init__(self, ordering: Ordering, without: Iterable[tuple[str, str, str]] = ()) -> None:
        self.ordering, self.without = ordering, frozenset(without)
        super().__init__()

    def _make(self, name: str) -> Lane:
        return OrderedLane(name, self)

    def order_compute(self, waits: Iterable[Wait], *measured: Any) -> bool:
        return super().order_compute([w for w in waits if (COMPUTE, "", w.name) not in self.without], *measured)

    def mark(self) -> Ticket:
        self.ordering.follow(COMPUTE, self.ordering.clock(HOST))
        return _Ticket(self.ordering, COMPUTE, COMPUTE, on_stream=True)


def _watch(ordering: Ordering, patch: pytest.MonkeyPatch) -> None:
    """Record the engine's buffers, and what happens to them outside PyTorch and in other threads."""
    allocate, make_host, make_device = DeviceBuffers.allocate, HostBuffer.__init__, DeviceMemory.allocate
    make_slot, update, square_sums = GradSlot.__init__, library.update, library.square_sums
    transfer, run_task = disk_transfer._transfer, Step._run_task

    def allocated(self: DeviceBuffers, nbytes: int) -> torch.Tensor:
        before = self.bytes
        after = allocate(self, nbytes)
        if after is not before:
            ordering.add(after, True, self.order.name)
        return after

    def host_buffer(self: Any, *args: Any, **kwargs: Any) -> None:
        make_host(self, *args, **kwargs)
        ordering.add(self.bytes, False, f"{self.nbytes} bytes of RAM")

    def device_buffer(self: DeviceMemory, nbytes: int, **kwargs: Any) -> Buffer:
        buffer = make_device(self, nbytes, **kwargs)
        ordering.add(buffer.bytes, True, f"{nbytes} bytes of VRAM")
        return buffer

    def grad_slot(self: Any, *args: Any, **kwargs: Any) -> None:
        make_slot(self, *args, **kwargs)
        ordering.add(self.square_sum, True, "square sum")

    def updated(**values: Any) -> Any:
        written = [values["weight"], values["residual"], *values["moments"], *values["scales"]]
        ordering.access([(t, True) for t in written if t is not None] + [(values["gradient"], False)], "update")
        return update(**values)

    def summed(flat: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        ordering.access([(flat, False)], "norm")
        return square_sums(flat, *args, **kwargs)

    def transferred(copies: Sequence[tuple[torch.Tensor, Buffer]], *, write: bool) -> int:
        ordering.access([(memory, not write) for memory, _ in copies], "write" if write else "read")
        return transfer(copies, write=write)

    def task_run(self: Step, task: Callable[[], Any]) -> Any:
        with _Mode(ordering):
            return run_task(self, task)

    patch.setattr(DeviceBuffers, "allocate", allocated)
    patch.setattr(HostBuffer, "__init__", host_buffer)
    patch.setattr(DeviceMemory, "allocate", device_buffer)
    patch.setattr(GradSlot, "__init__", grad_slot)
    patch.setattr(library, "update", updated)
    patch.setattr(library, "square_sums", summed)
    patch.setattr(disk_transfer, "_transfer", transferred)
    patch.setattr(disk_transfer, "uninterrupted", lambda work: work())
    patch.setattr(Step, "_run_task", task_run)


def ordering_of(scenario: Callable[[Lanes], Any], without: Iterable[tuple[str, str, str]] = ()) -> Ordering:
    """Run a scenario on lanes that check its order, with some waits left out."""
    ordering = Ordering()
    with pytest.MonkeyPatch.context() as patch:
        _watch(ordering, patch)
        with _Mode(ordering):
            scenario(OrderedLanes(ordering, without))
    return ordering
