"""Weights for the extent of one call, without touching the module that is called.

A module inside a block keeps its parameters in a `Bound` dict. Lookups by the thread that makes the call find the
weights of that call; everybody else finds what the module owns. Nothing is swapped in and out: a second thread sees no
change, and an exception at any point (Ctrl-C) leaves nothing behind, since a context is left by the interpreter itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

Result = TypeVar("Result")
Binding = dict[int, dict[str, torch.Tensor]]
"""What a call has bound: names and tensors, by the identity of the `Bound` dict that they are looked up in."""
_current: ContextVar[Binding] = ContextVar("megatrain_binding", default={})  # noqa: B039 nobody writes to it
_UNSET = object()


class Bound(dict[str, Any]):
    """`_parameters` or `_buffers` of a module: bound tensors first, then what the module owns.

    The storage of the dict itself is what `torch.compile` traces, which looks past overridden methods; it may hold the
    weights of a compiled call. `own` never does.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.own: dict[str, Any] = dict(content)

    def _bound(self) -> dict[str, torch.Tensor]:
        return _current.get().get(id(self), {})

    def _shown(self) -> dict[str, Any]:
        bound = self._bound()
        return self.own | bound if bound else self.own

    def __getitem__(self, name: str) -> Any:
        if is_dynamo_compiling():
            return super().__getitem__(name)
        bound = self._bound()
        return bound[name] if name in bound else self.own[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if is_dynamo_compiling():
            super().__setitem__(name, value)
            return
        bound = self._bound()
        if name in bound:
            # A recompute must not advance running statistics again: what it assigns ends with the call.
            bound[name] = value
            return
        self.own[name] = value
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        del self.own[name]
        super().pop(name, None)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) if is_dynamo_compiling() else name in self.own

    def __iter__(self) -> Iterator[str]:
        return super().__iter__() if is_dynamo_compiling() else iter(self.own)

    def __len__(self) -> int:
        return super().__len__() if is_dynamo_compiling() else len(self.own)

    def keys(self) -> Any:
        return super().keys() if is_dynamo_compiling() else self.own.keys()

    def values(self) -> Any:
        return super().values() if is_dynamo_compiling() else self._shown().values()

    def items(self) -> Any:
        return super().items() if is_dynamo_compiling() else self._shown().items()

    def copy(self) -> dict[str, Any]:
        return dict(self._shown())

    def pop(self, name: str, *default: Any) -> Any:
        if name not in self and default:
            return default[0]
        value = self[name]
        del self[name]
        return value

    def popitem(self) -> tuple[str, Any]:
        name = next(reversed(self.own))
        return name, self.pop(name)

    def clear(self) -> None:
        self.own.clear()
        super().clear()

    # dict's own would go past the methods above.
    get, setdefault, update = MutableMapping.get, MutableMapping.setdefault, MutableMapping.update  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.own,)

    # ---- around a compiled call

    def reset_traced(self) -> None:
        """Put the storage that `torch.compile` sees back to what the module owns."""
        super().clear()
        super().update(self.own)

    def keep_traced(self) -> None:
        """Take over what a compiled forward assigned."""
        self.own = dict(zip(super().keys(), super().values(), strict=True))


def call_bound(binding: Binding, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call with tensors bound, on top of what an outer call has bound."""
    return call_with({_current: _current.get() | binding}, function, *args, **kwargs)


def call_with(
    variables: Mapping[ContextVar[Any], Any], function: Callable[..., Result], *args: Any, **kwargs: Any
) -> Result:
    """Call in a copy of the present context with variables of ours set, which are left with it, however the call ends.

    Variables that somebody else set inside are handed on after a call that ended well.
    """
    context = copy_context()
    for variable, value in variables.items():
        context.run(variable.set, value)
    result = context.run(function, *args, **kwargs)
    for variable, value in context.items():
        if not variable.name.startswith("megatrain_") and variable.get(_UNSET) is not value:
            variable.set(value)
    return result
