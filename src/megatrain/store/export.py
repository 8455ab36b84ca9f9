"""Parameters on their way to a file: each is brought to host memory when it is written, and freed after it.

Writers of state dicts copy a tensor that is not on the CPU to it, one after the other. So these claim a device of their
own. They also claim a storage each: views of one slab would be taken for tensors that share memory, and be cloned.
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
    """A weight in the dtype it is saved in: FP32, joined from both halves, if the model was loaded in FP32."""

    @classmethod
    def of(cls, parameter: StoreTensor) -> ExportTensor:
        slab = parameter.slab
        flat = torch.empty(slab.layout.numel, dtype=slab.saved[parameter.segment], device="meta")
        return cls(slab, parameter.segment, "weight", DEVICE, parameter._strided(flat))

    @property
    def copies(self) -> bool:
        """Whether reading it takes host memory."""
        return self.dtype != self.slab.layout.dtype or self.slab.on_device

    def host(self) -> torch.Tensor:
        """The values in host memory, dense: a view of the store if they lie there in this dtype."""
        found = super().host() if self.dtype == self.slab.layout.dtype else self.master().to(self.dtype)
        return found.contiguous()

    materialise = host

    def require_writable(self) -> None:
        raise MegaTrainError("this state dict was made for saving and is read-only; write into the parameter itself.")

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.host().to(*args, **kwargs)

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.host()

    def is_contiguous(self, *_: Any, **__: Any) -> bool:
        """What `to("cpu")` gives is."""
        return True

    def contiguous(self, *_: Any, **__: Any) -> ExportTensor:
        return self

    def data_ptr(self) -> int:
        """Tells tensors apart; nothing can be read there."""
        return self.slab.weight.data_ptr() + int(self.geometry.storage_offset()) * self.slab.layout.dtype.itemsize

    def untyped_storage(self) -> Any:
        """As much of a storage as tells tensors apart and sizes shards."""
        return SimpleNamespace(data_ptr=self.data_ptr, nbytes=lambda: self.numel() * self.dtype.itemsize)


def exported(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict for saving: the store's tensors are read when they are written, everything else is as it was."""
    return {
        name: ExportTensor.of(value) if isinstance(value, StoreTensor) and value.role == "weight" else value
        for name, value in state.items()
    }
