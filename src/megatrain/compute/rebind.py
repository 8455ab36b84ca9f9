"""Stores a block's graph without its weights: saved tensors that are views of a slot are replaced with handles.

Autograd saves the weights that the backward needs, often as transposed views. The slot is refilled before the backward
runs, so a handle stores the view's position in the slab. The backward applies it to the slot that then holds the slab.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch._dynamo.eval_frame import skip_code

from megatrain.compute.binding import call_with
from megatrain.errors import UnsupportedCall

Key = TypeVar("Key")
_numbers = itertools.count()
_active: ContextVar[Any] = ContextVar("megatrain_rebinder", default=None)


class Addresses(Generic[Key]):
    """The address ranges of contiguous tensors. Several of them may share a storage."""

    def __init__(self, tensors: Mapping[Key, torch.Tensor]) -> None:
        self._ranges = [(t.data_ptr(), t.data_ptr() + t.nbytes, key) for key, t in tensors.items()]

    def find(self, tensor: torch.Tensor) -> Key | None:
        """The key of the tensor whose range contains this tensor's start, or None."""
        at = tensor.data_ptr()
        for begin, end, key in self._ranges:
            if begin <= at < end:
                return key
        return None

    def copy_if_inside(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a copy if it lies in one of the ranges, whose memory will be reused."""
        return tensor if self.find(tensor) is None else tensor.clone()


class Rebinder:
    """Saved-tensor hooks for one call of a block."""

    def __init__(self, views: Mapping[int, torch.Tensor], block: str) -> None:
        self._slabs, self._block = Addresses(views), block
        self._starts = {slab: view.data_ptr() for slab, view in views.items()}
        self.views: Mapping[int, torch.Tensor] = {}
        """The weights' current location; set by the block's own backward."""

    def run(self, forward: Callable[[], Any]) -> Any:
        """Run the forward with the hooks active. If a Ctrl-C leaves the hooks installed, they do nothing afterwards."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            return call_with({_active: self}, forward)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if _active.get() is not self:
            return tensor
        slab = self._slabs.find(tensor)
        if slab is None:
            # Detach: a node that saves its own output would form a reference cycle, and a graph whose backward never
            # runs would never be freed.
            return partial(_unchanged, tensor.detach(), tensor._version)
        offset = (tensor.data_ptr() - self._starts[slab]) // tensor.element_size()
        return partial(self._view, slab, tensor.dtype, tensor.size(), tensor.stride(), offset)

    def _unpack(self, packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else packed()

    def _view(
        self, slab: int, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        """The view at its current location; `offset` is relative to the start of the slab."""
        if not self.views:
            refuse_hidden_gradient(self._block)
        view = self.views[slab].view(dtype)
        return view.as_strided(size, stride, int(view.storage_offset()) + offset)


def refuse_hidden_gradient(block: str, _: torch.Tensor | None = None) -> NoReturn:
    """Raise: a gradient reaches the inner graph of a block otherwise than through the block's outputs."""
    raise UnsupportedCall(
        f"a tensor made inside {block} reached the loss without being returned by its forward (kept as an attribute, "
        "say), so its gradient would be lost; return it from the layer's forward."
    )


def refuse_hidden_gradients(block: str, leaves: Iterable[torch.Tensor]) -> None:
    """Raise in a backward that reaches the graph of a block's forward through a tensor that was not returned.

    The backward of the block's own node accumulates nothing into leaves. The hook must not refer to the call, which
    would never be freed: the garbage collector does not see through autograd.
    """
    refuse = partial(refuse_hidden_gradient, block)
    for leaf in leaves:
        if leaf.requires_grad:
            leaf.register_post_accumulate_grad_hook(refuse)


def make_anchor() -> torch.Tensor:
    """A tensor that requires grad, so that a node has a backward even if none of its inputs does."""
    anchor: Any = torch.zeros((), requires_grad=True)
    anchor.megatrain_number = next(_numbers)
    return anchor  # type: ignore[no-any-return]


def refuse_side_inputs(
    block: str, outputs: Iterable[torch.Tensor], leaves: Iterable[torch.Tensor], anchor: Any
) -> None:
    """Raise if the graph of a block's outputs reaches another block, or a parameter that is not one of `leaves`.

    `anchor` is the one of this call. Later ones belong to blocks inside it. Other leaves may be made by the forward.
    """
    known = {id(leaf) for leaf in leaves}
    reached = [tensor for tensor in outputs if tensor.requires_grad and tensor.is_leaf]
    seen: set[Any] = set()
    pending: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if edges := node.next_functions:
            pending += [before for before, _ in edges if before is not None]
        elif (leaf := getattr(node, "variable", None)) is not None:
            reached.append(leaf)
    own: int = anchor.megatrain_number
    others = [leaf for leaf in reached if id(leaf) not in known]
    if any(isinstance(leaf, torch.nn.Parameter) or getattr(leaf, "megatrain_number", own) < own for leaf in others):
        raise UnsupportedCall(
            f"{block} used a tensor that requires grad and was not passed to its forward (an attribute, or a parameter "
            "of another module), so its gradient would be lost; pass it to the layer's forward, or detach it."
        )


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each was changed in place. Tensors made in inference mode do not count it."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def refuse_changed_inputs(block: str, before: Sequence[int], inputs: Iterable[torch.Tensor]) -> None:
    """Raise if inputs of a block that will be recomputed were changed by its forward; `before`: their versions."""
    if before != versions(inputs):
        raise UnsupportedCall(
            f"{block} changed an input in place, so a recompute would start from other values; change a copy of it, or "
            "use policy='store'."
        )


def _unchanged(tensor: torch.Tensor, version: int) -> torch.Tensor:
    # Autograd does not check versions of tensors that hooks have packed.
    if tensor._version != version:
        raise UnsupportedCall(
            "a tensor needed for a gradient was modified by an inplace operation after it had been saved "
            f"(version {tensor._version}, expected {version}); use a copy for one of the two."
        )
    return tensor


# After a graph break, dynamo would compile these. A decorator that forbids it would run for every saved tensor.
for _function in (Addresses.find, Rebinder._pack, Rebinder._unpack, Rebinder._view, _unchanged):
    skip_code(_function.__code__)
