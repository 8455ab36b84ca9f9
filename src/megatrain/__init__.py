"""MegaTrain: train every parameter of models far larger than the GPU, on one machine, at full precision."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megatrain._version import __version__

if TYPE_CHECKING:
    from megatrain import errors as errors
    from megatrain.engine.init import init as init
    from megatrain.engine.planning import largest_batch as largest_batch
    from megatrain.engine.planning import largest_context as largest_context
    from megatrain.engine.planning import largest_model as largest_model
    from megatrain.engine.planning import plan as plan
    from megatrain.engine.probing import probe as probe
    from megatrain.engine.session import Engine as Engine
    from megatrain.errors import MegaTrainError as MegaTrainError
    from megatrain.errors import WindowAborted as WindowAborted
    from megatrain.hardware.machine import Machine as Machine
    from megatrain.hf.mixin import MegaMixin as MegaMixin
    from megatrain.hf.trainer import Trainer as Trainer
    from megatrain.planner import Answer as Answer
    from megatrain.planner import Plan as Plan
    from megatrain.planner import Refusal as Refusal
    from megatrain.planner import Run as Run
    from megatrain.settings import Debug as Debug
    from megatrain.settings import Settings as Settings

_WHERE = {
    "Answer": "megatrain.planner",
    "Debug": "megatrain.settings",
    "Engine": "megatrain.engine.session",
    "Machine": "megatrain.hardware.machine",
    "MegaMixin": "megatrain.hf.mixin",
    "MegaTrainError": "megatrain.errors",
    "Plan": "megatrain.planner",
    "Refusal": "megatrain.planner",
    "Run": "megatrain.planner",
    "Settings": "megatrain.settings",
    "Trainer": "megatrain.hf.trainer",
    "WindowAborted": "megatrain.errors",
    "init": "megatrain.engine.init",
    "largest_batch": "megatrain.engine.planning",
    "largest_context": "megatrain.engine.planning",
    "largest_model": "megatrain.engine.planning",
    "plan": "megatrain.engine.planning",
    "probe": "megatrain.engine.probing",
}

__all__ = ["__version__", "errors", *_WHERE]


def __getattr__(name: str) -> Any:
    # Imported on first use: `import megatrain` stays free of torch, transformers and CUDA.
    if name == "errors":
        return importlib.import_module("megatrain.errors")
    if name not in _WHERE:
        raise AttributeError(f"module 'megatrain' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
