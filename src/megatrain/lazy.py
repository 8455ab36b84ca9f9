"""Tensors whose values stay in a file until they are read.

A `LazyTensor` has shape, dtype and the device "cpu", and takes no RAM. While a model is loaded, views and copies of
it (a conversion to another dtype, experts that are stacked into one tensor) are recorded; they are computed when the
result is read. Afterwards only views are. A read computes the values and frees them again; a write copies them to RAM
first, where they stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

Kind = TypeVar("Kind", bound=torch.Tensor)
aten: Any = torch.ops.aten
RECORDED = {
    aten._to_copy.default,
    aten._unsafe_view.default,
    aten.cat.default,
    aten.clone.default,
    aten.flip.default,
    aten.index_select.default,
    aten.stack.default,
}
"""Operators, beside views, that are recorded while a model is loaded: they only move or convert values."""


def without_storage(kind: type[Kind], geometry: torch.Tensor, device: torch.device) -> Kind:
    """A tensor of a subclass, with the dtype and strides of `geometry`, whose operators reach `__torch_dispatch__`."""
    return torch.Tensor._make_wrapper_subclass(
        kind,
        geometry.size(),
        strides=geometry.stride(),
        storage_offset=geometry.storage_offset(),
        dtype=geometry.dtype,
        device=device,
        requires_grad=False,
    )


class Load:
    """One load of a model."""

    def __init__(self) -> None:
        self.recording = True

    def tensor(self, read: Callable[[], torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> LazyTensor:
        """A tensor in a file. `read` returns it as a view of the file, which is not written to."""
        return LazyTensor(_Values(self, read, torch.empty(shape, dtype=dtype, device="meta"), in_file=True))


def lazy_slice(stored: Any, load: Load) -> LazyTensor:
    """A tensor of a safetensors file, from `safe_open(...).get_slice(name)`. The file may be closed meanwhile."""
    # An empty slice has the dtype. `get_dtype` would have its name in the format.
    dtype = (stored[:0] if stored.get_shape() else stored[...]).dtype
    return load.tensor(lambda: stored[...], tuple(stored.get_shape()), dtype)


class _Values:
    """How to compute the values of a lazy tensor, or the values themselves once they are in RAM."""

    def __init__(
        self,
        load: Load,
        compute: Callable[[], torch.Tensor],
        geometry: torch.Tensor,
        *,
        in_file: bool = False,
        base: _Values | None = None,
        equal: _Values | None = None,
        temporary: int = 0,
    ) -> None:
        self.load, self._compute, self.geometry = load, compute, geometry
        self._in_file = in_file
        self._base = base
        """What it is a view of."""
        self._equal = equal
        """Equal values in the same shape, in this dtype or a narrower one that converts to it exactly."""
        self._temporary = temporary
        self._kept: torch.Tensor | None = None

    def read(self) -> torch.Tensor:
        """The values: kept ones, a view of the file, or a new tensor."""
        return self._compute() if self._kept is None else self._kept

    def keep(self) -> torch.Tensor:
        """The values in RAM, from now on. Views of them share their memory, as those of any tensor do."""
        if self._kept is None:
            if self._base is not None:
                self._base.keep()
            values = self._compute()
            self._kept = values.clone() if self._in_file else values
        return self._kept

    @property
    def in_ram(self) -> bool:
        return self._kept is not None or (self._base is not None and self._base.in_ram)

    @property
    def temporary(self) -> int:
        """Bytes of RAM that a read takes until its result is freed."""
        return 0 if self.in_ram else self._temporary

    def narrowest(self) -> _Values:
        """Equal values that take the least RAM to read."""
        return self if self.in_ram or self._equal is None else self._equal.narrowest()


class LazyTensor(torch.Tensor):
    """A tensor whose values are in a file, or are computed from tensors in files."""

    source: _Values

    # Methods and attributes behave like a plain tensor's; only operators reach __torch_dispatch__.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: _Values) -> LazyTensor:
        tensor = without_storage(cls, values.geometry, torch.device("cpu"))
        tensor.source = values
        return tensor

    # ---- attributes and methods that need memory

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """The parameter becomes an ordinary one, which may have another shape."""
        plain = torch.nn.Parameter(value.detach(), requires_grad=self.requires_grad)
        plain.__dict__.update(self._attributes)
        torch.utils.swap_tensors(self, plain)

    @property
    def _attributes(self) -> dict[str, Any]:
        """What others have set on the tensor, such as transformers' mark of what needs no initialisation."""
        return {name: value for name, value in vars(self).items() if name not in ("source", "_is_param")}

    def plain(self) -> torch.Tensor:
        """An ordinary tensor in RAM, with the same attributes."""
        copied = self.source.read().clone()
        copied.__dict__.update(self._attributes)
        return copied

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{'Parameter' if getattr(self, '_is_param', False) else 'LazyTensor'}({self.source.read()!r})"

    def __format__(self, spec: str) -> str:
        return format(self.source.read(), spec)

    def tolist(self) -> Any:
        return self.source.read().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.source.keep().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().__array__(dtype)

    def data_ptr(self) -> int:
        return self.source.keep().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.source.keep().untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """An ordinary tensor or parameter in RAM."""
        copied: torch.Tensor = self.source.read().clone()
        if getattr(self, "_is_param", False):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)

    # ---- operators

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        base = args[0] if args else None
        if isinstance(base, LazyTensor) and (func.is_view or func is aten.detach.default):
            return _recorded(func, args, kwargs, base.source.load, base=base.source)
        lazy = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, LazyTensor)]
        loads = {tensor.source.load for tensor in lazy}
        on_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        if func in RECORDED and len(loads) == 1 and lazy[0].source.load.recording and on_cpu:
            return _recorded(func, args, kwargs, loads.pop())
        targets = (tensor for tensor in written(func, args, kwargs) if isinstance(tensor, LazyTensor))
        originals = {id(tensor.source.keep()): tensor for tensor in targets}
        args, kwargs = _read(args, kwargs)
        return pytree.tree_map_only(torch.Tensor, lambda out: originals.get(id(out), out), func(*args, **kwargs))


