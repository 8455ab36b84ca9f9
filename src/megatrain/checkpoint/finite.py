"""Finds NaN and infinite values in the trained weights and moments of a checkpoint."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from megatrain.store.parameter import StoreTensor, states_of
from megatrain.telemetry.notices import warn

PIECE = 1 << 22
"""Elements per check."""
LARGEST = torch.finfo(torch.float32).max
NAMED = 3
_warned: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
"""Model or optimizer → names that it has been warned about."""


def nonfinite(parameters: Iterable[tuple[str, StoreTensor]], moments: Collection[str] = ()) -> list[str]:
    """Trained parameters with a weight ("<name>") or a moment ("<name>/<role>") that is not finite.

    Of a split master weight the high half is checked. Buffers and frozen parameters may be infinite on purpose.
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
        # Residuals and low-bit codes are integers.
        return True
    flat = tensor.reshape(-1)
    for piece in (flat,) if flat.is_cuda else flat.split(PIECE):
        low, high = (float(value) for value in torch.aminmax(piece))
        # The scale of an infinite low-bit moment is the largest FP32 number.
        if not (math.isfinite(low) and math.isfinite(high)) or (scales and high >= LARGEST):
            return False
    return True


def fault(content: Mapping[str, Any]) -> str | None:
    """Why a checkpoint should not be resumed from, according to its manifest; None: no reason."""
    marked = content.get("nonfinite", [])
    return f"it holds NaN or infinite values in {_listed(marked)}" if marked else None


def warn_once(owner: object, marked: Iterable[str]) -> None:
    """Warn about parameters that are not finite, once for each."""
    warned = _warned.setdefault(owner, set())
    fresh = [name for name in marked if name not in warned]
    warned.update(fresh)
    if fresh:
        warn(
            f"this checkpoint has NaN or infinite values in {_listed(fresh)}: resume_from_checkpoint=True will skip it "
            "and save_total_limit will not count it; go back to an earlier one with a lower learning rate or other data"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
