"""What fits where and how long a step takes, from shapes and a machine's numbers alone: no CUDA, no weights."""

from __future__ import annotations

from typing import Any

from megatrain.model.shapes import ModelShape, describe
from megatrain.planner.plan import Plan
from megatrain.planner.questions import Answer, largest_batch, largest_context, largest_model
from megatrain.planner.refuse import Refusal, Suggestion
from megatrain.planner.run import MachineLike, Run, machine_of, run_or
from megatrain.planner.search import solve
from megatrain.planner.simulate import StepEstimate

__all__ = [
    "Answer", "ModelShape", "Plan", "Refusal", "Run", "StepEstimate", "Suggestion", "describe", "largest_batch",
    "largest_context", "largest_model", "plan", "solve",
]  # fmt: skip


def plan(model_or_config: Any, *, machine: MachineLike = None, **options: Any) -> Plan:
    """The fastest plan for a model, a config or a name, on a machine (its name, a path, or a `Machine`).

    `options` are those of `planner/run.py`: `batch` × `length` tokens are a micro-batch, `accumulation` of them a
    step, `evaluation` tokens a batch of the evaluation (0: none), of which logits (`predictions`) or the loss alone are
    looked at; the other settings mean what they mean in `mt.init`; `reach` is what can be had of the machine now (None:
    all of it). Raises `NotEnoughMemory` with what would make it fit.
    """
    where, shape = machine_of(machine), describe(model_or_config)
    run, limits = run_or(None, shape.precision, options)
    return solve(shape, where, run, **limits)
