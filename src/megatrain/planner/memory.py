"""Predicts the bytes that a decision takes, by tier and role.

A resident block has its weights, gradient sum and states (residual and moments) in VRAM. The states of every other
block are in RAM or on disk, and so are its weights. These may have a copy in VRAM (held) or be fetched for every use
(streamed), and so may its gradient sum, independently.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from megatrain.geometry import (
    GIB,
    MAX_WINDOW,
    MOMENT_ALIGN_BYTES,
    STAGING_SLOTS,
    WIDTHS,
    grad_slots,
    group_by_size,
    in_pages,
    padded_slab,
    round_up,
    staging_bytes,
    staging_slots,
    weight_slots,
)
from megatrain.geometry import TIERS as ENGINE_TIERS
from megatrain.hardware.machine import PINNED_PER_BYTE, PROCESS_BYTES, cuda_bytes, kernel_bytes
from megatrain.model.shapes import BlockShape, ModelShape, SlabShape
from megatrain.planner import activations
from megatrain.planner.arrays import Bools, Ints, Sums, Table, look_up, most_layers
from megatrain.planner.decision import HELD, RESIDENT, STREAMED, Decision, Decisions, Windows
from megatrain.planner.disk import ALONE, BESIDE, FROZEN, BlockBytes, DiskLedger, SlabBytes
from megatrain.planner.run import Run

TIERS = tuple(ENGINE_TIERS)
ROLES = ("weights", "residuals", "moments", "gradients", "activations", "workspace")

SLACK_BYTES = 13 * GIB // 8
SLACK_SHARE = 0.005
"""What PyTorch's allocator, with expandable segments, reserves above the peak of allocated memory: 0.9 to 2.2 GiB in
ten runs, independent of their size (benchmarks/results/2026-11-15-h200.md). With less memory it releases and reserves
cached blocks more often."""
STAGED_GRADIENTS = 2
"""Gradients in RAM that wait to be added to a sum, in windows of one micro-batch."""
INPUTS_IN_USE = 2
"""Inputs per micro-batch in VRAM under every policy: that of the last norm, and that of the head or its gradient."""
INPUTS_IN_FLIGHT = 3
"""Inputs in VRAM under policy `offload`: two being copied out, one in use."""
MAX_LAYER_BYTES = 1 << 44
"""Cap on the activations of one layer. It is above any machine's memory, and sums of it fit in 64 bits."""
Slabs = Counter[tuple[int, int, int]]
"""(bytes, elements, itemsize) of a slab → how many slabs there are of it."""


def slab_bytes(slab: SlabShape, itemsize: int) -> tuple[int, int]:
    """Bytes of a slab's weights and its elements with padding. `itemsize`: that of weights without one of their own."""
    itemsize = slab.itemsize or itemsize
    elements = padded_slab(slab.numel, itemsize)
    return elements * itemsize, elements


class State:
    """Bytes of one block's weights, residuals and moments. Its gradients also depend on the windows."""

    def __init__(self, block: BlockShape, run: Run) -> None:
        self.tied, self.weights, self.residuals, self.moments = block.tied, 0, 0, 0
        self.frozen_residuals = 0
        """Of weights that do not train: nothing reads or writes them in a step."""
        self.elements16 = self.elements32 = 0
        """Elements, with padding, whose gradients have 2 and 4 bytes."""
        self.slabs: list[SlabBytes] = []
        trained = ALONE if all(slab.trains for slab in block.slabs) else BESIDE
        for slab in block.slabs:
            nbytes, elements = slab_bytes(slab, run.itemsize)
            self.weights += nbytes
            split = (slab.itemsize or run.itemsize) == 2 and run.precision == "bf16"
            residual = elements * 2 if split else 0
            if not slab.trains:
                self.slabs.append(SlabBytes(nbytes, 0, FROZEN))
                self.frozen_residuals += residual if slab.low_bits else 0
                continue
            if (slab.itemsize or run.itemsize) == 2:
                self.elements16 += elements
            else:
                self.elements32 += elements
            per_moment = int(slab.vectors * 4 + (slab.numel - slab.vectors) * WIDTHS[run.moment_width].nbytes)
            self.residuals += residual
            self.moments += run.moments * round_up(per_moment, MOMENT_ALIGN_BYTES)
            staged = in_pages([residual, *[per_moment] * run.moments])
            self.slabs.append(SlabBytes(nbytes, staged, trained))

    @property
    def trained(self) -> int:
        """Bytes of the weights that train."""
        return sum(slab.weights for slab in self.slabs if slab.kind != FROZEN)

    @property
    def unshared_gradient(self) -> int:
        """Bytes of the gradient of a step of one window, if it has one part; else 0."""
        return 0 if self.tied else self.gradient(1)

    def gradient(self, windows: int, single: bool = False) -> int:
        """Bytes of the gradient: rounded if the step has one window, else an FP32 sum. A tied slab has two parts.

        `single`: some windows have one micro-batch. In RAM the first gradient is then kept rounded, beside the sum.
        """
        if self.tied:
            return self.elements16 * (12 if windows > 1 and single else 8) + self.elements32 * 8
        if windows == 1:
            return self.elements16 * 2 + self.elements32 * 4
        return self.elements16 * (6 if single else 4) + self.elements32 * 4


