"""The stateless call of a block: its module's own forward on weights that are handed in.

The module keeps everything that makes the layer itself (index, attention type, buffers, hooks of its submodules);
only parameters are swapped, by `torch.func.functional_call`, for the views or leaves given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.func import functional_call

from megatrain.compute.trees import Recipe, mappings, take_apart
from megatrain.store.slab import Slab


class Recorder(Protocol):
    """Access to tensors that a library records inside modules through hooks (router logits, attentions...)."""

    def active(self) -> Recording | None:
        """What is being recorded around the current call, or None."""


class Recording(Protocol):
    """One recording. Tensors recorded inside a block must leave it as outputs of its node."""

    def inside(self, call: Callable[[], Any]) -> tuple[Any, dict[str, list[Any]]]:
        """Run the call; return its result and what it recorded, kept from the outer recording."""

    def replay(self, recorded: dict[str, list[Any]]) -> None:
        """Add entries to the outer recording."""


class _Original(torch.nn.Module):
    """Calls the forward that the block's module had: going through `__call__` again would fire its hooks twice."""

    def __init__(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.block = module
        self._call = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


@dataclass(eq=False)
class Block:
    """A module whose weights stream, and where each of its parameters lies."""

    index: int
    name: str
    module: torch.nn.Module
    places: dict[str, tuple[Slab, int]]
    """Parameter name inside the module → (slab, segment). Tied parameters of other blocks appear here too."""
    parameters: dict[str, torch.nn.Parameter]
    """The same names → what the user sees; `requires_grad` is read from here at every call."""
    original: Callable[..., Any]
    slabs: list[Slab] = field(init=False)
    changes_buffers: bool = False
    """Whether a forward was seen to write its buffers (running statistics): recompute then works on copies."""

    def __post_init__(self) -> None:
        self.slabs = sorted(
            {slab.index: slab for slab, _ in self.places.values()}.values(), key=lambda slab: slab.index
        )
        self._stateless = _Original(self.module, self.original)

    @property
    def trainable(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters.values())

    def bind(self, views: Mapping[int, torch.Tensor], *, leaves: bool) -> dict[tuple[int, int], torch.Tensor]:
        """Weights by (slab, segment), as views of the slots. Fresh leaves per use: autocast caches casts by leaf."""
        bound: dict[tuple[int, int], torch.Tensor] = {}
        for name, (slab, index) in self.places.items():
            if (slab.index, index) in bound:
                continue
            segment = slab.layout.segments[index]
            weight = views[slab.index][segment.offset : segment.end].view(segment.shape).detach()
            bound[slab.index, index] = weight.requires_grad_(leaves and self.parameters[name].requires_grad)
        return bound

    def call(self, weights: Mapping[tuple[int, int], torch.Tensor], args: Any, kwargs: Any, *, replaying: bool) -> Any:
        """The module's own forward on these weights."""
        state = {f"block.{name}": weights[slab.index, index] for name, (slab, index) in self.places.items()}
        if replaying and self.changes_buffers:
            state |= {f"block.{name}": buffer.clone() for name, buffer in self.module.named_buffers()}
        before = [buffer._version for buffer in self.module.buffers()]
        result = functional_call(self._stateless, state, args, kwargs)
        if before != [buffer._version for buffer in self.module.buffers()]:
            self.changes_buffers = True
        return result


@dataclass(frozen=True)
class Emitted:
    """Everything that leaves a block, as flat tensors: its result, what was recorded inside, new dict entries."""

    tensors: list[torch.Tensor]
    recipe: Recipe

    def deliver(
        self, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], recording: Recording | None
    ) -> Any:
        """Hand the node's outputs on: entries into the caller's dicts, records to the recording, the result back."""
        result, recorded, entries = self.recipe.rebuild(tensors)
        outer = mappings(args, kwargs)
        for place, new in entries:
            outer[place].update(new)
        if recording is not None:
            recording.replay(recorded)
        return result


def emit(
    block: Block,
    weights: Mapping[tuple[int, int], torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    recording: Recording | None,
    *,
    replaying: bool,
) -> Emitted:
    """Call a block and gather what leaves it. The arguments are this call's own: it may write to dicts in them."""
    known = {place: set(mapping) for place, mapping in mappings(args, kwargs).items()}

    def call() -> Any:
        return block.call(weights, args, kwargs, replaying=replaying)

    result, recorded = (call(), {}) if recording is None else recording.inside(call)
    entries = [
        (place, {key: value for key, value in mapping.items() if key not in known[place]})
        for place, mapping in mappings(args, kwargs).items()
    ]
    storages = {weight.untyped_storage().data_ptr() for weight in weights.values()}
    tensors, recipe = take_apart((result, recorded, entries))
    # What aliases a slot would change when the slot is refilled.
    tensors = [t.clone() if t.untyped_storage().data_ptr() in storages else t for t in tensors]
    return Emitted(tensors, recipe)
