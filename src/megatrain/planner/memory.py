"""Bytes per tier and role for a decision: the model of memory that a plan must not exceed.

A block's weights, gradient sums and states (residual and moments) are all in VRAM (resident); or its states are in RAM
and, each for itself, its weights have a copy in VRAM (held) and its gradient sum lies there (held), or not (streamed).
With a disk, states may lie there.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from megatrain.geometry import STAGING_SLOTS, WIDTHS, grad_slots, group_by_size, padded_slab, round_up, weight_slots
from megatrain.geometry import TIERS as ENGINE_TIERS
from megatrain.hardware.machine import PROCESS_BYTES, cuda_bytes, kernel_bytes
from megatrain.model.shapes import BlockShape, ModelShape, SlabShape
from megatrain.planner import activations
from megatrain.planner.arrays import Bools, Ints, Sums, Table, look_up, most_layers
from megatrain.planner.decision import HELD, RESIDENT, STREAMED, Decision, Decisions, Windows
from megatrain.planner.run import Run

GIB = 1 << 30
TIERS = (*ENGINE_TIERS, "disk")
ROLES = ("weights", "residuals", "moments", "gradients", "activations", "workspace")

SLACK_BYTES = 13 * GIB // 8
SLACK_SHARE = 0.005
"""What PyTorch's allocator reserves above the peak of what is allocated, with expandable segments: 0.9 to 2.2 GiB in
ten runs held to their plans, whatever the size (benchmarks/results/2026-11-15-h200.md). Where less is left it gives
back what it has cached, and takes it again when it must."""
STAGED_GRADIENTS = 2
"""Gradients in RAM on their way into a sum there, when micro-batches come one by one."""
INPUTS_IN_USE = 2
"""Inputs per micro-batch that are there whatever the policy: the last norm's, and the head's or its gradient."""
INPUTS_IN_FLIGHT = 3
"""Inputs of one micro-batch that policy `offload` has in VRAM: two on their way out, one being computed on."""
MAX_LAYER_BYTES = 1 << 44
"""Bytes of one layer's activations at the most: no machine has as much, and sums of them fit in 64 bits."""
DISK_STAGED_BLOCKS = 3
"""Blocks whose states are in RAM on their way from and to the disk: read ahead, updated, written."""
Slabs = Counter[tuple[int, int, int]]
"""Slabs alike (bytes, elements, itemsize) → how many."""


def slab_bytes(slab: SlabShape, run: Run) -> tuple[int, int]:
    """Bytes of the weight, and padded elements."""
    itemsize = slab.itemsize or run.itemsize
    elements = padded_slab(slab.numel, itemsize)
    return elements * itemsize, elements


class State:
    """Bytes of one block's state by role; gradients apart, since they depend on the window."""

    def __init__(self, block: BlockShape, run: Run) -> None:
        self.tied, self.weights, self.residuals, self.moments = block.tied, 0, 0, 0
        self.elements16 = self.elements32 = 0
        """Padded elements whose gradients have 2 bytes, and 4."""
        for slab in block.slabs:
            nbytes, elements = slab_bytes(slab, run)
            self.weights += nbytes
            if not slab.trains:
                continue
            if (slab.itemsize or run.itemsize) == 2:
                self.elements16 += elements
                self.residuals += elements * 2 if run.precision == "bf16" else 0
            else:
                self.elements32 += elements
            per_moment = slab.vectors * 4 + (slab.numel - slab.vectors) * WIDTHS[run.moment_width].nbytes
            self.moments += run.moments * round_up(int(per_moment + 1), 64)

    def gradient(self, windows: int, single: bool = False) -> int:
        """Its gradient, in RAM or VRAM: rounded if the step has one window, else an FP32 sum; of a tied slab two parts.

        In RAM a window of a single micro-batch leaves the first gradient as it is, and then needs a sum beside it.
        """
        if self.tied:
            return self.elements16 * (12 if windows > 1 and single else 8) + self.elements32 * 8
        if windows == 1:
            return self.elements16 * 2 + self.elements32 * 4
        return self.elements16 * (6 if single else 4) + self.elements32 * 4


def pinned_bytes(ram: Any, visits: Any) -> Any:
    """Of RAM by role, of one decision or many, what takes part in transfers: weights, gradients, parked inputs; where
    states visit the GPU, those (all are counted)."""
    return ram[0] + ram[3] + ram[4] + visits * (ram[1] + ram[2])


@lru_cache(maxsize=16)
def _shared_tables(shape: ModelShape, itemsize: int, several: bool) -> tuple[Table, Table]:
    """Weight slots and gradient rings of a model: they depend on no more of a run, and a refusal tries many runs."""
    return {}, {}


