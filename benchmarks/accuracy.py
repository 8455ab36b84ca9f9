"""Accuracy of the planner: each row is planned and run, and seconds, VRAM and RAM are compared with the plan.

    PYTHONPATH=src python -m benchmarks.accuracy --rows held,padded --resume rows.jsonl --budget 400
    PYTHONPATH=src python -m benchmarks.accuracy --rows disk --offload-dir /mnt/nvme/scratch --resume rows.jsonl
    PYTHONPATH=src python -m benchmarks.accuracy --shape qwen2.5-7b --max-vram-gb 48 [--compile] [--compression 8bit]

The first form runs the rows of the named groups, each in its own process. A finished row is appended to the file and
skipped by the next call with that file. A row that would exceed the budget (seconds) is left for the next call. The
last form runs one row. The machine is probed if there is no earlier probe, or with `--refresh`. VRAM is the peak that
PyTorch's allocator reserved plus what the driver reports beyond it (total - free - reserved, so nothing else may run on
the GPU). RAM is RssAnon + RssShmem in the steps, and its peak since the process began to build the model. TFLOP/s as in
`Plan.tflops`.

With `--offload-dir`, weights are drawn when the engine reads them, so that RAM never holds the model beside the state
of the engine. Bytes that moved are counted from the end of the second step; GB/s are these by the seconds of a step.
"Stalled" is the share of the steps' time in which compute waited for a lane of the disk. A row whose state does not fit
on the disk is refused before anything is built.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import megatrain as mt
from benchmarks.resumable import Task, add_options, dated, here, in_child, results
from benchmarks.row import WARM, measure, probed, row_name, row_parser
from benchmarks.shapes import config_of
from megatrain.hardware.machine import Disk, Machine
from megatrain.model.shapes import describe
from megatrain.planner import Refusal, plan

GROUPS: dict[str, list[list[str]]] = {
    # Speed targets: the Trainer's own plans, no cap, compiled.
    "held": [
        ["--shape", "qwen2.5-7b", "--micro", "4", "--compile", "--trainer"],
        ["--shape", "qwen2.5-7b", "--micro", "16", "--compile", "--trainer"],
        ["--shape", "qwen2.5-14b", "--batch", "2", "--micro", "16", "--compression", "8bit", "--compile", "--trainer"],
        ["--shape", "qwen2.5-14b", "--batch", "2", "--micro", "16", "--compile", "--trainer"],
    ],
    "padded": [
        ["--shape", "qwen2.5-1.5b", "--max-vram-gb", "24", "--padded", "--trainer"],
        ["--shape", "qwen2.5-7b", "--micro", "4", "--padded", "--compile", "--trainer"],
    ],
    "32b": [
        ["--shape", "qwen3-32b", "--batch", "1", "--length", "4096", "--micro", "8", "--compression", "4bit",
         "--compile", "--trainer", "--steps", "1"],
    ],
    # With state on disk: they need --offload-dir.
    "disk": [
        ["--shape", "qwen2.5-32b", "--batch", "1", "--micro", "8", "--compression", "8bit", "--compile", "--trainer"],
        ["--shape", "qwen2.5-7b", "--micro", "4", "--max-ram-gb", "60", "--max-vram-gb", "24", "--compile",
         "--trainer"],
        ["--shape", "qwen2.5-7b", "--micro", "4", "--max-ram-gb", "40", "--max-vram-gb", "24", "--compression", "8bit",
         "--compile", "--trainer"],
    ],
    "slow": [
        ["--shape", "qwen2.5-1.5b", "--batch", "8", "--micro", "1", "--trainer"],
        ["--shape", "qwen2.5-1.5b", "--batch", "8", "--micro", "1", "--compile", "--trainer"],
        ["--shape", "llama3-8b", "--batch", "1", "--length", "4096", "--micro", "8", "--trainer"],
    ],
    "published": [
        ["--shape", "qwen2.5-1.5b", "--max-vram-gb", "12"],
        ["--shape", "qwen2.5-1.5b"],
        ["--shape", "qwen2.5-3b", "--max-vram-gb", "24"],
        ["--shape", "qwen2.5-3b", "--max-vram-gb", "48"],
        ["--shape", "qwen2.5-14b"],
        ["--shape", "qwen2.5-7b", "--max-vram-gb", "80"],
        ["--shape", "qwen2.5-1.5b", "--max-vram-gb", "24"],
        ["--shape", "qwen2.5-3b", "--max-vram-gb", "12"],
        ["--shape", "qwen2.5-7b", "--max-vram-gb", "24"],
        ["--shape", "qwen2.5-7b", "--max-vram-gb", "12", "--micro", "1"],
        ["--shape", "qwen2.5-7b", "--max-vram-gb", "80", "--compile"],
    ],
    # Shapes with lengths to which no constant of the planner was fitted.
    "unseen": [
        ["--shape", "llama2-7b", "--micro", "2", "--length", "1024", "--max-vram-gb", "40", "--compile", "--trainer"],
        ["--shape", "qwen2.5-3b", "--batch", "1", "--length", "8192", "--micro", "4", "--max-vram-gb", "16",
         "--compile", "--trainer"],
        ["--shape", "qwen2.5-7b", "--batch", "2", "--length", "3072", "--micro", "4", "--max-vram-gb", "32",
         "--compile", "--trainer"],
        ["--shape", "gemma2-2b", "--batch", "8", "--length", "512", "--micro", "4", "--compile", "--trainer"],
        ["--shape", "llama3.2-1b", "--batch", "1", "--length", "16384", "--micro", "1", "--max-vram-gb", "16",
         "--compile", "--trainer"],
        ["--shape", "qwen2.5-14b", "--batch", "1", "--length", "6144", "--micro", "4", "--max-vram-gb", "60",
         "--compression", "8bit", "--compile", "--trainer"],
        ["--shape", "qwen3-30b-a3b", "--layers", "4", "--length", "1024", "--max-vram-gb", "24", "--compile",
         "--trainer"],
    ],
    # Other caps, lengths, widths and families.
    "others": [
        ["--shape", "qwen2.5-1.5b", "--max-vram-gb", "12", "--trainer"],
        ["--shape", "gpt2-xl", "--max-vram-gb", "12", "--batch", "8", "--length", "1024"],
        ["--shape", "qwen3-30b-a3b", "--layers", "6", "--max-vram-gb", "24"],
        ["--shape", "qwen2.5-1.5b", "--max-vram-gb", "24", "--batch", "1", "--length", "32768", "--micro", "1"],
        ["--shape", "qwen2.5-1.5b", "--max-vram-gb", "8", "--batch", "1", "--length", "128", "--micro", "1"],
        ["--shape", "llama3.2-1b", "--max-vram-gb", "24", "--dtype", "float32", "--batch", "2"],
        ["--shape", "gemma2-2b", "--max-vram-gb", "24", "--batch", "2"],
        ["--shape", "llama3.2-1b", "--max-vram-gb", "16", "--batch", "16", "--length", "512", "--micro", "8"],
        ["--shape", "qwen2.5-3b", "--max-vram-gb", "12", "--compression", "8bit"],
        ["--shape", "deepseek-v2-lite", "--layers", "6", "--max-vram-gb", "24"],
        ["--shape", "qwen2.5-3b", "--compile"],
        ["--shape", "qwen2.5-3b", "--trainer"],
        ["--shape", "qwen2.5-1.5b", "--max-vram-gb", "48"],
        ["--shape", "qwen2.5-3b", "--max-vram-gb", "80"],
        ["--shape", "qwen2.5-7b", "--max-vram-gb", "48"],
        ["--shape", "qwen2.5-7b"],
        ["--shape", "qwen2.5-14b", "--max-vram-gb", "80", "--compression", "8bit"],
    ],
}  # fmt: skip
STARTING, PER_PARAMETER, COMPILING = 25.0, 3e-9, 30.0
"""Seconds of a row besides its steps: process and engine, weights per parameter, and compiling."""
ESTIMATED = replace(
    Machine.load("h200-128gb"), disks=(Disk(path="estimated", free_bytes=1 << 60, read=4.0e9, write=2.4e9),)
)
"""The machine whose plans estimate how long a row takes."""


@contextmanager
def _traced(path: Path, engine: mt.Engine) -> Iterator[None]:
    with engine.trace() as timeline:
        yield
    timeline.save(path)


def main() -> None:
    parser = row_parser(__doc__)
    parser.add_argument("--rows", help=f"comma-separated groups of rows: {', '.join(GROUPS)}")
    add_options(parser)
    parser.add_argument("--trace", type=Path, help="with --trainer: write the timeline of one more step here")
    args = parser.parse_args()
    if args.trace is not None:
        args.around, args.more = partial(_traced, args.trace), 1
    if args.rows is None:
        print(json.dumps(measure(args) | here() | dated(args.commit)))
        return
    if unknown := set(args.rows.split(",")) - set(GROUPS):
        parser.error(f"unknown group {', '.join(sorted(unknown))}; groups are {', '.join(GROUPS)}")
    groups = args.rows.split(",")
    if "disk" in groups and not args.offload_dir:
        parser.error("rows of the group disk need --offload-dir, a directory on the drive to measure")
    rows = [(row, parser.parse_args(row)) for group in groups for row in GROUPS[group]]
    for _, options in rows:
        options.offload_dir = args.offload_dir
    run_rows(rows, args)


def run_rows(rows: list[tuple[list[str], argparse.Namespace]], args: argparse.Namespace) -> None:
    """Run the rows that are not in the file, within the time budget."""
    if args.refresh:
        # An earlier probe may be outdated; all rows use the same one.
        in_child(lambda: {"probed": probed(args).name})
    print(
        "| row | placement, policy, windows | seconds: plan, measured | TFLOP/s | VRAM GiB: plan, driver | "
        "RAM GiB: plan, measured | disk, GB per step: plan, written, read; GB/s; stalled; of the rating |\n"
        "|---|---|---|---|---|---|---|",
        flush=True,
    )
    words = {row_name(options): " ".join(row) for row, options in rows}
    tasks = [Task(row_name(options), expected(options), partial(measure, options)) for _, options in rows]
    for result in results(tasks, args):
        failed = f"| {result['row']} | failed: {result.get('failed')} ({words[result['row']]}) |"
        print(failed if "failed" in result else line(result), flush=True)


def expected(options: argparse.Namespace) -> float:
    """Estimated seconds of a row, from its plan for an H200 with one drive."""
    layers = {} if options.layers is None else {"num_hidden_layers": options.layers}
    shape = describe(config_of(options.shape, **layers))
    starting = STARTING + PER_PARAMETER * shape.parameters + (COMPILING if options.compile else 0)
    try:
        found = plan(
            shape,
            machine=ESTIMATED,
            batch=options.batch,
            length=options.length,
            accumulation=options.micro,
            padded=options.padded,
            compile=options.compile,
            precision="fp32" if options.dtype == "float32" else "bf16",
            optimizer_compression=options.compression or False,
            max_vram_gb=options.max_vram_gb,
            max_ram_gb=options.max_ram_gb,
            offload_dir=options.offload_dir and "estimated",
        )
    except Refusal:
        return starting  # this machine may be larger; on one like it, the row is refused at once
    return starting + found.step.seconds * (options.steps + WARM)


def line(found: dict[str, Any]) -> str:
    """A row of the table."""
    planned, measured, off = found["seconds"]
    ram = [f"{gib:.2f}" for gib in found["ram_gib"][:2]]
    ram += [f"peak {gib:.2f}" for gib in found["ram_gib"][2:]]
    return (
        f"| {found['row']} | {found['placement']}; {found['policy']}; {found['windows']} | {planned:.2f}, "
        f"{measured:.2f} ({off:+.1%}) | {found['tflops']:.0f} | {found['vram_gib'][0]:.2f}, "
        f"{found['vram_gib'][1]:.2f} (allocated {found['vram_gib'][2]:.2f}) | {', '.join(ram)} | {moved_of(found)} |"
    )


def moved_of(found: dict[str, Any]) -> str:
    """The cell of the disk."""
    disk = found["disk"]
    if not disk["planned"]:
        return ""
    sizes = (disk["planned_written"], disk["written"], disk["read"])
    return (
        f"{', '.join(f'{nbytes / 1e9:.2f}' for nbytes in sizes)}; {disk['gb_per_s']:.2f}; {disk['stall_share']:.0%}; "
        f"{disk['rating_share_per_day']:.1%} a day"
    )


if __name__ == "__main__":
    main()
