"""The stateless call of a block: its module's own forward on weights that are handed in.

The module keeps everything that makes the layer itself (index, attention type, buffers, hooks of its submodules);
only parameters are swapped, by `torch.func.functional_call`, for the views or leaves given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.func import functional_call

from megatrain.compute.compiled import Compiled
from megatrain.compute.trees import Recipe, containers, entries_of, put_back, take_apart
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


Weights = Mapping[tuple[int, int], torch.Tensor]
Buffers = dict[str, torch.Tensor]


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
    layer: bool = False
    """Whether it is one of the model's repeated layers (else an embedding, a norm, the head...)."""
    slabs: list[Slab] = field(init=False)
    compiled: Compiled | None = None
    """Set by an engine that compiles blocks; one for all of them."""

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
            weight = slab.layout.view(views[slab.index], index).detach()
            bound[slab.index, index] = weight.requires_grad_(leaves and self.parameters[name].requires_grad)
        return bound

    def call(
        self, weights: Weights, args: Any, kwargs: Any, buffers: Buffers | None = None, *, eager: bool = True
    ) -> Any:
        """The module's own forward on these weights, and on these buffers instead of its own if given."""
        state = {f"block.{name}": weights[slab.index, index] for name, (slab, index) in self.places.items()}
        if buffers is not None:
            state |= {f"block.{name}": buffer.clone() for name, buffer in buffers.items()}
        if self.compiled is not None and not eager:
            return self.compiled(self._stateless, state, args, kwargs)
        return functional_call(self._stateless, state, args, kwargs, tie_weights=False)

    @contextmanager
    def keeping_buffers(self) -> Iterator[Buffers]:
        """Around a forward: filled, at the end, with the buffers' former values if the forward changed any.

        Recompute must see running statistics as the forward saw them, and must not advance them again.
        """
        before = {name: (buffer, buffer._version, buffer.clone()) for name, buffer in self.module.named_buffers()}
        kept: Buffers = {}
        yield kept
        after = dict(self.module.named_buffers())
        if any(after.get(name) is not buffer or buffer._version != v for name, (buffer, v, _) in before.items()):
            kept |= {name: copy for name, (_, _, copy) in before.items()}


@dataclass(frozen=True)
class Emitted:
    """Everything that leaves a block, as flat tensors: its result, what was recorded inside, entries of dicts."""

    tensors: list[torch.Tensor]
    recipe: Recipe

    def deliver(
        self, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], recording: Recording | None
    ) -> Any:
        """Hand the node's outputs on: entries into the caller's dicts, records to the recording, the result back."""
        result, recorded, entries = self.recipe.rebuild(tensors)
        outer = containers(args, kwargs)
        for place, changed in entries:
            put_back(outer[place], changed)
        if recording is not None:
            recording.replay(recorded)
        return result


def emit(
    block: Block,
    weights: Weights,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    recording: Recording | None,
    buffers: Buffers | None = None,
) -> Emitted:
    """Call a block and gather what leaves it. The arguments are this call's own: it may write to dicts in them."""
    before = {place: entries_of(container) for place, container in containers(args, kwargs).items()}

    def call() -> Any:
        # What hooks record inside is a side effect, which compiled code does not repeat.
        return block.call(weights, args, kwargs, buffers, eager=recording is not None)

    result, recorded = (call(), {}) if recording is None else recording.inside(call)
    entries = [
        (place, {k: v for k, v in entries_of(container).items() if k not in before[place] or v is not before[place][k]})
        for place, container in containers(args, kwargs).items()
    ]
    storages = {weight.untyped_storage().data_ptr() for weight in weights.values()}
    tensors, recipe = take_apart((result, recorded, entries))
    # What aliases a slot would change when the slot is refilled.
    tensors = [t.clone() if t.untyped_storage().data_ptr() in storages else t for t in tensors]
    return Emitted(tensors, recipe)