class Ledger:
    """A model and a run, summed up so that the bytes of many decisions are a few additions."""

    def __init__(self, shape: ModelShape, run: Run, gpu: bool = True) -> None:
        self.shape, self.run, self.gpu = shape, run, gpu
        attention = run.attention or shape.attention
        self.states = [State(block, run) for block in shape.blocks]
        self.layers = [i for i, block in enumerate(shape.blocks) if block.kind == "layer"]
        self.other_blocks = [i for i, block in enumerate(shape.blocks) if block.kind != "layer"]
        blocks = [shape.blocks[i] for i in self.layers]
        inputs = [min(MAX_LAYER_BYTES, activations.input_bytes(block, run)) for block in blocks]
        graphs = [min(MAX_LAYER_BYTES, activations.graph_bytes(block, run, attention)) for block in blocks]
        self._largest_input = max(inputs, default=0)
        self._inputs, self._graphs = np.cumsum([0, *inputs]), np.cumsum([0, *graphs])
        masks = activations.mask_bytes(shape, run, attention)
        self._per_micro_batch = min(MAX_LAYER_BYTES, masks + activations.logits_bytes(shape, run))
        """Of every micro-batch, whatever the policy: a mask, and logits if they are computed whole."""
        self._evaluation = min(MAX_LAYER_BYTES, activations.evaluation_bytes(shape, run, attention, gpu))
        peaks = activations.workspace_bytes(shape, run, attention, gpu)
        self._work = np.array([min(MAX_LAYER_BYTES, peak) for peak in peaks])
        """Layers that keep their graphs → the highest peak of any block."""
        self._weights = self._sums([state.weights for state in self.states])
        self._residuals = self._sums([state.residuals for state in self.states])
        self._moments = self._sums([state.moments for state in self.states])
        kinds = ((1, False), (2, False), (2, True))
        self._gradients = [self._sums([state.gradient(*kind) for state in self.states]) for kind in kinds]
        self._layer_slabs, self._rest_slabs = self._slabs(trained=False)
        self._layer_trained, self._rest_trained = self._slabs(trained=True)
        alike = group_by_size([self.states[i] for i in self.layers], lambda state: state.weights)
        self._state_slot_bytes = STAGING_SLOTS * sum(
            max(state.residuals + state.moments for state in ring) for ring in alike
        )
        """Slots for states that come to VRAM."""
        self._slot_bytes, self._ring_bytes = _shared_tables(shape, run.itemsize, run.accumulation > 1)
        self._disk_bytes: Table = {}

    def placed(self, decision: Decision) -> dict[str, list[int]]:
        """Blocks by the fields of a plan that name them."""

        def held(until: int) -> list[int]:
            found = [
                *self.layers[decision.resident_layers : until],
                *(self.other_blocks if decision.other_blocks == HELD else []),
            ]
            return sorted(i for i in found if self.states[i].weights)

        sums = [i for i in held(decision.held_gradients) if self.shape.blocks[i].trainable]
        return {
            "resident": sorted(
                [
                    *self.layers[: decision.resident_layers],
                    *(self.other_blocks if decision.other_blocks == RESIDENT else []),
                ]
            ),
            "held_weights": held(decision.held_weights),
            "held_gradients": sums,
            "streamed_states": [i for i in sums if i in self.layers[: decision.gpu_updates]],
            "on_disk": self.on_disk(decision.other_blocks == RESIDENT, decision.resident_layers, decision.disk_blocks),
        }

    def on_disk(self, resident: bool | int, layers: int, disk: int) -> list[int]:
        """Blocks whose states are on disk: layers from the last, then the rest unless that is resident."""
        blocks = [*self.layers[layers:][::-1], *([] if resident else self.other_blocks[::-1])]
        return sorted(blocks[:disk])

    def account(self, decision: Decision) -> dict[str, dict[str, int]]:
        """Tier → role → bytes of a decision, each at its peak."""
        found = self.accounts(Decisions.of([decision]))[:, :, 0].tolist()
        return {tier: dict(zip(ROLES, roles, strict=True)) for tier, roles in zip(TIERS, found, strict=True)}

    def totals(self, chosen: Decisions) -> dict[str, Ints]:
        """Tier → bytes of each decision."""
        return dict(zip(TIERS, self.accounts(chosen).sum(axis=1), strict=True))

    def accounts(self, chosen: Decisions) -> Ints:
        """The bytes of many decisions: tiers × roles × decisions."""
        windows = Windows(chosen, self.run.accumulation)
        layers, resident, streamed = (
            chosen.resident_layers,
            chosen.other_blocks == RESIDENT,
            chosen.other_blocks == STREAMED,
        )
        roles = (self._weights, self._residuals, self._moments)
        device = [role.before(layers, resident) for role in roles]
        host = [role.after(layers, ~resident) for role in roles]
        weights = self._weights.before(chosen.held_weights, ~streamed) + self._slots(chosen)
        in_vram = np.choose(
            windows.several, [sums.before(chosen.held_gradients, ~streamed) for sums in self._gradients[:2]]
        )
        passing, leaving, staging = self._rings(chosen, windows)
        kinds = [sums.after(chosen.held_gradients, streamed) for sums in self._gradients]
        in_ram = np.choose(windows.several * 1 + windows.single, kinds) + leaving + staging * windows.single
        on_device, work, parked = self._computing(chosen)
        residuals, moments, stages = self._disk(chosen)
        zero = np.zeros_like(layers)
        ram = np.array([host[0], host[1] - residuals, host[2] - moments, in_ram, parked, PROCESS_BYTES + stages])
        vram = np.array([weights, device[1], device[2], in_vram + passing, on_device, work])
        visits = chosen.streams_states
        vram[2] += visits * self._state_slot_bytes
        ram[5] += kernel_bytes(ram[:5].sum(axis=0), pinned_bytes(ram, visits) if self.gpu else zero)
        if self.gpu:
            taken = vram.sum(axis=0)
            vram[5] += cuda_bytes(pinned_bytes(ram, visits), chosen.largest_window) + SLACK_BYTES
            vram[5] += (SLACK_SHARE * taken).astype(np.int64)
        else:
            vram, ram = np.zeros_like(vram), ram + vram
        return np.array([vram, ram, [zero, residuals, moments, zero, zero, zero]])

    def computing(self, decision: Decision) -> tuple[int, int]:
        """What micro-batches of a window keep and need on the device beside state, its slots and gradients; and of
        that, what one block needs for a while."""
        chosen, work = Decisions.of([decision]), int(self._work[decision.stored_graphs])
        return int(self._computing(chosen)[0][0]) + work * int(chosen.largest_window[0]), work

    def with_stored_graphs(self, chosen: Decisions, capacity: Mapping[str, int]) -> Decisions:
        """With as many layers stored as there is room for, at least as many as they have; all must fit as they are."""
        tier, share = ("vram", 1 + SLACK_SHARE) if self.gpu else ("ram", 1.0)
        on_device, work, _ = self._computing(chosen)
        room = capacity[tier] - self.totals(chosen)[tier] + share * (on_device + work) - 2

        def fit(stored: Ints) -> Bools:
            on_device, work, _ = self._computing(chosen.replace(stored_graphs=stored))
            return share * (on_device + work) <= room

        most = len(self.layers)
        # With every graph kept none is rebuilt, so that all may fit where fewer do not.
        all_fit = fit(np.full_like(chosen.stored_graphs, most))
        return chosen.replace(stored_graphs=np.where(all_fit, most, most_layers(chosen.stored_graphs, most, fit)))

    def _sums(self, values: list[int]) -> Sums:
        return Sums(values, self.layers, self.other_blocks)

    def _computing(self, chosen: Decisions) -> tuple[Ints, Ints, Ints]:
        """Inputs and graphs that wait for the backward; beside them, what one block or an evaluation needs for a while;
        and inputs that are parked in RAM."""
        stored, window = chosen.stored_graphs, chosen.largest_window
        inputs = self._inputs[-1] - self._inputs[stored]
        held = window * (self._graphs[stored] + INPUTS_IN_USE * self._largest_input + self._per_micro_batch)
        # One input ahead of the backward for each micro-batch, and the few that are leaving.
        parking = (window + INPUTS_IN_FLIGHT) * self._largest_input
        on_device = held + np.where(chosen.offload_inputs > 0, parking, window * inputs)
        work = self._work[stored] + activations.BLAS_BYTES * (2 + np.where(window > 1, window, 0))
        parked = chosen.offload_inputs * window * (inputs + self._largest_input)
        return on_device, np.maximum(work, self._evaluation - on_device), parked

    def _slots(self, chosen: Decisions) -> Ints:
        """Slots that weights are fetched into."""

        def nbytes(streamed: int, held: int, slots: int) -> tuple[int]:
            slabs = self._layer_slabs[held] + (self._rest_slabs if streamed else Counter())
            return (sum(ring.nbytes * weight_slots(slots, ring.count) for ring in _rings(slabs)),)

        found: Ints = look_up(
            self._slot_bytes, nbytes, chosen.other_blocks == STREAMED, chosen.held_weights, chosen.slots
        )[0]
        return found

    def _rings(self, chosen: Decisions, windows: Windows) -> tuple[Ints, Ints, Ints]:
        """Gradients on their way: slots in VRAM, buffers in RAM for sums that leave it, and staging of single ones."""
        columns = chosen.other_blocks, chosen.resident_layers, chosen.held_gradients, chosen.grad_slots
        slots, rounded, leaving, staging = look_up(self._ring_bytes, self._passing, *columns)
        return slots + np.where(windows.several, leaving, rounded), leaving, staging

    def _passing(self, rest: int, layers: int, summed: int, most: int) -> tuple[int, int, int, int]:
        none: Slabs = Counter()
        streamed = self._layer_trained[summed] + (self._rest_trained if rest == STREAMED else none)
        held = self._layer_trained[layers] - self._layer_trained[summed]
        held += self._rest_trained if rest == HELD else none
        slots, several = 0, self.run.accumulation > 1
        for ring in _rings(streamed + held):
            # A streamed gradient is summed in its slot, and rounded beside that; a held one passes none.
            per = max((4 if size == 4 else 4 + size) if several else size for _, _, size in ring.slabs)
            if ring.slabs & streamed.keys():
                slots += ring.elements * per * grad_slots(most, ring.count)
        others = self._layer_slabs[layers] + (none if rest == RESIDENT else self._rest_slabs)
        leaving = sum(
            ring.nbytes * min(STAGING_SLOTS, ring.count) for ring in _rings(others) if ring.slabs & held.keys()
        )
        # A sum is rounded before it is copied. In a step of one window it is, when the window has passed the block, but
        # for parts that are merged; until then it is FP32.
        here = self._layer_trained[0] - self._layer_trained[summed] + (none if rest == STREAMED else self._rest_trained)
        sums = sum(4 * ring.elements for ring in _rings(here) if several and ring.itemsize < 4)
        merged = leaving if any(self.states[i].tied for i in self.other_blocks) else 0
        staging = STAGED_GRADIENTS * max((nbytes for nbytes, _, _ in streamed), default=0)
        return slots, merged + sums, leaving, staging

    def _slabs(self, trained: bool) -> tuple[list[Slabs], Slabs]:
        """Slabs of the layers from each on, and of all other blocks; of all, or those that train."""

        def of(index: int) -> Slabs:
            slabs = (slab for slab in self.shape.blocks[index].slabs if slab.trains or not trained)
            return Counter((*slab_bytes(slab, self.run), slab.itemsize or self.run.itemsize) for slab in slabs)

        none: Slabs = Counter()
        after = [*accumulate(map(of, reversed(self.layers)), operator.add, initial=none)][::-1]
        return after, sum(map(of, self.other_blocks), none)

    def _disk(self, chosen: Decisions) -> tuple[Ints, Ints, Ints]:
        """Residuals and moments on disk, and in RAM on their way there and back."""

        def nbytes(resident: int, layers: int, disk: int) -> tuple[int, int, int]:
            states = [self.states[i] for i in self.on_disk(resident, layers, disk)]
            largest = max((state.residuals + state.moments for state in states), default=0)
            residuals, moments = sum(state.residuals for state in states), sum(state.moments for state in states)
            return residuals, moments, min(disk, DISK_STAGED_BLOCKS) * largest

        columns = chosen.other_blocks == RESIDENT, chosen.resident_layers, chosen.disk_blocks
        residuals, moments, stages = look_up(self._disk_bytes, nbytes, *columns)
        return residuals, moments, stages

    def moved_to_disk(self, chosen: Decisions, over: Ints) -> Decisions:
        """With the fewest blocks on disk that free so much RAM; if none do, with those that free most."""
        disk = np.zeros_like(over)
        groups = 2 * chosen.resident_layers + (chosen.other_blocks == RESIDENT)
        for group in np.unique(groups[over > 0]):
            counts = np.arange(len(self.on_disk(group % 2, group // 2, len(self.states))) + 1)
            freed = self._disk(
                Decisions(other_blocks=RESIDENT * (group % 2), resident_layers=group // 2, disk_blocks=counts)
            )
            relief = np.maximum.accumulate(freed[0] + freed[1] - freed[2])
            members = np.flatnonzero((groups == group) & (over > 0))
            disk[members] = np.searchsorted(relief, np.minimum(over[members], relief[-1]))
        return chosen.replace(disk_blocks=disk)


class _Ring:
    """Slabs that share slots, the largest first: those alike, and how many there are of each."""

    def __init__(self, alike: list[tuple[tuple[int, int, int], int]]) -> None:
        self.slabs = dict(alike).keys()
        self.nbytes, _, self.itemsize = alike[0][0]
        self.elements = max(elements for _, elements, _ in self.slabs)
        self.count = sum(count for _, count in alike)


def _rings(slabs: Slabs) -> list[_Ring]:
    return [_Ring(alike) for alike in group_by_size(slabs.items(), lambda alike: alike[0][0])]
