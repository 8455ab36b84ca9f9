"""The dtype of every parameter in the store, for the engine and the planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

import torch

from megatrain.lazy import is_lazy, narrowest_dtype

SAMPLE = 4096
"""Values of a parameter that are read to find out whether BF16 has them."""


def store_dtype(precision: str) -> torch.dtype:
    return torch.float32 if precision == "fp32" else torch.bfloat16


def natural_precision(loaded: torch.dtype) -> str:
    """The default precision for a model that was loaded in this dtype."""
    return "fp32" if loaded == torch.float32 else "bf16"


def has_low_bits(parameter: torch.Tensor) -> bool:
    """Whether BF16 does not have all values of a parameter, so that its master has low halves. A sample of evenly
    spaced values decides; if they are not in RAM, the dtype."""
    if narrowest_dtype(parameter) not in (torch.float32, torch.float16):
        return False
    if parameter.is_meta or is_lazy(parameter) or type(parameter) not in (torch.Tensor, torch.nn.Parameter):
        return True
    # An odd distance: one that divides the width of a matrix would find a single column.
    places = torch.arange(0, parameter.numel(), parameter.numel() // SAMPLE | 1, device=parameter.device)
    # Not of a flat view, which of a transposed matrix would be a copy.
    sample = parameter.detach().take(places).float()
    return not torch.equal(sample.bfloat16().float(), sample)


class Dtypes:
    """The dtypes of a model's parameters, as loaded and as stored."""

    def __init__(self, model: torch.nn.Module, saved: Mapping[str, torch.dtype] = MappingProxyType({})) -> None:
        """`saved`: parameter name → the dtype in which a closed engine saved it. That engine returned its masters as
        FP32, whatever the model had been loaded in."""
        self._model, self._saved = model, saved
        self._counts: Counter[torch.dtype] = Counter()
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                self._counts[saved.get(name, parameter.dtype)] += parameter.numel()
        not_fp32 = self._counts.total() - self._counts[torch.float32]
        self._mixed = not_fp32 * 2 > self._counts.total()
        """Whether most parameters are in 16 bits: FP32 ones are then in FP32 on purpose."""

    @property
    def loaded(self) -> torch.dtype:
        """The dtype of most parameters."""
        return max(self._counts, key=lambda dtype: self._counts[dtype], default=torch.float32)

    def fixed(self, name: str, parameter: torch.Tensor) -> torch.dtype | None:
        """The stored dtype if it does not depend on the precision; None: `store_dtype(precision)`."""
        if not parameter.is_floating_point() or (parameter.dtype == torch.float64 and not parameter.requires_grad):
            return parameter.dtype
        # A meta model does not have the dtypes of a loaded one.
        on_meta = parameter.device.type == "meta"
        # Modules that transformers keeps in FP32 when it loads the model in BF16.
        patterns = getattr(self._model, "_keep_in_fp32_modules_strict", None) or ()
        keeps_fp32 = any(pattern in name for pattern in patterns) or (self._mixed and not on_meta)
        loaded = self._saved.get(name, parameter.dtype)
        return torch.float32 if keeps_fp32 and (on_meta or loaded == torch.float32) else None

    def stored(self, name: str, parameter: torch.Tensor, precision: str) -> torch.dtype:
        return self.fixed(name, parameter) or store_dtype(precision)
