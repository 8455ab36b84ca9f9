"""Accuracy of the planner: each row is planned and run, and seconds, VRAM and RAM are compared with the plan.

    PYTHONPATH=src python -m benchmarks.accuracy --rows held,padded --resume rows.jsonl --budget 400
    PYTHONPATH=src python -m benchmarks.accuracy --shape qwen2.5-7b --max-vram-gb 48 [--compile] [--compression 8bit]

The first form runs the rows of the named groups, each in its own process. A finished row is appended to the file and
skipped by the next call with that file. A row that would exceed the budget (seconds) is left for the next call. The
second form runs one row. The machine is probed if there is no earlier probe, or with `--refresh`. VRAM is the peak that
PyTorch's allocator reserved plus what the driver reports beyond it (total - free - reserved, so nothing else may run on
the GPU). RAM is RssAnon + RssShmem. TFLOP/s as in `Plan.tflops`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

# Keeps reserved memory close to allocated memory; read when CUDA is first used.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
# Checking for a GPU must not initialise CUDA in a process that forks.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

import megatrain as mt
from benchmarks.shapes import SHAPES, config_of, random_model
from benchmarks.step import GIB, now, resident_ram, seconds_between, vram_outside
from megatrain.model.shapes import describe

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
WARM = 3
"""Untimed steps: after the second, the engine waits for its lanes once, so the third starts with all updates done."""
STARTING, PER_PARAMETER, COMPILING = 25.0, 3e-9, 30.0
"""Seconds of a row besides its steps: process and engine, weights per parameter, and compiling."""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    ram = {"started": resident_ram()}
    layers = {} if args.layers is None else {"num_hidden_layers": args.layers}
    model = random_model(args.shape, getattr(torch, args.dtype), **layers).train()
    blocks = {block.name for block in describe(model).blocks if block.kind == "layer"}
    machine = mt.probe(refresh=args.refresh, offload_dir=args.offload_dir)
    torch.cuda.empty_cache()
    ram["model"] = resident_ram()
    plan, engine, losses, seconds = (with_trainer if args.trainer else with_own_loop)(model, machine, args, ram)
    times = engine.step_times
    measured = sorted(seconds)[len(seconds) // 2]
    ram["end"] = resident_ram()
    # Peak VRAM: what is outside PyTorch's allocator, plus its peak reservation.
    outside = vram_outside()
    reserved = torch.cuda.max_memory_reserved() / GIB
    at_end = torch.cuda.memory_reserved() / GIB
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    result = {
        "row": _name(args),
        "tokens": plan.run.tokens,
        "tflops": 6 * plan.matmul_parameters * plan.run.tokens / measured / 1e12,
        "placement": plan.placement,
        "policy": plan.policies,
        "windows": plan.windows,
        "decision": decision_of(plan, blocks),
        "seconds": [plan.step.seconds, measured, measured / plan.step.seconds - 1],
        "vram_gib": [plan.total("vram") / GIB, outside + reserved, torch.cuda.max_memory_allocated() / GIB],
        "vram_detail": {"outside": outside, "reserved": reserved, "retries": retries, "at_end": at_end},
        "vram_planned": {role: round(nbytes / GIB, 3) for role, nbytes in plan.memory["vram"].items()},
        "ram_gib": [plan.total("ram") / GIB, max(ram["stepped"], ram["end"])],
        "ram_detail": ram,
        "ram_planned": {role: round(nbytes / GIB, 3) for role, nbytes in plan.memory["ram"].items()},
        "lanes_predicted": {"busy": plan.step.busy, "waited": plan.step.waited},
        "lanes_measured": {"busy": times.busy, "waited": times.waited} if times else None,
        "disk": {
            "planned": plan.total("disk"),
            "blocks": len(plan.on_disk),
            "read": engine.counters.bytes_disk_in / max(1, engine.counters.steps),
            "written": engine.counters.bytes_disk_out / max(1, engine.counters.steps),
        },
        "losses": losses,
        "all_seconds": seconds,
    }
    return result


def decision_of(plan: mt.Plan, layers: set[str]) -> dict[str, Any]:
    """What the planner decided, as `tests/unit/planner/accuracy.json` keeps it."""
    resident, held, summed = (
        len(layers.intersection(names)) for names in (plan.resident, plan.held_weights, plan.held_gradients)
    )
    streamed = len(plan.streamed_states)
    others = 2 if set(plan.resident) - layers else int(bool(set(plan.held_weights) - layers))
    stored = sum(policy == "store" for policy in plan.policy.values())
    return {
        "other_blocks": others, "resident_layers": resident, "held_weights": resident + held,
        "held_gradients": resident + summed, "gpu_updates": resident + streamed if streamed else 0,
        "disk_blocks": len(plan.on_disk), "disk_weights": len(set(plan.weights_on_disk) & set(plan.on_disk)),
        "disk_frozen": len(set(plan.weights_on_disk) - set(plan.on_disk)),
        "stored_graphs": stored, "offload_inputs": plan.policy["*"] == "offload", "first_window": plan.windows[0],
        "window": plan.windows[:2][-1], "slots": plan.slots, "grad_slots": plan.grad_slots,
    }  # fmt: skip


def with_own_loop(
    model: PreTrainedModel, machine: mt.Machine, args: argparse.Namespace, ram: dict[str, float]
) -> tuple[mt.Plan, mt.Engine, list[float], list[float]]:
    """The plan, the engine, losses and seconds of steps of a training loop."""
    settings = {
        "compile": args.compile,
        "optimizer_compression": args.compression or False,
        "max_vram_gb": args.max_vram_gb,
        "max_ram_gb": args.max_ram_gb,
        "offload_dir": args.offload_dir,
    }
    run = {"batch": args.batch, "length": args.length, "accumulation": args.micro, "padded": args.padded}
    plan = mt.plan(model, machine=machine, **run, **settings)
    print(plan.table(), file=sys.stderr, flush=True)
    engine = mt.Engine(model, plan=plan, **settings)
    ram["attached"] = resident_ram()
    optimizer = engine.optimizer(lr=1e-5, max_grad_norm=1.0)
    inputs = [collated(rows) for rows in batches(model, args, args.micro)]

    def micro_batch(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = model(**{name: values.to(engine.device) for name, values in batch.items()}).loss / args.micro
        loss.backward()
        return loss.detach()

    def step() -> float:
        tasks = [partial(micro_batch, batch) for batch in inputs]
        losses: list[torch.Tensor] = []
        for size in plan.windows:
            losses += engine.window(tasks[len(losses) : len(losses) + size], full_step=size == len(tasks))
        optimizer.step()
        optimizer.zero_grad()
        return sum(loss.item() for loss in losses)

    losses, seconds = [step() for _ in range(WARM)], []
    ram["stepped"] = resident_ram()
    for _ in range(args.steps):
        began = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - began)
    engine.synchronize()
    return plan, engine, losses, seconds


def with_trainer(
    model: PreTrainedModel, machine: mt.Machine, args: argparse.Namespace, ram: dict[str, float]
) -> tuple[mt.Plan, mt.Engine, list[float], list[float]]:
    """The same for `megatrain.Trainer`, which makes its own plan. `args.more` steps follow, inside `args.around`."""
    ends: list[Any] = []
    around = ExitStack()

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(now())  # the host may be steps ahead of the GPU
            if len(ends) == 2:
                ram["stepped"] = resident_ram()
            if len(ends) == args.steps + WARM + args.more:
                around.close()
            if args.around is not None and len(ends) == args.steps + WARM:
                around.enter_context(args.around(trainer.engine))

    mt.init(
        machine=machine,
        max_vram_gb=args.max_vram_gb,
        max_ram_gb=args.max_ram_gb,
        offload_dir=args.offload_dir,
        optimizer_compression=args.compression or False,
        length=args.length,
        compile=args.compile,
    )
    steps = args.steps + WARM + args.more
    rows = [row for batch in batches(model, args, args.micro * steps) for row in batch]
    with tempfile.TemporaryDirectory() as directory:
        trainer = mt.Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=directory,
                per_device_train_batch_size=args.batch,
                gradient_accumulation_steps=args.micro,
                max_steps=steps,
                learning_rate=1e-5,
                bf16=args.dtype == "bfloat16",
                use_cpu=not torch.cuda.is_available(),
                logging_steps=steps,  # a step that is logged waits for its loss
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=rows,
            data_collator=collated,
            callbacks=[Clock()],
        )
        plan = trainer.engine.settings.plan
        ram["attached"] = resident_ram()
        trainer.train()
    del ends[args.steps + WARM :]
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return plan, trainer.engine, losses, seconds_between(ends[WARM - 1 :])


def batches(model: PreTrainedModel, args: argparse.Namespace, count: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Micro-batches of rows of random tokens; with `--padded` every second row is three quarters as long."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        ids = torch.randint(0, model.config.vocab_size, (args.batch, args.length), generator=generator)
        short = 3 * args.length // 4 if args.padded else args.length
        yield [{"input_ids": row[: short if number % 2 else args.length]} for number, row in enumerate(ids)]


def collated(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    tokens = [row["input_ids"] for row in rows]
    batch = {name: pad_sequence(tokens, True, value) for name, value in (("input_ids", 0), ("labels", -100))}
    if any(len(row) < batch["input_ids"].shape[1] for row in tokens):
        batch["attention_mask"] = (batch["labels"] != -100).long()
    return batch


def _name(args: argparse.Namespace) -> str:
    """The row in words: shape, cap, and non-default options."""
    words = [args.shape if args.layers is None else f"{args.layers} layers of {args.shape}"]
    words.append(f"{args.max_vram_gb or 'no'} cap")
    words.append(f"{args.micro} of {args.batch} x {args.length} tokens")
    words += [f"{args.max_ram_gb:g} GiB of RAM and disk"] if args.offload_dir and args.max_ram_gb else []
    words += [args.dtype] if args.dtype != "bfloat16" else []
    words += [args.compression] if args.compression else []
    words += ["padded"] if args.padded else []
    words += ["compiled"] if args.compile else []
    words += ["Trainer"] if args.trainer else []
    return ", ".join(words)


@contextmanager
def _traced(path: Path, engine: mt.Engine) -> Iterator[None]:
    with engine.trace() as timeline:
        yield
    timeline.save(path)


def row_parser(description: str | None) -> argparse.ArgumentParser:
    """Options that describe one row."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", action="store_true", help="let megatrain.Trainer plan and train")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--micro", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help=f"timed steps, after {WARM} untimed ones")
    parser.add_argument("--padded", action="store_true", help="rows differ in length")
    parser.add_argument("--max-vram-gb", type=float)
    parser.add_argument("--max-ram-gb", type=float)
    parser.add_argument("--offload-dir", nargs="*", help="directories for states that do not fit in RAM")
    parser.add_argument("--compression")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--refresh", action="store_true", help="probe the machine again")
    parser.set_defaults(around=None, more=0)
    return parser


