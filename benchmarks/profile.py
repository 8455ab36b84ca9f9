"""Where the milliseconds of a Trainer's step go on the GPU: kernels by kind, and the gaps between them.

    PYTHONPATH=src python -m benchmarks.profile --shape qwen2.5-7b --micro 4 --compile [--kernels 20] [--gaps 20]

Runs a row of `benchmarks.accuracy` through `megatrain.Trainer`, then three more steps under PyTorch's profiler, which
records what the GPU does. The table is of the time from the norm of the second of them to that of the third: starting
the profiler holds up the host. Its rows are kinds of kernels; together with "idle" they are the whole step. Time in
which kernels overlap counts for the one that started first. A gap is a stretch in which no kernel ran (copies may
have), with the kernels before and after it: gaps of a few microseconds are launches, longer ones are waits for the
host, for a copy or for an update.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import megatrain as mt
from benchmarks.row import measure, row_parser

NORM = "norm of gradients"
KINDS = (
    ("copies", r"^Mem(cpy|set)"),
    ("attention", r"flash|fmha|cudnn.*(sdpa|attention|mha)|sdpa|attention"),
    ("matrix products", r"gemm|nvjet|cutlass|xmma|cublas|splitK"),
    ("update of states", r"^_kernel$"),
    ("loss", r"^_(losses|gradient)$|softmax|nll_loss"),
    (NORM, r"^_(chunks|tree)"),
    ("sums of gradients", r"^_add$"),
    ("fused (Inductor)", r"^triton_"),
    ("other PyTorch kernels", r""),
)
MIN_STEP = 1e4
"""Microseconds between two norms that belong to different steps."""
SHORT = 20.0
"""Gaps up to this many microseconds count as launches."""


@dataclass(frozen=True)
class Kernel:
    name: str
    stream: int
    start: float
    end: float
    """Microseconds."""

    @property
    def kind(self) -> str:
        return next(kind for kind, pattern in KINDS if re.search(pattern, self.name))


def kernels_of(profiled: profile) -> list[Kernel]:
    """What ran on the GPU, in the order in which it started."""
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    found = [
        Kernel(event.name(), event.device_resource_id(), event.start_ns() / 1e3, event.end_ns() / 1e3)
        for event in profiled.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0
    ]
    return sorted(found, key=lambda kernel: kernel.start)


def covered(kernels: Iterable[Kernel]) -> tuple[dict[str, float], list[tuple[float, Kernel, Kernel]]]:
    """Microseconds by kind, each instant counted once; and the gaps, with the kernels around them."""
    kinds: dict[str, float] = defaultdict(float)
    gaps: list[tuple[float, Kernel, Kernel]] = []
    last: Kernel | None = None
    for kernel in kernels:
        if last is not None and kernel.start > last.end:
            gaps.append((kernel.start - last.end, last, kernel))
        begin = kernel.start if last is None else max(kernel.start, last.end)
        kinds[kernel.kind] += max(0.0, kernel.end - begin)
        last = kernel if last is None or kernel.end > last.end else last
    return dict(kinds), gaps


def last_step(kernels: list[Kernel]) -> list[Kernel]:
    """From the end of one norm of all gradients to that of the next."""
    norms = [kernel for kernel in kernels if kernel.kind == NORM]
    ends = [a.end for a, b in pairwise(norms) if b.start - a.end > MIN_STEP] + [norms[-1].end]
    return [kernel for kernel in kernels if ends[-2] <= kernel.start < ends[-1]]


def report(kernels: list[Kernel], most_kernels: int, most_gaps: int) -> Iterator[str]:
    """The tables, line by line."""
    seconds = (kernels[-1].end - kernels[0].start) / 1e6
    # Copies run beside compute: an instant in which only a copy runs is a gap of compute.
    compute = [kernel for kernel in kernels if kernel.kind != "copies"]
    kinds, gaps = covered(compute)
    launches = sum(gap for gap, _, _ in gaps if gap <= SHORT)
    waits = sum(gap for gap, _, _ in gaps if gap > SHORT)
    total = seconds * 1e6
    rows = [*sorted(kinds.items(), key=lambda item: -item[1])]
    rows += [(f"idle, gaps up to {SHORT:.0f} us", launches), ("idle, longer gaps", waits)]
    count: dict[str, int] = defaultdict(int)
    for kernel in compute:
        count[kernel.kind] += 1
    yield f"{seconds * 1e3:.1f} ms, {len(compute):,} kernels"
    yield "| kind | ms | share | kernels |\n|---|---|---|---|"
    for kind, microseconds in rows:
        yield f"| {kind} | {microseconds / 1e3:.2f} | {microseconds / total:.1%} | {count.get(kind, 0) or ''} |"
    yield "\n| kernel | ms | calls | us each |\n|---|---|---|---|"
    by_name: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        by_name[kernel.name].append(kernel.end - kernel.start)
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:most_kernels]:
        yield f"| {name[:90]} | {sum(times) / 1e3:.2f} | {len(times)} | {sum(times) / len(times):.1f} |"
    yield "\n| longest gaps, ms | at, ms | after | before |\n|---|---|---|---|"
    first = compute[0].start
    for gap, before, after in sorted(gaps, key=lambda item: -item[0])[:most_gaps]:
        yield f"| {gap / 1e3:.3f} | {(before.end - first) / 1e3:.1f} | {before.name[:60]} | {after.name[:60]} |"
    pairs: dict[tuple[str, str], list[float]] = defaultdict(list)
    for gap, before, after in gaps:
        pairs[before.name[:50], after.name[:50]].append(gap)
    yield "\n| gaps of one kind, ms in all | gaps | after | before |\n|---|---|---|---|"
    for (before_name, after_name), times in sorted(pairs.items(), key=lambda item: -sum(item[1]))[:most_gaps]:
        yield f"| {sum(times) / 1e3:.2f} | {len(times)} | {before_name} | {after_name} |"


def main() -> None:
    parser = row_parser(__doc__)
    parser.add_argument("--kernels", type=int, default=20, help="how many kernels to list")
    parser.add_argument("--gaps", type=int, default=20, help="how many gaps to list")
    parser.add_argument("--chrome", type=Path, help="write the profiler's own trace here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU, whose kernels this lists")
    lines: list[str] = []

    @contextmanager
    def profiled(_: mt.Engine) -> Iterator[None]:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            yield
            torch.cuda.synchronize()
        lines.extend(report(last_step(kernels_of(profiler)), args.kernels, args.gaps))
        if args.chrome is not None:
            profiler.export_chrome_trace(str(args.chrome))

    args.around, args.more, args.trainer = profiled, 3, True
    result = measure(args)
    print(f"{result['row']}: {result['seconds'][1]:.3f} s without the profiler, {result['tflops']:.0f} TFLOP/s")
    print("\n".join(lines))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