def pinned_bytes(ram: Any, streams_states: Any) -> Any:
    """Pinned bytes, given RAM by role: weights, gradients, offloaded inputs, and all states if any are streamed to the
    GPU. Takes the numbers of one decision or arrays of many."""
    return ram[0] + ram[3] + ram[4] + streams_states * (ram[1] + ram[2])


@lru_cache(maxsize=16)
def _shared_tables(shape: ModelShape, itemsize: int, several: bool) -> tuple[Table, Table]:
    """Tables of weight slots and gradient rings, shared by all runs for which they are the same."""
    return {}, {}


@lru_cache(maxsize=16)
def _slabs(shape: ModelShape, itemsize: int, trained: bool) -> tuple[list[Slabs], Slabs]:
    """For each layer the slabs of it and all later ones, and the slabs of all other blocks."""
    none: Slabs = Counter()
    counts: dict[bool, list[Slabs]] = {True: [], False: []}
    for block in shape.blocks:
        chosen = (slab for slab in block.slabs if slab.trains or not trained)
        sizes = ((*slab_bytes(slab, itemsize), slab.itemsize or itemsize) for slab in chosen)
        counts[block.kind == "layer"].append(Counter(sizes))
    after = [*accumulate(reversed(counts[True]), operator.add, initial=none)][::-1]
    return after, sum(counts[False], none)