def main() -> None:
    parser = row_parser(__doc__)
    parser.add_argument("--rows", help=f"comma-separated groups of rows: {', '.join(GROUPS)}")
    parser.add_argument("--resume", type=Path, help="append finished rows to this file, and skip rows that are in it")
    parser.add_argument("--budget", type=float, default=float("inf"), help="total seconds")
    parser.add_argument("--trace", type=Path, help="with --trainer: write the timeline of one more step here")
    args = parser.parse_args()
    if args.trace is not None:
        args.around, args.more = partial(_traced, args.trace), 1
    if args.rows is None:
        print(json.dumps(measure(args)))
        return
    if unknown := set(args.rows.split(",")) - set(GROUPS):
        parser.error(f"unknown group {', '.join(sorted(unknown))}; groups are {', '.join(GROUPS)}")
    run_rows([(row, parser.parse_args(row)) for group in args.rows.split(",") for row in GROUPS[group]], args)


def run_rows(rows: list[tuple[list[str], argparse.Namespace]], args: argparse.Namespace) -> None:
    """Run the rows that are not in the file, within the time budget."""
    began = time.perf_counter()
    for name in ("transformers.models.qwen2.modeling_qwen2", "megatrain.engine.session", "megatrain.engine.planning"):
        importlib.import_module(name)
    done = {}
    if args.resume is not None and args.resume.exists():
        done = {result["row"]: result for result in map(json.loads, args.resume.read_text().splitlines())}
    print(
        "| row | placement, policy, windows | seconds: plan, measured | TFLOP/s | VRAM GiB: plan, driver | "
        "RAM GiB: plan, measured |\n|---|---|---|---|---|---|",
        flush=True,
    )
    remaining: list[str] = []
    refresh = args.refresh
    for row, options in rows:
        name = _name(options)
        result = done.get(name)
        if result is None:
            started = time.perf_counter()
            if started - began + expected(options) > args.budget:
                remaining.append(name)
                continue
            # An earlier probe may be outdated; all rows use the same one.
            options.refresh, refresh = refresh, False
            result = in_child(lambda options=options: measure(options))  # type: ignore[misc]
            if result is None:
                print(f"| {name} | failed: {' '.join(row)} |", flush=True)
                continue
            result["wall_s"] = round(time.perf_counter() - started, 1)
            if args.resume is not None:
                with args.resume.open("a") as file:
                    print(json.dumps(result), file=file, flush=True)
        print(line(result), flush=True)
    if remaining:
        print(f"\nLeft for the next call: {'; '.join(remaining)}.")


