"""Whether what is saved can be trained on: a NaN or an infinity in a trained weight or a moment is found and named."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from megatrain.store.parameter import StoreTensor, states_of
from megatrain.telemetry.notices import warn

PIECE = 1 << 22
"""Elements that are looked at together."""
LARGEST = torch.finfo(torch.float32).max
NAMED = 3
_said: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
"""What was said, by whose parameters it was."""


def nonfinite(parameters: Iterable[tuple[str, StoreTensor]], moments: Collection[str] = ()) -> list[str]:
    """Trained parameters with a weight ("<name>") or a moment ("<name>/<role>") that is not finite.

    The high half of a split master shows it. Buffers and frozen parameters may hold infinities on purpose.
    """
    found = []
    for name, parameter in parameters:
        parameter.slab.settle()
        if not _all_finite(parameter.stored()):
            found.append(name)
        for role, tensor in states_of(parameter, moments).items():
            if not _all_finite(tensor, scales=role.endswith(".scale")):
                found.append(f"{name}/{role.split('.')[0]}")
    return found


def _all_finite(tensor: torch.Tensor, scales: bool = False) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        # Residuals, and codes, which are finite whatever they were made of.
        return True
    flat = tensor.reshape(-1)
    for piece in (flat,) if flat.is_cuda else flat.split(PIECE):
        low, high = (float(value) for value in torch.aminmax(piece))
        # An infinity that was coded has the largest scale there is.
        if not (math.isfinite(low) and math.isfinite(high)) or (scales and high >= LARGEST):
            return False
    return True


def fault(content: Mapping[str, Any]) -> str | None:
    """What is wrong with a checkpoint, by its manifest; None: nothing."""
    marked = content.get("nonfinite", [])
    return f"it holds NaN or infinite values in {_listed(marked)}" if marked else None


def warn_once(owner: object, marked: Iterable[str]) -> None:
    """Say which parameters are not finite, each once."""
    said = _said.setdefault(owner, set())
    fresh = [name for name in marked if name not in said]
    said.update(fresh)
    if fresh:
        warn(
            f"this checkpoint has NaN or infinite values in {_listed(fresh)}: resume_from_checkpoint=True will skip it "
            "and "
            "save_total_limit will not count it; go back to an earlier one with a lower learning rate or other data"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
