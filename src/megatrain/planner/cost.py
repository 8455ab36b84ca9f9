"""Seconds of every piece of a step: a block's forward and backward, its copies, its update.

A layer's time is that of its matrix products at a share of the machine's rate, its attention, and the bytes that its
other operations move through GPU memory. Coefficients are from one H200 (774 TFLOP/s in BF16, 4.17 TB/s).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatrain.geometry import fuses_loss, group_by_size
from megatrain.hardware.machine import TOUCHED, Disk, Machine
from megatrain.model.shapes import BlockShape, ModelShape
from megatrain.planner.activations import first_identical, head_chunk, input_bytes, uses_mask, writes_scores
from megatrain.planner.arrays import Floats, Ints
from megatrain.planner.memory import State
from megatrain.planner.run import Run

MATMUL_SHARE = {"bf16": 0.9, "fp32": 1.0}
"""Of the rate of a large product, what a layer's products reach."""
EXPERT_SHARE = 2 / 3
"""Of that, what products of experts reach, each on the few rows routed to it (Qwen3-30B-A3B, compiled: 0.61, 0.87)."""


@dataclass(frozen=True)
class Traffic:
    """Bytes moved in GPU memory per token and unit of width, by a layer's operations other than products."""

    hidden: float
    norm: float
    """Per norm; of queries and keys, per unit of their width."""
    mlp: float
    row: float
    """Per unit of hidden size of the rows that experts are given."""


LAYER_TRAFFIC = {
    False: (Traffic(hidden=37, norm=60, mlp=12, row=40), Traffic(hidden=128, norm=150, mlp=5, row=90)),
    True: (Traffic(hidden=0, norm=7.3, mlp=6.4, row=8), Traffic(hidden=0, norm=67, mlp=0, row=16)),
}
"""Compiled → forward and backward. Fitted to what `benchmarks/layers.py` measured of five dense shapes beyond products,
attention and one pass over the weights (two in the backward); rows of experts to one shape."""
LOGIT_TRAFFIC = {False: 78, True: 8}
"""Whether the loss is fused → bytes moved per logit of the head. The fused one reads and writes six. Head and loss of
8k tokens (H 3584, V 152064) take 47 ms with it in five chunks, and took 77 in ten with PyTorch's own."""
CHUNK_TRAFFIC = 12
"""Bytes moved per weight of the head and chunk: its gradient is written, read and added to the FP32 sum."""
ATTENTION_HALF_RATE = (800, 54)
"""Length and head dimension at which attention reaches half of what it would with very long and wide ones. (An H200
did 237, 411, 505 TFLOP/s with lengths of 512, 2048, 8192; this gives 223, 411, 521.)"""
MASKED_SHARE = 0.3
"""Of that, what attention with a mask reaches: it computes the hidden half too, with a slower kernel (an estimate)."""
SCORE_TRAFFIC = 8
"""Bytes moved per score that is written out, in a seventh of attention, forward and backward."""
HOST_OPERATIONS = {False: (220, 700), True: (150, 600)}
"""Compiled → what a layer's forward and backward keep the host busy with, in small operations (`Machine.launches`). A
step of 1.5B, all of it in VRAM and every graph stored, took 6.4 ms per layer and micro-batch at 155,000 a second."""
LAUNCH_SLOWDOWN = 2.0
"""How many times as long that takes while the CPU updates: the threads that launch share its cores and its memory. A
padded 1.5B in a window of two took 3.9 ms per layer and micro-batch there (H200, 2026-11-16; 3.1 here); without this
a step of GPT-2 XL was planned 14% too short, with it 6%."""
CALL_SECONDS = 0.1e-3
"""Seconds around every call of a block."""
WINDOW_CALL_SECONDS = 0.3e-3
"""The same in a window, where micro-batches hand over to each other."""
FETCH_SECONDS = 0.1e-3
"""The same for a block whose weights are fetched: slots, events, and a launch that waits; once per step for a held
weight, and for a held sum."""
OFFLOAD_SECONDS = 0.1e-3
"""The same for an input that is parked or brought back. These three are fitted to ten rows of
`benchmarks/accuracy.py`."""
MERGE_TRAFFIC = {False: 16, True: 64}
"""Bytes per parameter that a slab used in two places costs the CPU, at the speed of host memory: its parts are added,
and the norm is taken there. True: parts are single gradients in BF16, as in a step of one micro-batch. (An
embedding of 233M took 0.18 s more than its update, at 111 GB/s, and 0.22 at 128; this gives 0.13 and 0.12.)"""
STEP_SECONDS = 10e-3
"""Seconds around a step: the norm, and the first launches of the next forward."""
TRAINER_SECONDS = 50e-3
"""The same beside that in a Trainer: logging, callbacks, its data loader. Steps of 1.5B took 0.05 and 0.06 s longer
than planned without it."""
STREAMED_STATES_SHARE = 0.8
"""Of the rate of copies both ways, what states reach that come and go while the CPU updates others. An H200's came at
38 GB/s (7 layers of 7B, FP32 moments) and 42 (27 of 14B, 8-bit), of 50."""
COPY_LATENCY_SECONDS = 20e-6
"""Seconds before a copy starts."""
ASSUMED_DISK = Disk(path="assumed", free_bytes=1 << 62, read=3.7e9, write=2.1e9)
"""An `offload_dir` that the machine's description does not know: one NVMe drive as it was measured."""


