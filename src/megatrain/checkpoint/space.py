"""Room on the disk: what a checkpoint takes, whether it is there, and which errors mean that it was not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError

from megatrain import files
from megatrain.checkpoint import adapters, states
from megatrain.errors import CheckpointError
from megatrain.files import AnyPath
from megatrain.store.export import ExportTensor
from megatrain.store.parameter import states_of

SLACK = 1 << 20
"""For configs, tokenizers and headers; and a hundredth."""
CODED = 0.5
"""The least that a moment coded without loss may take: what does not fit then is seen while it is written."""


class NoRoom(CheckpointError):
    """Nothing was written."""


def needed(model: Any, state: Mapping[str, Any], optimizer: states.Optimizer | None) -> int:
    """The bytes that a checkpoint will have: weights in the dtype saved, and the optimizer's state."""
    if getattr(model, "peft_config", None):
        state = {str(number): ExportTensor.of(target) for number, target in enumerate(adapters.targets(model))}
    tensors = {
        (value.data_ptr(), value.shape): value.numel() * value.element_size()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    total = sum(tensors.values())
    if optimizer is not None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        for tensor in (tensor for p in parameters for tensor in states_of(p, optimizer.moments).values()):
            coded = optimizer.lossless and tensor.dtype == torch.float32
            total += int(tensor.nbytes * CODED) if coded else tensor.nbytes
    return total + total // 100 + SLACK


def require(directory: AnyPath, nbytes: int) -> None:
    """Raise unless there is room. What the new checkpoint replaces is deleted only after it is complete."""
    free = files.free_bytes(directory)
    if free < nbytes:
        raise NoRoom(
            f"it needs about {nbytes / 1e9:.3g} GB, but {free / 1e9:.3g} GB are free in {directory}; free some space."
        )


def fault_of(error: BaseException) -> str | None:
    """What the disk said, if it was the disk that failed; None: something else is wrong."""
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror or error}{where}"
    said = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, SafetensorError) and "(os error " in said:
        return said.removeprefix("Error while serializing: ")
    # torch.save has no number of the error.
    if isinstance(error, RuntimeError) and ("inline_container.cc" in said or "PytorchStreamWriter" in said):
        return f"torch.save could not write: {said}"
    return None
