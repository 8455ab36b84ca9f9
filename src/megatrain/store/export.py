"""State dicts for saving: each parameter is copied to host memory when it is written, and freed afterwards.

Writers of state dicts call `.cpu()` on tensors of other devices one at a time, so these tensors claim a device of their
own. Each also claims its own storage: writers would clone views of one slab as tensors that share memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from megatrain.errors import MegaTrainError
from megatrain.store.parameter import StoreTensor

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

    def require_writable(self) -> None:
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


class SurvivingTensor(ExportTensor):
    """A weight as it is in memory, after states on disk were lost. It is rounded to BF16 if the rest of its FP32 master
    was there. All lanes must be idle.
    """

    def stored(self) -> torch.Tensor:
        # Failed updates would raise here.
        return self._within_segment(self.slab.read_weight(self.segment))

    def host(self) -> torch.Tensor:
        if self.slab.homes.states.tier != "disk":
            return super().host()
        return self.stored().cpu().to(self.dtype).contiguous()

    materialise = host


def exported(state: Mapping[str, Any], kind: type[ExportTensor] = ExportTensor) -> dict[str, Any]:
    """A state dict whose store tensors are read only when they are written; other values are unchanged."""
    return {name: kind.of(value) if _is_stored(value) else value for name, value in state.items()}


def _is_stored(value: Any) -> bool:
    return isinstance(value, StoreTensor) and not isinstance(value, ExportTensor) and value.role == "weight"
