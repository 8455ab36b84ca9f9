"""What fits where and how long a step takes, from shapes and a machine's numbers alone: no CUDA, no weights."""

from __future__ import annotations

from megatrain.model.shapes import ModelShape, describe
from megatrain.planner.api import Answer, largest_batch, largest_context, largest_model, plan
from megatrain.planner.plan import Plan
from megatrain.planner.refusal import Refusal, Suggestion
from megatrain.planner.run import Run
from megatrain.planner.simulate import StepEstimate

__all__ = [
    "Answer", "ModelShape", "Plan", "Refusal", "Run", "StepEstimate", "Suggestion", "describe", "largest_batch",
    "largest_context", "largest_model", "plan",
]  # fmt: skip
