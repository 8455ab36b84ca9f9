"""Copies in host memory of integer tensors on the GPU, so that reading their values does not wait for the GPU.

Models decide on the host how to compute attention: whether rows are padded, whether sequences are packed. They read
what follows from the batch and from sizes, and a batch is on the host before it is on the GPU. Inside, a value
that is read on the host (`if mask.all():`) is computed on the CPU, by the same operations from the copy of the batch.
The result is the same, because these operations are exact for integers. If it follows from anything else, or a tensor
was written in place, PyTorch reads it from the GPU as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils.weak import WeakTensorKeyDictionary

Function = Callable[..., Any]


def _named(names: str) -> frozenset[Function]:
    """The functions of PyTorch and the methods of tensors with these names."""
    places = (torch, torch.Tensor, torch.nn.functional)
    return frozenset(getattr(place, name) for name in names.split() for place in places if hasattr(place, name))


FACTORIES = _named("arange ones zeros")
CONSTANT = _named("ones zeros ones_like zeros_like new_ones new_zeros")
"""Exact in every dtype."""
EXACT = (
    FACTORIES
    | CONSTANT
    | _named("__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ add sub mul cumsum diff sum all any")
    | _named("__eq__ __ne__ __lt__ __le__ __gt__ __ge__ eq ne lt le gt ge __and__ __or__ __invert__ masked_fill")
    | _named("__getitem__ expand view reshape squeeze unsqueeze pad cat stack to bool int long clone contiguous")
)
"""Functions of their arguments alone that have equal results on every device if those are integers or booleans."""
READS = _named("__bool__ __int__ __index__ __contains__ item tolist equal")
PLAIN = (int, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None), type(Ellipsis))
CPU = torch.device("cpu")


class _Copy(NamedTuple):
    value: Callable[[], torch.Tensor]
    """Computes the copy, when it is first needed."""
    version: int
    """Of the tensor on the GPU. PyTorch raises it when the tensor is written."""


class HostCopies(TorchFunctionMode):
    """Active in a thread that enters it. Several threads may enter the same one."""

    def __init__(self) -> None:
        super().__init__()
        self._copies = WeakTensorKeyDictionary()

    def __exit__(self, *error: Any) -> None:
        # A Ctrl-C in `paused` may have left it.
        if _get_current_function_mode() is self:
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    def add(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        """Add a tensor's copy in host memory. Nothing may write to the copy."""
        if _is_exact(tensor):
            self._copies[tensor] = _Copy(lambda: copy, tensor._version)

    def __torch_function__(
        self, function: Function, types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = {} if kwargs is None else dict(kwargs)
        reads = function in READS
        if not (reads or function in EXACT) or "out" in options or torch.compiler.is_compiling():
            return function(*args, **options)
        try:
            call = partial(_repeat, function, _map(self._known, args), _map(self._known, options))
        except LookupError:
            return function(*args, **options)
        if reads:
            return call()
        result = function(*args, **options)
        if type(result) is torch.Tensor and not result.is_inference() and (function in CONSTANT or _is_exact(result)):
            self._copies[result] = _Copy(cache(call), result._version)
        return result

    def _known(self, argument: Any) -> Any:
        """An argument with copies for tensors. Raises LookupError if it does not follow from the batch."""
        if isinstance(argument, torch.Tensor):
            copy = self._copies.get(argument)
            if copy is None or copy.version != argument._version:
                raise LookupError
            return copy
        if not isinstance(argument, PLAIN) and not (isinstance(argument, str) and argument == "constant"):
            raise LookupError
        return argument


def paused() -> AbstractContextManager[Any]:
    """Leave the calling thread's `HostCopies`: for code that is compiled, or has another state when it is repeated."""
    inside = isinstance(_get_current_function_mode(), HostCopies)
    return _pop_mode_temporarily() if inside else nullcontext()


def _is_exact(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _map(leaf: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to everything in nested arguments."""
    if isinstance(tree, dict):
        return {name: _map(leaf, each) for name, each in tree.items()}
    if isinstance(tree, slice):
        return slice(*(_map(leaf, end) for end in (tree.start, tree.stop, tree.step)))
    if isinstance(tree, list | tuple) and not isinstance(tree, _Copy):
        return [_map(leaf, each) for each in tree] if isinstance(tree, list) else tuple(_map(leaf, e) for e in tree)
    return leaf(tree)


def _on_cpu(argument: Any) -> Any:
    if isinstance(argument, _Copy):
        return argument.value()
    return CPU if isinstance(argument, torch.device) else argument


def _repeat(function: Function, args: Any, options: dict[str, Any]) -> Any:
    placed = {"device": CPU} if function in FACTORIES else {}
    return function(*_map(_on_cpu, args), **_map(_on_cpu, options) | placed)
