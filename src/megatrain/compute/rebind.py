"""Keeping a block's graph while its weights leave: saved tensors that are views of a slot are kept as handles.

Autograd saves the weights it needs for the backward, often as transposed views. A slot is refilled before the backward
comes, so what is saved is only where in the slab the view lies; it is bound again to the slot that the weights come
back in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from megatrain.compute.binding import call_with
from megatrain.errors import UnsupportedCall

Key = TypeVar("Key")
_active: ContextVar[Any] = ContextVar("megatrain_rebinder", default=None)


class Addresses(Generic[Key]):
    """The ranges of memory that contiguous tensors take: slots and copies may be parts of one storage."""

    def __init__(self, tensors: Mapping[Key, torch.Tensor]) -> None:
        self._ranges = [(t.data_ptr(), t.data_ptr() + t.nbytes, key) for key, t in tensors.items()]

    def find(self, tensor: torch.Tensor) -> Key | None:
        """Whose memory a tensor begins in; None if nobody's."""
        at = tensor.data_ptr()
        return next((key for begin, end, key in self._ranges if begin <= at < end), None)

    def copy_if_inside(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, copied if it lies in any of them: their memory will hold something else."""
        return tensor if self.find(tensor) is None else tensor.clone()


class Rebinder:
    """Saved-tensor hooks for one call of a block."""

    def __init__(self, views: Mapping[int, torch.Tensor]) -> None:
        self._slabs = Addresses(views)
        self._starts = {slab: view.data_ptr() for slab, view in views.items()}
        self.views: Mapping[int, torch.Tensor] = {}
        """Set before the backward: where the weights are then."""

    def run(self, forward: Callable[[], Any]) -> Any:
        """Run the forward. Hooks that a Ctrl-C leaves behind find that they are nobody's, and do nothing."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            return call_with({_active: self}, forward)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _pack(self, tensor: torch.Tensor) -> Any:
        if _active.get() is not self:
            return tensor
        slab = self._slabs.find(tensor)
        if slab is None:
            # Without its own history: a node that saves what it made would hold itself, and a graph that no backward
            # uses (one that ran out of memory, say) would never be freed.
            return partial(_unchanged, tensor.detach(), tensor._version)
        offset = (tensor.data_ptr() - self._starts[slab]) // tensor.element_size()
        return partial(self._view, slab, tensor.dtype, tensor.size(), tensor.stride(), offset)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _unpack(self, packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else packed()

    def _view(
        self, slab: int, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        """A view of the weights where they are now; `offset` is from the start of the slab."""
        view = self.views[slab].view(dtype)
        return view.as_strided(size, stride, int(view.storage_offset()) + offset)


def _unchanged(tensor: torch.Tensor, version: int) -> torch.Tensor:
    # Autograd does not look at versions where hooks are set.
    if tensor._version != version:
        raise UnsupportedCall(
            "a tensor needed for a gradient was modified by an inplace operation after it had been saved "
            f"(version {tensor._version}, expected {version}); use a copy for one of the two."
        )
    return tensor
