"""Speed of the optimizer step on the CPU, relative to memory bandwidth.

    PYTHONPATH=src python -m benchmarks.adamw --threads 16

For each storage of weights and moments: the native update, and a loop that reads and writes the same data with the same
threads and chunks but without arithmetic. For comparison, torch's fused AdamW on FP32. GB/s counts bytes read and
written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from megatrain.native import library
from megatrain.optim.rules import AdamW
from megatrain.store.formats import FORMATS
from megatrain.store.ram import HostMemory
from megatrain.store.random import GROUP

RULE = AdamW(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
ELEMENTS = 200_000_000
LARGEST = 16
"""Bytes per element of the largest case: FP32 weight, gradient and moments."""
WEIGHTS = {
    "split": ("BF16 + int16, BF16 gradient", torch.bfloat16, True, torch.bfloat16),
    "fp32": ("FP32, FP32 gradient", torch.float32, False, torch.float32),
    "bf16": ("BF16 alone, BF16 gradient", torch.bfloat16, False, torch.bfloat16),
}
"""Name → description, the weight's dtype, whether there is a residual, the gradient's dtype."""


@dataclass(frozen=True)
class Measured:
    what: str
    moments: str
    isa: str
    seconds: float
    loop_seconds: float | None
    gparam_s: float
    gb_s: float
    of_loop: float | None
    """The loop's time over the update's: 1 means bound by memory bandwidth."""


def filled(memory: HostMemory, numel: int, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Normal numbers, repeated from a short pattern, since drawing them is slow."""
    tensor = memory.allocate(numel * dtype.itemsize, transferred=False).view(dtype)
    pattern = (torch.randn(min(numel, 1 << 20)) * scale).to(dtype)
    for start in range(0, numel, pattern.numel()):
        part = tensor[start : start + pattern.numel()]
        part.copy_(pattern[: part.numel()])
    return tensor


def median(repeat: int, *works: Callable[[], None]) -> list[float]:
    """Median seconds of each, interleaved, so that changes of the machine's speed affect all of them."""
    times: list[list[float]] = [[] for _ in works]
    for number in range(repeat + 1):
        for work, taken in zip(works, times, strict=True):
            began = time.perf_counter()
            work()
            if number > 0:  # the first is for caches, page tables and clocks
                taken.append(time.perf_counter() - began)
    return [statistics.median(taken) for taken in times]


def native(weights: str, width: str, numel: int, threads: int, repeat: int) -> Measured:
    """Measure one storage of weights and moments on the current instruction set."""
    memory = HostMemory(pin=False, threads=threads)
    what, dtype, split, gradient_dtype = WEIGHTS[weights]
    moments, scales, touched = [], [], 2 * dtype.itemsize + gradient_dtype.itemsize + (4 if split else 0)
    state_bytes = 0
    for kind in FORMATS[width]:
        moments.append(memory.allocate(kind.payload_bytes(numel), transferred=False).bytes)
        scales.append(
            memory.allocate(kind.scale_bytes(numel), transferred=False).view(torch.float32) if kind.block else None
        )
        state_bytes += 2 * (kind.payload_bytes(numel) + kind.scale_bytes(numel))
    operands: dict[str, Any] = {
        "rule": RULE.code,
        "scalars": RULE.scalars(100, 1.0),
        "weight": filled(memory, numel, dtype, 0.02),
        "residual": memory.allocate(2 * numel, transferred=False).view(torch.int16) if split else None,
        "gradient": filled(memory, numel, gradient_dtype, 1e-3),
        "rounded": gradient_dtype == torch.bfloat16,
        "width": width,
        "moments": moments,
        "scales": scales,
        "seed": 1,
        "first": 0,
        "threads": threads,
    }
    seconds, loop = median(
        repeat,
        lambda: library.update(**operands),
        lambda: library.update(**operands, arithmetic=False),
    )
    gigabytes = (touched * numel + state_bytes) / 1e9
    return Measured(what, width, "", seconds, loop, numel / seconds / 1e9, gigabytes / seconds, loop / seconds)


def fused(numel: int, threads: int, repeat: int) -> Measured:
    """Measure torch's fused AdamW on FP32 weight, gradient and moments."""
    torch.set_num_threads(threads)
    memory = HostMemory(pin=False, threads=threads)
    parameter = torch.nn.Parameter(filled(memory, numel, torch.float32, 0.02))
    parameter.grad = filled(memory, numel, torch.float32, 1e-3)
    optimizer = torch.optim.AdamW([parameter], lr=RULE.lr, weight_decay=RULE.weight_decay, fused=True)

    def step() -> None:
        optimizer.step()

    (seconds,) = median(repeat, step)
    rate = numel / seconds / 1e9
    return Measured("torch.optim.AdamW(fused=True)", "fp32", "", seconds, None, rate, 28 * rate, None)


def show(rows: list[Measured], numel: int, threads: int) -> None:
    table = Table(title=f"AdamW, {numel / 1e6:.0f}M parameters, {threads} threads, {cpu()}, torch {torch.__version__}")
    for heading in ("weights", "moments", "instructions"):
        table.add_column(heading)
    for heading in ("ms", "Gparam/s", "GB/s", "loop, GB/s", "of the loop"):
        table.add_column(heading, justify="right")
    for row in rows:
        loop = "" if row.loop_seconds is None else f"{row.gb_s * row.seconds / row.loop_seconds:.1f}"
        share = "" if row.of_loop is None else f"{row.of_loop:.0%}"
        numbers = (f"{row.seconds * 1e3:.1f}", f"{row.gparam_s:.2f}", f"{row.gb_s:.1f}", loop, share)
        table.add_row(row.what, row.moments, row.isa, *numbers)
    Console(width=140).print(table)


def cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, help=f"default: {ELEMENTS}, or what half the free memory holds")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--isa", choices=library.isas(), default=library.isas()[-1])
    parser.add_argument("--all-isas", action="store_true", help="also the split FP32 case on every instruction set")
    parser.add_argument("--json", type=Path, help="append one line with everything")
    return parser.parse_args()


def main() -> None:
    args = parse()
    quota = library.cpu_quota()
    threads = min(args.threads, quota) if quota else args.threads
    fits = psutil.virtual_memory().available // 2 // LARGEST
    numel = min(args.elements or ELEMENTS, fits) // GROUP * GROUP
    cases = [(weights, width, args.isa) for weights in WEIGHTS for width in FORMATS]
    if args.all_isas:
        cases += [("split", "fp32", name) for name in library.isas() if name != args.isa]
    rows = []
    for weights, width, isa in cases:
        library.use_isa(isa)
        measured = native(weights, width, numel, threads, args.repeat)
        rows.append(Measured(**{**asdict(measured), "isa": isa}))
    rows.append(fused(numel, threads, args.repeat))
    show(rows, numel, threads)
    if args.json:
        record = {
            "cpu": cpu(),
            "threads": threads,
            "elements": numel,
            "repeat": args.repeat,
            "torch": torch.__version__,
        }
        with args.json.open("a") as file:
            file.write(json.dumps(record | {"rows": [asdict(row) for row in rows]}) + "\n")


if __name__ == "__main__":
    main()
