"""The layout of a block's parameters in a slab: one flat tensor of one dtype, so that it moves in one transfer.

A process may own states and gradient sums of a slice of the slab only. The slice is a layout of the same parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatrain.geometry import ALIGN_ELEMENTS, padded, padded_slab


@dataclass(frozen=True)
class Segment:
    """One parameter in a slab, or the part of it in a slice of the slab; offsets and sizes in elements."""

    name: str
    shape: torch.Size
    offset: int
    numel: int
    owned_start: int = 0
    """Index of the parameter's element at `offset`."""
    owned_shape: torch.Size = field(init=False)
    """The parameter's shape if it is complete in this layout, else flat."""
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
    """The parameters of a slab or of a slice of it, in order, and its padded length in elements."""

    dtype: torch.dtype
    segments: tuple[Segment, ...]
    numel: int
    begin: int = 0
    """Where a slice begins in its slab."""
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", self.numel * self.dtype.itemsize)

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        segment = self.segments[index]
        return flat.as_strided(segment.owned_shape, segment.strides, flat.storage_offset() + segment.offset)

    def slice(self, begin: int, end: int) -> Layout:
        """The layout of the slab's elements [begin, end). Parameters outside it have zero elements."""
        assert begin % ALIGN_ELEMENTS == end % ALIGN_ELEMENTS == 0, "slices begin and end where blocks of moments do"

        def part(segment: Segment) -> Segment:
            start, stop = (min(max(at, begin), end) for at in (segment.offset, segment.end))
            owned_start = segment.owned_start + start - segment.offset if start < stop else 0
            return Segment(segment.name, segment.shape, start - begin, stop - start, owned_start)

        return Layout(self.dtype, tuple(map(part, self.segments)), end - begin, begin)

    def slice_flat(self, flat: torch.Tensor) -> torch.Tensor:
        """This layout's part of a flat tensor that covers the slab."""
        return flat[self.begin : self.begin + self.numel]

    def slice_values(self, values: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """This layout's part of complete parameters, by segment."""
        slices = {}
        for index, tensor in values.items():
            segment = self.segments[index]
            if segment.complete:
                slices[index] = tensor
            elif segment.numel:
                slices[index] = tensor.reshape(-1)[segment.owned_start : segment.owned_start + segment.numel]
        return slices

    def runs(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """Element ranges that cover the given segments; adjacent ones are merged across their padding."""
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
    """Lay parameters out one after another, each aligned, and pad the slab to whole pages."""
    segments = []
    offset = 0
    for name, shape in parameters:
        segments.append(Segment(name, shape, offset, shape.numel()))
        offset += padded(shape.numel())
    return Layout(dtype, tuple(segments), padded_slab(offset, dtype.itemsize))
