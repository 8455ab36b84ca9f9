"""Counter-based random bits for stochastic rounding: they depend only on a seed and the element's index.

An update has a 64-bit seed. Elements are numbered from the start of their slab. Every 256 share a 64-bit key, and an
element's 32 bits are its key mixed with its index in the group. There is no state, so an update draws the same bits on
any thread or device and after a resume.
"""

from __future__ import annotations

import torch

GROUP = 256
"""Elements that share a key. Updates start on multiples of this."""
_M64 = (1 << 64) - 1
_M32 = (1 << 32) - 1
_GOLDEN64 = 0x9E3779B97F4A7C15
_GOLDEN32 = 0x9E3779B9


def mix64(value: int) -> int:
    """The finaliser of splitmix64."""
    value &= _M64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _M64
    return value ^ (value >> 31)


def seed_of(slab: int, step: int) -> int:
    """The seed of one slab's update in one step."""
    return mix64(mix64(slab + 1) + step)


class Draws:
    """Random bits of elements [first, first + count) of a slab; `first` is a multiple of 256."""

    def __init__(self, seed: int, first: int, count: int, device: torch.device | str = "cpu") -> None:
        groups = range(first // GROUP, first // GROUP + -(-count // GROUP))
        keys = [mix64(seed + (group + 1) * _GOLDEN64) for group in groups]
        self._states = self._mix([key & _M32 for key in keys], device)[:count]
        self._weights = self._mix([key >> 32 for key in keys], device)[:count]

    def moment(self, number: int) -> torch.Tensor:
        """16 bits per element for the first (0) or second (1) moment, as int32."""
        return ((self._states >> (16 * number)) & 0xFFFF).int()

    def weight(self) -> torch.Tensor:
        """16 bits per element for the weight, as int32."""
        return (self._weights & 0xFFFF).int()

    @staticmethod
    def _mix(keys: list[int], device: torch.device | str) -> torch.Tensor:
        """Unsigned 32-bit values in int64, mixed by the finaliser of murmur3."""
        indices = torch.arange(GROUP, dtype=torch.int64, device=device) * _GOLDEN32
        value = (torch.tensor(keys, dtype=torch.int64, device=device)[:, None] + indices) & _M32
        value = ((value ^ (value >> 16)) * 0x85EBCA6B) & _M32
        value = ((value ^ (value >> 13)) * 0xC2B2AE35) & _M32
        return (value ^ (value >> 16)).reshape(-1)
