"""How the parameters of a block lie in a slab: one flat run of one dtype, so that it moves in one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatrain.geometry import padded, padded_slab


@dataclass(frozen=True)
class Segment:
    """Where one parameter lies in its slab, in elements."""

    name: str
    shape: torch.Size
    offset: int
    numel: int
    strides: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "strides", torch.empty(self.shape, device="meta").stride())

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Layout:
    """The parameters of one slab, in order, and the slab's padded length in elements."""

    dtype: torch.dtype
    segments: tuple[Segment, ...]
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """One parameter in a flat tensor of this layout."""
        segment = self.segments[index]
        return flat.as_strided(segment.shape, segment.strides, flat.storage_offset() + segment.offset)

    def runs(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """Element ranges that cover the given segments, neighbours merged across their padding."""
        runs: list[tuple[int, int]] = []
        previous = -2
        for index in sorted(indices):
            segment = self.segments[index]
            if index == previous + 1:
                runs[-1] = (runs[-1][0], segment.end)
            else:
                runs.append((segment.offset, segment.end))
            previous = index
        return runs


def lay_out(parameters: Sequence[tuple[str, torch.Size]], dtype: torch.dtype) -> Layout:
    """Place parameters one after the other, each aligned, the slab padded to whole pages."""
    segments = []
    offset = 0
    for name, shape in parameters:
        segments.append(Segment(name, shape, offset, shape.numel()))
        offset += padded(shape.numel())
    return Layout(dtype, tuple(segments), padded_slab(offset, dtype.itemsize))
