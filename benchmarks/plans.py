"""Plans of models from 7B to 120B on the shipped machines, as Markdown. Downloads and runs nothing.

PYTHONPATH=src python -m benchmarks.plans > docs/plans.md
PYTHONPATH=src python -m benchmarks.plans --seconds     how long plans and refusals of 100 layers take
"""

from __future__ import annotations

import sys
import time
from typing import Any

from transformers import AutoConfig

from benchmarks.shapes import SHAPES
from megatrain.geometry import GIB
from megatrain.hardware.machine import Machine
from megatrain.model.shapes import ModelShape, describe
from megatrain.planner import Plan, Refusal, Run, plan
from megatrain.planner.api import dense_shape, largest_batch, largest_context, largest_model

LLAMA = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072, "num_key_value_heads": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "7B (Qwen2.5-7B)": dict(SHAPES["qwen2.5-7b"]),
    "14B (Qwen2.5-14B)": dict(SHAPES["qwen2.5-14b"]),
    "32B (Qwen2.5-32B)": dict(SHAPES["qwen2.5-32b"]),
    "70B (Llama-3-70B)": LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                                  "num_attention_heads": 64},
    "100B (dense)": LLAMA | {"hidden_size": 12288, "intermediate_size": 32768, "num_hidden_layers": 63,
                             "num_attention_heads": 96},
    "120B MoE (gpt-oss-120b)": {"model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
                                "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
                                "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
                                "num_experts_per_tok": 4},
}  # fmt: skip
TABLES = [
    ("FP32 states, in RAM", {}),
    ("8-bit states (lossy), in RAM", {"optimizer_compression": "8bit"}),
    ("FP32 states, on one NVMe drive where RAM is short", {"offload_dir": "/mnt/nvme"}),
]
RUN: dict[str, Any] = {"batch": 4, "length": 2048, "accumulation": 16, "compile": True}
HEAD = """# Example plans

After this page you know what the planner predicts for models of 7B to 120B parameters on six machines.

`PYTHONPATH=src python -m benchmarks.plans > docs/plans.md` writes this page from configs and machine descriptions.
These are predictions. Only the H200 with 128 GB has been measured ([accuracy of the
planner](performance.md#accuracy-of-the-planner)). The other machines are specifications times the efficiency seen there
(`src/megatrain/hardware/machines`).

| assumed | value |
|---|---|
| precision | BF16 with an exact FP32 master |
| optimizer | AdamW with clipping |
| layers | compiled |
| step | 16 micro-batches of 4 × 2048 tokens (131,072), full sequences without masks, unless stated |
| usable memory | {usable:.0%} of VRAM and RAM |
| disk | reads 3.7 GB/s, writes 2.1 GB/s |
| experts | two thirds of the rate of dense products, as one layer of Qwen3-30B-A3B on the H200 |

A cell is: tokens per second (TFLOP/s) · bottleneck · GiB of VRAM / RAM (/ disk) · blocks resident in VRAM + blocks with
held weights, size of the first window.
"""


def shape_of(name: str) -> ModelShape:
    fields = CONFIGS[name]
    config = AutoConfig.for_model(fields["model_type"], **{k: v for k, v in fields.items() if k != "model_type"})
    config.name_or_path = name
    return describe(config)


def cell(shape: ModelShape, machine: str, **settings: Any) -> str:
    """One plan in a line, or its shortfall."""
    try:
        found = plan(shape, machine=machine, **{**RUN, **settings})
    except Refusal as refused:
        return f"{refused.tier} short by {refused.shortfall_gb:.0f} GiB"
    sizes = [f"{found.total(tier) / GIB:.0f}" for tier in ("vram", "ram", "disk") if found.total(tier)]
    placed = f"{len(found.resident)} + {len(found.held_weights)} of {found.blocks}, {found.window}"
    speed = f"{found.tokens_per_second:,.0f} ({found.tflops:.0f})"
    bound = "disk" if found.step.bottleneck.startswith("disk") else found.step.bottleneck
    return f"{speed} · {bound} · {' / '.join(sizes)} · {placed}"


