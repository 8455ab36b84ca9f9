"""Bytes per tier and role for a decision: the model of memory that a plan must not exceed.

A block's weights, gradient sums and states (residual and moments) are all in VRAM (resident); or its states are in RAM
and, each for itself, its weights have a copy in VRAM (held) and its gradient sum lies there (held), or not (streamed).
With a disk, states may lie there.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from megatrain.geometry import PASSING, by_size, grad_slots, weight_slots
from megatrain.geometry import TIERS as ENGINE_TIERS
from megatrain.hardware.machine import PROCESS_BYTES, cuda_bytes, kernel_bytes
from megatrain.model.shapes import ModelShape, SlabShape
from megatrain.planner import decision as choices
from megatrain.planner.activations import (
    BLAS_BYTES,
    evaluation_bytes,
    graph_bytes,
    input_bytes,
    logits_bytes,
    mask_bytes,
    workspace_bytes,
)
from megatrain.planner.decision import HELD, RESIDENT, STREAMED, Bools, Decision, Decisions, Ints, Windows, looked_up
from megatrain.planner.run import Run
from megatrain.planner.state import State, slab_bytes, state_of

GIB = 1 << 30
TIERS = (*ENGINE_TIERS, "disk")
ROLES = ("weights", "residuals", "moments", "gradients", "activations", "workspace")

SLACK_BYTES = 13 * GIB // 8
SLACK_SHARE = 0.005
"""What PyTorch's allocator reserves above the peak of what is allocated, with expandable segments: 0.9 to 2.2 GiB in
ten runs held to their plans, whatever the size (benchmarks/results/2026-11-15-h200.md). Where less is left it gives
back what it has cached, and takes it again when it must."""
STAGING = 2
"""Gradients in RAM on their way into a sum there, when micro-batches come one by one."""
FLOWING = 2
"""Inputs per micro-batch that are there whatever the policy: the last norm's, and the head's or its gradient."""
PARKING = 3
"""Inputs of one micro-batch that policy `offload` has in VRAM: two on their way out, one being computed on."""
MOST_GRAD_SLOTS = 2
MOST = 1 << 44
"""Bytes of one layer's activations at the most: no machine has as much, and sums of them fit in 64 bits."""
STAGES = 3
"""Blocks whose states are in RAM on their way from and to the disk: read ahead, updated, written."""


Slabs = Counter[tuple[int, int, int]]
"""Slabs alike (bytes, elements, itemsize) → how many."""


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


def pinned_bytes(ram: Any, visits: Any) -> Any:
    """Of RAM by role, of one decision or many, what takes part in transfers: weights, gradients, parked inputs; where
    states visit the GPU, those (all are counted)."""
    return ram[0] + ram[3] + ram[4] + visits * (ram[1] + ram[2])


