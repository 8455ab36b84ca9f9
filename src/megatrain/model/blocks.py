"""Finds the blocks of a model: its repeated layers, and every other module that owns weights.

Layers are the outermost modules that transformers marks as `GradientCheckpointingLayer`, and members of a `ModuleList`
that repeats a class. Outside layers, a block is the topmost module with parameters of its own. Parameters of a module
that also contains layers (a position table on the model itself) are `loose`: they belong to no block's call and are
read where the model uses them.

A model without repeated layers is one block, and all its parameters are loose. Its forward is not wrapped, so it may
return anything, have side effects and consist of several methods; autograd computes its gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatrain.errors import NothingToStream, UnsupportedModel
from megatrain.model.transformers_api import TransformersApi

Named = tuple[str, torch.nn.Module]


@dataclass(frozen=True, eq=False)
class BlockSpec:
    """A module that becomes a block or, if `loose`, a module whose direct parameters are stored."""

    name: str
    module: torch.nn.Module
    loose: bool = False
    layer: bool = False

    @property
    def label(self) -> str:
        """Its name; for the model itself, which has none, its class."""
        return self.name or type(self.module).__name__

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Parameters by their name inside the module; tied ones under each of their names."""
        if self.loose:
            return [(key, value) for key, value in self.module._parameters.items() if value is not None]
        return list(self.module.named_parameters(remove_duplicate=False))


def find_blocks(model: torch.nn.Module, api: TransformersApi) -> list[BlockSpec]:
    """All blocks in registration order. Every parameter belongs to one of them."""
    _check_parameters(model)
    return layered_blocks(model, api) or [
        BlockSpec(name, module, loose=True) for name, module in model.named_modules() if _has_own_parameters(module)
    ]


def layered_blocks(model: torch.nn.Module, api: TransformersApi) -> list[BlockSpec]:
    """The blocks of a model with repeated layers; empty for other models."""
    modules = list(model.named_modules())
    checkpointed = _outermost([(n, m) for n, m in modules if isinstance(m, api.layer) and _has_parameters(m)])
    layers = checkpointed + _repeated(modules, torch.nn.ModuleList, checkpointed)
    layers = layers or _repeated(modules, torch.nn.Sequential, [])
    blocks = {id(module): BlockSpec(name, module, layer=True) for name, module in layers}
    return list(_walk("", model, blocks, set())) if blocks else []


def _repeated(modules: list[Named], container: type, layers: list[Named]) -> list[Named]:
    """Members of containers that repeat a class, unless they contain or are inside one of the `layers`."""
    inside = {id(part) for _, block in layers for part in block.modules()}
    layer_ids = {id(block) for _, block in layers}
    matches = []
    for name, module in modules:
        if not isinstance(module, container) or id(module) in inside:
            continue
        members = [
            (f"{name}.{key}".lstrip("."), member) for key, member in module.named_children() if _has_parameters(member)
        ]
        classes = Counter(type(member) for _, member in members)
        matches += [
            (key, member)
            for key, member in members
            if classes[type(member)] > 1 and not any(id(part) in layer_ids for part in member.modules())
        ]
    return _outermost(matches)


def _outermost(matches: list[Named]) -> list[Named]:
    nested = {id(part) for _, module in matches for part in module.modules() if part is not module}
    unique = {id(module): (name, module) for name, module in reversed(matches) if id(module) not in nested}
    return list(reversed(unique.values()))


def _walk(name: str, module: torch.nn.Module, layers: dict[int, BlockSpec], seen: set[int]) -> Iterator[BlockSpec]:
    """The blocks inside a module, top down, in registration order."""
    if id(module) in seen:
        return
    seen.add(id(module))
    if id(module) in layers:
        yield layers[id(module)]
        return
    if _has_own_parameters(module):
        contains_layers = any(id(part) in layers for part in module.modules())
        yield BlockSpec(name, module, loose=contains_layers)
        if not contains_layers:
            return
    for key, child in module.named_children():
        yield from _walk(f"{name}.{key}".lstrip("."), child, layers, seen)


def _has_own_parameters(module: torch.nn.Module) -> bool:
    """Whether it has direct parameters, not only in its submodules."""
    return any(parameter is not None for parameter in module._parameters.values())


def _has_parameters(module: torch.nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _check_parameters(model: torch.nn.Module) -> None:
    parameters = list(model.named_parameters())
    if not parameters:
        raise NothingToStream(f"{type(model).__name__} has no parameters, so there is nothing to train.")
    for name, parameter in parameters:
        if isinstance(parameter, torch.nn.UninitializedParameter):
            raise UnsupportedModel(
                f"parameter {name} has no shape yet (a lazy module); run the model once before attaching an engine."
            )
        if parameter.device.type == "meta":
            raise UnsupportedModel(
                f"parameter {name} is on the meta device: its weights were never loaded; name their directory "
                "(megatrain.Engine(model, weights=...)), or load or initialise the model before attaching an engine."
            )
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UnsupportedModel(
                f"parameter {name} is {parameter.dtype}, which cannot be trained; load the model in bf16 or fp32."
            )