class Piece:
    """Seconds for one block; compute is per micro-batch, all else per window or step."""

    def __init__(self, costs: Costs, block: BlockShape) -> None:
        run, machine, state = costs.run, costs.machine, State(block, costs.run)
        elements, states = state.elements16 + state.elements32, state.moments + state.residuals
        head, parked = block.kind == "head", input_bytes(block, run) if block.kind == "layer" else 0
        updated = block.trainable * costs.relative
        self.forward, self.backward = costs.compute(block, state)
        self.forward_during_updates = (
            max(self.forward, LAUNCH_SLOWDOWN * costs.launched[0]) if block.kind == "layer" else self.forward
        )
        """The forward while the CPU updates."""
        self.recompute = 0.0 if head else self.forward
        """The forward once more, where its graph was not kept; gradients of the head are taken at once."""
        self.fetch = _copy(state.weights, costs.h2d)
        """Its weights to the GPU, in the forward."""
        self.fetch_backward = 0.0 if head else _copy(state.weights, costs.both)
        """The same in the backward, beside copies in the other direction."""
        self.drain = _copy(state.gradient(1), costs.both)
        """Its gradients to RAM, rounded."""
        self.drain_sum = _copy(elements * 4, costs.both)
        """Its gradients to RAM as FP32 sums, or back."""
        self.sum_out = _copy(2 * state.elements16 + 4 * state.elements32, costs.both)
        """Its sum from VRAM to RAM, rounded."""
        self.norm = 10 * elements / costs.hbm
        """Of a sum in VRAM: its norm, and rounding it."""
        slowed = costs.fetch_slowdown * self.fetch if block.trainable else 0.0
        self.update = updated / machine.update[run.moment_width] + slowed
        """On the CPU, slowed down by one fetch of its weights."""
        self.stream_states = _copy(states, STREAMED_STATES_SHARE * costs.both)
        """Its states to the GPU, or back."""
        single = run.accumulation == 1 and run.itemsize == 2
        self.merge = block.trainable * MERGE_TRAFFIC[single] / machine.dram if block.tied else 0.0
        """Beside an update on the CPU, of parts that are summed there."""
        self.gpu_update = updated / machine.gpu_update[run.moment_width] if machine.gpu else 0.0
        self.disk_read, self.disk_write = (states / rate if rate else 0.0 for rate in costs.disk)
        """Its states from disk, and back."""
        self.offload, self.restore = parked / costs.d2h, parked / costs.both
        """Its inputs to RAM, and back, per micro-batch."""
        self.fetch_bytes = state.weights
        """Weights; they decide which ring it uses."""


