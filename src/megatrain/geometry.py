"""Facts that the engine, the planner and the settings share, each defined once: names, lanes, slab and ring sizes.

Pure Python; importing it loads nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import TypeVar

T = TypeVar("T")

GIB = 1 << 30

# ---- names

PRECISIONS = ("bf16", "fp32", "bf16-sr")
POLICIES = ("recompute", "store", "offload")
OPTIMIZER_MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1}
"""Optimizer → number of moments it keeps."""
PLACEMENT_SETTINGS = (
    "resident", "held_weights", "held_gradients", "streamed_states", "on_disk", "weights_on_disk", "gradients_on_disk",
)  # fmt: skip
"""Settings that list patterns of block names: which state of those blocks is kept in or streamed through GPU memory, or
is on disk."""
PATTERN_SETTINGS = (*PLACEMENT_SETTINGS, "inputs_on_disk")
"""All settings that list patterns of block names. Plans do not decide the last one."""
DISK_SETTINGS = tuple(name for name in PATTERN_SETTINGS if name.endswith("on_disk"))
"""Those that use `offload_dir`."""
PLANNED_SETTINGS = (*PLACEMENT_SETTINGS, "policy", "window")
"""Settings that a plan decides unless the user sets them."""
PLANNED_DEBUG_SETTINGS = ("slots", "grad_slots")
"""Fields of `Settings.debug` that a plan decides."""


def matches(block: str, patterns: Iterable[str]) -> bool:
    """Whether one of a setting's patterns names a block."""
    return any(fnmatchcase(block, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Width:
    """Storage of a moment: bits per element, and one FP32 scale per `block` elements (0: no scales)."""

    bits: int
    block: int = 0

    @property
    def nbytes(self) -> float:
        """Bytes per element, scales included."""
        return self.bits / 8 + (4 / self.block if self.block else 0)


WIDTHS = {"fp32": Width(32), "bf16": Width(16), "8bit": Width(8, 256), "4bit": Width(4, 128)}
"""Moment widths by name, widest first, in the order of `enum mt_state` in csrc/megatrain.h."""
MIN_COMPRESSED_NUMEL = 4096
"""Tensors with fewer elements, and vectors of any length (norms, biases), keep FP32 moments: they are sensitive to
rounding and take little memory."""


def compresses_moments(shape: Sequence[int]) -> bool:
    """Whether moments of a tensor are stored in the width that was chosen, and not always in FP32."""
    return len(shape) >= 2 and prod(shape) >= MIN_COMPRESSED_NUMEL


# ---- lanes


@dataclass(frozen=True)
class Lane:
    """An ordered queue of work that runs alongside compute."""

    runs_on: str | None
    """"stream": a CUDA stream of its own; "thread": a CPU thread that computes; "drive": a CPU thread that reads and
    writes disks; None: the engine has no queue for it. Threads share the cores, and drive lanes the bandwidth."""
    tier: str | None = None
    """The tier whose state the lane moves or updates."""
    link: str | None = None
    """The PCIe direction it uses, "in" (to the GPU) or "out". Lanes of one direction share the bandwidth."""
    after_compute: bool = False
    """Whether each job waits for everything submitted to compute so far, because it uses what compute wrote."""


LANES = {
    "compute": Lane(None),
    "h2d": Lane("stream", "ram", link="in"),  # weights of streamed blocks, resumed sums, offloaded inputs
    "refresh": Lane("stream", "ram", link="in"),  # held weights, once per step, after their update
    "d2h": Lane("stream", "ram", link="out", after_compute=True),  # gradients of streamed blocks, inputs to offload
    "sums_out": Lane("stream", "ram", link="out", after_compute=True),  # held gradient sums, rounded, once per step
    "update": Lane("thread", "ram"),  # gradient sums and updates in RAM
    "gpu_update": Lane("stream", "vram", after_compute=True),  # norms, merges and updates in GPU memory
    "states_in": Lane("stream", "ram", link="in"),  # streamed states, into slots
    "states_out": Lane("stream", "ram", link="out"),  # streamed states and their updated weights, back to RAM
    "disk_in": Lane("drive", "disk"),  # states on disk, into staging buffers in RAM
    "disk_update": Lane("thread", "disk"),  # updates of those; apart, so that a late read holds up no other update
    "disk_out": Lane("drive", "disk"),  # states back to disk
    "disk_weights": Lane("drive", "disk"),  # weights on disk, staged; compute waits for them, so they are apart
    # Inputs of blocks, to disk and back. Compute waits for both: behind states, a forward would wait for the updates of
    # the step before it. They share a lane because the reads of a backward begin when the writes of its forward end.
    "disk_inputs": Lane("drive", "disk"),
}
"""All lanes by name, as the engine, the timeline and the simulator use them."""


def lanes_on(runs_on: str) -> tuple[str, ...]:
    """The lanes of one kind."""
    return tuple(name for name, lane in LANES.items() if lane.runs_on == runs_on)


@dataclass(frozen=True)
class Tier:
    """A kind of memory that holds state."""

    update_lane: str
    """The lane that sums gradients and updates state in this tier."""
    on_device: bool
    """Whether compute reads and writes it directly."""


TIERS = {
    "vram": Tier("gpu_update", on_device=True),
    "ram": Tier("update", on_device=False),
    "disk": Tier("disk_update", on_device=False),
}
STAGING_SLOTS = 2
"""Slots per ring for data that moves once per step: held gradient sums on their way to RAM, and streamed states."""
DISK_STAGING_SLOTS = 3
"""Staging buffers per ring for state on disk: one being read, one updated and one written. Weights and gradients have
rings of their own, of as many."""
INPUT_STAGING_SLOTS = 4
"""Staging buffers for inputs of blocks on disk: a drive is slow to start, so more than one input is read ahead."""
DISK_PIECE_BYTES = 8 << 20
"""Bytes of a transfer to or from disk, and of its checksum."""
DISK_THREADS = 8
"""Such transfers in flight per directory."""
MAX_DISK_THREADS = 64
"""The same in all directories together."""


DISK_KEPT_FREE = 64 << 20
"""Bytes that stay free on a file system."""


def disk_threads(directories: int) -> int:
    """Transfers in flight."""
    return min(DISK_THREADS * directories, MAX_DISK_THREADS)


def unused_disk_bytes(directories: int) -> int:
    """The most of the free space of directories that is not used: what stays free, and an incomplete piece in each."""
    return directories * (DISK_KEPT_FREE + DISK_PIECE_BYTES)


def cached_bytes(direct: Sequence[bool]) -> int:
    """The most that is in the page cache: all transfers in flight, unless each directory has direct I/O."""
    return 0 if all(direct) else disk_threads(len(direct)) * DISK_PIECE_BYTES


def transit_bytes(direct: Sequence[bool], coded: bool) -> int:
    """RAM that transfers take beside staging buffers: page cache, and the native library's memory for coded pieces."""
    return cached_bytes(direct) + coded * disk_threads(len(direct)) * DISK_PIECE_BYTES


# ---- slabs and rings

ALIGN_ELEMENTS = 256
"""Every parameter starts on a multiple of this, so that vector loads, blocks of low-bit moments and groups of random
numbers are aligned."""
MOMENT_ALIGN_BYTES = 64
"""In the buffer of a moment, parameters of each format start on a cache line."""
ALIGN_BYTES = 4096
"""Slabs are padded to whole pages, because they are registered with the CUDA driver. Roles of a slab that are staged
start on a page too."""


def padded(numel: int) -> int:
    """The elements that a parameter occupies in a slab."""
    return round_up(numel, ALIGN_ELEMENTS)


def padded_slab(numel: int, itemsize: int) -> int:
    """The length of a slab whose padded parameters have `numel` elements."""
    return round_up(numel, ALIGN_BYTES // itemsize)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def in_pages(sizes: Iterable[int]) -> int:
    """Bytes of buffers that are staged one after another: each starts on a page, as direct I/O requires."""
    return sum(round_up(size, ALIGN_BYTES) for size in sizes)


def group_by_size(slabs: Iterable[T], nbytes: Callable[[T], int]) -> list[list[T]]:
    """Group slabs that share a ring: sizes within a factor of two of the group's largest, stable for equal sizes."""
    groups: list[list[T]] = []
    largest = 0
    for slab in sorted(slabs, key=nbytes, reverse=True):
        if not groups or nbytes(slab) * 2 < largest:
            groups.append([])
            largest = nbytes(slab)
        groups[-1].append(slab)
    return groups


def staging_slots(slabs: int) -> int:
    """Staging buffers on the device in a ring that serves `slabs` slabs."""
    return min(STAGING_SLOTS, slabs)


def disk_staging_slots(slabs: int) -> int:
    """The same in RAM, for state on disk."""
    return min(DISK_STAGING_SLOTS, slabs)


def slot_rings(
    slabs: Iterable[T], slots: Callable[[int], int], size: Callable[[T], int], count: Callable[[T], int] = lambda _: 1
) -> list[tuple[list[T], int]]:
    """The slabs of each ring, and how many slots it has. `size`: bytes of a slab's weight; `count`: how many slabs an
    item stands for."""
    return [(ring, slots(sum(map(count, ring)))) for ring in group_by_size(slabs, size)]


def staging_bytes(
    slabs: Iterable[T],
    slots: Callable[[int], int],
    size: Callable[[T], int],
    nbytes: Callable[[T], int],
    count: Callable[[T], int] = lambda _: 1,
) -> int:
    """Bytes of the slots of all rings, each as large as the largest that one of its slabs needs."""
    return sum(number * max(map(nbytes, ring)) for ring, number in slot_rings(slabs, slots, size, count))


def weight_slots(slots: int, slabs: int) -> int:
    """Slots in a ring that serves `slabs` slabs."""
    return min(slots, slabs)


def grad_slots(slots: int, slabs: int) -> int:
    """Gradient slots. Two slabs (embedding and head) need one: their gradients come at opposite ends of a backward."""
    return min(slots, (slabs + 1) // 2)


# ---- a step

CHUNK_ELEMENTS = {False: 1 << 27, True: 1 << 28}
"""Whether the loss is fused → logits per chunk of the head. Constant: the chunk size changes the last bits of a sum, so
it must not depend on a memory limit."""
MAX_WINDOW = 64
"""Micro-batches per window, each of which has a thread. Beyond this, fetching weights is a small share of a step."""


def fuses_loss(compiled: bool, gpu: bool) -> bool:
    """Whether cross-entropy is a fused kernel. Like compiled layers, its last bits differ from PyTorch's."""
    return compiled and gpu


def chunk_tokens(vocabulary: int, fused: bool) -> int:
    """Tokens per chunk of the head, a multiple of 64."""
    return max(64, CHUNK_ELEMENTS[fused] // max(1, vocabulary) // 64 * 64)


def window_sizes(sizes: int | Sequence[int], micro_batches: int) -> tuple[int, ...]:
    """The windows of a step: the given sizes in order, the last repeated, cut off at the end of the step."""
    requested = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    windows: list[int] = []
    remaining = micro_batches
    while remaining > 0:
        windows.append(min(requested[min(len(windows), len(requested) - 1)], remaining))
        remaining -= windows[-1]
    return tuple(windows)


def update_threads(cores: int) -> int:
    """Threads for updates on the CPU. Two cores are left free to launch kernels and issue copies."""
    return max(1, cores - 2) if cores > 4 else cores
