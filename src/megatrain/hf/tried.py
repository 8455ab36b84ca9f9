"""Sizes of steps that have been through forward and backward, so that another one of them fits as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MOST = 64
"""Sizes that are remembered; of those that none of the others covers, the latest."""
Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Of the tensors of a micro-batch, by where they are in it."""


@dataclass(frozen=True)
class Size:
    """What a step passes through the model."""

    batches: tuple[Shapes, ...]
    """Of every micro-batch, the largest first."""
    together: int
    """Micro-batches that pass a block together."""

    def covers(self, other: Size) -> bool:
        """Whether the other one takes no more in any way: as many micro-batches, none longer in any dimension."""
        return (
            other.together <= self.together
            and len(other.batches) <= len(self.batches)
            and all(_within(small, large) for small, large in zip(other.batches, self.batches, strict=False))
        )


class Tried:
    """The sizes that have been through."""

    def __init__(self) -> None:
        self._sizes: list[Size] = []

    def add(self, batches: Sequence[Any], together: int) -> None:
        size = _size(batches, together)
        if size is not None and not any(known.covers(size) for known in self._sizes):
            self._sizes = [known for known in self._sizes if not size.covers(known)][1 - MOST :]
            self._sizes.append(size)

    def covers(self, batches: Sequence[Any], together: int) -> bool:
        size = _size(batches, together)
        return size is not None and any(known.covers(size) for known in self._sizes)


def _size(batches: Sequence[Any], together: int) -> Size | None:
    """None if there is something whose size cannot be told."""
    shapes = [_shapes(batch, "") for batch in batches]
    known = [tuple(sorted(each)) for each in shapes if each is not None]
    if len(known) < len(batches):
        return None
    return Size(tuple(sorted(known, key=_numel, reverse=True)), together)


def _shapes(value: Any, path: str) -> list[tuple[str, tuple[int, ...]]] | None:
    if isinstance(value, torch.Tensor):
        return [(path, tuple(value.shape))]
    if value is None or isinstance(value, (str, bytes, bool, int, float)):
        return []
    # Not only a dict: tokenizers give a mapping of their own.
    if isinstance(value, Mapping):
        items = [(str(key), inner) for key, inner in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(str(key), inner) for key, inner in enumerate(value)]
    else:
        return None
    found = [_shapes(inner, f"{path}/{key}") for key, inner in items]
    return None if None in found else [pair for each in found if each is not None for pair in each]


def _numel(shapes: Shapes) -> tuple[int, Shapes]:
    return sum(torch.Size(shape).numel() for _, shape in shapes), shapes


def _within(small: Shapes, large: Shapes) -> bool:
    """Whether the tensors are the same ones, and none is longer in any dimension."""
    return len(small) == len(large) and all(
        name == other and len(shape) == len(limit) and all(a <= b for a, b in zip(shape, limit, strict=True))
        for (name, shape), (other, limit) in zip(small, large, strict=True)
    )
