"""Arguments and results as flat lists of tensors, with a spec to put them back together."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class FlattenSpec:
    """A nested structure with its tensors taken out."""

    spec: Any
    leaves: tuple[Any, ...]
    positions: tuple[int, ...]

    def unflatten(self, tensors: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> Any:
        """The structure with these tensors in the places of the old ones; containers are new objects."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class _Shown:
    """Stands for a UserDict, which is a leaf to pytree, and shows its content."""

    kind: type
    content: dict[Any, Any]


pytree.register_pytree_node(_Shown, lambda shown: ([shown.content], shown.kind), lambda content, kind: kind(*content))


def flatten_tensors(tree: Any) -> tuple[list[torch.Tensor], FlattenSpec]:
    """Split a structure into its tensors and the spec for the rest."""
    leaves, spec = pytree.tree_flatten(_expose(tree))
    positions = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    tensors = [leaves[i] for i in positions]
    kept = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return tensors, FlattenSpec(spec, kept, positions)


def containers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
    """Dict and list arguments, by position or keyword: a block may leave entries in them (shared keys and values)."""
    found = [*enumerate(args), *kwargs.items()]
    return {place: value for place, value in found if isinstance(value, dict | UserDict | list)}


def entries_of(container: Any) -> dict[Any, Any]:
    """What a dict or list holds, by key or position."""
    return dict(enumerate(container)) if isinstance(container, list) else dict(container)


def update_entries(container: Any, changed: dict[Any, Any]) -> None:
    """Set entries of the caller's dict or list; positions past a list's end are appended."""
    for key, value in changed.items():
        if isinstance(container, list) and key >= len(container):
            container.append(value)
        else:
            container[key] = value


def _expose(tree: Any) -> Any:
    return pytree.tree_map_only(UserDict, lambda found: _Shown(type(found), _expose(dict(found.items()))), tree)
