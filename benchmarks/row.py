"""Plans and runs one row of `benchmarks.accuracy`: a model, a batch, caps. Others train their rows with it too."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

# Keeps reserved memory close to allocated memory; read when CUDA is first used.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

import megatrain as mt
from benchmarks.shapes import SHAPES, random_model
from benchmarks.step import GIB, now, resident_ram, seconds_between, vram_outside
from benchmarks.traffic import Moved, Traffic, sampled_peak
from megatrain.model.shapes import describe

COUNTED, WARM = 2, 3
"""Steps after which transfers are counted, and untimed steps: after the second, the engine waits for its lanes once, so
the third starts with all updates done."""
Measured = tuple[mt.Plan, mt.Engine, list[float], list[float], Moved]
"""The plan, the engine, losses, seconds of the timed steps, and what moved to and from disk."""


def measure(args: argparse.Namespace, machine: mt.Machine | None = None) -> dict[str, Any]:
    """Run one row. The machine is probed unless it is given."""
    ram = {"started": resident_ram()}
    machine = machine or probed(args)
    layers = {} if args.layers is None else {"num_hidden_layers": args.layers}
    with sampled_peak(ram):
        dtype, lazy = getattr(torch, args.dtype), bool(args.offload_dir)
        model = random_model(args.shape, dtype, lazy=lazy, **layers).train()
        blocks = {block.name for block in describe(model).blocks if block.kind == "layer"}
        torch.cuda.empty_cache()
        ram["model"] = resident_ram()
        run = with_trainer if args.trainer else with_own_loop
        plan, engine, losses, seconds, moved = run(model, machine, args, ram)
    times = engine.step_times
    measured = sorted(seconds)[len(seconds) // 2]
    ram["end"] = resident_ram()
    # Peak VRAM: what is outside PyTorch's allocator, plus its peak reservation.
    cuda = torch.cuda.is_available()
    outside = vram_outside() if cuda else 0.0
    reserved = torch.cuda.max_memory_reserved() / GIB
    at_end = torch.cuda.memory_reserved() / GIB
    retries = torch.cuda.memory_stats()["num_alloc_retries"] if cuda else 0
    return {
        "row": row_name(args),
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
        "ram_gib": [plan.total("ram") / GIB, max(ram["stepped"], ram["end"]), ram["peak"]],
        "ram_detail": ram,
        "ram_planned": {role: round(nbytes / GIB, 3) for role, nbytes in plan.memory["ram"].items()},
        "lanes_predicted": {"busy": plan.step.busy, "waited": plan.step.waited},
        "lanes_measured": {"busy": times.busy, "waited": times.waited} if times else None,
        "disk": disk_of(plan, engine, moved, measured),
        "losses": losses,
        "all_seconds": seconds,
    }


def probed(args: argparse.Namespace) -> mt.Machine:
    """This machine, with the drives of `offload_dir`."""
    for folder in args.offload_dir or ():
        Path(folder).mkdir(parents=True, exist_ok=True)
    return mt.probe(refresh=args.refresh, offload_dir=args.offload_dir)


def disk_of(plan: mt.Plan, engine: mt.Engine, moved: Moved, seconds: float) -> dict[str, Any]:
    """Bytes on disk and per step, how fast they moved in steps of so many seconds, and what they cost."""
    read, written = moved.read / moved.steps, moved.written / moved.steps
    rating = engine.drive.rating
    return {
        "planned": plan.total("disk"),
        "blocks": len(plan.on_disk),
        "planned_written": plan.written,
        "read": read,
        "written": written,
        "gb_per_s": (read + written) / seconds / 1e9,
        "waited": moved.waited,
        "stall_share": moved.stall_share,
        "rating_tb": rating / 1e12,
        "rating_share_per_day": written * 86400 / seconds / rating if rating else 0.0,
    }


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
) -> Measured:
    """A training loop with a plan."""
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

    losses, seconds = [step() for _ in range(COUNTED)], []
    traffic = Traffic(engine)
    losses += [step() for _ in range(WARM - COUNTED)]
    ram["stepped"] = resident_ram()
    for _ in range(args.steps):
        began = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - began)
    return plan, engine, losses, seconds, traffic.end()


def with_trainer(
    model: PreTrainedModel, machine: mt.Machine, args: argparse.Namespace, ram: dict[str, float]
) -> Measured:
    """The same for `megatrain.Trainer`, which makes its own plan. `args.more` steps follow, inside `args.around`."""
    ends: list[Any] = []
    traffic: list[Traffic] = []
    around = ExitStack()

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(now())  # the host may be steps ahead of the GPU
            if len(ends) == COUNTED:
                ram["stepped"] = resident_ram()
                traffic.append(Traffic(trainer.engine))
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
    return plan, trainer.engine, losses, seconds_between(ends[WARM - 1 :]), traffic[0].end()


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


def row_name(args: argparse.Namespace) -> str:
    """The row in words: shape, cap, and non-default options."""
    words = [args.shape if args.layers is None else f"{args.layers} layers of {args.shape}"]
    words.append(f"{args.max_vram_gb or 'no'} cap")
    words.append(f"{args.micro} of {args.batch} x {args.length} tokens")
    words += [f"{args.max_ram_gb:g} GiB of RAM"] if args.max_ram_gb else []
    words += ["disk"] if args.offload_dir else []
    words += [args.dtype] if args.dtype != "bfloat16" else []
    words += [args.compression] if args.compression else []
    words += ["padded"] if args.padded else []
    words += ["compiled"] if args.compile else []
    words += ["Trainer"] if args.trainer else []
    return ", ".join(words)


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
    parser.add_argument("--offload-dir", nargs="+", help="directories for state that does not fit in RAM")
    parser.add_argument("--compression")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--refresh", action="store_true", help="probe the machine again")
    parser.set_defaults(around=None, more=0)
    return parser