class Ledger:
    """Prefix sums over a model's blocks, from which the bytes of many decisions take a few additions."""

    def __init__(self, shape: ModelShape, run: Run, gpu: bool = True, transit: int = 0) -> None:
        """`transit`: bytes of RAM that transfers to and from disk take."""
        self.shape, self.run, self.gpu, self.transit = shape, run, gpu, transit
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
        """Bytes of each micro-batch under every policy: attention masks, and logits if all of them are materialized."""
        self._evaluation = min(MAX_LAYER_BYTES, activations.evaluation_bytes(shape, run, attention, gpu))
        peaks = activations.workspace_bytes(shape, run, attention, gpu)
        self._work = np.array([min(MAX_LAYER_BYTES, peak) for peak in peaks])
        """Number of layers with stored graphs → the highest workspace of any block."""
        self._weights = self._sums([state.weights for state in self.states])
        self._residuals = self._sums([state.residuals + state.frozen_residuals for state in self.states])
        self._moments = self._sums([state.moments for state in self.states])
        kinds = ((1, False), (2, False), (2, True))
        self._gradients = [self._sums([state.gradient(*kind) for state in self.states]) for kind in kinds]
        self._layer_slabs, self._other_slabs = _slabs(shape, run.itemsize, trained=False)
        self._layer_trained, self._other_trained = _slabs(shape, run.itemsize, trained=True)
        trained = [Counter(slab for slab in self.states[i].slabs if slab.kind != FROZEN) for i in self.layers]
        none: Counter[SlabBytes] = Counter()
        self._trained_after = [*accumulate(reversed(trained), operator.add, initial=none)][::-1]
        """For each layer, the slabs that train of it and all later ones."""
        self._sums_in_turn = run.tried_in_turn and run.accumulation > 1
        """Whether gradient sums take as much memory as in windows of one micro-batch."""
        self._state_slot_bytes: Table = {}
        self._slot_bytes, self._ring_bytes = _shared_tables(shape, run.itemsize, run.accumulation > 1)
        self.disk = DiskLedger(
            [BlockBytes(s.slabs, s.residuals, s.moments, s.unshared_gradient, s.frozen_residuals) for s in self.states],
            self.layers,
            self.other_blocks,
            heads=[i for i, block in enumerate(shape.blocks) if block.kind == "head"],
            accumulation=MAX_WINDOW + 1 if self._sums_in_turn else run.accumulation,
            transit=transit,
        )

    def placed(self, decision: Decision) -> dict[str, list[int]]:
        """The blocks that each list of a plan names."""

        def blocks(layers: list[int], others: int) -> list[int]:
            return sorted([*layers, *(self.other_blocks if decision.other_blocks == others else [])])

        def held(until: int) -> list[int]:
            return [i for i in blocks(self.layers[decision.resident_layers : until], HELD) if self.states[i].weights]

        sums = [i for i in held(decision.held_gradients) if self.shape.blocks[i].trainable]
        return {
            "resident": blocks(self.layers[: decision.resident_layers], RESIDENT),
            "held_weights": held(decision.held_weights),
            "held_gradients": sums,
            "streamed_states": [i for i in sums if i in self.layers[: decision.gpu_updates]],
            **self.disk.placed(decision),
        }

    def account(self, decision: Decision) -> dict[str, dict[str, int]]:
        """Tier → role → bytes at the peak."""
        tiers = self.accounts(Decisions.of([decision]))[:, :, 0].tolist()
        return {tier: dict(zip(ROLES, roles, strict=True)) for tier, roles in zip(TIERS, tiers, strict=True)}

    def totals(self, chosen: Decisions) -> dict[str, Ints]:
        """Tier → bytes of each decision."""
        return dict(zip(TIERS, self.accounts(chosen).sum(axis=1), strict=True))

    def least_vram(self, chosen: Decisions) -> Ints:
        """Bytes of VRAM of each decision, without those for its pinned RAM: what goes to disk needs none."""
        vram, ram, _ = self.accounts(chosen)
        needed: Ints = vram.sum(axis=0) - self.gpu * (pinned_bytes(ram, chosen.streams_states) // PINNED_PER_BYTE)
        return needed

    def accounts(self, chosen: Decisions) -> Ints:
        """Bytes at the peak: tiers × roles × decisions."""
        alone = chosen.replace(first_window=1, window=1) if self._sums_in_turn else chosen
        windows = Windows(alone, self.run.accumulation)
        layers, held_sums = chosen.resident_layers, chosen.held_gradients
        resident, streamed = chosen.other_blocks == RESIDENT, chosen.other_blocks == STREAMED
        roles = (self._weights, self._residuals, self._moments)
        device = [role.before(layers, resident) for role in roles]
        host = [role.after(layers, ~resident) for role in roles]
        weights = self._weights.before(chosen.held_weights, ~streamed) + self._slots(chosen)
        in_vram = np.choose(windows.several, [sums.before(held_sums, ~streamed) for sums in self._gradients[:2]])
        slots, sums_out, staging = self._rings(chosen, windows)
        kinds = [sums.after(held_sums, streamed) for sums in self._gradients]
        in_ram = np.choose(windows.several * 1 + windows.single, kinds) + sums_out + staging * windows.single
        on_device, work, offloaded = self._activations(chosen)
        on_disk, (staged_weights, staged_states, staged_gradients, transit) = self.disk.accounts(chosen)
        zero = np.zeros_like(layers)
        near = np.array([*host, in_ram]) - on_disk
        near[0] += staged_weights
        near[3] += staged_gradients
        ram = np.array([*near, offloaded, PROCESS_BYTES + staged_states + transit])
        vram = np.array([weights, device[1], device[2], in_vram + slots, on_device, work])
        vram[2] += look_up(self._state_slot_bytes, self._state_slots, chosen.resident_layers, chosen.gpu_updates)[0]
        pinned = pinned_bytes(ram, chosen.streams_states) if self.gpu else zero
        ram[5] += kernel_bytes(ram[:5].sum(axis=0), pinned)
        if self.gpu:
            slack = SLACK_BYTES + (SLACK_SHARE * vram.sum(axis=0)).astype(np.int64)
            vram[5] += cuda_bytes(pinned, chosen.largest_window) + slack
        else:
            vram, ram = np.zeros_like(vram), ram + vram
        tiers = {"vram": vram, "ram": ram, "disk": [*on_disk, zero, zero]}
        return np.array([tiers[tier] for tier in TIERS])

    def computing(self, decision: Decision) -> tuple[int, int]:
        """Bytes on the device for the activations and the workspace of a window's micro-batches, and the workspace of
        one of them."""
        chosen, work = Decisions.of([decision]), int(self._work[decision.stored_graphs])
        return int(self._activations(chosen)[0][0]) + work * int(chosen.largest_window[0]), work

    def with_stored_graphs(self, chosen: Decisions, capacity: Mapping[str, int]) -> Decisions:
        """Decisions, all of which fit, with as many graphs stored as memory allows, at least as many as before."""
        tier, share = ("vram", 1 + SLACK_SHARE) if self.gpu else ("ram", 1.0)
        on_device, work, _ = self._activations(chosen)
        limit = capacity[tier] - self.totals(chosen)[tier] + share * (on_device + work) - 2

        def fit(stored: Ints) -> Bools:
            on_device, work, _ = self._activations(chosen.replace(stored_graphs=stored))
            return share * (on_device + work) <= limit

        count = len(self.layers)
        # If every graph is stored, none is rebuilt, so all may fit where fewer do not.
        all_fit = fit(np.full_like(chosen.stored_graphs, count))
        return chosen.replace(stored_graphs=np.where(all_fit, count, most_layers(chosen.stored_graphs, count, fit)))

    def _sums(self, values: list[int]) -> Sums:
        return Sums(values, self.layers, self.other_blocks)

    def _activations(self, chosen: Decisions) -> tuple[Ints, Ints, Ints]:
        """Inputs and graphs kept for the backward; the workspace of one block, or of an evaluation; and inputs that are
        offloaded to RAM."""
        stored, window = chosen.stored_graphs, chosen.largest_window
        inputs = self._inputs[-1] - self._inputs[stored]
        kept = window * (self._graphs[stored] + INPUTS_IN_USE * self._largest_input + self._per_micro_batch)
        # Under `offload`: for each micro-batch the input of the next backward, and the inputs being copied out.
        in_flight = (window + INPUTS_IN_FLIGHT) * self._largest_input
        on_device = kept + np.where(chosen.offload_inputs > 0, in_flight, window * inputs)
        work = self._work[stored] + activations.BLAS_BYTES * (2 + np.where(window > 1, window, 0))
        offloaded = chosen.offload_inputs * window * (inputs + self._largest_input)
        return on_device, np.maximum(work, self._evaluation - on_device), offloaded

    def _slots(self, chosen: Decisions) -> Ints:
        """Slots for fetched weights."""

        def nbytes(streamed: int, held: int, slots: int) -> tuple[int]:
            slabs = self._layer_slabs[held] + (self._other_slabs if streamed else Counter())
            return (sum(ring.nbytes * weight_slots(slots, ring.count) for ring in _rings(slabs)),)

        columns = chosen.other_blocks == STREAMED, chosen.held_weights, chosen.slots
        slots: Ints = look_up(self._slot_bytes, nbytes, *columns)[0]
        return slots

    def _state_slots(self, resident: int, updated: int) -> tuple[int]:
        """Slots in VRAM for the states of the layers from the first that is not resident."""
        counts = (self._trained_after[resident] - self._trained_after[updated]).items()
        return (
            staging_bytes(counts, staging_slots, lambda it: it[0].weights, lambda it: it[0].states, lambda it: it[1]),
        )

    def _rings(self, chosen: Decisions, windows: Windows) -> tuple[Ints, Ints, Ints]:
        """Gradients in transit: slots in VRAM, buffers in RAM for held sums that are copied out, and staging in RAM."""
        columns = chosen.other_blocks, chosen.resident_layers, chosen.held_gradients, chosen.grad_slots
        slots, rounding, sums_out, staging = look_up(self._ring_bytes, self._ring_sizes, *columns)
        return slots + np.where(windows.several, sums_out, rounding), sums_out, staging

    def _ring_sizes(self, others: int, resident: int, held_sums: int, most_slots: int) -> tuple[int, int, int, int]:
        none: Slabs = Counter()
        streamed = self._layer_trained[held_sums] + (self._other_trained if others == STREAMED else none)
        held = self._layer_trained[resident] - self._layer_trained[held_sums]
        held += self._other_trained if others == HELD else none
        slots, several = 0, self.run.accumulation > 1
        for ring in _rings(streamed + held):
            # A streamed gradient is summed in its slot and rounded beside the sum. A held one needs no slot.
            itemsize = max((4 if size == 4 else 4 + size) if several else size for _, _, size in ring.slabs)
            if ring.slabs & streamed.keys():
                slots += ring.elements * itemsize * grad_slots(most_slots, ring.count)
        in_ram = self._layer_slabs[resident] + (none if others == RESIDENT else self._other_slabs)
        rings = (ring for ring in _rings(in_ram) if ring.slabs & held.keys())
        sums_out = sum(ring.nbytes * min(STAGING_SLOTS, ring.count) for ring in rings)
        # A sum is rounded before it is copied out. In a step of one window that happens as soon as the window has
        # passed the block, except for the parts of a tied slab; until then the sum is FP32.
        in_vram = self._layer_trained[0] - self._layer_trained[held_sums]
        in_vram += none if others == STREAMED else self._other_trained
        sums = sum(4 * ring.elements for ring in _rings(in_vram) if several and ring.itemsize < 4)
        merged = sums_out if any(self.states[i].tied for i in self.other_blocks) else 0
        staging = STAGED_GRADIENTS * max((nbytes for nbytes, _, _ in streamed), default=0)
        return slots, merged + sums, sums_out, staging


class _Ring:
    """Slabs that share slots, the largest first, with the count of each."""

    def __init__(self, alike: list[tuple[tuple[int, int, int], int]]) -> None:
        self.slabs = dict(alike).keys()
        self.nbytes, _, self.itemsize = alike[0][0]
        self.elements = max(elements for _, elements, _ in self.slabs)
        self.count = sum(count for _, count in alike)


def _rings(slabs: Slabs) -> list[_Ring]:
    return [_Ring(alike) for alike in group_by_size(slabs.items(), lambda alike: alike[0][0])]
