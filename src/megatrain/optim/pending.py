"""A gradient norm that is computed together with the step's updates, and read only when somebody asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


class PendingNorm(torch.Tensor):
    """A scalar on the CPU whose value may not be known yet. Every use of it waits for the value.

    Trainers log a norm of this type in the steps that are logged; the other steps do not wait for the GPU.
    """

    _known: Callable[[], bool]
    _read: Callable[[], float]

    @staticmethod
    def __new__(cls, known: Callable[[], bool], read: Callable[[], float]) -> PendingNorm:
        norm = torch.Tensor._make_subclass(cls, torch.zeros((), dtype=torch.float64, device="cpu"))
        norm._known, norm._read = known, read
        return norm

    @property
    def known(self) -> bool:
        """Whether reading it needs no wait."""
        return vars(self)["_known"]()  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(PendingNorm, _value, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def _value(norm: PendingNorm) -> torch.Tensor:
    return torch.tensor(vars(norm)["_read"](), dtype=torch.float64, device="cpu")
