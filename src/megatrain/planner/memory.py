"""Bytes per tier and role for a decision: the model of memory that a plan must not exceed.

A block's state is wholly in VRAM (resident), or in RAM and streamed; with a disk, residual and moments of a streamed
block may lie there. Resident are the first layers (and with `rest` all that is not a layer): they are needed first in
a forward, so that it starts while the CPU updates those after them. On disk are the last ones, updated last.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import accumulate

from megatrain.geometry import WIDTHS, by_size, grad_slots, padded_slab, weight_slots
from megatrain.hardware.machine import PROCESS_BYTES, cuda_bytes, kernel_bytes
from megatrain.model.shapes import BlockShape, ModelShape, SlabShape
from megatrain.planner.activations import (
    BLAS_BYTES,
    evaluation_bytes,
    graph_bytes,
    input_bytes,
    logits_bytes,
    mask_bytes,
    workspace_bytes,
)
from megatrain.planner.run import Run

GIB = 1 << 30
TIERS = ("vram", "ram", "disk")
ROLES = ("weights", "residuals", "moments", "gradients", "activations", "workspace")

SLACK_BYTES = 13 * GIB // 8
SLACK_SHARE = 0.005
"""What PyTorch's allocator reserves above the peak of what is allocated, with expandable segments: 0.9 to 2.2 GiB in
ten runs held to their plans, whatever the size (benchmarks/results/2026-11-15-h200.md). Where less is left it gives
back what it has cached, and takes it again when it must."""
STAGING = 2
"""Gradients on their way into a sum, in the tier of their slab, when micro-batches come one by one."""
FLOWING = 2
"""Inputs per micro-batch that are there whatever the policy: the last norm's, and the head's or its gradient."""
PARKING = 3
"""Inputs of one micro-batch that policy `offload` has in VRAM: two on their way out, one being computed on."""
STAGES = 3
"""Blocks whose states are in RAM on their way from and to the disk: read ahead, updated, written."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a plan chooses; nothing in it changes bits."""

    rest: bool = False
    """Whether embedding, head and all else that is not a layer are resident."""
    layers: int = 0
    """Resident layers, from the first."""
    stored: int = 0
    """Layers with policy `store`, from the first."""
    offload: bool = False
    """Whether the other layers have policy `offload` (else `recompute`)."""
    window: int = 1
    """Micro-batches that pass a block together."""
    slots: int = 3
    grad_slots: int = 2
    disk: int = 0
    """Streamed blocks whose residual and moments are on disk: layers from the last, then the others."""


@dataclass(frozen=True)
class State:
    """Bytes of one block's state by role; gradients apart, since they depend on the window."""

    weights: int
    residuals: int
    moments: int
    elements16: int
    """Padded elements whose gradients have 2 bytes."""
    elements32: int
    tied: bool

    def gradients(self, windows: int, window: int) -> int:
        """As they lie in memory: rounded; as FP32 sums if the step has several windows; of a tied slab two, summed."""
        if self.tied:
            return self.elements16 * (8 if windows == 1 or window > 1 else 12) + self.elements32 * 8
        if windows == 1:
            return self.elements16 * 2 + self.elements32 * 4
        # A window of one micro-batch leaves the first gradient as it is, and then needs a sum beside it.
        return self.elements16 * (4 if window > 1 else 6) + self.elements32 * 4


def slab_bytes(slab: SlabShape, run: Run) -> tuple[int, int]:
    """Bytes of the weight, and padded elements."""
    itemsize = slab.itemsize or run.itemsize
    elements = padded_slab(slab.numel, itemsize)
    return elements * itemsize, elements


