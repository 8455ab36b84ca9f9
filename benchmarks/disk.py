"""How fast states move to and from a drive: the I/O engine alone, and in training.

    PYTHONPATH=src python -m benchmarks.disk /mnt/nvme/scratch [MORE_DIRECTORIES] [--gb 8] [--seconds 10] [--repeats 3]
    PYTHONPATH=src python -m benchmarks.disk /mnt/nvme/scratch --train --layers 8 --hidden 2048 [--steps 8]

Alone: reads, writes, and both at once, of extents that were written before, by threads and by io_uring in turns, for
several sizes of pieces and numbers of pieces at once; the median of the repeats, with the least and the most.

In training: a Llama whose states are all on disk; bytes read and written per second of the steps after the first two,
as a share of what the I/O engine reaches alone with both at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import megatrain as mt
from megatrain.native.disk import BACKENDS
from megatrain.store import disk
from megatrain.store.disk import DiskBuffer, DiskMemory
from megatrain.store.ram import HostMemory

WARM = 2
"""Steps that are not counted: the first writes allocate what the file system has only reserved."""


class Extent:
    """Bytes on disk and as many in RAM."""

    def __init__(self, memory: DiskMemory, ram: HostMemory, nbytes: int) -> None:
        self.buffer: DiskBuffer = memory.allocate(nbytes, transferred=False)
        self.held = ram.allocate(nbytes, transferred=False)
        # Drives may compress what is not random.
        self.held.view(torch.int64).random_()

    def move(self, *, write: bool) -> int:
        transfer = self.buffer.transfer(self.held.address, write=write, keep=self.held)
        self.buffer.wait(transfer, write=write)
        return self.buffer.nbytes


def sustained(work: Callable[[], int], seconds: float) -> float:
    """Bytes per second."""
    begin, moved = time.perf_counter(), 0
    while (now := time.perf_counter()) - begin < seconds:
        moved += work()
    return moved / (now - begin)


def alone(
    directories: list[str], nbytes: int, seconds: float, piece: int, depth: int, backend: str
) -> dict[str, float]:
    """Bytes per second of reads, of writes, and of both at once."""
    disk.PIECE_BYTES, disk.THREADS = piece, depth
    memory, ram = DiskMemory(directories, backend=backend), HostMemory(pin=False, threads=16)
    first, second = Extent(memory, ram, nbytes // 2), Extent(memory, ram, nbytes // 2)
    for extent in (first, second):
        extent.move(write=True)
    rates = {
        "read": sustained(lambda: first.move(write=False), seconds),
        "write": sustained(lambda: second.move(write=True), seconds),
    }
    both: dict[str, float] = {}

    def run(name: str, extent: Extent, write: bool) -> None:
        both[name] = sustained(lambda: extent.move(write=write), seconds)

    workers = [threading.Thread(target=run, args=args) for args in (("in", first, False), ("out", second, True))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    memory.close()
    return rates | {"mixed": sum(both.values()), "mixed read": both["in"], "mixed write": both["out"]}


def spread(rates: list[float]) -> str:
    """The median; with the least and the most, if there are several."""
    middle = f"{statistics.median(rates) / 1e9:.2f}"
    return middle if len(rates) == 1 else f"{middle} ({min(rates) / 1e9:.2f} to {max(rates) / 1e9:.2f})"


def train(directories: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Seconds per step, bytes per second, and how long lanes were busy."""
    config = LlamaConfig(
        vocab_size=options.vocabulary, hidden_size=options.hidden, intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    engine = mt.Engine(
        model, offload_dir=directories, on_disk=["*"], optimizer_compression=options.moments, precision="bf16"
    )
    optimizer = engine.optimizer(lr=1e-4, max_grad_norm=None if options.no_clipping else 1.0)
    counters, begin, counted, before = engine.counters, 0.0, options.steps - WARM, (0, 0)
    for step in range(options.steps):
        if step == WARM:
            engine.synchronize()
            begin, before = time.perf_counter(), (counters.bytes_disk_in, counters.bytes_disk_out)
        ids = torch.randint(0, options.vocabulary, (1, options.tokens), device=engine.device)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.synchronize()
    seconds = time.perf_counter() - begin
    moved = counters.bytes_disk_in - before[0], counters.bytes_disk_out - before[1]
    times = engine.step_times
    found = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds per step": seconds / counted,
        "read per step": moved[0] / counted,
        "written per step": moved[1] / counted,
        "rate": sum(moved) / seconds,
        "busy": None if times is None else times.busy,
        "waited": None if times is None else times.waited,
    }
    engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+")
    parser.add_argument("--gb", type=float, default=8, help="bytes on disk while measuring, in GB")
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement")
    parser.add_argument("--pieces", type=int, nargs="+", default=[8], help="MiB per transfer")
    parser.add_argument("--depths", type=int, nargs="+", default=[8], help="pieces at once per directory")
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--moments", default=False, help="bf16, 8bit or 4bit; default: FP32")
    parser.add_argument("--no-clipping", action="store_true")
    options = parser.parse_args()
    mixed = 0.0
    nbytes = int(options.gb * 1e9) & -8
    for piece in options.pieces:
        for depth in options.depths:
            rates: dict[str, list[dict[str, float]]] = {backend: [] for backend in options.backends}
            for _ in range(options.repeats):
                for backend, found in rates.items():
                    found.append(alone(options.directories, nbytes, options.seconds, piece << 20, depth, backend))
            for backend, found in rates.items():
                shown = ", ".join(f"{name} {spread([each[name] for each in found])}" for name in found[0])
                print(f"{piece} MiB, {depth} at once, {backend}: {shown} GB/s", flush=True)
                mixed = max(mixed, statistics.median(each["mixed"] for each in found))
    if options.train:
        trained = train(options.directories, options)
        print(json.dumps(trained | {"share of mixed": trained["rate"] / mixed}, indent=2))


if __name__ == "__main__":
    main()
