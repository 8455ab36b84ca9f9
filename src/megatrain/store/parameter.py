"""The parameters that users see: tensor subclasses without storage that claim the compute device.

They have shape, dtype and device. Reading one waits for pending updates and copies the current values to the device;
writing one writes the store. Views (slices, transposes, `.data`) remain views of the store: each carries a meta tensor
with its geometry inside the slab.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from megatrain.errors import MegaTrainError, UnsupportedCall
from megatrain.lazy import without_storage, written
from megatrain.store.slab import PIECE, Slab
from megatrain.store.split import join

GradientSink = Callable[[Slab, int, torch.Tensor], None]
_plain_grad: Any = torch.Tensor.grad
"""The field that autograd writes; `StoreTensor.grad` hides it."""
GRAD_FIELD_TIMEOUT_S = 10.0
"""A thread waits this long for another thread's backward to empty a parameter's field, then proceeds."""

NO_DEEP_COPY = (
    "a model that belongs to an engine cannot be deep-copied: its weights live in the engine's store; copy it before "
    "attaching the engine, or load the copy from a saved directory."
)


class StoreTensor(torch.Tensor):
    """A view of one role (`weight` or `grad`) of a slab."""

    slab: Slab
    segment: int
    role: str
    geometry: torch.Tensor

    # Methods and attributes behave like a plain tensor's; only operators reach __torch_dispatch__.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, slab: Slab, segment: int, role: str, device: torch.device, geometry: torch.Tensor) -> StoreTensor:
        tensor = without_storage(cls, geometry, device)
        tensor.slab, tensor.segment, tensor.role, tensor.geometry = slab, segment, role, geometry
        return tensor

    @classmethod
    def of_parameter(cls, slab: Slab, index: int, role: str, device: torch.device) -> StoreTensor:
        """A tensor that covers one parameter of a slab."""
        flat = torch.empty(slab.layout.numel, dtype=slab.layout.dtype, device="meta")
        return cls(slab, index, role, device, slab.layout.view(flat, index))

    # ---- reading and writing the store

    def host(self) -> torch.Tensor:
        """The values in host memory and in the store's dtype; a view of the store unless it is on the device."""
        return self.stored().cpu()

    def stored(self) -> torch.Tensor:
        """A view of the store (a copy of what is on disk, and of a scaled gradient); FP32 for a gradient that is a
        sum."""
        if self.role == "weight":
            self.slab.settle()
            return self._within_segment(self.slab.read_weight(self.segment))
        gradient = self.slab.grad.read()
        values = self._strided(gradient.flat)
        return values if gradient.scale == 1.0 else values * gradient.scale

    def master(self) -> torch.Tensor:
        """The exact weight in host memory: FP32 where there is a residual."""
        weight = self.stored().cpu()
        if self.slab.residual is None:
            return weight
        residual = self._residual_view(self.low_half())
        halves = [flat.contiguous().view(-1) for flat in (weight, residual.cpu())]
        master = torch.empty(weight.shape, dtype=torch.float32)
        # In pieces, to bound the integer temporaries.
        for target, high, low in zip(*(flat.split(PIECE) for flat in (master.view(-1), *halves)), strict=True):
            target.copy_(join(high, low))
        return master

    def low_half(self) -> torch.Tensor:
        """The residual of the parameter, flat; the slab must have one."""
        return self.slab.read_residual(self.segment)

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype that has the values exactly."""
        return self.dtype if self.slab.residual is None else torch.float32

    def materialise(self) -> torch.Tensor:
        return self.stored().to(dtype=self.dtype, device=self.device)

    def prepare_write(self) -> None:
        """Raise if the values must not change. A submitted update may still read a gradient: wait for it."""
        if self.role == "weight":
            self.slab.require_owner()
        else:
            self.slab.grad.writable_part()

    def write(self, values: torch.Tensor) -> None:
        """Replace the values; a split master then equals the BF16 values exactly."""
        if self.role == "weight":
            self.slab.before_write()
            with self.slab.changing_weight(self.segment) as weight:
                self._within_segment(weight).copy_(values)
            if self.slab.residual is not None:
                with self.slab.changing_residual(self.segment) as residual:
                    self._residual_view(residual).zero_()
            # Another thread may have fetched the slab meanwhile.
            self.slab.version += 1
        else:
            self._strided(self.slab.grad.writable()).copy_(values)

    def _strided(self, flat: torch.Tensor) -> torch.Tensor:
        view = self.geometry
        self._require_complete(flat.numel())
        return flat.as_strided(view.size(), view.stride(), view.storage_offset())

    def _require_complete(self, numel: int) -> None:
        """Raise unless a buffer of `numel` elements covers the slab."""
        if numel < self.slab.layout.numel:
            owned, layout = self.slab.owned, self.slab.layout
            raise UnsupportedCall(
                f"this process has only a part of the state and gradient of {layout.segments[self.segment].name}, "
                "elements "
                f"{owned.begin:,} to {owned.begin + owned.numel:,} of {layout.numel:,} in {self.slab.name}; gather the "
                "others first."
            )

    def _residual_view(self, residual: torch.Tensor) -> torch.Tensor:
        """This tensor's part of the residual of its parameter."""
        self._require_complete(self.slab.owned.numel)
        return self._within_segment(residual)

    def _within_segment(self, flat: torch.Tensor) -> torch.Tensor:
        """This tensor's part of a flat tensor that covers its parameter."""
        view, start = self.geometry, self.slab.layout.segments[self.segment].offset
        return flat.as_strided(view.size(), view.stride(), flat.storage_offset() + view.storage_offset() - start)

    # ---- attributes and methods

    @property
    def grad(self) -> torch.Tensor | None:
        """The accumulated gradient. In-place changes reach the store; assigning None clears it."""
        if not getattr(self, "_is_param", False) or self.segment not in self.slab.grad.present:
            return None
        return self._gradient()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if not getattr(self, "_is_param", False):
            raise MegaTrainError(
                "the gradient of a view or of a detached parameter cannot be set; set the gradient of the parameter "
                "itself."
            )
        if value is None:
            self.slab.grad.drop(self.segment)
            return
        if value.shape != self.shape:
            raise UnsupportedCall(
                f"a gradient of shape {tuple(value.shape)} was assigned to a parameter of shape {tuple(self.shape)}; "
                "the shapes "
                "must be equal."
            )
        values = value.detach().clone()
        self.slab.grad.writable_part().present.add(self.segment)
        self._gradient().write(values)

    @grad.deleter
    def grad(self) -> None:
        self.slab.grad.drop(self.segment)

    def _gradient(self) -> StoreTensor:
        """The gradient of a parameter, which has the parameter's geometry in the slab."""
        return StoreTensor(self.slab, self.segment, "grad", self.device, self.geometry)

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape:
            raise MegaTrainError(
                f"a parameter of shape {tuple(self.shape)} lives in MegaTrain's store and cannot be replaced by data "
                f"of shape {tuple(value.shape)}; resize the model before attaching an engine."
            )
        self.write(value.detach())

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{'Parameter' if getattr(self, '_is_param', False) else 'StoreTensor'}({self.materialise()!r})"

    def numpy(self, *, force: bool = False) -> Any:
        """A copy in host memory; NumPy cannot view the store."""
        return self.host().to(self.dtype).clone().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy().__array__(dtype) if dtype is not None else self.numpy()

    def tolist(self) -> Any:
        return self.host().to(self.dtype).tolist()

    def __format__(self, spec: str) -> str:
        return format(self.materialise(), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if not getattr(self, "_is_param", False):
            return self.materialise().clone()
        raise MegaTrainError(NO_DEEP_COPY)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.host().detach().to(self.dtype).clone()
        if getattr(self, "_is_param", False):
            return torch.nn.Parameter(plain, self.requires_grad).__reduce_ex__(protocol)
        return plain.__reduce_ex__(protocol)

    # ---- operators

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        base = args[0] if args else None
        if (func.is_view or func is torch.ops.aten.detach.default) and isinstance(base, StoreTensor):
            return pytree.tree_map_only(
                torch.Tensor,
                lambda geometry: type(base)(base.slab, base.segment, base.role, base.device, geometry),
                func(base.geometry, *args[1:], **kwargs),
            )
        read: dict[int, tuple[StoreTensor, torch.Tensor]] = {}

        def materialise(tensor: StoreTensor) -> torch.Tensor:
            values = tensor.materialise()
            read[id(values)] = (tensor, values)
            return values

        plain_args, plain_kwargs = pytree.tree_map_only(StoreTensor, materialise, (args, kwargs))
        changed = [read[id(leaf)] for leaf in written(func, plain_args, plain_kwargs) if id(leaf) in read]
        for target, _ in changed:
            # The operator may write to the store directly.
            target.prepare_write()
        result = func(*plain_args, **plain_kwargs)
        for target, values in changed:
            target.write(values)
        originals = {id(values): target for target, values in changed}
        return pytree.tree_map_only(torch.Tensor, lambda out: originals.get(id(out), out), result)


def as_parameter(tensor: StoreTensor, requires_grad: bool, deposit: GradientSink) -> torch.nn.Parameter:
    """Make a store tensor a parameter. `deposit` receives gradients that reach it outside any block."""
    parameter: Any = torch.nn.Parameter(tensor, requires_grad=requires_grad)
    reference, field = weakref.ref(parameter), _GradField(deposit)

    def drop() -> None:
        leaf = reference()
        if leaf is not None:
            field.pop(leaf)

    if tensor.is_floating_point():
        # Hooks need requires_grad; a parameter that is unfrozen later needs the hooks too.
        parameter.requires_grad_(True)
        parameter.register_hook(field.before_add)
        parameter.register_post_accumulate_grad_hook(field.after_add)
        # Ctrl-C before the hook leaves a gradient in the field, and the next one would be added to it.
        tensor.slab.grad.drop_leftovers.append(drop)
        parameter.requires_grad_(requires_grad)
    return parameter  # type: ignore[no-any-return]


class _GradField:
    """The field that autograd accumulates into: held by one thread from before the addition until the sum is taken out.

    Autograd's own lock is released before it calls the hook that takes the sum out. The garbage collector does not see
    what a hook refers to, so this object must not refer to the slab.
    """

    def __init__(self, deposit: GradientSink) -> None:
        self._deposit = deposit
        self._lock = threading.Lock()
        self._holder: int | None = None

    def before_add(self, _: Any) -> None:
        me = threading.get_ident()
        # `torch.autograd.grad` adds nothing. A backward that failed before the hook still holds the lock; its own
        # thread proceeds at once, others after the timeout.
        if torch.autograd._is_checkpoint_valid() and self._holder != me:
            self._lock.acquire(timeout=GRAD_FIELD_TIMEOUT_S)
            self._holder = me

    def pop(self, leaf: Any) -> Any:
        """Empty the field and return its content. Called by `drop`, it may run while another thread holds the lock."""
        gradient = _plain_grad.__get__(leaf)
        _plain_grad.__set__(leaf, None)
        if self._holder == threading.get_ident():
            self._holder = None
            self._lock.release()
        return gradient

    def after_add(self, leaf: Any) -> None:
        self._deposit(leaf.slab, leaf.segment, self.pop(leaf))

    # A copied parameter is a plain tensor that needs no hook, so torch need not warn that hooks are not copied.
    before_add.__torch_unserializable__ = True  # type: ignore[attr-defined]
    before_add.__megatrain__ = after_add.__megatrain__ = True  # type: ignore[attr-defined]


def user_hooks(parameter: Any) -> tuple[list[Any], list[Any]]:
    """Hooks that users registered on a parameter: on its gradient, and after accumulation."""
    before, after = (
        [hook for hook in (hooks or {}).values() if not getattr(hook, "__megatrain__", False)]
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    )
    return before, after


def states_of(
    parameter: StoreTensor, moments: Iterable[str] | None = None, *, values: bool = True
) -> dict[str, torch.Tensor]:
    """One parameter's residual and moments (None: all), in their storage formats: views, or copies of what is on disk.
    Without `values`, shapes and dtypes only: the tensors may be on the meta device."""
    slab, index = parameter.slab, parameter.segment
    states = {}
    if slab.residual is not None:
        flat = slab.read_residual(index) if values else slab.owned.view(slab.residual, index)
        states["residual"] = flat.view(slab.owned.segments[index].owned_shape)
    for role in slab.moments if moments is None else moments:
        stored = slab.moments[role].stored(index, values=values)
        states |= {role + suffix: tensor for suffix, tensor in stored.items()}
    return states


def restore_states(parameter: StoreTensor, entry: Mapping[str, torch.Tensor]) -> bool:
    """Load what `states_of` returned; missing moments become zero. Return False if one had to be rounded."""
    slab, index = parameter.slab, parameter.segment
    if "residual" in entry and slab.residual is not None:
        # Without a split master the residual of a BF16 run has no meaning.
        with slab.changing_residual(index) as residual:
            residual.copy_(entry["residual"].reshape(-1))
    exact = True
    for role, moment in slab.moments.items():
        saved = {key.removeprefix(role): tensor for key, tensor in entry.items() if key.partition(".")[0] == role}
        exact &= moment.restore(index, saved)
    return exact
