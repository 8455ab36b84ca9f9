"""The table of the README: the largest model that each card and amount of RAM can train. Nothing is run or downloaded.

    PYTHONPATH=src python -m benchmarks.fit

Only memory decides what fits, so one machine description serves every row, with its GPU memory and RAM replaced.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from transformers import AutoConfig

from benchmarks.shapes import SHAPES
from megatrain.errors import NotEnoughMemory
from megatrain.hardware.machine import Machine
from megatrain.planner import Plan, Refusal, largest_model, plan

CARDS = (16, 24, 48, 80, 141)
RAM = (32, 64, 128, 256, 512)
BASE = "rtx4090-64gb"
NOMINAL = 24, 64
"""GB of the card and of the RAM of `BASE`, as they are sold. A system has 1 to 3% less than that to give, and the other
machines are assumed to have the same share."""
MOMENTS = (False, "8bit")
MICRO_BATCHES = 16
LLAMA = {"model_type": "llama", "max_position_embeddings": 4096}
MODELS: dict[str, dict[str, Any]] = {
    "7B": SHAPES["qwen2.5-7b"],
    "13B": LLAMA | {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "vocab_size": 32000,
                    "num_attention_heads": 40, "num_key_value_heads": 40},
    "32B": SHAPES["qwen2.5-14b"] | {"intermediate_size": 27648, "num_hidden_layers": 64},
    "70B": LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256,
                    "num_attention_heads": 64, "num_key_value_heads": 8},
}  # fmt: skip
QUESTIONS = (("7B", 24, 64), ("13B", 24, 64), ("13B", 24, 128), ("32B", 80, 256), ("70B", 80, 512))
CHOICES = [
    *[{"accumulation": MICRO_BATCHES, "optimizer_compression": width} for width in (False, "8bit", "4bit")],
    *[{"accumulation": 1, "optimizer_compression": width} for width in (False, "8bit", "4bit")],
    *[
        {"accumulation": micro_batches, "precision": "bf16-sr", "optimizer_compression": width}
        for micro_batches in (MICRO_BATCHES, 1)
        for width in ("8bit", "4bit")
    ],
]
"""Settings in the order in which they are tried: those that lose least come first."""
DRIVE: dict[str, Any] = {"accumulation": MICRO_BATCHES, "optimizer_compression": "8bit", "offload_dir": "/mnt/nvme"}
"""Settings of a run with state on a drive."""


def machine(card: int, ram: int) -> Machine:
    """A machine with a card of `card` GB and `ram` GB of RAM."""
    base = Machine.load(BASE)
    vram_bytes, ram_bytes = base.vram_bytes * card // NOMINAL[0], base.ram_bytes * ram // NOMINAL[1]
    return dataclasses.replace(base, name=f"{card}gb-{ram}gb", vram_bytes=vram_bytes, ram_bytes=ram_bytes)


def billions(parameters: int) -> str:
    """Rounded down: what the table names must fit."""
    value = parameters / 1e9
    return f"{math.floor(value)}B" if value >= 10 else f"{math.floor(10 * value) / 10:.1f}B"


def cell(card: int, ram: int) -> str:
    """The largest model with FP32 moments and with 8-bit moments."""
    sizes = []
    for compression in MOMENTS:
        try:
            answer = largest_model(machine(card, ram), accumulation=MICRO_BATCHES, optimizer_compression=compression)
            sizes.append(billions(answer.value))
        except NotEnoughMemory:
            sizes.append("none")
    return " / ".join(sizes)


def row(card: int) -> str:
    return f"| **{card} GB card** | {' | '.join(cell(card, ram) for ram in RAM)} |"


def planned(model: str, card: int, ram: int, **settings: Any) -> Plan | Refusal:
    """The plan of a model of this size, with micro-batches of 1 × 2048 tokens, or why there is none."""
    fields = MODELS[model]
    config = AutoConfig.for_model(fields["model_type"], **{k: v for k, v in fields.items() if k != "model_type"})
    try:
        return plan(config, machine=machine(card, ram), batch=1, length=2048, **{"precision": "bf16"} | settings)
    except Refusal as refusal:
        return refusal


def answer(model: str, card: int, ram: int) -> str:
    """Whether a model fits, and with which settings."""
    settings = next((choice for choice in CHOICES if isinstance(planned(model, card, ram, **choice), Plan)), None)
    question = f"| {model}, {card} GB card, {ram} GB of RAM |"
    if settings is None:
        return f"{question} **no** | |"
    used = [f'`{name}="{settings[name]}"`' for name in ("precision", "optimizer_compression") if settings.get(name)]
    used += ["one micro-batch per step"] if settings["accumulation"] == 1 else []
    if "precision" not in settings:
        return f"{question} **yes** | {', '.join(used) or 'the defaults'} |"
    in_ram = planned(model, card, ram, accumulation=1, optimizer_compression="4bit")
    on_disk = planned(model, card, ram, **DRIVE)
    if not (isinstance(in_ram, Refusal) and isinstance(on_disk, Plan)):
        raise ValueError(f"the answer for {model} has another form")
    return (
        f"{question} **no** in RAM with the FP32 master: even with 4-bit moments {in_ram.shortfall_gb:.0f} GiB are "
        f"missing; **yes** with an NVMe drive, on which a step writes {on_disk.written / 1e9:.0f} GB; **yes** without "
        f'the master | `offload_dir`, `optimizer_compression="{DRIVE["optimizer_compression"]}"`; '
        f"or {', '.join(used)} |"
    )


def main() -> None:
    print("| | " + " | ".join(f"{ram} GB of RAM" for ram in RAM) + " |")
    print("|---" * (len(RAM) + 1) + "|")
    for card in CARDS:
        print(row(card), flush=True)
    print("\n| question | answer | settings |\n|---|---|---|")
    for question in QUESTIONS:
        print(answer(*question), flush=True)


if __name__ == "__main__":
    main()
