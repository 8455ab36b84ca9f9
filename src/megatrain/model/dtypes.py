"""The dtype of every parameter in the store. The engine allocates by it, and the planner counts by it."""

from __future__ import annotations

from collections import Counter

import torch


def store_dtype(precision: str) -> torch.dtype:
    return torch.float32 if precision == "fp32" else torch.bfloat16


def natural_precision(loaded: torch.dtype) -> str:
    """The precision of a run on a model that was loaded in this dtype."""
    return "fp32" if loaded == torch.float32 else "bf16"


class Dtypes:
    """Of a model's parameters, as it was loaded and as the store keeps them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._counts: Counter[torch.dtype] = Counter()
        for parameter in model.parameters():
            if parameter.is_floating_point():
                self._counts[parameter.dtype] += parameter.numel()
        rest = self._counts.total() - self._counts[torch.float32]
        self._mixed = rest * 2 > self._counts.total()
        """A model mostly in 16 bits: its FP32 parameters were kept so on purpose."""

    @property
    def loaded(self) -> torch.dtype:
        """What most parameters are in."""
        return max(self._counts, key=lambda dtype: self._counts[dtype], default=torch.float32)

    def fixed(self, name: str, parameter: torch.Tensor) -> torch.dtype | None:
        """What the store keeps a parameter in, whatever the precision; None: `store_dtype` of the precision."""
        if not parameter.is_floating_point() or (parameter.dtype == torch.float64 and not parameter.requires_grad):
            return parameter.dtype
        # A skeleton has no dtypes of its own.
        skeleton = parameter.device.type == "meta"
        # What transformers keeps in FP32 when it loads the model in BF16.
        patterns = getattr(self._model, "_keep_in_fp32_modules_strict", None) or ()
        kept = any(pattern in name for pattern in patterns) or (self._mixed and not skeleton)
        return torch.float32 if kept and (skeleton or parameter.dtype == torch.float32) else None

    def stored(self, name: str, parameter: torch.Tensor, precision: str) -> torch.dtype:
        return self.fixed(name, parameter) or store_dtype(precision)
