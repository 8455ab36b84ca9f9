"""MegaTrain: train every parameter of models far larger than the GPU, on one machine, at full precision."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megatrain._version import __version__

if TYPE_CHECKING:
    from megatrain import errors as errors
    from megatrain.engine.planning import init as init
    from megatrain.engine.planning import largest_batch as largest_batch
    from megatrain.engine.planning import largest_context as largest_context
    from megatrain.engine.planning import largest_model as largest_model
    from megatrain.engine.planning import plan as plan
    from megatrain.engine.planning import probe as probe
    from megatrain.engine.session import Engine as Engine
    from megatrain.errors import MegaTrainError as MegaTrainError
    from megatrain.errors import WindowAborted as WindowAborted
    from megatrain.hardware.machine import Machine as Machine
    from megatrain.hf.trainer import MegaMixin as MegaMixin
    from megatrain.hf.trainer import Trainer as Trainer
    from megatrain.planner import Answer as Answer
    from megatrain.planner import Plan as Plan
    from megatrain.planner import Refusal as Refusal
    from megatrain.planner import Run as Run
    from megatrain.settings import Debug as Debug
    from megatrain.settings import Settings as Settings

_NAMES = {
    "engine.planning": ("init", "largest_batch", "largest_context", "largest_model", "plan", "probe"),
    "engine.session": ("Engine",),
    "errors": ("MegaTrainError", "WindowAborted"),
    "hardware.machine": ("Machine",),
    "hf.trainer": ("MegaMixin", "Trainer"),
    "planner": ("Answer", "Plan", "Refusal", "Run"),
    "settings": ("Debug", "Settings"),
}
_WHERE = {name: f"megatrain.{module}" for module, names in _NAMES.items() for name in names}

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
