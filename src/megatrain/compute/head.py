"""The head and its loss in chunks of tokens, so that no more than one chunk of logits exists.

The output embedding returns `LazyLogits`: not yet computed, but shaped like logits. Pointwise operations on it (a
softcap, a scale, a cast) are recorded; the model's loss function takes it and runs head, recorded operations and
cross-entropy chunk by chunk, each chunk differentiated at once; any other use computes the logits whole, as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from megatrain.compute import node
from megatrain.compute.block import Block
from megatrain.compute.replay import Ambient
from megatrain.errors import UnsupportedCall
from megatrain.store.gradient import Place

Pointwise = Callable[[torch.Tensor], torch.Tensor]


class LazyLogits(torch.Tensor):
    """Logits that are computed when somebody looks at them."""

    whole: Callable[[], torch.Tensor]
    hidden: torch.Tensor
    chain: tuple[Pointwise, ...]
    _computed: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        whole: Callable[[], torch.Tensor],
        hidden: torch.Tensor,
        features: int,
        dtype: torch.dtype,
        chain: tuple[Pointwise, ...] = (),
        graph: bool = True,
    ) -> LazyLogits:
        shape = (*hidden.shape[:-1], features)
        logits = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device, requires_grad=graph)
        logits.whole, logits.hidden, logits.chain, logits._computed = whole, hidden, chain, None
        return logits

    def compute(self) -> torch.Tensor:
        """The logits. Kept, so that two uses share them; without the graph that they should have they are not."""
        if self._computed is not None:
            return self._computed
        logits = self.whole()
        for operation in self.chain:
            logits = operation(logits)
        if torch.is_grad_enabled() or not self.requires_grad:
            self._computed = logits
        return logits

    def then(self, operation: Pointwise, dtype: torch.dtype | None = None) -> LazyLogits:
        chain = (*self.chain, operation)
        return LazyLogits(self.whole, self.hidden, self.shape[-1], dtype or self.dtype, chain, self.requires_grad)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, operations={len(self.chain)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.compute().detach().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _only_looks(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if args and isinstance(args[0], LazyLogits) and args[0]._computed is None:
            recorded = _record(func, args[0], args[1:], kwargs)
            if recorded is not None:
                return recorded
        args, kwargs = pytree.tree_map_only(LazyLogits, LazyLogits.compute, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Reached by code that bypasses torch functions (C++ extensions, autograd internals).
        args, kwargs = pytree.tree_map_only(LazyLogits, LazyLogits.compute, (args, kwargs or {}))
        return func(*args, **kwargs)


_LOOKS = {"size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "get_device", "__len__"}
_LOOKED_AT = {"shape", "dtype", "device", "ndim", "is_cuda", "layout", "requires_grad", "is_leaf", "is_meta"}
_ADD = ("add", "__add__", "__radd__", "__iadd__")
_SUB = ("sub", "__sub__", "__isub__")
_MUL = ("mul", "multiply", "__mul__", "__rmul__", "__imul__")
_DIV = ("div", "true_divide", "__truediv__", "__itruediv__")
_BINARY: dict[str, Callable[..., torch.Tensor]] = {
    name: operation
    for names, operation in ((_ADD, torch.add), (_SUB, torch.sub), (_MUL, torch.mul), (_DIV, torch.div))
    for name in names
}
_UNARY: dict[str, Pointwise] = {"tanh": torch.tanh, "contiguous": torch.Tensor.contiguous}


def _only_looks(func: Any) -> bool:
    """Whether the call asks for the tensor's shape or kind alone."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _LOOKED_AT
    return name in _LOOKS


