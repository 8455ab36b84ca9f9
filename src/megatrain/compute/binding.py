"""Binds weights for one call without modifying the module.

Modules inside a block keep their parameters in a `Bound` dict. Lookups by the calling thread return the weights of its
call; other threads get the module's own parameters. Bindings are context variables, restored after every call, so an
exception at any point, even a Ctrl-C, leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])
Binding = dict[int, dict[str, torch.Tensor]]
"""id of a `Bound` dict → the tensors bound in it, by name."""
_current: ContextVar[Binding] = ContextVar("megatrain_binding", default={})  # noqa: B039 never modified


class Bound(dict[str, Any]):
    """`_parameters` or `_buffers` of a module: looks up bound tensors first, then the module's own.

    `torch.compile` ignores overridden methods and traces the storage of the dict itself, which may hold the weights of
    a compiled call. `own` never does.
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
            # A recompute must not advance running statistics again, so its assignments end with the call.
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

    # The methods of dict would bypass those above.
    get, setdefault, update = MutableMapping.get, MutableMapping.setdefault, MutableMapping.update  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.own,)

    # ---- around a compiled call

    def reset_traced(self) -> None:
        """Reset the storage that `torch.compile` traces to the module's own tensors."""
        super().clear()
        super().update(self.own)

    def keep_traced(self) -> None:
        """Make what a compiled forward assigned the module's own."""
        self.own = dict(zip(super().keys(), super().values(), strict=True))


def untraced(function: Function) -> Function:
    """The function as it is, inside a model that the user has passed to `torch.compile` too."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


def call_bound(binding: Binding, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call with tensors bound, in addition to those of an outer call."""
    return call_with({_current: _current.get() | binding}, function, *args, **kwargs)


def call_with(
    variables: Mapping[ContextVar[Any], Any], function: Callable[..., Result], *args: Any, **kwargs: Any
) -> Result:
    """Call with these context variables set. All of them have defaults.

    The call runs in the present context: copying it and finding out what has changed would take a millisecond, since
    torch.compile keeps its settings in about a thousand variables.
    """
    before = [(variable, variable.get()) for variable in variables]
    # Nested: if a Ctrl-C interrupts the first restore, the second completes it.
    try:
        try:
            for variable, value in variables.items():
                variable.set(value)
            return function(*args, **kwargs)
        finally:
            _restore(before)
    finally:
        _restore(before)


def _restore(values: list[tuple[ContextVar[Any], Any]]) -> None:
    for variable, value in values:
        variable.set(value)
