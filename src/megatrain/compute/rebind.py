"""Keeping a block's graph while its weights leave: saved tensors that are views of a slot are kept as handles.

Autograd saves the weights it needs for the backward, often as transposed views. A slot is refilled before the backward
comes, so what is saved is only where in the slab the view lies; it is bound again to the slot that the weights come
back in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.compute.addresses import Addresses
from megatrain.compute.binding import within_context
from megatrain.errors import UnsupportedCall

_active: ContextVar[Any] = ContextVar("megatrain_rebinder", default=None)


@dataclass(frozen=True)
class _Handle:
    slab: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """From the start of the slab."""


@dataclass(frozen=True)
class _Kept:
    """Any other saved tensor, and how often it had been written to."""

    tensor: torch.Tensor
    version: int


class Rebinder:
    """Saved-tensor hooks for one call of a block."""

    def __init__(self, views: Mapping[int, torch.Tensor]) -> None:
        self._slabs = Addresses(views)
        self._starts = {slab: view.data_ptr() for slab, view in views.items()}
        self._views: Mapping[int, torch.Tensor] = {}

    def packing(self, forward: Callable[[], Any]) -> Any:
        """Run the forward. Hooks that a Ctrl-C leaves behind find that they are nobody's, and do nothing."""
        return within_context(self._packing, forward)

    def _packing(self, forward: Callable[[], Any]) -> Any:
        _active.set(self)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            return forward()

    def bind(self, views: Mapping[int, torch.Tensor]) -> None:
        """Before the backward: where the weights are now."""
        self._views = views

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _pack(self, tensor: torch.Tensor) -> Any:
        if _active.get() is not self:
            return tensor
        slab = self._slabs.find(tensor)
        if slab is None:
            # Without its own history: a node that saves what it made would hold itself, and a graph that no backward
            # uses (one that ran out of memory, say) would never be freed.
            return _Kept(tensor.detach(), tensor._version)
        offset = (tensor.data_ptr() - self._starts[slab]) // tensor.element_size()
        return _Handle(slab, tensor.dtype, tensor.size(), tensor.stride(), offset)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, _Kept):
            # Autograd does not look at versions where hooks are set.
            if packed.tensor._version != packed.version:
                raise UnsupportedCall(
                    "a tensor needed for a gradient was modified by an inplace operation after it had been saved "
                    f"(version {packed.tensor._version}, expected {packed.version}); use a copy for one of the two."
                )
            return packed.tensor
        if isinstance(packed, torch.Tensor):
            return packed
        view = self._views[packed.slab].view(packed.dtype)
        return view.as_strided(packed.size, packed.stride, int(view.storage_offset()) + packed.offset)
