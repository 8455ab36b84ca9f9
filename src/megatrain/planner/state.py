"""Bytes of a block's state: weights, residuals, moments, gradients."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.geometry import WIDTHS, padded_slab
from megatrain.model.shapes import BlockShape, SlabShape
from megatrain.planner.run import Run


@dataclass(frozen=True)
class State:
    """Bytes of one block's state by role; gradients apart, since they depend on the window."""

    weights: int
    residuals: int
    moments: int
    elements16: int
    """Padded elements whose gradients have 2 bytes."""
    elements32: int
    tied: bool

    def in_ram(self, windows: int, single: bool) -> int:
        """Its gradient in RAM: rounded if the step has one window, else an FP32 sum; of a tied slab two parts, summed.

        A window of a single micro-batch leaves the first gradient as it is, and then needs a sum beside it.
        """
        if self.tied:
            return self.elements16 * (12 if windows > 1 and single else 8) + self.elements32 * 8
        if windows == 1:
            return self.elements16 * 2 + self.elements32 * 4
        return self.elements16 * (6 if single else 4) + self.elements32 * 4

    def in_vram(self, windows: int) -> int:
        """Its gradient sum in VRAM: rounded if the step has one window, else FP32; of a tied slab two parts, merged."""
        if self.tied:
            return (self.elements16 + self.elements32) * 8
        return self.elements16 * (2 if windows == 1 else 4) + self.elements32 * 4


def slab_bytes(slab: SlabShape, run: Run) -> tuple[int, int]:
    """Bytes of the weight, and padded elements."""
    itemsize = slab.itemsize or run.itemsize
    elements = padded_slab(slab.numel, itemsize)
    return elements * itemsize, elements


def state_of(block: BlockShape, run: Run) -> State:
    """The bytes of a block's state."""
    weights = residuals = moments = elements16 = elements32 = 0
    for slab in block.slabs:
        nbytes, elements = slab_bytes(slab, run)
        weights += nbytes
        if not slab.trains:
            continue
        half = (slab.itemsize or run.itemsize) == 2
        residuals += elements * 2 if half and run.precision == "bf16" else 0
        per_moment = slab.vectors * 4 + (slab.numel - slab.vectors) * WIDTHS[run.moment_width].nbytes
        moments += run.moments * -(-int(per_moment + 1) // 64) * 64
        elements16 += elements if half else 0
        elements32 += 0 if half else elements
    return State(weights, residuals, moments, elements16, elements32, block.tied)
