"""Storage formats of moments: FP32, BF16, or block-wise codes of 8 or 4 bits. The reference that kernels equal bitwise.

A code is a small floating-point number: `value = sign · level(code) · scale`, with one FP32 scale per block, the
block's largest magnitude. Levels are spaced like those of a float with M mantissa bits, and the highest is 1:

    level(c) = the FP32 whose bits are (c + (127 << M) - (N - 1)) << (23 - M),  N codes per sign

Rounding is stochastic and unbiased. A decaying average changes by less than a code's width per step, so rounding to
nearest would freeze it. Code 0 is zero in a signed format and the smallest level in a positive one, because a second
moment of zero would make the next update explode.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatrain.geometry import WIDTHS

_ONE = 0x3F800000
_SMALLEST, _LARGEST = 0x00800000, 0x7F7FFFFF
"""Scales are clamped to normal FP32 numbers, so that their inverse is finite."""


@dataclass(frozen=True)
class Format:
    """Storage of one moment in `bits` per element: FP32, or stochastically rounded BF16."""

    name: str
    bits: int
    block: int = 0
    """Elements per FP32 scale (0: no scales)."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.block else torch.float32 if self.bits == 32 else torch.bfloat16

    def payload_bytes(self, numel: int) -> int:
        return numel * self.bits // 8

    def scale_bytes(self, numel: int) -> int:
        return 4 * -(-numel // self.block) if self.block else 0

    def decode(self, payload: Tensor, scales: Tensor | None, count: int) -> Tensor:
        """A copy in FP32 of the first `count` elements of a uint8 payload."""
        return payload[: self.payload_bytes(count)].view(self.dtype).to(torch.float32, copy=True)

    def encode(self, values: Tensor, payload: Tensor, scales: Tensor | None, draws: Tensor | None) -> None:
        """Write FP32 values. `draws` has 16 random bits per element; without it, round to nearest."""
        stored = values if self.bits == 32 else round_to_bf16(values, draws)
        payload[: self.payload_bytes(values.numel())].view(self.dtype).copy_(stored)


@dataclass(frozen=True)
class Codes(Format):
    """Block-wise codes of 8 or 4 bits. Two 4-bit codes share a byte: element k of a block and element k + block / 2."""

    mantissa: int = 0
    signed: bool = True

    @property
    def levels(self) -> int:
        """Codes per sign (N above)."""
        return 1 << (self.bits - self.signed)

    @property
    def _base(self) -> int:
        return (127 << self.mantissa) - (self.levels - 1)

    @property
    def below(self) -> float:
        """65536 / level(1) in FP32: magnitudes under level 1, times this, are compared with the 16 random bits."""
        first = torch.tensor((1 + self._base) << (23 - self.mantissa), dtype=torch.int32).view(torch.float32)
        return float(torch.tensor(65536.0) / first)

    def decode(self, payload: Tensor, scales: Tensor | None, count: int) -> Tensor:
        assert scales is not None
        blocks = -(-count // self.block)
        codes = payload[: self.payload_bytes(blocks * self.block)].view(blocks, -1).int()
        if self.bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], dim=1)
        magnitude = codes & (self.levels - 1)
        levels = ((magnitude + self._base) << (23 - self.mantissa)).view(torch.float32)
        if self.signed:
            levels = torch.where(magnitude == 0, torch.zeros((), device=levels.device), levels)
        values = levels * scales[:blocks, None]
        if self.signed:
            sign = (codes >> (self.bits - 1)) << 31
            values = (values.view(torch.int32) | sign).view(torch.float32)
        return values.reshape(-1)[:count]

    def encode(self, values: Tensor, payload: Tensor, scales: Tensor | None, draws: Tensor | None) -> None:
        assert scales is not None
        count, blocks = values.numel(), -(-values.numel() // self.block)
        if draws is None:
            draws = torch.full((count,), 0x8000, dtype=torch.int32, device=values.device)
        # Padding past `count` is zeros, whose codes are zero too.
        padding = (0, blocks * self.block - count)
        bits, draws = pad(values.view(torch.int32), padding).view(blocks, -1), pad(draws, padding).view(blocks, -1)
        magnitude = bits & 0x7FFFFFFF
        scale = magnitude.amax(dim=1).clamp(_SMALLEST, _LARGEST).view(torch.float32)
        scales[:blocks] = scale
        share = magnitude.view(torch.float32) * (1.0 / scale)[:, None]
        shift = 23 - self.mantissa
        codes = (share.view(torch.int32).clamp(max=_ONE) + (draws << (shift - 16))) >> shift
        codes = (codes - self._base).clamp(0, self.levels - 1)
        if self.signed:
            # Magnitudes between zero and level 1.
            small = (share * self.below).clamp(max=65536.0).int()
            codes = torch.where(small < 65536, (draws < small).int(), codes) | ((bits >> 31) & self.levels)
        if self.bits == 4:
            codes = codes[:, : self.block // 2] | (codes[:, self.block // 2 :] << 4)
        payload[: codes.numel()].copy_(codes.reshape(-1))


def _codes(name: str, mantissa: int, signed: bool) -> Codes:
    return Codes(name, WIDTHS[name].bits, WIDTHS[name].block, mantissa, signed)


FP32 = Format("fp32", WIDTHS["fp32"].bits)
_BF16 = Format("bf16", WIDTHS["bf16"].bits)
FORMATS: dict[str, tuple[Format, Format]] = {
    "fp32": (FP32, FP32),
    "bf16": (_BF16, _BF16),
    "8bit": (_codes("8bit", mantissa=3, signed=True), _codes("8bit", mantissa=3, signed=False)),
    "4bit": (_codes("4bit", mantissa=1, signed=True), _codes("4bit", mantissa=0, signed=False)),
}
"""Width → the format of a signed moment, and of one that is never negative."""


def round_to_bf16(values: Tensor, draws: Tensor | None) -> Tensor:
    """FP32 → BF16: stochastic rounding with 16 random bits per element, or to nearest even without draws."""
    if draws is None:
        return values.bfloat16()
    bits = values.view(torch.int32)
    special = (bits & 0x7F800000) == 0x7F800000
    rounded = torch.where(special, bits, bits + draws)
    rounded = torch.where(values.isnan(), torch.tensor(0x7FC00000, dtype=torch.int32, device=values.device), rounded)
    return (rounded >> 16).to(torch.int16).view(torch.bfloat16)