class Ledger:
    """A model and a run, summed up so that the bytes of many decisions are a few additions."""

    def __init__(self, shape: ModelShape, run: Run, gpu: bool = True) -> None:
        self.shape, self.run, self.gpu = shape, run, gpu
        self.attention = run.attention or shape.attention
        self.states = [state_of(block, run) for block in shape.blocks]
        self.layers = [i for i, block in enumerate(shape.blocks) if block.kind == "layer"]
        self.rest = [i for i, block in enumerate(shape.blocks) if block.kind != "layer"]
        blocks = [shape.blocks[i] for i in self.layers]
        self._widest = min(MOST, max((input_bytes(block, run) for block in blocks), default=0))
        self._inputs = _sums([input_bytes(block, run) for block in blocks])
        self._graphs = _sums([graph_bytes(block, run, self.attention) for block in blocks])
        self._beside = min(MOST, mask_bytes(shape, run, self.attention) + logits_bytes(shape, run))
        """Of every micro-batch, whatever the policy: a mask, and logits if they are computed whole."""
        self._evaluation = min(MOST, evaluation_bytes(shape, run, self.attention, gpu))
        self._work = np.array([min(MOST, peak) for peak in workspace_bytes(shape, run, self.attention, gpu)])
        """Layers that keep their graphs → the highest peak of any block."""
        self._weights = self._role(lambda state: state.weights)
        self._residuals = self._role(lambda state: state.residuals)
        self._moments = self._role(lambda state: state.moments)
        self._sums = [self._role(lambda state, n=n: state.in_vram(n)) for n in (1, 2)]  # type: ignore[misc]
        kinds = ((1, False), (2, False), (2, True))
        self._gradients = [self._role(lambda state, k=k: state.in_ram(*k)) for k in kinds]  # type: ignore[misc]
        self._layer_slabs, self._rest_slabs = self._slabs(lambda slab: True)
        self._layer_trained, self._rest_trained = self._slabs(lambda slab: slab.trains)
        alike = by_size({self.states[i] for i in self.layers}, lambda state: state.weights)
        self._visiting = PASSING * sum(max(state.residuals + state.moments for state in ring) for ring in alike)
        """Slots for states that come to VRAM."""
        # A refusal tries many runs of one model, and rings depend on little of a run.
        self._slot_bytes, self._ring_bytes = choices.tables(shape, run.itemsize, run.accumulation > 1)
        self._disk_bytes: dict[tuple[int, ...], tuple[int, ...]] = {}

    # ---- which blocks

    def resident(self, decision: Decision) -> list[int]:
        return sorted([*self.layers[: decision.layers], *(self.rest if decision.rest == RESIDENT else [])])

    def held_weights(self, decision: Decision) -> list[int]:
        return self._held(decision, decision.held)

    def held_sums(self, decision: Decision) -> list[int]:
        """Blocks that are not resident and train, and whose gradient sums stay in VRAM."""
        trained = {i for i, block in enumerate(self.shape.blocks) if block.trainable}
        return [i for i in self._held(decision, decision.summed) if i in trained]

    def visited(self, decision: Decision) -> list[int]:
        """Blocks whose states come to VRAM for their update."""
        return [i for i in self.held_sums(decision) if i in self.layers[: decision.visited]]

    def _held(self, decision: Decision, until: int) -> list[int]:
        found = [*self.layers[decision.layers : until], *(self.rest if decision.rest == HELD else [])]
        return sorted(i for i in found if self.states[i].weights)

    def on_disk(self, decision: Decision) -> list[int]:
        return sorted(self._disk_blocks(decision.rest == RESIDENT, decision.layers)[: decision.disk])

    def _disk_blocks(self, resident: bool | int, layers: int) -> list[int]:
        """Blocks whose states may be on disk, in the order in which they go there."""
        return [*self.layers[layers:][::-1], *([] if resident else self.rest[::-1])]

    # ---- bytes

    def account(self, decision: Decision) -> Account:
        """The bytes of a decision, each at its peak."""
        vram, ram, disk = (tuple(int(n) for n in tier) for tier in self.accounts(Decisions.of([decision]))[:, :, 0])
        return Account(vram, ram, disk)

    def totals(self, chosen: Decisions) -> dict[str, Ints]:
        """Tier → bytes of each decision."""
        return dict(zip(TIERS, self.accounts(chosen).sum(axis=1), strict=True))

    def accounts(self, chosen: Decisions) -> Ints:
        """The bytes of many decisions: tiers × roles × decisions."""
        windows = Windows(chosen, self.run.accumulation)
        layers, resident = chosen.layers, chosen.rest == RESIDENT
        device = [self._before(role, layers, resident) for role in (self._weights, self._residuals, self._moments)]
        host = [self._after(role, layers, ~resident) for role in (self._weights, self._residuals, self._moments)]
        held = self._before(self._weights, chosen.held, chosen.rest != STREAMED) - device[0]
        weights = device[0] + held + self._slots(chosen)
        streamed = chosen.rest == STREAMED
        in_vram = np.choose(windows.several, [self._before(sums, chosen.summed, ~streamed) for sums in self._sums])
        passing, leaving, staging = self._rings(chosen, windows)
        kinds = [self._after(role, chosen.summed, streamed) for role in self._gradients]
        in_ram = np.choose(windows.several * 1 + windows.single, kinds) + leaving + staging * windows.single
        on_device, parked = self._activations(chosen)
        work = self._workspace(chosen)
        work += np.maximum(0, self._evaluation - on_device - work)
        residuals, moments, stages = self._disk(chosen)
        zero = np.zeros_like(layers)
        ram = np.array([host[0], host[1] - residuals, host[2] - moments, in_ram, parked, PROCESS_BYTES + stages])
        vram = np.array([weights, device[1], device[2], in_vram + passing, on_device, work])
        visits = chosen.visited > layers
        vram[2] += visits * self._visiting
        ram[5] += kernel_bytes(ram[:5].sum(axis=0), pinned_bytes(ram, visits) if self.gpu else zero)
        if self.gpu:
            taken = vram.sum(axis=0)
            vram[5] += cuda_bytes(pinned_bytes(ram, visits), chosen.largest) + SLACK_BYTES
            vram[5] += (SLACK_SHARE * taken).astype(np.int64)
        else:
            vram, ram = np.zeros_like(vram), ram + vram
        return np.array([vram, ram, [zero, residuals, moments, zero, zero, zero]])

    def computing(self, decision: Decision) -> int:
        """What a window's micro-batches keep and need on the device beside state, its slots and gradients."""
        chosen = Decisions.of([decision])
        return int(self._activations(chosen)[0][0]) + self.workspace(decision) * int(chosen.largest[0])

    def workspace(self, decision: Decision) -> int:
        """What of it one block needs for a while."""
        return int(self._work[decision.stored])

    def allocated(self, decision: Decision) -> int:
        """The peak of what PyTorch's allocator hands out: VRAM without the context and the allocator's slack."""
        account, largest = self.account(decision), max(decision.first, decision.window)
        pinned = pinned_bytes(account.ram, decision.visited > decision.layers)
        whole = account.total("vram") - cuda_bytes(pinned, largest) - SLACK_BYTES
        return int(whole / (1 + SLACK_SHARE))

    def filled(self, chosen: Decisions, capacity: Mapping[str, int]) -> Decisions:
        """With as many layers stored as there is room for, at least as many as they have; all must fit as they are."""
        tier, share = ("vram", 1 + SLACK_SHARE) if self.gpu else ("ram", 1.0)
        room = capacity[tier] - self.totals(chosen)[tier] + share * self._computing(chosen) - 2

        def fits(stored: Ints) -> Bools:
            return share * self._computing(chosen.replace(stored=stored)) <= room

        most = np.full_like(chosen.stored, len(self.layers))
        low, high = chosen.stored, most
        while (high - low > 1).any():
            middle = (low + high) // 2
            enough = fits(middle)
            low, high = np.where(enough, middle, low), np.where(enough, high, middle)
        # With every graph kept none is rebuilt, so that all may fit where fewer do not.
        return chosen.replace(stored=np.where(fits(most), most, low))

    # ---- the parts

    def _role(self, nbytes: Callable[[State], int]) -> tuple[Ints, int]:
        """Of the layers before each, and of all other blocks."""
        return _sums([nbytes(self.states[i]) for i in self.layers]), sum(nbytes(self.states[i]) for i in self.rest)

    def _before(self, role: tuple[Ints, int], layers: Ints, rest: Bools) -> Ints:
        """Of the first layers, and of the rest or not."""
        found: Ints = role[0][layers] + rest * role[1]
        return found

    def _after(self, role: tuple[Ints, int], layers: Ints, rest: Bools) -> Ints:
        found: Ints = role[0][-1] - role[0][layers] + rest * role[1]
        return found

    def _activations(self, chosen: Decisions) -> tuple[Ints, Ints]:
        """Inputs and graphs that wait for the backward: on the device, and parked in RAM."""
        stored, window = chosen.stored, chosen.largest
        inputs = self._inputs[-1] - self._inputs[stored]
        held = window * (self._graphs[stored] + FLOWING * self._widest + self._beside)
        # One input ahead of the backward for each micro-batch, and the few that are leaving.
        parking = (window + PARKING) * self._widest
        parked = chosen.offload * window * (inputs + self._widest)
        return held + np.where(chosen.offload > 0, parking, window * inputs), parked

    def _workspace(self, chosen: Decisions) -> Ints:
        window = chosen.largest
        found: Ints = self._work[chosen.stored] + BLAS_BYTES * (2 + np.where(window > 1, window, 0))
        return found

    def _computing(self, chosen: Decisions) -> Ints:
        """Activations and workspace, in training or in an evaluation."""
        found: Ints = np.maximum(self._activations(chosen)[0] + self._workspace(chosen), self._evaluation)
        return found

    def _slots(self, chosen: Decisions) -> Ints:
        """Slots that weights are fetched into."""

        def nbytes(streamed: int, held: int, slots: int) -> tuple[int]:
            slabs = self._layer_slabs[held] + (self._rest_slabs if streamed else Counter())
            return (sum(_largest(ring)[0] * weight_slots(slots, _count(ring)) for ring in _rings(slabs)),)

        found: Ints = looked_up(self._slot_bytes, nbytes, chosen.rest == STREAMED, chosen.held, chosen.slots)[0]
        return found

    def _rings(self, chosen: Decisions, windows: Windows) -> tuple[Ints, Ints, Ints]:
        """Gradients on their way: slots in VRAM, buffers in RAM for sums that leave it, and staging of single ones."""
        found = looked_up(self._ring_bytes, self._passing, chosen.rest, chosen.layers, chosen.summed)
        slots = np.where(chosen.grad_slots > 1, found[1], found[0])
        return slots + np.where(windows.several, found[2], found[3]), found[4], found[5]

    def _passing(self, rest: int, layers: int, summed: int) -> tuple[int, ...]:
        none: Slabs = Counter()
        streamed = self._layer_trained[summed] + (self._rest_trained if rest == STREAMED else none)
        held = self._layer_trained[layers] - self._layer_trained[summed]
        held += self._rest_trained if rest == HELD else none
        slots, several = [0] * MOST_GRAD_SLOTS, self.run.accumulation > 1
        for ring in _rings(streamed + held):
            # A streamed gradient is summed in its slot, and rounded beside that; a held one passes none.
            per = max((4 if size == 4 else 4 + size) if several else size for (_, _, size), _ in ring)
            for most in range(1, MOST_GRAD_SLOTS + 1) if any(slab in streamed for slab, _ in ring) else ():
                slots[most - 1] += _largest(ring)[1] * per * grad_slots(most, _count(ring))
        others = self._layer_slabs[layers] + (none if rest == RESIDENT else self._rest_slabs)
        leaving = sum(
            _largest(ring)[0] * min(PASSING, _count(ring))
            for ring in _rings(others)
            if any(slab in held for slab, _ in ring)
        )
        # A sum is rounded before it is copied. In a step of one window it is, when the window has passed the block, but
        # for parts that are merged; until then it is FP32.
        here = self._layer_trained[0] - self._layer_trained[summed] + (none if rest == STREAMED else self._rest_trained)
        sums = sum(4 * _largest(ring)[1] for ring in _rings(here) if several and ring[0][0][2] < 4)
        merged = leaving if any(self.states[i].tied for i in self.rest) else 0
        staging = STAGING * max((nbytes for nbytes, _, _ in streamed), default=0)
        return *slots, leaving, merged + sums, leaving, staging

    def _slabs(self, wanted: Callable[[SlabShape], bool]) -> tuple[list[Slabs], Slabs]:
        """Slabs of the layers from each on, and of all other blocks."""

        def of(index: int) -> Slabs:
            found: Slabs = Counter()
            for slab in filter(wanted, self.shape.blocks[index].slabs):
                found[*slab_bytes(slab, self.run), slab.itemsize or self.run.itemsize] += 1
            return found

        none: Slabs = Counter()
        after = [*accumulate(map(of, reversed(self.layers)), operator.add, initial=none)][::-1]
        return after, sum(map(of, self.rest), none)

    def _disk(self, chosen: Decisions) -> tuple[Ints, Ints, Ints]:
        """Residuals and moments on disk, and in RAM on their way there and back."""

        def nbytes(resident: int, layers: int, disk: int) -> tuple[int, int, int]:
            states = [self.states[i] for i in self._disk_blocks(resident, layers)[:disk]]
            largest = max((state.residuals + state.moments for state in states), default=0)
            residuals, moments = sum(state.residuals for state in states), sum(state.moments for state in states)
            return residuals, moments, min(disk, STAGES) * largest

        found = looked_up(self._disk_bytes, nbytes, chosen.rest == RESIDENT, chosen.layers, chosen.disk)
        return found[0], found[1], found[2]

    def relieved(self, chosen: Decisions, over: Ints) -> Decisions:
        """With the fewest blocks on disk that free so much RAM; if none do, with those that free most."""
        disk = np.zeros_like(over)
        groups = 2 * chosen.layers + (chosen.rest == RESIDENT)
        for group in np.unique(groups[over > 0]):
            blocks = self._disk_blocks(group % 2, group // 2)
            counts = np.arange(len(blocks) + 1)
            freed = self._disk(Decisions(rest=RESIDENT * (group % 2), layers=group // 2, disk=counts))
            relief = np.maximum.accumulate(freed[0] + freed[1] - freed[2])
            members = np.flatnonzero((groups == group) & (over > 0))
            disk[members] = np.searchsorted(relief, np.minimum(over[members], relief[-1]))
        return chosen.replace(disk=disk)


Ring = list[tuple[tuple[int, int, int], int]]


def _rings(slabs: Slabs) -> list[Ring]:
    return by_size(slabs.items(), lambda alike: alike[0][0])


def _largest(ring: Ring) -> tuple[int, int]:
    """Bytes and elements of a ring's largest slab."""
    return ring[0][0][0], max(elements for (_, elements, _), _ in ring)


def _count(ring: Ring) -> int:
    return sum(count for _, count in ring)


def _sums(values: Sequence[int]) -> Ints:
    return np.array([0, *accumulate(min(MOST, value) for value in values)], np.int64)
