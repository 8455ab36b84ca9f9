"""How fast states move to and from a drive: the I/O engine alone, and in training.

    PYTHONPATH=src python -m benchmarks.disk /mnt/nvme/scratch [MORE_DIRECTORIES] [--gb 8] [--seconds 10] [--repeats 3]
    PYTHONPATH=src python -m benchmarks.disk /mnt/nvme/scratch --train --seconds 60 --layers 8 --hidden 4096

Alone: reads, writes, and both at once, of extents that were written before, by threads and by io_uring in turns, for
several sizes of pieces and numbers of pieces at once; the median of the repeats, with the least and the most.

In training: a Llama whose states are all on disk takes steps for at least `--seconds`, after two that are not counted:
the first writes of an extent are slower. Then the I/O engine alone moves the same share of reads for as long, with the
same pieces and as many bytes on disk. Printed are the rate in training as a share of the rate alone, and the share of
the steps' time in which compute waited for the disk. Steps must be short of compute for the rates to be comparable:
`stalled` says whether they were.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

import megatrain as mt
from benchmarks.shapes import random_model
from benchmarks.traffic import Moved, Traffic
from megatrain.native.disk import BACKENDS, Transfer, uring_refusal
from megatrain.store import disk
from megatrain.store.disk import DiskBuffer, DiskMemory
from megatrain.store.ram import HostMemory

WARM = 2
"""Steps that are not counted: the first writes allocate what the file system has only reserved."""
EXTENT = 64 << 20
"""Bytes of a transfer when the I/O engine runs alone."""
IN_FLIGHT = 8
"""Transfers at once, in which all pieces that may be in flight find work."""
KINDS = {"read": 1.0, "write": 0.0, "mixed": 0.5}
"""Share of reads among the bytes that move."""


class Extents:
    """Buffers on disk that have been written, and memory for those in flight."""

    def __init__(self, memory: DiskMemory, ram: HostMemory, nbytes: int) -> None:
        count = max(2 * IN_FLIGHT, nbytes // EXTENT)
        self._idle = deque(memory.allocate(EXTENT, transferred=False) for _ in range(count))
        self._held = deque(ram.allocate(EXTENT, transferred=False) for _ in range(IN_FLIGHT))
        for held in self._held:
            # Drives may compress what is not random.
            held.view(torch.int64).random_()
        self._moving: deque[tuple[DiskBuffer, Any, Transfer, bool]] = deque()
        for _ in range(count):
            self._start(write=True)
        self.drain()

    def sustained(self, read_share: float, seconds: float) -> float:
        """Bytes per second of transfers of which this share reads, mixed evenly."""
        begin, reads, count = time.perf_counter(), 0, 0
        while time.perf_counter() - begin < seconds:
            # Whichever kind is behind its share goes next.
            write = reads >= read_share * (count + 1)
            self._start(write=write)
            reads, count = reads + (not write), count + 1
        self.drain()
        return count * EXTENT / (time.perf_counter() - begin)

    def drain(self) -> None:
        while self._moving:
            self._finish()

    def _start(self, *, write: bool) -> None:
        if len(self._moving) == IN_FLIGHT:
            self._finish()
        buffer, held = self._idle.popleft(), self._held.popleft()
        self._moving.append((buffer, held, buffer.transfer(held.address, write=write, keep=held), write))

    def _finish(self) -> None:
        buffer, held, transfer, write = self._moving.popleft()
        buffer.wait(transfer, write=write)
        self._idle.append(buffer)
        self._held.append(held)


def alone(options: argparse.Namespace, nbytes: int, backend: str, kinds: dict[str, float]) -> dict[str, float]:
    """Bytes per second of each kind of transfers."""
    memory = DiskMemory(options.directories, backend=backend, allow_tmpfs=options.allow_tmpfs)
    try:
        extents = Extents(memory, HostMemory(pin=False, threads=16), nbytes)
        return {name: extents.sustained(share, options.seconds) for name, share in kinds.items()}
    finally:
        memory.close()


def spread(rates: Sequence[float]) -> str:
    """The median; with the least and the most, if there are several."""
    middle = f"{statistics.median(rates) / 1e9:.2f}"
    return middle if len(rates) == 1 else f"{middle} ({min(rates) / 1e9:.2f} to {max(rates) / 1e9:.2f})"


def train(options: argparse.Namespace, backend: str) -> tuple[Moved, dict[str, Any]]:
    """What steps of at least so many seconds moved, and what was trained."""
    heads = options.hidden // 64
    model = random_model(
        "tiny", torch.bfloat16, lazy=True, vocab_size=options.vocabulary, hidden_size=options.hidden,
        intermediate_size=3 * options.hidden, num_hidden_layers=options.layers, num_attention_heads=heads,
        num_key_value_heads=heads,
    )  # fmt: skip
    debug = mt.Debug(disk_io=backend, allow_tmpfs=options.allow_tmpfs)
    engine = mt.Engine(
        model, offload_dir=options.directories, on_disk=["*"], optimizer_compression=options.moments,
        precision="bf16", debug=debug,
    )  # fmt: skip
    optimizer = engine.optimizer(lr=1e-4, max_grad_norm=None if options.no_clipping else 1.0)

    def step() -> None:
        ids = torch.randint(0, options.vocabulary, (1, options.tokens), device=engine.device)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM):
        step()
    traffic, begin, steps = Traffic(engine), time.perf_counter(), 0
    # The first step after a pause waits for no transfer, so that there must be a second one.
    while steps < 2 or time.perf_counter() - begin < options.seconds:
        step()
        steps += 1
    moved = traffic.end()
    about = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "on disk": engine._placement.disk.allocated_bytes,
        "busy": engine.step_times.busy,
    }
    engine.close()
    return moved, about


def compared(options: argparse.Namespace, backend: str) -> dict[str, Any]:
    """The rate in training beside the rate of the I/O engine alone, with the same share of reads."""
    moved, about = train(options, backend)
    rate = alone(options, about["on disk"], backend, {"mixed": moved.read_share})["mixed"]
    return about | {
        "backend": backend,
        "steps": moved.steps,
        "seconds": moved.seconds,
        "read per step": moved.read / moved.steps,
        "written per step": moved.written / moved.steps,
        "GB/s": moved.rate / 1e9,
        "GB/s alone": rate / 1e9,
        "share of alone": moved.rate / rate,
        "stalled": moved.stall_share,
        "waited": moved.waited,
    }


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+")
    parser.add_argument("--gb", type=float, default=8, help="on disk while measuring alone, without --train")
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement")
    parser.add_argument("--pieces", type=int, nargs="+", default=[8], help="MiB per transfer")
    parser.add_argument("--depths", type=int, nargs="+", default=[8], help="pieces at once per directory")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, help="default: all that this system allows")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--train", action="store_true", help="compare with training")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--moments", default=False, help="bf16, 8bit or 4bit; default: FP32")
    parser.add_argument("--no-clipping", action="store_true")
    parser.add_argument("--allow-tmpfs", action="store_true", help="for trying this out where there is no drive")
    options = parser.parse_args(arguments)
    options.backends = options.backends or [name for name in BACKENDS if name != "uring" or uring_refusal() is None]
    return options


def main() -> None:
    options = parsed()
    for piece in options.pieces:
        for depth in options.depths:
            disk.PIECE_BYTES, disk.THREADS = piece << 20, depth
            about = f"{piece} MiB, {depth} at once"
            found: dict[str, list[dict[str, Any]]] = {backend: [] for backend in options.backends}
            for _ in range(options.repeats):
                for backend, results in found.items():
                    if options.train:
                        results.append(compared(options, backend))
                        print(json.dumps({"pieces": about} | results[-1], indent=2), flush=True)
                    else:
                        results.append(alone(options, int(options.gb * 1e9), backend, KINDS))
            for backend, results in found.items():
                print(f"{about}, {backend}: {summary(results, options.train)}", flush=True)


def summary(results: Sequence[dict[str, Any]], trained: bool) -> str:
    if not trained:
        return ", ".join(f"{kind} {spread([each[kind] for each in results])}" for kind in KINDS) + " GB/s"
    rate, rate_alone, share, stalled = (
        statistics.median(each[name] for each in results)
        for name in ("GB/s", "GB/s alone", "share of alone", "stalled")
    )
    return f"training {rate:.2f} GB/s, alone {rate_alone:.2f}, share {share:.1%}; compute waited {stalled:.1%} of steps"


if __name__ == "__main__":
    main()