def expected(options: argparse.Namespace) -> float:
    """Estimated seconds of a row, at 300 TFLOP/s; most rows take less."""
    layers = {} if options.layers is None else {"num_hidden_layers": options.layers}
    shape = describe(config_of(options.shape, **layers))
    tokens = options.batch * options.length * options.micro * (options.steps + WARM)
    steps = 6 * shape.matmul_parameters * tokens / (3e14 if options.dtype == "bfloat16" else 3e13)
    return STARTING + PER_PARAMETER * shape.parameters + steps + (COMPILING if options.compile else 0)


def line(found: dict[str, Any]) -> str:
    """A row of the table."""
    planned, measured, off = found["seconds"]
    return (
        f"| {found['row']} | {found['placement']}; {found['policy']}; {found['windows']} | {planned:.2f}, "
        f"{measured:.2f} ({off:+.1%}) | {found['tflops']:.0f} | {found['vram_gib'][0]:.2f}, "
        f"{found['vram_gib'][1]:.2f} (allocated {found['vram_gib'][2]:.2f}) | {found['ram_gib'][0]:.2f}, "
        f"{found['ram_gib'][1]:.2f} |"
    )


def in_child(work: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """Run in a process forked before CUDA is used, so that modules are loaded once. None if it failed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "w") as out:
                json.dump(work(), out)
            code = 0
        except BaseException:
            traceback.print_exc()
        # Skip the parent's exit handlers.
        sys.stderr.flush()
        os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as source:
        text = source.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if status == 0 else None


if __name__ == "__main__":
    main()
