"""Disk space: how much a checkpoint needs, whether it is free, and which errors mean that it was not."""

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
"""For configs, tokenizers and headers, in addition to 1%."""
CODED = 0.5
"""The smallest expected ratio of a losslessly compressed moment. If it is larger, writing may still fail."""


class NoRoom(CheckpointError):
    """There is not enough disk space; nothing was written."""


def needed(model: Any, state: Mapping[str, Any], optimizer: states.Optimizer | None) -> int:
    """The estimated size of a checkpoint: weights in the saved dtype, and the optimizer's state."""
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
        for tensor in (tensor for p in parameters for tensor in states_of(p, optimizer.moments, values=False).values()):
            coded = optimizer.lossless and tensor.dtype == torch.float32
            total += int(tensor.nbytes * CODED) if coded else tensor.nbytes
    return total + total // 100 + SLACK


def require(directory: AnyPath, nbytes: int) -> None:
    """Raise `NoRoom` unless the space is free. An old checkpoint is deleted only after the new one is complete."""
    free = files.free_bytes(directory)
    if free < nbytes:
        raise NoRoom(
            f"it needs about {nbytes / 1e9:.3g} GB, but {free / 1e9:.3g} GB are free in {directory}; free some space."
        )


def fault_of(error: BaseException) -> str | None:
    """The message of an error of the disk or file system; None for other errors."""
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror or error}{where}"
    said = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, SafetensorError) and "(os error " in said:
        return said.removeprefix("Error while serializing: ")
    # Errors of torch.save have no errno.
    if isinstance(error, RuntimeError) and ("inline_container.cc" in said or "PytorchStreamWriter" in said):
        return f"torch.save could not write: {said}"
    return None
