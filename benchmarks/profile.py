"""Where the milliseconds of a Trainer's step go on the GPU: kernels by kind, and the gaps between them.

    PYTHONPATH=src python -m benchmarks.profile --shape qwen2.5-7b --micro 4 --compile [--kernels 20] [--gaps 20]

Runs a row of `benchmarks.accuracy` through `megatrain.Trainer`, then three more steps under PyTorch's profiler, which
records what the GPU does. The table is of the time from the end of the second of them to that of the third: starting
the profiler holds up the host. A step ends where compute has finished its backward; a small kernel marks that. Its
rows are kinds of kernels; together with "idle" they are the whole step. Time in which kernels overlap counts for the
one that started first. A gap is a stretch in which no kernel ran (copies may have), with the kernels before and after
it: gaps of a few microseconds are launches, longer ones are waits for the host, for a copy or for an update.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import megatrain as mt
from benchmarks.row import measure, row_parser

MARK = "marks of this program"
KINDS = (
    (MARK, r"nextafter"),
    ("copies", r"^Mem(cpy|set)"),
    ("attention", r"flash|fmha|cudnn.*(sdpa|attention|mha)|sdpa|attention"),
    ("matrix products", r"gemm|nvjet|cutlass|xmma|cublas|splitK"),
    ("update of states", r"^_kernel$"),
    ("loss", r"^_(losses|gradient)$|softmax|nll_loss"),
    ("norm of gradients", r"^_(chunks|tree)"),
    ("sums of gradients", r"^_add$"),
    ("fused (Inductor)", r"^triton_"),
    ("other PyTorch kernels", r""),
)
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


@contextmanager
def last_step(engine: mt.Engine, found: list[Kernel], chrome: Path | None = None) -> Iterator[None]:
    """Profile the steps inside. Adds what the GPU did in the last one to `found`; on a CPU, PyTorch's operations."""
    on_gpu = engine.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        with marked(engine):
            yield
        if on_gpu:
            torch.cuda.synchronize()
    found += between_marks(kernels_of(profiler, on_gpu))
    if chrome is not None:
        profiler.export_chrome_trace(str(chrome))


@contextmanager
def marked(engine: mt.Engine) -> Iterator[None]:
    """Launch a kernel that nothing else uses at the end of each step, wherever its gradients are."""
    step, submit, value = engine._step, engine._step.step, torch.zeros(1, device=engine.device)

    def mark(*args: Any) -> Any:
        outcome = submit(*args)
        torch.nextafter(value, value)
        return outcome

    step.step = mark  # type: ignore[method-assign]
    try:
        yield
    finally:
        step.step = submit  # type: ignore[method-assign]


def kernels_of(profiled: profile, on_gpu: bool) -> list[Kernel]:
    """What ran, in the order in which it started."""
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    device = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    found = [
        Kernel(event.name(), event.device_resource_id(), event.start_ns() / 1e3, event.end_ns() / 1e3)
        for event in profiled.profiler.kineto_results.events()
        if event.device_type() == device and event.duration_ns() > 0
    ]
    return sorted(found, key=lambda kernel: kernel.start)


def between_marks(kernels: list[Kernel]) -> list[Kernel]:
    """From the last mark but one to the last, with both."""
    begin, end = [number for number, kernel in enumerate(kernels) if kernel.kind == MARK][-2:]
    return kernels[begin : end + 1]


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
    kernels: list[Kernel] = []
    args.around, args.more, args.trainer = partial(last_step, found=kernels, chrome=args.chrome), 3, True
    result = measure(args)
    print(f"{result['row']}: {result['seconds'][1]:.3f} s without the profiler, {result['tflops']:.0f} TFLOP/s")
    print("\n".join(report(kernels, args.kernels, args.gaps)))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
