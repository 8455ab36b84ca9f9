"""Is the plan right? One row: plan, then run it, then compare seconds, VRAM as the driver reports it, and RAM.

    PYTHONPATH=src python -m benchmarks.accuracy --shape qwen2.5-7b --max-vram-gb 48 [--compile] [--compression 8bit]

The machine is probed first (if it has not been, or with `--refresh`). VRAM is what the driver reports beside PyTorch's
allocator (total minus free minus reserved, so nothing else may run there) and the most that this has reserved; RAM is
RssAnon + RssShmem. `--all` runs the rows of the published table, `--others` rows of other kinds, each in a process of
its own, and probes anew before the first.
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
from functools import partial
from itertools import pairwise
from typing import Any

# What is reserved stays close to what is allocated; read when CUDA is first used.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
# Asking whether there is a GPU must not start CUDA in a process that forks.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

import megatrain as mt
from benchmarks.shapes import SHAPES, random_model
from benchmarks.step import GIB, driver_vram, resident_ram

ROWS = [
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
]
"""The published table."""
OTHERS = [
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
]
"""Other caps, lengths, widths, families, and runs of `megatrain.Trainer`."""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    ram = {"started": resident_ram()}
    layers = {} if args.layers is None else {"num_hidden_layers": args.layers}
    model = random_model(args.shape, getattr(torch, args.dtype), **layers).train()
    machine = mt.probe(refresh=args.refresh)
    torch.cuda.empty_cache()
    ram["model"] = resident_ram()
    plan, engine, losses, seconds = (with_trainer if args.trainer else with_own_loop)(model, machine, args, ram)
    times = engine.step_times
    measured = sorted(seconds)[len(seconds) // 2]
    ram["end"] = resident_ram()
    # The most that the driver saw: what is outside PyTorch's allocator, and the most that this reserved.
    outside = driver_vram() - torch.cuda.memory_reserved() / GIB
    reserved = torch.cuda.max_memory_reserved() / GIB
    at_end = torch.cuda.memory_reserved() / GIB
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    result = {
        "row": _name(args),
        "tokens": plan.run.tokens,
        "resident": f"{len(plan.resident)} of {plan.blocks}",
        "policy": plan._policies(),
        "seconds": [plan.step.seconds, measured, measured / plan.step.seconds - 1],
        "vram_gib": [plan.total("vram") / GIB, outside + reserved, torch.cuda.max_memory_allocated() / GIB],
        "vram_detail": {"outside": outside, "reserved": reserved, "retries": retries, "at_end": at_end},
        "vram_planned": {role: round(nbytes / GIB, 3) for role, nbytes in plan.memory["vram"].items()},
        "ram_gib": [plan.total("ram") / GIB, max(ram["stepped"], ram["end"])],
        "ram_detail": ram,
        "ram_planned": {role: round(nbytes / GIB, 3) for role, nbytes in plan.memory["ram"].items()},
        "lanes_predicted": {"busy": plan.step.busy, "waited": plan.step.waited},
        "lanes_measured": {"busy": times.busy, "waited": times.waited} if times else None,
        "losses": losses,
        "all_seconds": seconds,
    }
    return result


def with_own_loop(
    model: PreTrainedModel, machine: mt.Machine, args: argparse.Namespace, ram: dict[str, float]
) -> tuple[mt.Plan, mt.Engine, list[float], list[float]]:
    """The plan, the engine, losses and seconds of steps that are written out here."""
    settings = {
        "compile": args.compile,
        "optimizer_compression": args.compression or False,
        "max_vram_gb": args.max_vram_gb,
        "max_ram_gb": args.max_ram_gb,
    }
    plan = mt.plan(model, machine=machine, batch=args.batch, length=args.length, accumulation=args.micro, **settings)
    print(plan.table(), file=sys.stderr, flush=True)
    engine = mt.Engine(model, plan=plan, **settings)
    ram["attached"] = resident_ram()
    optimizer = engine.optimizer(lr=1e-5, max_grad_norm=1.0)
    tokens = list(_rows(model, args, args.micro))

    def micro_batch(ids: torch.Tensor) -> torch.Tensor:
        ids = ids.to(engine.device)
        loss = model(input_ids=ids, labels=ids).loss / args.micro
        loss.backward()
        return loss.detach()

    def step() -> float:
        tasks = [partial(micro_batch, ids) for ids in tokens]
        if plan.window == 1:
            losses = [task() for task in tasks]
        else:
            losses = []
            for start in range(0, len(tasks), plan.window):
                losses += engine.window(tasks[start : start + plan.window], whole=plan.window >= len(tasks))
        optimizer.step()
        optimizer.zero_grad()
        return sum(loss.item() for loss in losses)

    losses, seconds = [step(), step()], []
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
    """The same of a run of `megatrain.Trainer`, which plans by itself with what the process can have."""
    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(time.perf_counter())
            if len(ends) == 2:
                ram["stepped"] = resident_ram()

    mt.init(
        machine=machine,
        max_vram_gb=args.max_vram_gb,
        max_ram_gb=args.max_ram_gb,
        optimizer_compression=args.compression or False,
    )
    steps = args.steps + 2
    rows = [{"input_ids": ids} for batch in _rows(model, args, args.micro * steps) for ids in batch]
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
                torch_compile=args.compile,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=rows,
            data_collator=_collated,
            callbacks=[Clock()],
        )
        plan = trainer.engine.settings.plan
        ram["attached"] = resident_ram()
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return plan, trainer.engine, losses, [after - before for before, after in pairwise(ends[1:])]


def _rows(model: PreTrainedModel, args: argparse.Namespace, count: int) -> Iterator[torch.Tensor]:
    """Micro-batches of random tokens."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randint(0, model.config.vocab_size, (args.batch, args.length), generator=generator)


