"""Fills a model on the meta device from safetensors files, so that an engine can read each weight from its file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatrain.checkpoint.weights import lazy_tensors
from megatrain.errors import CheckpointError, SettingsError
from megatrain.lazy import Load
from megatrain.model.dtypes import Dtypes
from megatrain.model.loading import plain_buffers, pretrained

Tensors = dict[str, torch.Tensor]


@contextmanager
def filled(model: torch.nn.Module, weights: str | os.PathLike[str]) -> Iterator[None]:
    """Give the model lazy weights from a directory or file. If the body fails, it is on the meta device again."""
    _require_meta(model)
    before = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    try:
        _fill(model, Path(weights))
        yield
    except BaseException:
        for module, parameters, buffers in before:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        raise


def _require_meta(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.device.type != "meta":
            raise SettingsError(
                f"weights= fills a model on the meta device, but parameter {name} is on {parameter.device}; build the "
                'model under `with torch.device("meta")`, or leave weights out.'
            )


def _fill(model: Any, path: Path) -> None:
    load = Load()
    tensors = lazy_tensors(path, load)
    if hasattr(model, "from_pretrained"):
        source, missing = pretrained(model, tensors, Dtypes(model).loaded)
        found: Tensors = dict(source.named_parameters(remove_duplicate=False)) | dict(source.named_buffers())
    else:
        own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        found = {name: tensor.to(own[name].dtype) for name, tensor in tensors.items() if name in own}
        covered = {id(own[name]) for name in found}
        missing = sorted(name for name, tensor in own.items() if tensor.is_meta and id(tensor) not in covered)
    load.recording = False
    if missing:
        raise CheckpointError(
            f"{path} has no {missing[0]} ({len(missing)} tensors of the model are missing); use the checkpoint of this "
            "model, or load it with from_pretrained, which initialises what is missing."
        )
    _replace(model, found, path)
    plain_buffers(model)


def _replace(model: torch.nn.Module, found: Tensors, path: Path) -> None:
    """Replace the model's tensors on the meta device. Tied parameters stay tied."""
    replaced: dict[int, torch.nn.Parameter] = {}
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in found:
            names.setdefault(id(parameter), name)
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            name = f"{prefix}.{key}".lstrip(".")
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = _checked(name, buffer, found, path)
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in replaced:
                name = names.get(id(parameter), f"{prefix}.{key}".lstrip("."))
                values = _checked(name, parameter, found, path)
                replaced[id(parameter)] = torch.nn.Parameter(values.detach(), requires_grad=parameter.requires_grad)
            module._parameters[key] = replaced[id(parameter)]


def _checked(name: str, target: torch.Tensor, found: Tensors, path: Path) -> torch.Tensor:
    values = found.get(name)
    if values is None or values.shape != target.shape:
        has = "is missing" if values is None else f"has shape {tuple(values.shape)}"
        raise CheckpointError(
            f"{name} {has} in {path}, but the model has shape {tuple(target.shape)}; use the checkpoint of this model."
        )
    return values
