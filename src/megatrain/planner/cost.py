"""Predicts the seconds of every piece of a step: the forward and backward of each block, its copies and its update.

The time of a layer is that of its matrix products at a share of the machine's rate, of its attention, and of the bytes
that its other operations move through GPU memory. Coefficients are from one H200 (774 TFLOP/s in BF16, 4.17 TB/s).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatrain.geometry import fuses_loss, group_by_size
from megatrain.hardware.machine import TOUCHED, Disk, Machine, striped
from megatrain.model.shapes import BlockShape, ModelShape
from megatrain.planner.activations import first_identical, fuses_head, head_chunk, input_bytes, uses_mask, writes_scores
from megatrain.planner.arrays import Floats, Ints
from megatrain.planner.memory import State
from megatrain.planner.run import Run

MATMUL_SHARE = {"bf16": 0.9, "fp32": 1.0}
"""The share of the rate of a large matrix product that the products of a layer reach."""
EXPERT_SHARE = 2 / 3
"""The share of that which experts reach, each with the few rows routed to it (Qwen3-30B-A3B, compiled: 0.61, 0.87)."""


@dataclass(frozen=True)
class Traffic:
    """Bytes moved in GPU memory per token and unit of width, by a layer's operations other than matrix products."""

    hidden: float
    norm: float
    """Per norm; for norms of queries and keys, per unit of their width."""
    mlp: float
    row: float
    """Per unit of hidden size of the experts' input rows."""


LAYER_TRAFFIC = {
    False: (Traffic(hidden=37, norm=60, mlp=12, row=40), Traffic(hidden=128, norm=150, mlp=5, row=90)),
    True: (Traffic(hidden=0, norm=7.3, mlp=6.4, row=8), Traffic(hidden=0, norm=67, mlp=0, row=16)),
}
"""Compiled → forward and backward. Fitted to `benchmarks/layers.py` on five dense shapes, less products, attention and
one pass over the weights (two in the backward); rows of experts to one shape."""
LOGIT_TRAFFIC = {False: 78, True: 8}
"""Whether the loss is fused → bytes moved per logit of the head. The fused loss reads and writes six. Head and loss of
8k tokens (hidden size 3584, vocabulary 152064) took 42 ms fused in five chunks, and 66 ms in ten with PyTorch's."""
CHUNK_TRAFFIC = {False: 12, True: 8}
"""Whether the head is fused → bytes moved per weight of it and chunk: its gradient is written, read, and added to the
FP32 sum, or the product adds to the sum."""
ATTENTION_HALF_RATE = (800, 54)
"""Length and head dimension at which attention reaches half of its asymptotic rate. An H200 measured 237, 411, 505
TFLOP/s at lengths of 512, 2048, 8192; this predicts 223, 411, 521."""
MASKED_SHARE = 0.3
"""The share of that with a mask, where a slower kernel also computes the masked half (an estimate)."""
SCORE_TRAFFIC = 8
"""Bytes moved per materialized score, in one seventh of attention's forward and backward."""
HOST_OPERATIONS = {False: (220, 700), True: (150, 600)}
"""Compiled → operations (`Machine.launches`) that the host issues in a layer's forward and backward. A 1.5B model,
all in VRAM with every graph stored, took 6.4 ms per layer and micro-batch at 155,000 operations per second."""
LAUNCH_SLOWDOWN = 2.0
"""How much longer launching takes while the CPU updates, because both share cores and memory. A padded 1.5B model in a
window of two took 3.9 ms per layer and micro-batch (H200, 2026-11-16; predicted 3.1). Without this factor a step of
GPT-2 XL was planned 14% too short, with it 6%."""
CALL_SECONDS = 0.1e-3
"""Overhead of every call of a block."""
WINDOW_CALL_SECONDS = 0.3e-3
"""The same in a window, where threads of micro-batches alternate."""
FETCH_SECONDS = 0.1e-3
"""Overhead of fetching weights: slots, events, and a launch that waits. Held weights and held sums have it once per
step."""
OFFLOAD_SECONDS = 0.1e-3
"""Overhead of offloading or restoring an input. It, `FETCH_SECONDS` and `WINDOW_CALL_SECONDS` are fitted to ten rows of
`benchmarks/accuracy.py`."""
MERGE_TRAFFIC = {False: 16, True: 64}
"""Bytes of host memory traffic per parameter of a tied slab: the CPU adds its two parts and computes their norm. True:
the parts are single BF16 gradients, as in a step of one micro-batch. (An embedding of 233M parameters took 0.18 s more
than its update at 111 GB/s, and 0.22 s at 128 GB/s; this predicts 0.13 and 0.12.)"""
DISK_TRAFFIC = 2
"""Bytes of host memory traffic per byte that is read from or written to disk: the transfer, and its checksum (counted,
not measured)."""
STEP_SECONDS = 10e-3
"""Overhead of a step: the norm, and the first launches of the next forward."""
TRAINER_SECONDS = 15e-3
"""Further overhead of a step in a Trainer: callbacks, its data loader. A step of a 1.5B model took 0.328 and 0.331 s;
without this, 0.31 are planned."""
STREAMED_STATES_SHARE = 0.8
"""The share of the duplex copy rate that streamed states reach while the CPU updates other blocks. An H200 reached 38
GB/s (7 layers of 7B, FP32 moments) and 42 GB/s (27 layers of 14B, 8-bit) of 50."""
COPY_LATENCY_SECONDS = 20e-6
"""Delay before a copy starts."""
ASSUMED_DISK = Disk(path="assumed", free_bytes=1 << 62, read=3.7e9, write=2.1e9)
"""Used for an `offload_dir` that the machine's description does not list: one NVMe drive, as measured."""


