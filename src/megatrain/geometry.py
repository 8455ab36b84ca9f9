"""Facts that the engine and the planner both go by: what is allocated and moved, and what is counted. Pure Python.

Each fact stands here once. The engine allocates by it, the planner counts by it, and settings are checked against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

# ---- names

PRECISIONS = ("bf16", "fp32", "bf16-sr")
POLICIES = ("recompute", "store", "offload")
OPTIMIZER_MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1}
"""Optimizer → how many moments it keeps."""
PLACEMENT_SETTINGS = ("resident", "held_weights", "held_gradients", "streamed_states")
"""Settings that are patterns of block names: what of them is in GPU memory, or comes there."""
PLANNED_SETTINGS = (*PLACEMENT_SETTINGS, "policy", "window")
"""Settings that a plan decides; whoever sets one of them decides alone."""
PLANNED_DEBUG_SETTINGS = ("slots", "grad_slots")
"""The same of `Settings.debug`."""


@dataclass(frozen=True)
class Width:
    """How a moment is stored: bits per element, and one FP32 scale per `block` elements (0: none)."""

    bits: int
    block: int = 0

    @property
    def nbytes(self) -> float:
        """Bytes per element, scales included."""
        return self.bits / 8 + (4 / self.block if self.block else 0)


WIDTHS = {"fp32": Width(32), "bf16": Width(16), "8bit": Width(8, 256), "4bit": Width(4, 128)}
"""By name, the widest first. The order is that of the C library's formats."""
MIN_COMPRESSED_NUMEL = 4096
"""Tensors with fewer elements, and vectors of any length (norms, biases), keep FP32 moments: they are sensitive, and
together they are nothing."""

# ---- lanes


@dataclass(frozen=True)
class Lane:
    """A queue of work beside compute, in its order."""

    runs_on: str | None
    """"stream": issued on a CUDA stream of its own; "thread": done by a CPU thread. None: no queue of the engine."""
    link: str | None = None
    """The direction of PCIe that it uses, "in" (to the GPU) or "out"; lanes of one direction share it."""
    after_compute: bool = False
    """Whether its work comes after all that compute has been given: it uses what compute, or the user, wrote."""


LANES = {
    "compute": Lane(None),
    "h2d": Lane("stream", link="in"),  # weights of streamed blocks into slots, sums and parked inputs back
    "refresh": Lane("stream", link="in"),  # held weights, once per step, each after its update
    "d2h": Lane("stream", link="out", after_compute=True),  # gradients of streamed blocks, inputs to be parked
    "sums_out": Lane("stream", link="out", after_compute=True),  # held gradient sums, rounded, once per step
    "update": Lane("thread"),  # sums and updates in RAM
    "gpu_update": Lane("stream", after_compute=True),  # the same in GPU memory
    "states_in": Lane("stream", link="in"),  # states that are updated on the device, into slots
    "states_out": Lane("stream", link="out"),  # the same back, and the weights that were updated there
    "disk": Lane(None),  # states from and to disk; not in this version's engine
}
"""Every lane by its name. The engine's lanes, the timeline and the simulator have these and no others."""


@dataclass(frozen=True)
class Tier:
    """A kind of memory that state lives in."""

    update_lane: str
    """The lane that sums and updates what lies in it."""
    on_device: bool
    """Whether compute reads and writes it where it lies."""


TIERS = {"vram": Tier("gpu_update", on_device=True), "ram": Tier("update", on_device=False)}
STAGING_SLOTS = 2
"""Slots per ring of what passes once per step: gradients on their way from a held sum to its update, on the device and
in RAM, and states that come to the device for theirs."""

# ---- slabs and rings

ALIGN_ELEMENTS = 256
"""Every parameter starts on a multiple of this: vector loads are aligned whatever came before it, and so are the blocks
of low-bit moments and the groups of random numbers."""
ALIGN_BYTES = 4096
"""Slabs are padded to whole pages: they are registered with the driver, and later read with O_DIRECT."""


def padded(numel: int) -> int:
    """The room that a parameter takes in a slab, in elements."""
    return round_up(numel, ALIGN_ELEMENTS)


def padded_slab(numel: int, itemsize: int) -> int:
    """The length of a slab whose parameters take `numel` elements."""
    return round_up(numel, ALIGN_BYTES // itemsize)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def group_by_size(slabs: Iterable[T], nbytes: Callable[[T], int]) -> list[list[T]]:
    """Slabs in groups that share a ring, each within a factor of two of its largest; equal ones in their order."""
    groups: list[list[T]] = []
    largest = 0
    for slab in sorted(slabs, key=nbytes, reverse=True):
        if not groups or nbytes(slab) * 2 < largest:
            groups.append([])
            largest = nbytes(slab)
        groups[-1].append(slab)
    return groups


def weight_slots(slots: int, slabs: int) -> int:
    """Slots in a ring of so many slabs."""
    return min(slots, slabs)


def grad_slots(slots: int, slabs: int) -> int:
    """The same for gradients: two slabs (embedding and head) need one, theirs come at opposite ends of a backward."""
    return min(slots, (slabs + 1) // 2)


# ---- a step

CHUNK_ELEMENTS = {False: 1 << 27, True: 1 << 28}
"""Whether the loss is fused → logits in a chunk of the head. Constants: a chunk changes the last bits of a sum, so no
memory cap may choose it."""
MAX_WINDOW = 64
"""A window is that many threads at the most; beyond it the weights' share of a step is small anyway."""


def fuses_loss(compiled: bool, gpu: bool) -> bool:
    """Whether cross-entropy is a kernel of our own, whose last bits are not PyTorch's: like compiled layers."""
    return compiled and gpu


def chunk_tokens(vocabulary: int, fused: bool) -> int:
    """Tokens per chunk of the head: a multiple of 64, at least 64."""
    return max(64, CHUNK_ELEMENTS[fused] // max(1, vocabulary) // 64 * 64)


def window_sizes(sizes: int | Sequence[int], micro_batches: int) -> tuple[int, ...]:
    """The windows of a step: sizes in order, the last one repeated as long as needed, none beyond the step's end."""
    asked = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    windows: list[int] = []
    left = micro_batches
    while left > 0:
        windows.append(min(asked[min(len(windows), len(asked) - 1)], left))
        left -= windows[-1]
    return tuple(windows)


def update_threads(cores: int) -> int:
    """Threads for updates on the CPU: all cores but two, which launch kernels and issue copies."""
    return max(1, cores - 2) if cores > 4 else cores