def state_of(block: BlockShape, run: Run) -> State:
    """The bytes of a block's state."""
    weights = residuals = moments = elements16 = elements32 = 0
    for slab in block.slabs:
        nbytes, elements = slab_bytes(slab, run)
        weights += nbytes
        if not slab.trains:
            continue
        half = (slab.itemsize or run.itemsize) == 2
        residuals += elements * 2 if half and run.precision == "bf16" else 0
        per_moment = slab.vectors * 4 + (slab.numel - slab.vectors) * WIDTHS[run.moment_width].nbytes
        moments += run.moments * -(-int(per_moment + 1) // 64) * 64
        elements16 += elements if half else 0
        elements32 += 0 if half else elements
    return State(weights, residuals, moments, elements16, elements32, block.tied)


def ring_sizes(sizes: Counter[tuple[int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Slabs (bytes, elements, itemsize → how many) in rings of like size.

    Per ring: its largest slab in bytes and in elements, its smallest itemsize, and how many slabs share it.
    """
    groups = by_size(sizes.items(), lambda item: item[0][0])
    return [
        (members[0][0][0], max(m[0][1] for m in members), min(m[0][2] for m in members), sum(m[1] for m in members))
        for members in groups
    ]


@dataclass(frozen=True)
class Account:
    """Bytes by tier and role."""

    vram: tuple[int, ...]
    ram: tuple[int, ...]
    disk: tuple[int, ...]

    def total(self, tier: str) -> int:
        return sum(getattr(self, tier))

    def as_dict(self) -> dict[str, dict[str, int]]:
        return {tier: dict(zip(ROLES, getattr(self, tier), strict=True)) for tier in TIERS}


def outside_allocator(memory: Mapping[str, Mapping[str, int]], window: int) -> int:
    """Of a plan's VRAM, by tier and role, what CUDA takes beside PyTorch's allocator."""
    return cuda_bytes(_pinned([memory["ram"][role] for role in ROLES]), window)


def _pinned(ram: Sequence[int]) -> int:
    """Of RAM by role, what takes part in transfers: weights, gradients, parked inputs."""
    return ram[0] + ram[3] + ram[4]


class Ledger:
    """A model and a run, summed up so that the bytes of a decision are a few additions."""

    def __init__(self, shape: ModelShape, run: Run, gpu: bool = True) -> None:
        self.shape, self.run, self.gpu = shape, run, gpu
        self.attention = run.attention or shape.attention
        self.states = [state_of(block, run) for block in shape.blocks]
        self.layers = [i for i, block in enumerate(shape.blocks) if block.kind == "layer"]
        self.rest = [i for i, block in enumerate(shape.blocks) if block.kind != "layer"]
        self.disk_order = [*self.layers[::-1], *self.rest[::-1]]
        self._widest = max((input_bytes(shape.blocks[i], run) for i in self.layers), default=0)
        self._inputs = _prefix([input_bytes(shape.blocks[i], run) for i in self.layers])
        self.graphs = _prefix([graph_bytes(shape.blocks[i], run, self.attention) for i in self.layers])
        self._extra = {
            False: [graph - inputs for graph, inputs in zip(self.graphs, self._inputs, strict=True)],
            True: self.graphs,
        }
        """What the graphs of the first layers take above their inputs; above nothing, if those are offloaded."""
        self._beside = mask_bytes(shape, run, self.attention) + logits_bytes(shape, run)
        """Of every micro-batch, whatever the policy: a mask, and logits if they are computed whole."""
        self._evaluation = evaluation_bytes(shape, run, self.attention)
        self._work = lru_cache(maxsize=None)(lambda s: workspace_bytes(shape, run, self.attention, s))
        self._rings = lru_cache(maxsize=None)(self._weight_rings)
        self._role_sums = lru_cache(maxsize=None)(self._sum_roles)
        self._staging = lru_cache(maxsize=None)(self._staging_bytes)
        self._home = lru_cache(maxsize=None)(self._home_bytes)
        self._gone = lru_cache(maxsize=None)(self._disk_bytes)
        self._rest_slabs = self._slabs(self.rest)
        single = (self._slabs([i]) for i in reversed(self.layers))
        none: Counter[tuple[int, int, int]] = Counter()
        self._layer_slabs = [*accumulate(single, operator.add, initial=none)][::-1]
        self._grad_rings = ring_sizes(self._slabs([*self.layers, *self.rest], trains=True))

    def windows(self, window: int) -> int:
        """Windows in a step."""
        return -(-self.run.accumulation // window)

    def resident(self, decision: Decision) -> list[int]:
        return sorted([*self.layers[: decision.layers], *(self.rest if decision.rest else [])])

    def on_disk(self, decision: Decision) -> list[int]:
        kept = set(self.resident(decision))
        return sorted([i for i in self.disk_order if i not in kept][: decision.disk])

    def account(self, decision: Decision) -> Account:
        """The bytes of a decision, each at its peak."""
        rest, layers, window = decision.rest, decision.layers, decision.window
        several = self.windows(window) > 1
        here, there = self._home(rest, layers, several, window > 1)
        gone_residuals, gone_moments, largest = self._gone(rest, layers, decision.disk)
        slots = sum(nbytes * weight_slots(decision.slots, count) for nbytes, _, _, count in self._rings(rest, layers))
        on_device, parked = self._activations(decision)
        work = self._work(decision.stored) + BLAS_BYTES * (2 + (window if window > 1 else 0))
        work += max(0, self._evaluation - on_device - work)
        staged, staging = self._staging(rest, layers) if several and window == 1 else (0, 0)
        gradients = here[3] + self._grad_slots(decision.grad_slots) + staged
        vram = [here[0] + slots, here[1], here[2], gradients, on_device, work]
        host = PROCESS_BYTES + min(decision.disk, STAGES) * largest
        ram = [there[0], there[1] - gone_residuals, there[2] - gone_moments, there[3] + staging, parked, host]
        ram[5] += kernel_bytes(sum(ram[:5]), _pinned(ram) if self.gpu else 0)
        if self.gpu:
            vram[5] += cuda_bytes(_pinned(ram), window) + SLACK_BYTES + int(SLACK_SHARE * sum(vram))
        else:
            vram, ram = [0] * 6, [a + b for a, b in zip(ram, vram, strict=True)]
        return Account(tuple(vram), tuple(ram), (0, gone_residuals, gone_moments, 0, 0, 0))

    def computing(self, decision: Decision) -> int:
        """What a window's micro-batches keep and need on the device beside state, its slots and gradients."""
        return self._activations(decision)[0] + self.workspace(decision) * decision.window

    def workspace(self, decision: Decision) -> int:
        """What of it one block needs for a while."""
        return self._work(decision.stored)

    def allocated(self, decision: Decision) -> int:
        """The peak of what PyTorch's allocator hands out: VRAM without the context and the allocator's slack."""
        account = self.account(decision)
        whole = account.total("vram") - cuda_bytes(_pinned(account.ram), decision.window) - SLACK_BYTES
        return int(whole / (1 + SLACK_SHARE))

    def stored_limit(self, decision: Decision, room: int) -> int:
        """How many layers may keep their graphs if `room` bytes of the device are left without any."""
        # An evaluation uses the room that graphs have in training.
        room += max(0, self._evaluation - self._activations(decision)[0] - self._work(decision.stored))
        kept = self._extra[decision.offload]
        per = decision.window * (1 + SLACK_SHARE if self.gpu else 1)
        # With every graph kept none is rebuilt, so that the workspace is smaller.
        freed = self._work(0) - self._work(len(self.layers))
        if kept[-1] * per <= room + freed:
            return len(self.layers)
        return max(0, bisect_right(kept, room / per) - 1)

    def _activations(self, decision: Decision) -> tuple[int, int]:
        """Inputs and graphs that wait for the backward: on the device, and parked in RAM."""
        stored, window = decision.stored, decision.window
        inputs = self._inputs[-1] - self._inputs[stored]
        held = window * (self.graphs[stored] + FLOWING * self._widest + self._beside)
        if not decision.offload:
            return held + window * inputs, 0
        # One input ahead of the backward for each micro-batch, and the few that are leaving.
        return held + (window + PARKING) * self._widest, window * (inputs + self._widest)

    def _staging_bytes(self, rest: bool, layers: int) -> tuple[int, int]:
        """For gradients that are added one by one: bytes on the device (resident blocks) and in RAM (streamed ones)."""
        streamed = set(self._streamed(rest, layers))
        resident = [i for i in range(len(self.states)) if i not in streamed]
        largest = [
            max((n for n, _, _ in self._slabs([*blocks], trains=True)), default=0) for blocks in (resident, streamed)
        ]
        return STAGING * largest[0], STAGING * largest[1]

    def _grad_slots(self, slots: int) -> int:
        """Gradients of resident blocks pass them too: rings do not depend on where state lies."""
        total = 0
        for _, elements, itemsize, count in self._grad_rings:
            per = itemsize if self.run.accumulation == 1 else (4 if itemsize == 4 else 4 + itemsize)
            total += elements * per * grad_slots(slots, count)
        return total

    def _slabs(self, indices: Sequence[int], trains: bool | None = None) -> Counter[tuple[int, int, int]]:
        found: Counter[tuple[int, int, int]] = Counter()
        for index in indices:
            for slab in self.shape.blocks[index].slabs:
                if trains is None or slab.trains == trains:
                    nbytes, elements = slab_bytes(slab, self.run)
                    found[nbytes, elements, slab.itemsize or self.run.itemsize] += 1
        return found

    def _streamed(self, rest: bool, layers: int) -> list[int]:
        return [*self.layers[layers:], *([] if rest else self.rest)]

    def _weight_rings(self, rest: bool, layers: int) -> list[tuple[int, int, int, int]]:
        return ring_sizes(self._layer_slabs[layers] + (Counter() if rest else self._rest_slabs))

    def _home_bytes(
        self, rest: bool, layers: int, several: bool, together: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Weights, residuals, moments and gradients of the resident blocks, and of the streamed ones."""
        after, others = self._role_sums(several, together)
        streamed = after[layers] if rest else _added(after[layers], others)
        whole = _added(after[0], others)
        return tuple(a - b for a, b in zip(whole, streamed, strict=True)), streamed

    def _sum_roles(self, several: bool, together: bool) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
        """The four roles' bytes: of the layers from each one on, and of all other blocks."""
        windows, window = 2 if several else 1, 2 if together else 1
        roles: list[tuple[int, ...]] = [
            (s.weights, s.residuals, s.moments, s.gradients(windows, window)) for s in self.states
        ]
        nothing: tuple[int, ...] = (0, 0, 0, 0)
        after = [*accumulate((roles[i] for i in reversed(self.layers)), _added, initial=nothing)][::-1]
        return after, reduce(_added, (roles[i] for i in self.rest), nothing)

    def _disk_bytes(self, rest: bool, layers: int, disk: int) -> tuple[int, int, int]:
        """Residuals and moments on disk, and the largest block of them."""
        streamed = set(self._streamed(rest, layers))
        gone = [self.states[i] for i in self.disk_order if i in streamed][:disk]
        largest = max((state.residuals + state.moments for state in gone), default=0)
        return sum(state.residuals for state in gone), sum(state.moments for state in gone), largest


def _added(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _prefix(values: list[int]) -> list[int]:
    return [0, *accumulate(values)]
