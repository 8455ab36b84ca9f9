"""`Engine.save` and `Engine.load`: what is written and checked, and in which order."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from megatrain import files
from megatrain.checkpoint import manifest, replace, states, weights
from megatrain.optim.optimizer import Optimizer
from megatrain.telemetry.notices import announce


def save(
    model: torch.nn.Module,
    host_state: Callable[[], dict[str, torch.Tensor]],
    directory: str | os.PathLike[str],
    optimizer: Optimizer | None,
) -> None:
    """At every moment the directory, or what `replace.find` finds for it, holds a whole save: the old one or this."""
    stopwatch = files.Stopwatch()
    replacement = replace.Replacement(directory)
    try:
        weights.save_model(model, host_state, replacement.fresh)
        if optimizer is not None:
            states.save_optimizer(model, optimizer, replacement.fresh)
        listed = replacement.carry()
        if optimizer is None:
            # An ordinary HF directory: it has no manifest, and needs none to be whole.
            nbytes = files.sync_tree(replacement.fresh, listed)
            files.sync_names(replacement.fresh)
        else:
            nbytes = states.seal(model, optimizer, replacement.fresh, listed, replacement.target)
        replacement.commit()
    except BaseException:
        replacement.abandon()
        raise
    announce(stopwatch.report(replacement.target.name, nbytes))


def load(model: torch.nn.Module, directory: str | os.PathLike[str], optimizer: Optimizer | None) -> None:
    found = replace.find(directory)
    if optimizer is not None:
        manifest.verify(found)
        states.check_optimizer(model, optimizer, found)
    elif os.path.lexists(found / manifest.FILE):
        manifest.verify(found, states=False)
    weights.load_model(model, found)
    if optimizer is not None:
        states.load_optimizer(model, optimizer, found)
