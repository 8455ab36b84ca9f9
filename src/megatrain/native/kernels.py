"""Loading Triton kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from megatrain.telemetry.notices import announce


def triton_kernel(module: str, name: str, try_out: Callable[[Any], object], slower: str) -> Any | None:
    """Import a function from a module that needs Triton and try it once; announce and return None if it fails."""
    try:
        kernel = getattr(importlib.import_module(module), name)
        try_out(kernel)
    except torch.OutOfMemoryError:
        raise  # not a fault of Triton
    except Exception as reason:
        announce(f"Triton is not usable ({type(reason).__name__}), so {slower} on the GPU")
        return None
    return kernel
