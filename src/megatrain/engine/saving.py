"""Implements `Engine.save` and `Engine.load`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from safetensors import SafetensorError

from megatrain import files
from megatrain.checkpoint import finite, manifest, replace, space, states, weights
from megatrain.errors import CheckpointError
from megatrain.optim.optimizer import Optimizer
from megatrain.process import fork_safe_lock
from megatrain.telemetry.notices import announce, warn

_save_lock = fork_safe_lock()
"""Threads that save into the same directory would overwrite each other's files."""


def save(
    model: torch.nn.Module,
    host_state: Callable[[], dict[str, torch.Tensor]],
    directory: str | os.PathLike[str],
    optimizer: Optimizer | None,
    portion: Callable[[int], int],
    facts: dict[str, Any],
) -> None:
    """Save atomically: `replace.find(directory)` always returns a complete save, the old one or the new one."""
    stopwatch = files.Stopwatch()
    try:
        with _save_lock(), replace.replacing(directory) as replacement:
            space.require(replacement.fresh, space.needed(model, host_state(), optimizer))
            weights.save_model(model, host_state, replacement.fresh)
            if optimizer is not None:
                states.save_optimizer(model, optimizer, replacement.fresh, portion(states.SHARD_BYTES))
            listed = replacement.carry()
            if optimizer is None:
                # An ordinary Hugging Face directory has no manifest.
                nbytes = files.sync_tree(replacement.fresh, listed)
                files.sync_names(replacement.fresh)
            else:
                nbytes = states.seal(model, optimizer, replacement.fresh, listed, facts, replacement.target)
            replacement.commit()
    except (space.NoRoom, SafetensorError) as error:
        # safetensors raises its own exception if the disk is full.
        fault = str(error) if isinstance(error, space.NoRoom) else space.fault_of(error)
        if fault is None:
            raise
        raise CheckpointError(
            f"{directory} could not be saved: {fault.rstrip('.')}; its previous content is unchanged."
        ) from error
    announce(stopwatch.report(replacement.target.name, nbytes))


def load(
    model: torch.nn.Module,
    directory: str | os.PathLike[str],
    optimizer: Optimizer | None,
    check: Callable[[dict[str, Any]], None],
) -> None:
    """Load what `save` wrote. With an optimizer, `check` gets the manifest before anything is changed."""
    path = replace.find(directory)
    if optimizer is not None:
        content = manifest.verify(path)
        if content.get("weights_only"):
            raise CheckpointError(f"{directory} has weights but no optimizer state; load it without an optimizer.")
        fault = finite.fault(content)
        if fault is not None:
            warn(f"loading {directory}, although {fault}")
        states.check_optimizer(model, optimizer, path)
        check(content)
    elif os.path.lexists(path / manifest.FILE):
        manifest.verify(path, states=False)
    weights.load_model(model, path)
    if optimizer is not None:
        states.load_optimizer(model, optimizer, path)