def _collated(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids.clone()}


def _name(args: argparse.Namespace) -> str:
    """The row in words: the shape, the cap, and what is not as in most rows."""
    words = [args.shape if args.layers is None else f"{args.layers} layers of {args.shape}"]
    words.append(f"{args.max_vram_gb or 'no'} cap")
    words += [f"{args.batch} x {args.length} tokens"] if (args.batch, args.length) != (4, 2048) else []
    words += [args.dtype] if args.dtype != "bfloat16" else []
    words += [args.compression] if args.compression else []
    words += ["compiled"] if args.compile else []
    words += ["Trainer"] if args.trainer else []
    return ", ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="the rows of the published table")
    parser.add_argument("--others", action="store_true", help="rows of other caps, lengths, widths and families")
    parser.add_argument("--trainer", action="store_true", help="let megatrain.Trainer plan and train")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--micro", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--max-vram-gb", type=float)
    parser.add_argument("--max-ram-gb", type=float)
    parser.add_argument("--compression")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--refresh", action="store_true", help="measure the machine again")
    args = parser.parse_args()
    rows = (ROWS if args.all else []) + (OTHERS if args.others else [])
    if not rows:
        print(json.dumps(measure(args)))
        return
    for name in ("transformers.models.qwen2.modeling_qwen2", "megatrain.engine.session", "megatrain.engine.planning"):
        importlib.import_module(name)
    print("| row | resident, policy | seconds: plan, measured | VRAM GiB: plan, driver | RAM GiB: plan, measured |")
    print("|---|---|---|---|---|", flush=True)
    for number, row in enumerate(rows):
        # What an earlier probe found may be of another hour; all rows go by the same.
        row = [*row, "--refresh"] if number == 0 else row
        found = in_child(lambda row=row: measure(parser.parse_args(row)))  # type: ignore[misc]
        if found is None:
            print(f"| {' '.join(row)} | failed |", flush=True)
            continue
        planned, measured, off = found["seconds"]
        print(
            f"| {found['row']}, {found['tokens']} tokens | {found['resident']}, {found['policy']} | {planned:.2f}, "
            f"{measured:.2f} ({off:+.1%}) | {found['vram_gib'][0]:.2f}, {found['vram_gib'][1]:.2f} (allocated "
            f"{found['vram_gib'][2]:.2f}) | {found['ram_gib'][0]:.2f}, {found['ram_gib'][1]:.2f} |",
            flush=True,
        )
        print(f"  {json.dumps(found)}", file=sys.stderr, flush=True)


def in_child(work: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """In a process of its own, forked before CUDA is used: modules are loaded once for all rows. None if it failed."""
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
        # Without the exit handlers of the parent.
        sys.stderr.flush()
        os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as source:
        text = source.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if status == 0 else None


if __name__ == "__main__":
    main()