class Piece:
    """Seconds of one block. Compute and offloading are per micro-batch, everything else per window or step."""

    def __init__(self, costs: Costs, block: BlockShape) -> None:
        run, machine, state = costs.run, costs.machine, State(block, costs.run)
        elements, states = state.elements16 + state.elements32, state.moments + state.residuals
        head, layer = block.kind == "head", block.kind == "layer"
        updated = block.trainable * costs.relative
        self.forward, self.backward = costs.compute(block, state)
        self.forward_during_updates = max(self.forward, LAUNCH_SLOWDOWN * costs.launched[0] if layer else 0.0)
        self.recompute = 0.0 if head else self.forward - costs.left_out(block)
        """The second forward of a block without a stored graph. The head computes its gradients in the forward."""
        self.fetch = _copy(state.weights, costs.h2d)
        """Weights to the GPU, in the forward."""
        self.fetch_backward = 0.0 if head else _copy(state.weights, costs.both)
        """The same in the backward, while gradients are copied the other way."""
        self.drain = _copy(state.gradient(1), costs.both)
        """Gradients to RAM, rounded."""
        self.drain_sum = _copy(elements * 4, costs.both)
        """Gradients to RAM as FP32 sums, or back."""
        self.sum_out = _copy(2 * state.elements16 + 4 * state.elements32, costs.both)
        """A held sum to RAM, rounded."""
        self.norm = 10 * elements / costs.hbm
        """Norm and rounding of a sum in VRAM."""
        slowed = costs.fetch_slowdown * self.fetch if block.trainable else 0.0
        self.update = updated / machine.update[run.moment_width] + slowed
        """Update on the CPU, slowed down by one fetch of the weights."""
        moved = DISK_TRAFFIC * 2 * states / machine.dram
        self.update_on_disk = max(self.update, costs.update_traffic * self.update + moved)
        """The same of states on disk: reading and writing them shares the rate of host memory with updates."""
        self.stream_states = _copy(states, STREAMED_STATES_SHARE * costs.both)
        """States to the GPU, or back."""
        single = run.accumulation == 1 and run.itemsize == 2
        self.merge = block.trainable * MERGE_TRAFFIC[single] / machine.dram if block.tied else 0.0
        """Adding the parts of a tied slab, before an update on the CPU."""
        self.gpu_update = updated / machine.gpu_update[run.moment_width] if machine.gpu else 0.0
        self.disk_read, self.disk_write = (states / rate if rate else 0.0 for rate in costs.disk)
        """States from disk, and back."""
        self.trained_read, self.trained_write = (state.trained / rate if rate else 0.0 for rate in costs.disk)
        """Weights that train from disk, and back."""
        self.gradient_read, self.gradient_write = (
            state.unshared_gradient / rate if rate else 0.0 for rate in costs.disk
        )
        """A gradient from disk, and there."""
        self.frozen_bytes = state.weights - state.trained
        self.frozen_read = self.frozen_bytes / costs.disk[0] if costs.disk[0] else 0.0
        inputs = input_bytes(block, run) if layer else 0
        self.offload, self.restore = inputs / costs.d2h, inputs / costs.both
        """An input to RAM, and back."""
        self.fetch_bytes = state.weights
        """Bytes of weights, which determine the ring."""


