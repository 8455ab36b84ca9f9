"""Loads models of transformers with their weights left in their files (lazy.py).

After `megatrain.init(offload_dir=...)`, `from_pretrained` does so until an engine is attached.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from megatrain import process
from megatrain.geometry import GIB
from megatrain.lazy import LazyTensor, Load, is_lazy, lazy_slice, ram_bytes
from megatrain.model import transformers_api
from megatrain.telemetry.notices import announce

_OWNER = "megatrain.init"


def pretrained(model: Any, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> tuple[Any, list[str]]:
    """A model of the same class and config with these tensors, and the names that are missing among them.

    Transformers renames, merges and converts as for any checkpoint. Lazy tensors stay lazy.
    """
    loaded, report = type(model).from_pretrained(
        None, config=model.config, state_dict=tensors, dtype=dtype, output_loading_info=True
    )
    return loaded, sorted(report["missing_keys"])


def plain_buffers(model: torch.nn.Module) -> None:
    """Read buffers that are still in files: a model changes its buffers itself."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if isinstance(buffer, LazyTensor):
                module._buffers[key] = buffer.plain()


# ---- from_pretrained


def keep_in_files(wanted: bool) -> None:
    """Whether `from_pretrained` leaves weights in their files, from now on."""
    if wanted:
        transformers_api.require("transformers.modeling_utils", process.LOADER)
        process.weights_loader.request(_OWNER, _leaving_in_files)
    else:
        process.weights_loader.release(_OWNER)


def _leaving_in_files(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces the function with which transformers puts the tensors of a checkpoint into a model."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        model, state, config = (call.arguments[name] for name in ("model", "state_dict", "load_config"))
        reason = _why_in_ram(state, config)
        load = Load()
        if reason is None:
            call.arguments["state_dict"] = {name: lazy_slice(stored, load) for name, stored in state.items()}
        try:
            result = original(*call.args, **call.kwargs)
        finally:
            load.recording = False
        plain_buffers(model)
        _announce(model, reason or "transformers computes them while it loads")
        return result

    return load_state_dict


def _why_in_ram(state: dict[str, Any], config: Any) -> str | None:
    """Why weights cannot stay in their files; None if they can."""
    if config.hf_quantizer is not None:
        return "the model is quantised"
    devices = {str(device) for device in (config.device_map or {}).values()}
    if devices - {"cpu"}:
        return f"device_map places them on {', '.join(sorted(devices))}"
    if any(isinstance(stored, torch.Tensor) for stored in state.values()):
        return "they are not read from mapped safetensors files"
    return None


def _announce(model: torch.nn.Module, reason: str) -> None:
    parameters = [parameter for parameter in model.parameters() if not parameter.is_meta]
    in_files = sum(p.numel() * p.element_size() for p in parameters if is_lazy(p))
    in_ram = sum(map(ram_bytes, parameters))
    name = type(model).__name__
    if in_files:
        announce(f"weights of {name}, {in_files / GIB:.2f} GiB, stay in their files until an engine reads them")
    if in_ram:
        announce(f"weights of {name}, {in_ram / GIB:.2f} GiB, were loaded into RAM: {reason}")