class Costs:
    """A model and a run on a machine, piece by piece."""

    def __init__(self, shape: ModelShape, machine: Machine, run: Run, disks: tuple[Disk, ...] = ()) -> None:
        self.shape, self.machine, self.run = shape, machine, run
        self.attention = run.attention or shape.attention
        kind = "fp32" if run.precision == "fp32" else "bf16"
        self._matmul = MATMUL_SHARE[kind] * machine.matmul[kind]
        self._attention = machine.attention * machine.matmul[kind] / machine.matmul["bf16"]
        gpu = machine.gpu is not None
        self.hbm = machine.hbm if gpu else machine.dram
        self.launched = [count / machine.launches if gpu else 0.0 for count in HOST_OPERATIONS[run.compile]]
        """Seconds in which the host launches a layer's forward, and its backward."""
        self.h2d, self.d2h = (machine.h2d, machine.d2h) if gpu else (machine.dram / 2, machine.dram / 2)
        self.both = min(self.h2d, self.d2h, machine.duplex / 2) if gpu else machine.dram / 2
        self.fetch_slowdown, self.update_slowdown = _copy_slowdowns(machine, run)
        # The master is read and written (8 bytes, or 4 without one), the gradient read, each moment read and written.
        per_moment = (TOUCHED[run.moment_width] - 10) / 2
        touched = (4 if run.precision == "bf16-sr" else 8) + run.itemsize + run.moments * per_moment
        self.relative = touched / TOUCHED[run.moment_width]
        """Bytes that an update touches, relative to those that the machine's rates were measured with."""
        self.disk = sum(disk.read for disk in disks), sum(disk.write for disk in disks)
        alike = first_identical(shape)
        made = {index: Piece(self, shape.blocks[index]) for index in {*alike}}
        self.pieces = [made[index] for index in alike]
        groups = group_by_size({piece.fetch_bytes for piece in self.pieces if piece.fetch_bytes}, lambda size: size)
        self.rings = {size: number for number, group in enumerate(groups) for size in group}
        """Bytes of weights → which ring of slots they use."""

    @staticmethod
    def call(window: Ints) -> Floats:
        """Seconds around a call of a block, per micro-batch of a window."""
        return np.where(window > 1, WINDOW_CALL_SECONDS, CALL_SECONDS)

    def compute(self, block: BlockShape, state: State) -> tuple[float, float]:
        """Seconds of forward and backward for one micro-batch."""
        run, tokens = self.run, self.run.micro_tokens
        elements = state.elements16 + state.elements32
        # Into the gradient slot: cleared, copied, and its norm taken; in a window, rounded and added to an FP32 sum.
        handed = elements * (4 * run.itemsize if run.accumulation == 1 else 3 * run.itemsize + 8) / self.hbm
        inputs = input_bytes(block, run)
        if block.kind == "head":
            return self._head(block), handed + inputs / self.hbm
        if block.kind == "embedding":
            return 2 * inputs / self.hbm, (3 * elements * run.itemsize + 4 * inputs) / self.hbm + handed
        products = 2 * tokens * (block.matmul_parameters - block.expert_matmul_parameters) / self._matmul
        products += 2 * tokens * block.expert_matmul_parameters / (self._matmul * EXPERT_SHARE)
        if block.kind != "layer":
            return products + 10 * inputs / self.hbm, 2 * products + 20 * inputs / self.hbm + handed
        scores = self._scores(block)
        there, back = (self._moved(block, moved) for moved in LAYER_TRAFFIC[run.compile])
        forward = products + (there + state.weights) / self.hbm + 2 * scores
        backward = 2 * products + (back + 2 * state.weights) / self.hbm + 5 * scores
        # The host runs ahead of the GPU, unless a layer takes it longer to launch than the GPU to compute.
        return max(forward, self.launched[0]), max(backward + handed, self.launched[1])

    def _moved(self, block: BlockShape, moved: Traffic) -> float:
        """Bytes of one micro-batch."""
        heads = block.attention_width + block.kv_width if block.head_norms else 0
        rows = block.experts_per_token * block.hidden_size
        normed = (block.norms + block.fused_norms) * block.hidden_size + heads
        per_token = moved.hidden * block.hidden_size + moved.norm * normed + moved.mlp * block.intermediate_size
        return (per_token + moved.row * rows) * self.run.micro_tokens * self.run.itemsize / 2

    def _scores(self, block: BlockShape) -> float:
        """Seconds of a seventh of causal attention, forward and backward."""
        run, length = self.run, self.run.length
        flops = length * length * block.attention_width * run.micro_batch
        if writes_scores(block, run, self.attention):
            pairs = length * length * block.heads * run.micro_batch
            return 2 * flops / self._matmul + SCORE_TRAFFIC * pairs / self.hbm
        if self.attention == "eager":
            # The half that the mask hides is computed too.
            return 2 * flops / self._matmul
        # `Machine.attention` is of a length of 2048 and a dimension of 128; wider ones are not taken to be faster.
        rate = self._attention * _reached(length, max(1, min(block.head_dim, 128))) / _reached(2048, 128)
        if uses_mask(block, run, self.attention):
            return flops / (rate * MASKED_SHARE)
        return flops * min(1.0, 2 * block.span / length if block.span else 1.0) / rate

    def _head(self, block: BlockShape) -> float:
        """Head and loss in chunks, with their gradients, which are taken at once."""
        tokens, vocabulary, gpu = self.run.micro_tokens, max(1, self.shape.vocab_size), self.machine.gpu is not None
        chunks = -(-tokens // head_chunk(self.shape, self.run, tokens, gpu))
        per_logit = LOGIT_TRAFFIC[fuses_loss(self.run.compile, gpu)]
        moved = tokens * vocabulary * per_logit + chunks * block.hidden_size * vocabulary * CHUNK_TRAFFIC
        return 6 * tokens * block.matmul_parameters / self._matmul + moved * self.run.itemsize / 2 / self.hbm


def _copy(nbytes: int, rate: float) -> float:
    return COPY_LATENCY_SECONDS + nbytes / rate if nbytes else 0.0


def _reached(length: int, head_dim: int) -> float:
    """Of the rate of attention with very long sequences and wide heads."""
    half_length, half_dim = ATTENTION_HALF_RATE
    return length / (length + half_length) * head_dim / (head_dim + half_dim)


def _copy_slowdowns(machine: Machine, run: Run) -> tuple[float, float]:
    """The share of an update's speed that a copy to the GPU takes away while it runs (they share the host's memory),
    and how much longer updates take while states travel both ways beside them."""
    if machine.gpu is None:
        return 0.0, 1.0
    needed = machine.update[run.moment_width] * TOUCHED[run.moment_width]
    # `dram_under_dma` is with copies both ways; one way takes its part of that.
    left = machine.dram - max(0.0, machine.dram - machine.dram_under_dma) * min(1.0, machine.h2d / machine.duplex)
    return max(0.0, 1 - left / needed), max(1.0, needed / machine.dram_under_dma)
