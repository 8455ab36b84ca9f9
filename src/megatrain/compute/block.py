"""The stateless call of a block: its module's original forward on weights that the caller passes in.

The module keeps everything else (layer index, attention type, buffers, hooks of its submodules). Only its parameters
are replaced, for the duration of the call and in the calling thread (compute/binding.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from megatrain.compute import attributes
from megatrain.compute.binding import Binding, Bound, call_bound, call_with
from megatrain.compute.compiled import Compiled, CompiledCall, structure_of
from megatrain.compute.rebind import Addresses
from megatrain.compute.trees import FlattenSpec, containers, entries_of, flatten_tensors, update_entries
from megatrain.errors import ModelMoved
from megatrain.store.slab import Slab


class Capture(Protocol):
    """Tensors that a library records inside modules through hooks (router logits, attentions...).

    Tensors captured inside a block must become outputs of its node.
    """

    def inside(self, call: Callable[[], Any]) -> tuple[Any, dict[str, list[Any]]]:
        """Run the call; return its result and what it captured, which is not added to the outer capture."""

    def replay(self, captured: dict[str, list[Any]]) -> None:
        """Add entries to the outer capture."""


class _Original(torch.nn.Module):
    """Calls the module's original forward. Calling the module itself would fire its hooks twice."""

    def __init__(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.block = module
        self._call = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Weights = Mapping[tuple[int, int], torch.Tensor]
Buffers = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Kept:
    """What a block was before a forward that changed its buffers. Empty if it changed none."""

    buffers: Buffers = field(default_factory=dict)
    modules: attributes.Recorded = field(default_factory=list)
    """The attributes of modules that have other ones now."""


NOTHING_KEPT = Kept()


@dataclass(eq=False)
class Block:
    """A module whose weights are streamed, and where its parameters are stored."""

    index: int
    name: str
    module: torch.nn.Module
    locations: dict[str, tuple[Slab, int]]
    """Parameter name inside the module → (slab, segment). Includes tied parameters of other blocks."""
    parameters: dict[str, torch.nn.Parameter]
    """The same names → the parameters that users see. `requires_grad` is read from them at every call."""
    original: Callable[..., Any]
    layer: bool = False
    """Whether it is one of the model's repeated layers, not an embedding, a norm or the head."""
    slabs: list[Slab] = field(init=False)
    compiled: Compiled | None = None
    """Shared by all blocks of a structure; None: the block runs eagerly."""

    def __post_init__(self) -> None:
        self.slabs = sorted({slab for slab, _ in self.locations.values()}, key=lambda slab: slab.index)
        self.structure = structure_of(self.module)
        self._stateless = _Original(self.module, self.original)
        self._owners = [
            (path, module, _bindable(module, "_parameters"))
            for path, module in self.module.named_modules()
            if module._parameters
        ]
        self._buffers: dict[str, tuple[Bound, str]] = {}
        """Buffer name → its dict and key. Empty until a forward changes a buffer."""
        at = {name: (slab.index, index) for name, (slab, index) in self.locations.items()}
        self._names = [
            (
                id(content),
                [(key, at[f"{path}.{key}".lstrip(".")]) for key, value in content.items() if value is not None],
            )
            for path, _, content in self._owners
        ]
        self._links = self._child_links()
        # One thread at a time: modules may cache what they derive from their weights (LSTM), and torch.compile traces
        # the storage of their dicts.
        self._call_lock: AbstractContextManager[Any] = threading.RLock()
        self._traced = False
        """Whether a compiled call is running or was interrupted."""

    def allow_nested_calls(self, blocks: Iterable[Block]) -> None:
        """Drop the lock if this block contains others, in which micro-batches of a window wait for each other."""
        inside = set(self.module.modules()) - {self.module}
        if any(other.module in inside for other in blocks):
            self._call_lock, self.compiled = nullcontext(), None

    @property
    def trainable(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters.values())

    def bind(self, views: Mapping[int, torch.Tensor], *, leaves: bool) -> dict[tuple[int, int], torch.Tensor]:
        """Views of the slots by (slab, segment). They are new tensors on every call: autocast caches casts by leaf.

        Their version counters are new too: a copy into another part of a storage is not a change of these weights.
        """
        bound: dict[tuple[int, int], torch.Tensor] = {}
        for name, (slab, index) in self.locations.items():
            if (slab.index, index) in bound:
                continue
            weight = slab.layout.view(views[slab.index], index).data
            bound[slab.index, index] = weight.requires_grad_(leaves and self.parameters[name].requires_grad)
        return bound

    def call(
        self,
        weights: Weights,
        args: Any,
        kwargs: Any,
        kept: Kept = NOTHING_KEPT,
        *,
        compiled: CompiledCall | None = None,
        recompute: bool = False,
    ) -> Any:
        """Run the module's original forward on these weights, and on copies of the buffers in `kept`.

        With `recompute` only the graph of the call is needed: what it returns may be uninitialized.
        """
        self.check_modules_unchanged()
        binding: Binding = {content: {key: weights[at] for key, at in names} for content, names in self._names}
        copies = {name: buffer.clone() for name, buffer in kept.buffers.items()}
        for name, buffer in copies.items():
            content, key = self._buffers[name]
            binding.setdefault(id(content), {})[key] = buffer
        with self._call_lock, attributes.replayed(kept.modules) if kept.modules else nullcontext():
            if compiled is not None:
                call = partial(compiled, self._stateless, self._named_state(weights, copies), args, kwargs, recompute)
                return self._call_compiled(binding, call, keep_buffers=not copies)
            return call_bound(binding, self.original, *args, **kwargs)

    def _named_state(self, weights: Weights, buffers: Buffers) -> Buffers:
        state = {f"block.{name}": weights[slab.index, index] for name, (slab, index) in self.locations.items()}
        return state | {f"block.{name}": buffer for name, buffer in buffers.items()}

    def _call_compiled(self, binding: Binding, call: Callable[[], Any], keep_buffers: bool) -> Any:
        of_buffers = [*{id(content): content for content, _ in self._buffers.values()}.values()]
        contents = [*(content for _, _, content in self._owners), *of_buffers]
        if self._traced:
            for content in contents:
                content.reset_traced()
        self._traced = True
        # Code after a graph break runs eagerly and needs the same weights bound.
        result = call_bound(binding, call)
        for content in of_buffers if keep_buffers else ():
            content.keep_traced()
        for content in contents:
            content.reset_traced()
        self._traced = False
        return result

    def check_modules_unchanged(self) -> None:
        """Raise if modules or parameter dicts were replaced since the engine was attached."""
        if any(modules.get(key) is not module for modules, key, module in self._links):
            self._recheck_modules()
        for _, module, content in self._owners:
            if module.__dict__["_parameters"] is not content:
                raise ModelMoved(
                    f"the parameters of {self.name} were replaced after the engine was attached; change the model "
                    "before attaching, or write into them (`parameter.data.copy_`)."
                )

    def _recheck_modules(self) -> None:
        """Accept a replaced module if all modules with parameters are still in place (BigBird's attention)."""
        present = dict(self.module.named_modules(remove_duplicate=False))
        for path, owner, _ in self._owners:
            if present.get(path) is not owner:
                raise ModelMoved(
                    f"the module {path!r} of {self.name} was replaced after the engine was attached, so its weights "
                    "would not be trained; change the model before attaching."
                )
        self._links = self._child_links()

    def _child_links(self) -> list[tuple[dict[str, Any], str, torch.nn.Module | None]]:
        """Every (dict, key, child) through which submodules are reached."""
        modules = self.module.modules()
        return [(inner._modules, key, child) for inner in modules for key, child in inner._modules.items()]

    @contextmanager
    def keeping_buffers(self) -> Iterator[Kept]:
        """Yield what receives the buffers' previous values, and attributes, if the forward inside changes any buffer.

        A recompute must see the same running statistics as the forward, and must not advance them again.
        """
        before = {name: (buffer, buffer._version, buffer.clone()) for name, buffer in self.module.named_buffers()}
        had = attributes.recorded(self.module) if before else []
        kept = Kept()
        yield kept
        after = dict(self.module.named_buffers())
        if any(after.get(name) is not buffer or buffer._version != v for name, (buffer, v, _) in before.items()):
            kept.buffers.update({name: copy for name, (_, _, copy) in before.items()})
            kept.modules.extend(attributes.changed(had))
            self._buffers = self._buffers or {
                f"{path}.{key}".lstrip("."): (_bindable(module, "_buffers"), key)
                for path, module in self.module.named_modules()
                for key, value in module._buffers.items()
                if value is not None
            }


def _bindable(module: torch.nn.Module, attribute: str) -> Bound:
    """Replace a module's dict of tensors with one in which a call can bind tensors."""
    content = module.__dict__[attribute]
    if not isinstance(content, Bound):
        content = module.__dict__[attribute] = Bound(content)
    return content


def unbind(root: torch.nn.Module) -> None:
    """Restore plain dicts in all modules."""
    for module in root.modules():
        for attribute in ("_parameters", "_buffers"):
            content = module.__dict__[attribute]
            if isinstance(content, Bound):
                module.__dict__[attribute] = dict(content.own)


def capture_outputs(
    call: Callable[[], Any], weights: Weights, args: Args, kwargs: Kwargs, capture: Capture | None
) -> tuple[list[torch.Tensor], FlattenSpec]:
    """Call a block and flatten its outputs: the result, captured tensors, and entries it wrote to dicts and lists.

    The call may modify dicts and lists in `args` and `kwargs`.
    """
    before = {key: entries_of(container) for key, container in containers(args, kwargs).items()}
    result, captured = (call(), {}) if capture is None else call_with({}, capture.inside, call)
    entries = [
        (key, {k: v for k, v in entries_of(container).items() if k not in before[key] or v is not before[key][k]})
        for key, container in containers(args, kwargs).items()
    ]
    tensors, spec = flatten_tensors((result, captured, entries))
    # An output that aliases a slot would change when the slot is refilled.
    return [*map(Addresses(weights).copy_if_inside, tensors)], spec


def apply_side_effects(outputs: Any, args: Args, kwargs: Kwargs, capture: Capture | None) -> Any:
    """Write a block's entries to the caller's containers and its captured tensors to `capture`; return the result."""
    result, captured, entries = outputs
    outer = containers(args, kwargs)
    for key, changed in entries:
        update_entries(outer[key], changed)
    if capture is not None:
        capture.replay(captured)
    return result