def table(shapes: dict[str, ModelShape], settings: dict[str, Any]) -> list[str]:
    machines = Machine.shipped()
    lines = [f"| | {' | '.join(machines)} |", f"|---|{'---|' * len(machines)}"]
    for name, shape in shapes.items():
        cells = [cell(shape, machine, **settings) for machine in machines]
        lines.append(f"| **{name}** | {' | '.join(cells)} |")
    return lines


def explained(found: Plan, tokens: float = 1e9) -> list[str]:
    return ["```text", found.table(tokens), "```"]


def hundred(shape: ModelShape) -> list[str]:
    """A model loaded in FP32 under a cap, and the same model in BF16."""
    limits: dict[str, Any] = {"machine": "h200-1.5tb", "max_vram_gb": 80, "batch": 1, "accumulation": 128}
    offloaded: dict[str, Any] = {**limits, "optimizer_compression": True, "offload_dir": "/mnt/nvme/cache"}
    lines = ["## 100B parameters under `max_vram_gb=80`", "", "In FP32, with 4-bit states and `offload_dir`:", ""]
    lines += explained(plan(shape, **offloaded, precision="fp32"))
    lines += ["", "The same with `bf16=True`: BF16 compute, with the exact FP32 master:", ""]
    lines += explained(plan(shape, **offloaded, precision="bf16"))
    lines += ["", "With FP32 states, compiled, 16 micro-batches of 2 × 2048 tokens, nothing lossy:", ""]
    lines += explained(plan(shape, **{**limits, "batch": 2, "accumulation": 16, "compile": True}))
    lines += ["", "The refusal on a machine that is too small:", "", "```text"]
    try:
        plan(shape, **{**limits, "machine": "h100-512gb", "accumulation": 16})
    except Refusal as refused:
        lines.append(str(refused).replace("; ", ";\n"))
    return [*lines, "```"]


def inverse(shape: ModelShape) -> list[str]:
    """The largest batch, context and model of each machine."""
    lines = [
        "## How large can it be?",
        "",
        "The largest micro-batch of 2048 tokens and the longest sequence for the 7B model, and the largest dense model",
        "with a batch of 1 × 2048, with FP32 and with 8-bit states. Compiled, without a disk. `mt.largest_batch(model,",
        "machine=...)`, `mt.largest_context` and `mt.largest_model(machine=...)` answer these: they take what",
        "`mt.plan` takes, and return `.value` and the `.plan` for it.",
        "",
        "| machine | 7B: batch | 7B: context | largest model | with 8-bit states |",
        "|---|---|---|---|---|",
    ]
    for name in Machine.shipped():
        machine, run = Machine.load(name), Run(compile=True)
        cells = []
        for ask in (largest_batch, largest_context):
            try:
                cells.append(f"{ask(shape, machine, run).value:,}")
            except Refusal as refused:
                cells.append(f"{refused.tier} short by {refused.shortfall_gb:.0f}")
        for compression in (False, "8bit"):
            kept = Run(compile=True, optimizer_compression=compression)
            cells.append(f"{largest_model(machine, kept).value / 1e9:.1f}B")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def seconds() -> None:
    """Plans and refusals of 100 layers, by CPU time of this thread."""
    shape = dense_shape(64, 100)
    large = {"batch": 64, "length": 32768, "accumulation": 192, "evaluation": 131072}
    for machine, options in (
        ("h200-1.5tb", {"batch": 2}),
        ("h200-1.5tb", {"batch": 2, "accumulation": 128}),
        ("h100-512gb", {"batch": 2, "offload_dir": "/disk"}),
        ("gh200", large),
        ("gh200", {**large, "max_vram_gb": 3, "max_ram_gb": 3}),
    ):
        began = time.thread_time()
        answer = "planned" if "short" not in cell(shape, machine, **options) else "refused"
        print(f"{time.thread_time() - began:.2f} s  {answer} on {machine}  {options}")


def main() -> None:
    from megatrain.planner.search import USABLE_SHARE

    if "--seconds" in sys.argv:
        return seconds()
    shapes = {name: shape_of(name) for name in CONFIGS}
    lines = [HEAD.format(usable=USABLE_SHARE)]
    for title, settings in TABLES:
        lines += [f"## {title}", "", *table(shapes, settings), ""]
    lines += [*hundred(shapes["100B (dense)"]), "", *inverse(shapes["7B (Qwen2.5-7B)"])]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
