"""A moment of a slab: the optimizer's running averages of its parameters, in one buffer, each in its own format.

Parameters of one format form an area, in the slab's order and padded like the slab. Adjacent parameters of one format
are therefore adjacent here, and one kernel call covers them. Scales follow the codes of their area.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from itertools import accumulate

import torch

from megatrain.geometry import MOMENT_ALIGN_BYTES, compresses_moments, padded, round_up
from megatrain.store.formats import FORMATS, FP32, Format
from megatrain.store.layout import Layout
from megatrain.store.memory import Memory


@dataclass(frozen=True)
class SegmentStart:
    """Byte offsets of a segment's payload (codes or values) and of its scales, if the format has any."""

    format: Format
    payload: int
    scales: int


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of one format: payload (codes or values) as bytes, and scales if the format has any."""

    format: Format
    payload: torch.Tensor
    scales: torch.Tensor | None


class Moment:
    """One moment of one slab."""

    def __init__(self, layout: Layout, width: str, signed: bool, memory: Memory, transferred: bool = False) -> None:
        self.layout = layout
        self.signed = signed
        self._starts, nbytes = lay_out_areas(layout, width, signed)
        self.formats = {index: start.format for index, start in self._starts.items()}
        self.buffer = memory.allocate(nbytes, transferred=transferred)
        if set(self.formats.values()) == {FP32}:
            self.buffer.holds_fp32()
        self.bytes = self.buffer.bytes

    def with_storage(self, storage: torch.Tensor) -> Moment:
        """The same moment over a copy of its bytes in other memory."""
        other = copy(self)
        other.bytes = storage
        return other

    def piece(self, index: int, count: int | None = None) -> Piece:
        """`count` elements from the start of a segment, across later ones of the same format (None: the segment)."""
        format, *ranges = self._ranges(index, count)
        payload, scales = (self.bytes[start:end] for start, end in ranges)
        return Piece(format, payload, scales.view(torch.float32) if format.block else None)

    def _ranges(self, index: int, count: int | None = None) -> tuple[Format, tuple[int, int], tuple[int, int]]:
        """The format of a segment, and where the payload and the scales of `count` elements start and end."""
        count = self.layout.segments[index].numel if count is None else count
        start = self._starts[index]
        payload_bytes = start.format.payload_bytes(round_up(count, start.format.block or 1))
        payload_end, scales_end = start.payload + payload_bytes, start.scales + start.format.scale_bytes(count)
        return start.format, (start.payload, payload_end), (start.scales, scales_end)

    def read(self, index: int) -> torch.Tensor:
        """A copy of one parameter's values, in FP32."""
        return (
            self._decoded(index, self.stored(index)).to("cpu", copy=True).view(self.layout.segments[index].owned_shape)
        )

    def write(self, index: int, values: torch.Tensor) -> None:
        """Set one parameter's values, rounded to nearest."""
        piece = self.piece(index)
        # Encoded on the CPU for every tier: the reference defines the bits.
        payload = torch.empty_like(piece.payload, device="cpu")
        scales = None if piece.scales is None else torch.empty_like(piece.scales, device="cpu")
        piece.format.encode(values.detach().reshape(-1).float().cpu(), payload, scales, None)
        self._store(index, [payload] if scales is None else [payload, scales])

    def stored(self, index: int, *, values: bool = True) -> dict[str, torch.Tensor]:
        """One parameter's stored tensors by suffix of the moment's name, as checkpoints store them: views, or copies
        of what is on disk. Without `values`, they may be on the meta device."""
        piece = self.piece(index)
        if values and piece.payload.is_meta:
            payload, scales = (self.buffer.read(start, end) for start, end in self._ranges(index)[1:])
            piece = Piece(piece.format, payload, None if piece.scales is None else scales.view(torch.float32))
        suffix = "" if piece.format is FP32 else f".{piece.format.name}"
        if piece.scales is not None:
            return {suffix: piece.payload, f"{suffix}.scale": piece.scales}
        return {suffix: piece.payload.view(piece.format.dtype).view(self.layout.segments[index].owned_shape)}

    def restore(self, index: int, saved: Mapping[str, torch.Tensor]) -> bool:
        """Load what `stored` returned, in any format (empty: zeros). Return False if values had to be rounded."""
        current = self.stored(index, values=False)
        if not saved:
            for start, end in self._ranges(index)[1:]:
                self.buffer.zero(start, end)
            return True
        if current.keys() == saved.keys():
            self._store(index, [saved[suffix].to(view.dtype) for suffix, view in current.items()])
            return True
        self.write(index, self._decoded(index, saved))
        return self.formats[index] is FP32

    def _store(self, index: int, tensors: Iterable[torch.Tensor]) -> None:
        """Replace a parameter's payload and, if the format has them, its scales."""
        for tensor, (start, end) in zip(tensors, self._ranges(index)[1:], strict=False):
            with self.buffer.changing(start, end) as target:
                target.view(tensor.dtype).copy_(tensor.reshape(-1))

    def _decoded(self, index: int, saved: Mapping[str, torch.Tensor]) -> torch.Tensor:
        suffix = next(suffix for suffix in saved if not suffix.endswith(".scale"))
        if suffix in ("", ".bf16"):
            return saved[suffix].float()
        chosen = FORMATS[suffix.removeprefix(".")][0 if self.signed else 1]
        return chosen.decode(saved[suffix].cpu(), saved[f"{suffix}.scale"].cpu(), self.layout.segments[index].numel)


def lay_out_areas(layout: Layout, width: str, signed: bool) -> tuple[dict[int, SegmentStart], int]:
    """Segment offsets of a moment in its buffer, and the buffer's size."""
    members: dict[Format, list[int]] = {}
    for index, segment in enumerate(layout.segments):
        chosen = FORMATS[width][0 if signed else 1] if compresses_moments(segment.shape) else FP32
        members.setdefault(chosen, []).append(index)
    starts: dict[int, SegmentStart] = {}
    at = 0
    for chosen, indices in members.items():
        ends = list(accumulate(padded(layout.segments[index].numel) for index in indices))
        scales = at + chosen.payload_bytes(ends[-1])
        for index, first in zip(indices, [0, *ends[:-1]], strict=True):
            starts[index] = SegmentStart(chosen, at + chosen.payload_bytes(first), scales + chosen.scale_bytes(first))
        at = round_up(scales + chosen.scale_bytes(ends[-1]), MOMENT_ALIGN_BYTES)
    return starts, at
