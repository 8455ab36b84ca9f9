"""Optimizer state as a stock Trainer reads it, so that it can go on where this one stopped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatrain.optim.optimizer import Optimizer

FILE = "optimizer.pt"
LARGEST = 256 << 20
"""Bytes up to which a state is written a second time (small models, adapters)."""
CLASSES: dict[str, Any] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def stock_bytes(optimizer: Optimizer) -> int:
    """The size of what `stock_state` gives; 0: nothing."""
    if optimizer.kind not in CLASSES or optimizer.moment_width != "fp32":
        return 0
    entries = optimizer.state_dict()["state"].values()
    total = sum(value.nbytes for entry in entries for value in _moments(entry).values())
    return total if total <= LARGEST else 0


def stock_state(optimizer: Optimizer, most: int = LARGEST) -> dict[str, Any] | None:
    """The `state_dict` of torch's optimizer of this name; None if it is large, or torch has no such state."""
    if not 0 < stock_bytes(optimizer) <= most:
        return None
    own = optimizer.state_dict()
    state = {number: _moments(entry) for number, entry in own["state"].items()}
    defaults = CLASSES[optimizer.kind]([torch.empty(0)]).defaults
    return {
        # Copies: of a view, torch.save writes all of the memory behind it.
        "state": {n: {key: value.cpu().clone() for key, value in entry.items()} for n, entry in state.items()},
        "param_groups": [defaults | group for group in own["param_groups"]],
    }


def _moments(entry: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the residual: that is the low half of a master, which the saved weights have whole."""
    return {key: value for key, value in entry.items() if key != "residual"}