def _record(func: Any, logits: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits | None:
    """A pointwise operation that means the same on every chunk of tokens; None if it is anything else."""
    name = getattr(func, "__name__", "")
    if kwargs or (logits.requires_grad and not torch.is_grad_enabled()):
        return None
    if name in _BINARY and len(args) == 1 and _is_constant(args[0], logits.shape[-1]):
        operation, other = _BINARY[name], args[0]
        other = other.reshape(-1) if isinstance(other, torch.Tensor) and other.ndim > 1 else other
        return logits.then(lambda chunk: operation(chunk, other))
    if name in _UNARY and not args:
        return logits.then(_UNARY[name])
    if name == "float" and not args:
        return logits.then(lambda chunk: chunk.float(), torch.float32)
    if name == "to" and len(args) == 1 and isinstance(args[0], torch.dtype):
        return logits.then(lambda chunk: chunk.to(args[0]), args[0])
    if name == "to" and len(args) == 1 and isinstance(args[0], torch.device) and args[0] == logits.device:
        return logits
    return None


def _is_constant(other: Any, features: int) -> bool:
    """A number, or a tensor without gradient that has one value, or one value per logit."""
    if not isinstance(other, torch.Tensor):
        return isinstance(other, int | float)
    per_logit = other.ndim > 0 and other.shape[-1] == other.numel() and other.numel() in (1, features)
    return not other.requires_grad and (other.ndim == 0 or per_logit)


@dataclass
class ChunkedHead:
    """The head block, run lazily."""

    flow: node.Flow
    block: Block
    features: int
    tokens: int
    """Tokens per chunk."""

    def lazy(self, hidden: torch.Tensor, whole: Callable[[], torch.Tensor]) -> LazyLogits:
        """Logits to be computed; `whole` computes them at once, under the autocast of this moment."""
        ambient = Ambient.capture(self.flow.device)
        graph = torch.is_grad_enabled()
        versions = [slab.version for slab in self.block.slabs]

        def compute() -> torch.Tensor:
            if versions != [slab.version for slab in self.block.slabs]:
                raise UnsupportedCall(
                    "these logits are computed when they are looked at, and the weights have changed since; look at "
                    "them before optimizer.step(), or set head_chunk=0 to have them at once."
                )
            with ambient.autocasting(), nullcontext() if graph else torch.no_grad():
                return whole()

        return LazyLogits(compute, hidden, self.features, ambient.cast_dtype or hidden.dtype, graph=graph)

    def loss(self, logits: LazyLogits, targets: torch.Tensor, items: Any, ignore_index: int) -> torch.Tensor:
        """Cross-entropy summed over the targets that count, divided by `items` (None: their number)."""
        hidden = logits.hidden.reshape(-1, logits.hidden.shape[-1])
        targets = targets.reshape(-1).to(hidden.device)
        divisor = (targets != ignore_index).sum() if items is None else items
        if isinstance(divisor, torch.Tensor):
            divisor = divisor.to(hidden.device)
        task = _Task(self, logits.chain, targets, divisor, ignore_index)
        if not torch.is_grad_enabled() or not logits.requires_grad:
            return self._evaluate(task, hidden)
        task.place = self.flow.begin(self.block).place
        anchor = torch.zeros((), requires_grad=True)
        loss: torch.Tensor = _ChunkedLoss.apply(task, anchor, hidden)  # type: ignore[no-untyped-call]
        return loss

    def _evaluate(self, task: _Task, hidden: torch.Tensor) -> torch.Tensor:
        """The loss alone: the same sums as in training, no gradients."""
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        with torch.no_grad(), self.flow.weights(self.block, "inference") as views:
            weights = self.block.bind(views, leaves=False)
            for start in range(0, hidden.shape[0], self.tokens):
                total += task.chunk(weights, hidden[start : start + self.tokens], start)
        return total


@dataclass
class _Task:
    head: ChunkedHead
    chain: tuple[Pointwise, ...]
    targets: torch.Tensor
    divisor: Any
    ignore_index: int
    place: Place = (-1, 0)

    def chunk(self, weights: Any, hidden: torch.Tensor, start: int) -> torch.Tensor:
        logits = self.head.block.call(weights, (hidden,), {})
        for operation in self.chain:
            logits = operation(logits)
        targets = self.targets[start : start + hidden.shape[0]]
        loss = functional.cross_entropy(logits.float(), targets, ignore_index=self.ignore_index, reduction="sum")
        mean: torch.Tensor = loss / self.divisor
        return mean


class _ChunkedLoss(torch.autograd.Function):
    """Gradients are taken in the forward, while a chunk's logits are there; the backward only scales them."""

    @staticmethod
    def forward(ctx: Any, task: _Task, anchor: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        head = task.head
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        by_hidden = torch.empty_like(hidden) if hidden.requires_grad else None
        by_weight: dict[tuple[int, int], torch.Tensor] = {}
        with head.flow.weights(head.block, "forward") as views:
            weights = head.block.bind(views, leaves=True)
            leaves = {place: weight for place, weight in weights.items() if weight.requires_grad}
            for start in range(0, hidden.shape[0], head.tokens):
                piece = hidden[start : start + head.tokens].detach().requires_grad_(by_hidden is not None)
                with torch.enable_grad():
                    loss = task.chunk(weights, piece, start)
                wanted = [*([piece] if by_hidden is not None else []), *leaves.values()]
                found = list(torch.autograd.grad(loss, wanted, allow_unused=True)) if wanted else []
                total += loss.detach()
                if by_hidden is not None:
                    by_hidden[start : start + head.tokens] = found.pop(0)
                _add(by_weight, dict(zip(leaves, found, strict=True)))
                # A chunk's gradients must not live on beside the next one's.
                del loss, found
        ctx.head, ctx.place, ctx.weights = head, task.place, list(by_weight)
        ctx.dtypes = {slab.index: slab.layout.dtype for slab in head.block.slabs}
        ctx.save_for_backward(by_hidden, *by_weight.values())
        return total

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        node.refuse_create_graph(ctx.head.block.name)
        by_hidden, *by_weight = ctx.saved_tensors
        by_slab: dict[int, dict[int, torch.Tensor]] = {}
        for (slab, segment), gradient in zip(ctx.weights, by_weight, strict=True):
            by_slab.setdefault(slab, {})[segment] = _scaled(gradient, scale, ctx.dtypes[slab])
        if node.weights_wanted():
            node.hand_over(ctx.head.flow, ctx.head.block, ctx.place, by_slab)
        return None, None, None if by_hidden is None else by_hidden * scale.to(by_hidden.dtype)


def _add(sums: dict[tuple[int, int], torch.Tensor], gradients: dict[tuple[int, int], torch.Tensor | None]) -> None:
    """Chunks are summed in FP32: in BF16 the last of many would not count."""
    for place, gradient in gradients.items():
        if gradient is not None:
            previous = sums.get(place)
            sums[place] = gradient.float() if previous is None else previous.add_(gradient)


def _scaled(gradient: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The FP32 gradient times the loss's scale, rounded once to the weight's dtype, without a second FP32 copy."""
    rounded = torch.empty_like(gradient, dtype=dtype)
    rows = max(1, (1 << 24) // max(1, gradient[0].numel()))
    for source, target in zip(gradient.split(rows), rounded.split(rows), strict=True):
        target.copy_(source * scale)
    return rounded