def _read(args: Any, kwargs: Any) -> Any:
    return pytree.tree_map_only(LazyTensor, lambda tensor: tensor.source.read(), (args, kwargs))


def written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator writes to."""
    named = dict(zip((spec.name for spec in func._schema.arguments), args, strict=False)) | kwargs
    return [
        leaf
        for spec in func._schema.arguments
        if spec.alias_info is not None and spec.alias_info.is_write
        for leaf in pytree.tree_leaves(named.get(spec.name))
    ]


def _recorded(func: Any, args: Any, kwargs: Any, load: Load, base: _Values | None = None) -> Any:
    """The results of an operator as lazy tensors. `base`: they are views of it."""

    def on_meta(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.source.geometry if isinstance(tensor, LazyTensor) else tensor.to("meta")

    shapes_args, shapes_kwargs = pytree.tree_map_only(torch.Tensor, on_meta, (args, kwargs))
    if "device" in kwargs:
        shapes_kwargs["device"] = torch.device("meta")
    results = func(*shapes_args, **shapes_kwargs)
    # Not the tensors: an assignment to `.data` gives one of them other values.
    inputs = pytree.tree_map_only(LazyTensor, lambda tensor: tensor.source, (args, kwargs))
    sources = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, _Values)]
    temporary = sum(source.temporary for source in sources)

    def compute(index: int | None) -> torch.Tensor:
        plain_args, plain_kwargs = pytree.tree_map_only(_Values, _Values.read, inputs)
        result = func(*plain_args, **plain_kwargs)
        return result if index is None else result[index]  # type: ignore[no-any-return]

    def result(geometry: torch.Tensor, index: int | None) -> LazyTensor:
        own = 0 if base is not None else geometry.numel() * geometry.element_size()
        equal = sources[0] if len(sources) == 1 and _equal(func, sources[0].geometry, geometry) else None
        return LazyTensor(
            _Values(load, lambda: compute(index), geometry, base=base, equal=equal, temporary=temporary + own)
        )

    if isinstance(results, torch.Tensor):
        return result(results, None)
    return type(results)(result(each, index) for index, each in enumerate(results))


def _equal(func: Any, before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether the results of an operator are equal to its input, in this dtype or a wider one."""
    if func is aten._to_copy.default:
        # PyTorch promotes no 8-bit floats.
        floats = all(each.is_floating_point() and each.dtype.itemsize > 1 for each in (before, after))
        return floats and torch.promote_types(before.dtype, after.dtype) == after.dtype
    whole = before.dtype == after.dtype and before.shape == after.shape and before.stride() == after.stride()
    return func.is_view and whole and before.storage_offset() == after.storage_offset()


def contents(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values; those of a lazy one in the narrowest dtype that has them exactly, as a view of the file where
    that is possible."""
    return tensor.source.narrowest().read() if isinstance(tensor, LazyTensor) else tensor


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values are not in RAM."""
    return isinstance(tensor, LazyTensor) and not tensor.source.in_ram


def ram_bytes(tensor: torch.Tensor) -> int:
    """Bytes of RAM that a tensor on the CPU takes."""
    return 0 if is_lazy(tensor) or tensor.device.type != "cpu" else tensor.numel() * tensor.element_size()


def narrowest_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The narrowest dtype that is known to have a tensor's values exactly."""
    if isinstance(tensor, LazyTensor):
        return tensor.source.narrowest().geometry.dtype
    return getattr(tensor, "master_dtype", tensor.dtype)


def temporary_bytes(tensor: torch.Tensor) -> int:
    """Bytes of RAM that `contents` takes until its result is freed."""
    return tensor.source.narrowest().temporary if isinstance(tensor, LazyTensor) else 0
