"""State dicts for saving: each parameter is copied to host memory when it is written, and freed afterwards.

Writers of state dicts call `.cpu()` on tensors of other devices one at a time, so these tensors claim a device of their
own. Each also claims its own storage: writers would clone views of one slab as tensors that share memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from megatrain.errors import DiskFailed, MegaTrainError
from megatrain.store.parameter import StoreTensor
from megatrain.store.slab import Slab, Span

DEVICE = torch.device("lazy")


class ExportTensor(StoreTensor):
    """A weight in the dtype it is saved in: the FP32 master if the model was loaded in FP32."""

    @classmethod
    def of(cls, parameter: StoreTensor) -> ExportTensor:
        slab = parameter.slab
        flat = torch.empty(slab.layout.numel, dtype=slab.saved[parameter.segment], device="meta")
        return cls(slab, parameter.segment, "weight", DEVICE, parameter._strided(flat))

    @property
    def copies(self) -> bool:
        return self.dtype != self.slab.layout.dtype or self.slab.on_device or self.slab.weight_on_disk

    def host(self) -> torch.Tensor:
        """Contiguous values in host memory: a view of the store where it has this dtype."""
        values = super().host() if self.dtype == self.slab.layout.dtype else self.master().to(self.dtype)
        return values.contiguous()

    materialise = host

    def prepare_write(self) -> None:
        raise MegaTrainError("this state dict was made for saving and is read-only; write into the parameter itself.")

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.host().to(*args, **kwargs)

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.host()

    def is_contiguous(self, *_: Any, **__: Any) -> bool:
        """True of what `to("cpu")` returns."""
        return True

    def contiguous(self, *_: Any, **__: Any) -> ExportTensor:
        return self

    def data_ptr(self) -> int:
        """Unique per tensor; not an address that can be read."""
        # What is on disk has no address; these are beyond those of any memory.
        base = self.slab.weight.data_ptr() or (1 << 60) + (self.slab.index << 44)
        return base + int(self.geometry.storage_offset()) * self.slab.layout.dtype.itemsize

    def untyped_storage(self) -> Any:
        """The part of a storage's interface that writers use to compare tensors and size shards."""
        return SimpleNamespace(data_ptr=self.data_ptr, nbytes=lambda: self.numel() * self.dtype.itemsize)


class Survivors:
    """What is left of a model's weights after a drive failed. All lanes must be idle.

    A weight or residual on disk is read from there, or from the staging buffer of an update that was not written.
    """

    def __init__(self, unwritten: Callable[[Slab], Span | None]) -> None:
        self.unwritten = unwritten
        """The last update of a slab if its result did not reach the disk."""
        self.rounded: list[str] = []
        """Slabs of which a weight was rounded to BF16, because the rest of its FP32 master could not be read."""

    def exported(self, state: Mapping[str, Any]) -> dict[str, Any]:
        class Bound(SurvivingTensor):
            survivors = self

        return exported(state, Bound)

    def lost(self, slabs: Iterable[Slab]) -> list[str]:
        """Names of slabs with a weight that cannot be read."""
        return [slab.name for slab in slabs if slab.weight_on_disk and not self._readable(slab)]

    def _readable(self, slab: Slab) -> bool:
        try:
            for index in range(len(slab.layout.segments)):
                self.weight(slab, index)
        except DiskFailed:
            return False
        return True

    def weight(self, slab: Slab, index: int) -> torch.Tensor:
        """The weight of one parameter, flat."""
        update = self.unwritten(slab) if slab.weight_on_disk else None
        return slab.read_weight(index) if update is None else slab.layout.view(update.weight, index).reshape(-1)

    def residual(self, slab: Slab, index: int) -> torch.Tensor:
        """The residual of one parameter, flat; zero if it cannot be read."""
        update = self.unwritten(slab)
        if update is not None and update.residual is not None:
            return slab.owned.view(update.residual, index).reshape(-1)
        try:
            return slab.read_residual(index)
        except DiskFailed:
            if slab.name not in self.rounded:
                self.rounded.append(slab.name)
            return torch.zeros(slab.owned.segments[index].numel, dtype=torch.int16)


class SurvivingTensor(ExportTensor):
    """A weight as far as it can be read."""

    survivors: Survivors

    def stored(self) -> torch.Tensor:
        # Without waiting: failed updates would raise here.
        return self._within_segment(self.survivors.weight(self.slab, self.segment))

    def low_half(self) -> torch.Tensor:
        return self.survivors.residual(self.slab, self.segment)


def exported(state: Mapping[str, Any], kind: type[ExportTensor] = ExportTensor) -> dict[str, Any]:
    """A state dict whose store tensors are read only when they are written; other values are unchanged."""
    return {name: kind.of(value) if _is_stored(value) else value for name, value in state.items()}


def _is_stored(value: Any) -> bool:
    return isinstance(value, StoreTensor) and not isinstance(value, ExportTensor) and value.role == "weight"
