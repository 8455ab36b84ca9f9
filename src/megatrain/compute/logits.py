"""Lazy logits: the output embedding returns them, and the model's loss computes them chunk by chunk (compute/head.py).

Pointwise operations on them (a softcap, a scale, a cast) are recorded and applied to each chunk. Any other operation
computes all logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

Pointwise = Callable[[torch.Tensor], torch.Tensor]


class LazyLogits(torch.Tensor):
    """Logits that are computed when they are first read."""

    materialize: Callable[[], torch.Tensor]
    hidden: torch.Tensor
    chain: tuple[Pointwise, ...]
    _computed: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        materialize: Callable[[], torch.Tensor],
        hidden: torch.Tensor,
        features: int,
        dtype: torch.dtype,
        chain: tuple[Pointwise, ...] = (),
        graph: bool = True,
    ) -> LazyLogits:
        shape = (*hidden.shape[:-1], features)
        logits = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device, requires_grad=graph)
        logits.materialize, logits.hidden, logits.chain, logits._computed = materialize, hidden, chain, None
        return logits

    def compute(self) -> torch.Tensor:
        """Compute the logits. They are cached unless they lack a graph that they should have."""
        if self._computed is not None:
            return self._computed
        logits = self.materialize()
        for operation in self.chain:
            logits = operation(logits)
        if torch.is_grad_enabled() or not self.requires_grad:
            self._computed = logits
        return logits

    @property
    def computed(self) -> bool:
        return self._computed is not None

    def then(self, operation: Pointwise, dtype: torch.dtype | None = None) -> LazyLogits:
        chain = (*self.chain, operation)
        return LazyLogits(self.materialize, self.hidden, self.shape[-1], dtype or self.dtype, chain, self.requires_grad)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, operations={len(self.chain)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.compute().detach().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _reads_metadata(func):
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


_METADATA = {"size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "get_device", "__len__"}
_METADATA_ATTRIBUTES = {"shape", "dtype", "device", "ndim", "is_cuda", "layout", "requires_grad", "is_leaf", "is_meta"}
_BINARY: dict[str, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(("add", "__add__", "__radd__", "__iadd__"), torch.add),
    **dict.fromkeys(("sub", "__sub__", "__isub__"), torch.sub),
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__", "__imul__"), torch.mul),
    **dict.fromkeys(("div", "true_divide", "__truediv__", "__itruediv__"), torch.div),
}
_UNARY: dict[str, Pointwise] = {"tanh": torch.tanh, "contiguous": torch.Tensor.contiguous}


def _reads_metadata(func: Any) -> bool:
    """Whether the call reads only metadata (shape, dtype, device)."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _METADATA_ATTRIBUTES
    return name in _METADATA


def _record(func: Any, logits: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits | None:
    """Record a pointwise operation, which can be applied to each chunk of tokens; None for any other."""
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
