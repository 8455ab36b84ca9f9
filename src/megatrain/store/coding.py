"""Whether FP32 moments on disk are coded losslessly: if coding and transferring less is faster than the drive alone."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from megatrain.errors import DiskFull
from megatrain.store.disk import PIECE_BYTES, THREADS, DiskBuffer, DiskMemory, aligned
from megatrain.telemetry.notices import announce

ROUNDS = 3
MIN_GAIN = 1.05
"""Coding must be this much faster: in training, updates need the CPU too."""
TYPICAL_RATIO = 0.81


def choose_coding(
    directories: Sequence[str | os.PathLike[str]], choice: str, allow_tmpfs: bool = False, backend: str = "threads"
) -> float | None:
    """The expected ratio of coded moments, or None if they are not to be coded. Announces the choice.

    `choice`: "always", "never", or "auto", which measures both.
    """
    if choice == "never":
        return None
    if choice == "always":
        announce("lossless: FP32 moments on disk are coded, as disk_coding='always' asks")
        return TYPICAL_RATIO
    try:
        plain, coded, ratio = measure(directories, allow_tmpfs, backend)
    except DiskFull as error:
        announce(f"lossless: FP32 moments on disk are not coded, because this could not be measured: {error}")
        return None
    pays = coded > MIN_GAIN * plain
    announce(
        f"lossless: FP32 moments on disk are {'coded' if pays else 'not coded'}: {coded / 1e9:.3g} GB/s with coding "
        f"(ratio {ratio:.2f}), {plain / 1e9:.3g} GB/s without"
    )
    return ratio if pays else None


def measure(
    directories: Sequence[str | os.PathLike[str]], allow_tmpfs: bool = False, backend: str = "threads"
) -> tuple[float, float, float]:
    """Bytes of moments per second that are read and written at once, without and with coding; the coded ratio."""
    memory = DiskMemory(directories, allow_tmpfs=allow_tmpfs, ratio=TYPICAL_RATIO, backend=backend)
    try:
        nbytes = THREADS * len(directories) * PIECE_BYTES
        buffers = memory.allocate(nbytes, transferred=False), memory.allocate(nbytes, transferred=False)
        held = aligned(nbytes), aligned(nbytes)
        held[0].view(-1, PIECE_BYTES).copy_(typical_moments())
        plain = _rate(buffers, held)
        for buffer in buffers:
            buffer.holds_fp32()
        before = memory.written_bytes, memory.covered_bytes
        coded = _rate(buffers, held)
        return plain, coded, (memory.written_bytes - before[0]) / (memory.covered_bytes - before[1])
    finally:
        memory.close()


def typical_moments() -> torch.Tensor:
    """The bytes of a piece: first moments, and second moments, whose scale differs by row."""
    generator = torch.Generator().manual_seed(0)
    rows = PIECE_BYTES // 2 // 4 // 1024
    scales = torch.randn(rows, 1, generator=generator).mul_(1.5).exp_().mul_(1e-4)
    first = torch.randn(rows, 1024, generator=generator) * scales
    second = torch.randn(rows, 1024, generator=generator).mul_(scales).square_()
    return torch.cat([first, second]).view(-1).view(torch.uint8)


def _rate(buffers: tuple[DiskBuffer, DiskBuffer], held: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The best rate of a read of one buffer and a write of the other at the same time."""
    # The first write of a block may allocate it.
    for buffer in buffers:
        buffer.wait(buffer.transfer(held[0].data_ptr(), write=True, keep=held), write=True)
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        transfers = [
            (buffer, buffer.transfer(memory.data_ptr(), write=write, keep=held), write)
            for buffer, memory, write in zip(buffers, held, (True, False), strict=True)
        ]
        for buffer, transfer, write in transfers:
            buffer.wait(transfer, write=write)
        best = min(best, time.perf_counter() - begin)
    return 2 * held[0].nbytes / best
