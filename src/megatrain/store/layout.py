"""How the parameters of a block lie in a slab: one flat run of one dtype, so that it moves in one transfer.

States and gradient sums may lie here for a part of the slab only: that part is a layout too, of the same parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatrain.geometry import ALIGN_ELEMENTS, padded, padded_slab


@dataclass(frozen=True)
class Segment:
    """Where one parameter lies in its slab, or what a part of the slab has of it, in elements."""

    name: str
    shape: torch.Size
    """Of the whole parameter."""
    offset: int
    numel: int
    owned_start: int = 0
    """The parameter's element that lies at `offset`."""
    owned_shape: torch.Size = field(init=False)
    """The shape of what lies here: the parameter's, or a flat one of a part of it."""
    strides: tuple[int, ...] = field(init=False)
    end: int = field(init=False)

    def __post_init__(self) -> None:
        owned_shape = self.shape if self.complete else torch.Size([self.numel])
        object.__setattr__(self, "end", self.offset + self.numel)
        object.__setattr__(self, "owned_shape", owned_shape)
        object.__setattr__(self, "strides", torch.empty(owned_shape, device="meta").stride())

    @property
    def complete(self) -> bool:
        return self.numel == self.shape.numel()


@dataclass(frozen=True)
class Layout:
    """The parameters of one slab, in order, and the slab's padded length in elements; or those of a part of it."""

    dtype: torch.dtype
    segments: tuple[Segment, ...]
    numel: int
    begin: int = 0
    """The slab's element that a part of it begins with."""
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", self.numel * self.dtype.itemsize)

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """One parameter in a flat tensor of this layout."""
        segment = self.segments[index]
        return flat.as_strided(segment.owned_shape, segment.strides, flat.storage_offset() + segment.offset)

    def slice(self, begin: int, end: int) -> Layout:
        """The elements [begin, end) of the slab. Parameters outside of them have no elements there."""
        assert begin % ALIGN_ELEMENTS == end % ALIGN_ELEMENTS == 0, "slices begin and end where blocks of moments do"

        def part(segment: Segment) -> Segment:
            start, stop = (min(max(at, begin), end) for at in (segment.offset, segment.end))
            owned_start = segment.owned_start + start - segment.offset if start < stop else 0
            return Segment(segment.name, segment.shape, start - begin, stop - start, owned_start)

        return Layout(self.dtype, tuple(map(part, self.segments)), end - begin, begin)

    def slice_flat(self, flat: torch.Tensor) -> torch.Tensor:
        """What of a flat tensor as long as the slab lies in this layout."""
        return flat[self.begin : self.begin + self.numel]

    def slice_values(self, values: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """What of whole parameters, by segment, lies in this layout."""
        found = {}
        for index, tensor in values.items():
            segment = self.segments[index]
            if segment.complete:
                found[index] = tensor
            elif segment.numel:
                found[index] = tensor.reshape(-1)[segment.owned_start : segment.owned_start + segment.numel]
        return found

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