class Costs:
    """The pieces of a step of one model and run on one machine."""

    def __init__(self, shape: ModelShape, machine: Machine, run: Run, disks: tuple[Disk, ...] = ()) -> None:
        self.shape, self.machine, self.run = shape, machine, run
        self.attention = run.attention or shape.attention
        kind = "fp32" if run.precision == "fp32" else "bf16"
        self._matmul = MATMUL_SHARE[kind] * machine.matmul[kind]
        self._attention = machine.attention * machine.matmul[kind] / machine.matmul["bf16"]
        gpu = machine.gpu is not None
        self.hbm = machine.hbm if gpu else machine.dram
        self.launched = [count / machine.launches if gpu else 0.0 for count in HOST_OPERATIONS[run.compile]]
        """Seconds that the host takes to launch a layer's forward, and its backward."""
        self.h2d, self.d2h = (machine.h2d, machine.d2h) if gpu else (machine.dram / 2, machine.dram / 2)
        self.both = min(self.h2d, self.d2h, machine.duplex / 2) if gpu else machine.dram / 2
        self.fetch_slowdown, self.update_slowdown = _copy_slowdowns(machine, run)
        # The master weight is read and written (8 bytes; bf16-sr: 4), the gradient read, each moment read and written.
        per_moment = (TOUCHED[run.moment_width] - 10) / 2
        touched = (4 if run.precision == "bf16-sr" else 8) + run.itemsize + run.moments * per_moment
        self.update_traffic = min(1.0, machine.update[run.moment_width] * TOUCHED[run.moment_width] / machine.dram)
        """The share of the rate of host memory that updates take."""
        self.relative = touched / TOUCHED[run.moment_width]
        """Bytes that an update touches, relative to the update that the machine's rates were measured with."""
        self.disk = striped(disks, "read"), striped(disks, "write")
        alike = first_identical(shape)
        made = {index: Piece(self, shape.blocks[index]) for index in {*alike}}
        self.pieces = [made[index] for index in alike]
        groups = group_by_size({piece.fetch_bytes for piece in self.pieces if piece.fetch_bytes}, lambda size: size)
        self.rings = {size: number for number, group in enumerate(groups) for size in group}
        """Bytes of weights → the number of their ring."""

    @staticmethod
    def call(window: Ints) -> Floats:
        """Overhead of a block's call, per micro-batch, for each window size."""
        return np.where(window > 1, WINDOW_CALL_SECONDS, CALL_SECONDS)

    def compute(self, block: BlockShape, state: State) -> tuple[float, float]:
        """Seconds of forward and backward for one micro-batch."""
        run, tokens = self.run, self.run.micro_tokens
        elements = state.elements16 + state.elements32
        # The gradient slot is cleared and written, and its norm computed; in a window it is added to an FP32 sum.
        stored = elements * (4 * run.itemsize if run.accumulation == 1 else 3 * run.itemsize + 8) / self.hbm
        inputs = input_bytes(block, run)
        if block.kind == "head":
            return self._head(block), stored + inputs / self.hbm
        if block.kind == "embedding":
            return 2 * inputs / self.hbm, (3 * elements * run.itemsize + 4 * inputs) / self.hbm + stored
        products = 2 * tokens * (block.matmul_parameters - block.expert_matmul_parameters) / self._matmul
        products += 2 * tokens * block.expert_matmul_parameters / (self._matmul * EXPERT_SHARE)
        if block.kind != "layer":
            return products + 10 * inputs / self.hbm, 2 * products + 20 * inputs / self.hbm + stored
        scores = self._scores(block)
        moved = [self._traffic(block, traffic) for traffic in LAYER_TRAFFIC[run.compile]]
        forward = products + (moved[0] + state.weights) / self.hbm + 2 * scores
        backward = 2 * products + (moved[1] + 2 * state.weights) / self.hbm + 5 * scores
        # The host runs ahead of the GPU, unless launching a layer takes longer than computing it.
        return max(forward, self.launched[0]), max(backward + stored, self.launched[1])

    def left_out(self, block: BlockShape) -> float:
        """Seconds of the product that a recompute leaves out (compute/partition.py)."""
        # A layer that ends in a norm needs the product. Graphs of varying lengths have no fixed sizes, and keep it.
        ends_in_product = block.kind == "layer" and not block.experts and block.norms + block.fused_norms <= 2
        if not self.run.compile or self.run.padded or not ends_in_product or block.traced is not None:
            return 0.0
        return 2 * self.run.micro_tokens * block.hidden_size * block.intermediate_size / self._matmul

    def _traffic(self, block: BlockShape, moved: Traffic) -> float:
        """Bytes moved for one micro-batch."""
        heads = block.attention_width + block.kv_width if block.head_norms else 0
        rows = block.experts_per_token * block.hidden_size
        normed = (block.norms + block.fused_norms) * block.hidden_size + heads
        per_token = moved.hidden * block.hidden_size + moved.norm * normed + moved.mlp * block.intermediate_size
        return (per_token + moved.row * rows) * self.run.micro_tokens * self.run.itemsize / 2

    def _scores(self, block: BlockShape) -> float:
        """Seconds of one seventh of causal attention: 2 sevenths are the forward, 5 the backward."""
        run, length = self.run, self.run.length
        flops = length * length * block.attention_width * run.micro_batch
        if writes_scores(block, run, self.attention):
            pairs = length * length * block.heads * run.micro_batch
            return 2 * flops / self._matmul + SCORE_TRAFFIC * pairs / self.hbm
        if self.attention == "eager":
            # The masked half is computed too.
            return 2 * flops / self._matmul
        # `Machine.attention` is for length 2048 and dimension 128. Wider heads are not assumed to be faster.
        rate = (
            self._attention * _attention_share(length, max(1, min(block.head_dim, 128))) / _attention_share(2048, 128)
        )
        if uses_mask(block, run, self.attention):
            return flops / (rate * MASKED_SHARE)
        return flops * min(1.0, 2 * block.span / length if block.span else 1.0) / rate

    def _head(self, block: BlockShape) -> float:
        """Seconds of head and loss, chunk by chunk, with their gradients."""
        tokens, vocabulary, gpu = self.run.micro_tokens, max(1, self.shape.vocab_size), self.machine.gpu is not None
        chunks = -(-tokens // head_chunk(self.shape, self.run, tokens, gpu))
        per_logit = LOGIT_TRAFFIC[fuses_loss(self.run.compile, gpu)]
        per_weight = CHUNK_TRAFFIC[fuses_head(self.shape, self.run, gpu)]
        moved = tokens * vocabulary * per_logit + chunks * block.hidden_size * vocabulary * per_weight
        return 6 * tokens * block.matmul_parameters / self._matmul + moved * self.run.itemsize / 2 / self.hbm


def _copy(nbytes: int, rate: float) -> float:
    return COPY_LATENCY_SECONDS + nbytes / rate if nbytes else 0.0


def _attention_share(length: int, head_dim: int) -> float:
    """The share of its asymptotic rate that attention reaches."""
    half_length, half_dim = ATTENTION_HALF_RATE
    return length / (length + half_length) * head_dim / (head_dim + half_dim)


def _copy_slowdowns(machine: Machine, run: Run) -> tuple[float, float]:
    """By which share a copy to the GPU slows down a CPU update that runs at the same time, as both use host memory; and
    how much longer updates take while states are streamed both ways."""
    if machine.gpu is None:
        return 0.0, 1.0
    needed = machine.update[run.moment_width] * TOUCHED[run.moment_width]
    # `dram_under_dma` is measured with copies both ways; one way takes its share of that.
    remaining = machine.dram - max(0.0, machine.dram - machine.dram_under_dma) * min(1.0, machine.h2d / machine.duplex)
    return max(0.0, 1 - remaining / needed), max(1.0, needed / machine.dram_under_dma)
