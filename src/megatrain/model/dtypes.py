"""The dtype of every parameter in the store, for the engine and the planner."""

from __future__ import annotations

from collections import Counter

import torch


def store_dtype(precision: str) -> torch.dtype:
    return torch.float32 if precision == "fp32" else torch.bfloat16


def natural_precision(loaded: torch.dtype) -> str:
    """The default precision for a model that was loaded in this dtype."""
    return "fp32" if loaded == torch.float32 else "bf16"


def has_low_half(loaded: torch.dtype) -> bool:
    """Whether weights loaded in this dtype are not BF16 numbers, so that a split master of them has a residual."""
    return loaded in (torch.float32, torch.float16)


class Dtypes:
    """The dtypes of a model's parameters, as loaded and as stored."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._counts: Counter[torch.dtype] = Counter()
        for parameter in model.parameters():
            if parameter.is_floating_point():
                self._counts[parameter.dtype] += parameter.numel()
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
        return torch.float32 if keeps_fp32 and (on_meta or parameter.dtype == torch.float32) else None

    def stored(self, name: str, parameter: torch.Tensor, precision: str) -> torch.dtype:
        return self.fixed(name, parameter) or store_dtype(precision)
