"""What fits where and how long a step takes, from shapes and a machine's numbers alone: no CUDA, no weights."""

from __future__ import annotations

import os
from typing import Any

from megatrain.errors import SettingsError
from megatrain.hardware.machine import Machine, Reach
from megatrain.model.shapes import ModelShape, describe
from megatrain.planner.plan import Plan
from megatrain.planner.questions import largest_batch, largest_context, largest_model
from megatrain.planner.refuse import Refusal, Suggestion
from megatrain.planner.run import Run
from megatrain.planner.search import OffloadDir, solve
from megatrain.planner.simulate import StepEstimate
from megatrain.settings import Settings

__all__ = [
    "ModelShape", "Plan", "Refusal", "Run", "StepEstimate", "Suggestion", "describe", "largest_batch",
    "largest_context", "largest_model", "plan", "solve",
]  # fmt: skip


def plan(
    model_or_config: Any,
    *,
    machine: Machine | str | os.PathLike[str] | None = None,
    batch: int = 1,
    length: int = 2048,
    accumulation: int = 1,
    optimizer: str = "adamw",
    clipping: bool = True,
    evaluation: int = 0,
    predictions: bool = True,
    max_vram_gb: float | None = None,
    max_ram_gb: float | None = None,
    offload_dir: OffloadDir | None = None,
    optimizer_compression: bool | str = False,
    precision: str | None = None,
    compile: bool = False,
    reach: Reach | None = None,
) -> Plan:
    """The fastest plan for a model, a config or a name, on a machine (its name, a path, or a `Machine`).

    `batch` × `length` tokens are a micro-batch, `accumulation` of them a step, `evaluation` tokens a batch of the
    evaluation (0: none), of which logits (`predictions`) or the loss alone are looked at; the other settings mean what
    they mean in `mt.init`; `reach` is what can be had of the machine now (None: all of it). Raises `NotEnoughMemory`
    with what would make it fit.
    """
    if machine is None:
        raise SettingsError(
            "a plan needs a machine: pass machine=mt.probe() for this one, the path of a description, or one of "
            f"{', '.join(Machine.shipped())}."
        )
    if not isinstance(machine, Machine):
        machine = Machine.load(machine)
    # Checked as everywhere else: unknown values are refused by the same sentences.
    settings = Settings(
        max_vram_gb=max_vram_gb, max_ram_gb=max_ram_gb, optimizer_compression=optimizer_compression, precision=precision
    )
    shape = describe(model_or_config)
    run = Run(
        micro_batch=batch, length=length, accumulation=accumulation, precision=precision or shape.precision,
        width=settings.moment_width, kind=optimizer, compile=compile, clipping=clipping,
        evaluation=evaluation, predictions=predictions,
    )  # fmt: skip
    return solve(
        shape, machine, run, max_vram_gb=max_vram_gb, max_ram_gb=max_ram_gb, offload_dir=offload_dir, reach=reach
    )
