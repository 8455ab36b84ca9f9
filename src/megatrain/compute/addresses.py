"""Which of some tensors another one lies in: by address, since slots and copies may be parts of one storage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

import torch

Key = TypeVar("Key")


class Addresses(Generic[Key]):
    """The ranges of memory that contiguous tensors take."""

    def __init__(self, tensors: Mapping[Key, torch.Tensor]) -> None:
        self._ranges = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), key) for key, t in tensors.items()]

    def find(self, tensor: torch.Tensor) -> Key | None:
        """Whose memory a tensor begins in; None if nobody's."""
        at = tensor.data_ptr()
        return next((key for begin, end, key in self._ranges if begin <= at < end), None)

    def out_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, copied if it lies in any of them: their memory will hold something else."""
        return tensor if self.find(tensor) is None else tensor.clone()
