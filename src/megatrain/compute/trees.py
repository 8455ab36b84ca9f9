"""Flattens arguments and results to lists of tensors and back."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class FlattenSpec:
    """A nested structure without its tensors."""

    spec: Any
    leaves: tuple[Any, ...]
    positions: tuple[int, ...]

    def unflatten(self, tensors: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> Any:
        """The structure with these tensors. Containers are new objects."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class _WrappedUserDict:
    """Wraps a UserDict, which pytree treats as a leaf, so that its content is flattened."""

    kind: type
    content: dict[Any, Any]


pytree.register_pytree_node(
    _WrappedUserDict, lambda wrapped: ([wrapped.content], wrapped.kind), lambda content, kind: kind(*content)
)


def flatten_tensors(tree: Any) -> tuple[list[torch.Tensor], FlattenSpec]:
    """Split a structure into its tensors and a spec that rebuilds it."""
    leaves, spec = pytree.tree_flatten(tree)
    if any(isinstance(leaf, UserDict) for leaf in leaves):
        leaves, spec = pytree.tree_flatten(_wrap_user_dicts(tree))
    positions = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    tensors = [leaves[i] for i in positions]
    rest = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return tensors, FlattenSpec(spec, rest, positions)


def containers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
    """Dict and list arguments, by position or keyword. A block may write to them (shared keys and values)."""
    arguments = [*enumerate(args), *kwargs.items()]
    return {key: value for key, value in arguments if isinstance(value, dict | UserDict | list)}


def entries_of(container: Any) -> dict[Any, Any]:
    """The entries of a dict or list, by key or position."""
    return dict(enumerate(container)) if isinstance(container, list) else dict(container)


def update_entries(container: Any, changed: dict[Any, Any]) -> None:
    """Set entries of the caller's dict or list. Positions past the end of a list are appended."""
    for key, value in changed.items():
        if isinstance(container, list) and key >= len(container):
            container.append(value)
        else:
            container[key] = value


def _wrap_user_dicts(tree: Any) -> Any:
    return pytree.tree_map_only(UserDict, lambda d: _WrappedUserDict(type(d), _wrap_user_dicts(dict(d.items()))), tree)
