"""One autograd node per block. The block's policy decides what the node saves for the backward:

| policy | saved | backward |
|---|---|---|
| `recompute` | the inputs | fetches the weights, recomputes the block with the same random numbers, differentiates it |
| `offload` | the inputs, in host memory or on disk | the same |
| `store` | the graph, with handles instead of weights | fetches the weights and differentiates the stored graph |

The node's inputs are the tensors in the block's arguments, and an anchor that always requires grad, so that the node
has a backward even behind a frozen embedding. Its outputs are all tensors that leave the block (compute/block.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from megatrain.compute import rebind
from megatrain.compute.binding import call_with
from megatrain.compute.block import Args, Block, Capture, Kept, Kwargs, Weights, apply_side_effects, capture_outputs
from megatrain.compute.compiled import EVALUATED, FROZEN, TRAINED, CompiledCall, Shapes
from megatrain.compute.interrupts import DeferInterrupts
from megatrain.compute.replay import AmbientState
from megatrain.compute.trees import FlattenSpec, flatten_tensors
from megatrain.errors import UnsupportedCall
from megatrain.generators import Generators
from megatrain.store.gradient import CallId
from megatrain.store.parameter import user_hooks
from megatrain.store.slab import Slab
from megatrain.stream.activations import Activations
from megatrain.stream.offloaded import OffloadedTensor

MIN_OFFLOAD_BYTES = 1 << 10
"""Smaller inputs stay on the device."""
MAX_RECOMPUTES = 5
"""Attempts to recompute a block while another thread draws random numbers."""


@dataclass(frozen=True)
class CallInfo:
    """What the engine knows about one call of a block."""

    call_id: CallId
    """Identifies this call within the forward. Gradients are summed per call id."""
    policy: str
    """`recompute`, `store` or `offload`."""
    multithreaded: Callable[[], bool]
    """Whether several threads run the model."""
    replay_call_ids: Callable[[], AbstractContextManager[None]]
    """Wraps a recompute: nested blocks get the call ids of the original forward."""


class Runtime(Protocol):
    """What a node needs from the engine; implemented by engine/step.py."""

    device: torch.device
    activations: Activations

    def weights(self, block: Block, phase: str) -> AbstractContextManager[dict[int, torch.Tensor]]: ...
    def expect_gradients(self, block: Block, call_id: CallId) -> None: ...
    def backward_done(self, block: Block) -> None: ...
    def add_gradients(self, slab: Slab, call_id: CallId, gradients: dict[int, torch.Tensor]) -> None: ...
    def start_call(self, block: Block) -> CallInfo: ...


@dataclass
class _Graph:
    """A block's inner autograd graph: leaves and outputs."""

    inputs: list[torch.Tensor]
    weights: Weights
    outputs: list[torch.Tensor]
    rebinder: rebind.Rebinder | None = None
    """Policy `store`: set if the weights may be elsewhere in the backward."""


@dataclass
class _Call:
    """What one call's forward keeps for its backward, besides the tensors that autograd saves."""

    runtime: Runtime
    block: Block
    spec: FlattenSpec
    differentiable: tuple[int, ...]
    capture: Capture | None
    ambient: AmbientState
    info: CallInfo
    versions: tuple[int, ...]
    """Versions of the block's slabs in the forward. The backward needs the same weights."""
    policy: str
    training: bool
    """Whether the module was in training mode. A recompute in the other mode has different dropout masks."""
    generators_before: Generators | None
    """The random number state before the forward; None if it is not recomputed."""
    offloaded: dict[int, OffloadedTensor] = field(default_factory=dict)
    """Policy `offload`: inputs in host memory or on disk, by position, until the backward has taken them."""
    restored: bool = False
    """Whether it has."""
    graph: _Graph | None = None
    """Policy `store`: the forward's graph, until the backward uses it."""
    kept: Kept = field(default_factory=Kept)
    """The buffers and attributes before the forward, if it changed buffers."""
    generators_after: Generators | None = None
    """The random number state after the forward; None if it drew nothing."""
    interleaved: bool = False
    """Whether another thread called the model during the forward."""
    result: FlattenSpec | None = None
    """The structure of the outputs, until they are returned."""
    compiled: CompiledCall | None = None
    """How the forward ran, None: eagerly. The recompute runs the same way, or it would draw other dropout masks."""

    def run_forward(self, inputs: list[torch.Tensor], weights: Weights) -> tuple[list[torch.Tensor], FlattenSpec]:
        """Run the forward, compiled if possible."""

        def forward(compiled: CompiledCall | None) -> tuple[list[torch.Tensor], FlattenSpec]:
            self.compiled = compiled
            return self.run(inputs, weights)

        compiled = self.block.compiled
        if compiled is not None and self.capture is not None:
            # Compiled code does not repeat the side effects of hooks that record outputs.
            compiled.announce_recording()
            compiled = None
        if compiled is None:
            return forward(None)
        return compiled.run(tuple(tensor.shape for tensor in inputs), TRAINED, forward)

    def run(
        self, inputs: list[torch.Tensor], weights: Weights, *, recompute: bool = False
    ) -> tuple[list[torch.Tensor], FlattenSpec]:
        args, kwargs = self.spec.unflatten(inputs)
        with torch.enable_grad():
            call = partial(self.block.call, weights, args, kwargs, self.kept)
            call = partial(call, compiled=self.compiled, recompute=recompute)
            outputs = capture_outputs(call, weights, args, kwargs, self.capture)
        # Autocast would keep the casts of all blocks' weights until it is left.
        torch.clear_autocast_cache()
        return outputs

    def offload_inputs(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
        """Apply the policy to the inputs; returns those that autograd saves, and None for the others."""
        if self.policy == "store":
            return (None,) * len(tensors)
        if self.policy == "offload":
            large = [i for i in self.differentiable if tensors[i].nbytes >= MIN_OFFLOAD_BYTES]
            activations = self.runtime.activations
            activations.wait_for_room(len(large), self.block.name)
            with DeferInterrupts():
                offloaded = activations.offload([tensors[i] for i in large], self.block.name)
            self.offloaded = dict(zip(large, offloaded, strict=True))
        return tuple(None if i in self.offloaded else t for i, t in enumerate(tensors))

    def restore_inputs(self, saved: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        if self.restored or any(offloaded.restored for offloaded in self.offloaded.values()):
            raise UnsupportedCall(
                f"the backward of {self.block.name} ran twice, and policy 'offload' keeps its input for one; use "
                "'recompute'."
            )
        activations = self.runtime.activations
        with DeferInterrupts():
            activations.start([*self.offloaded.values()])
        taken = {i: activations.take(offloaded) for i, offloaded in self.offloaded.items()}
        # The call lives as long as the loss, which users may keep; its inputs must not take memory for so long.
        self.offloaded, self.restored = {}, bool(taken)
        return tuple(taken.get(i, t) for i, t in enumerate(saved))

    def take_stored_graph(self, views: dict[int, torch.Tensor]) -> _Graph:
        graph, self.graph = self.graph, None
        if graph is None:
            raise UnsupportedCall(
                f"the backward of {self.block.name} ran twice, and policy 'store' keeps its graph for one; use "
                "'recompute'."
            )
        self.block.check_modules_unchanged()
        if graph.rebinder is not None:
            graph.rebinder.views = views
        return graph

    def rebuild_graph(self, saved: tuple[torch.Tensor | None, ...], views: dict[int, torch.Tensor]) -> _Graph:
        inputs = self.detached(tuple(t for t in saved if t is not None))
        weights = self.block.bind(views, leaves=True)
        drawn_from = None if self.generators_after is None else self.generators_before
        for _ in range(MAX_RECOMPUTES):
            with self.ambient.replayed(drawn_from), self.info.replay_call_ids():
                outputs, _ = self.run(inputs, weights, recompute=True)
                if self.random_numbers_match():
                    return _Graph(inputs, weights, outputs)
        raise UnsupportedCall(
            f"another thread drew random numbers while {self.block.name} was computed or recomputed, so its dropout "
            "masks would differ from the forward's; train and evaluate in one thread, or use policy='store'."
        )

    def random_numbers_match(self) -> bool:
        """Whether a recompute drew the same random numbers as the forward, or none."""
        before, after = self.generators_before, self.generators_after
        if before is None or after is None:
            return True
        if self.interleaved:
            return False
        now = Generators.capture(self.runtime.device).device_state
        return any(torch.equal(now, other.device_state) for other in (after, before))

    def check_unchanged(self) -> None:
        """Raise if weights or training mode have changed since the forward."""
        if self.versions != tuple(slab.version for slab in self.block.slabs):
            raise UnsupportedCall(
                f"the weights of {self.block.name} were changed between a forward and its backward (by a step, or by "
                "writing to a parameter), so the gradient would be wrong; call backward() before changing them."
            )
        if self.policy != "store" and self.block.module.training != self.training:
            raise UnsupportedCall(
                f"{self.block.name} was switched between train() and eval() after its forward, so a recompute would "
                "give a wrong gradient; call backward() first, or use policy='store'."
            )

    def expect_gradients(self) -> None:
        if wants_weight_gradients():
            self.runtime.expect_gradients(self.block, self.info.call_id)

    def detached(self, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """Detach the inputs from the outer graph, keeping `requires_grad`."""
        return [t.detach().requires_grad_(i in self.differentiable) for i, t in enumerate(tensors)]


class _BlockNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        with call.runtime.weights(call.block, "forward") as views:
            inputs, weights = call.detached(tensors), call.block.bind(views, leaves=True)
            # If another thread may draw random numbers in between, a recompute cannot replay them: store the graph.
            multithreaded = call.info.multithreaded()
            may_store = call.policy == "store" or multithreaded
            moves = any(not slab.stays_on_device for slab in call.block.slabs)
            rebinder = rebind.Rebinder(views, call.block.name) if may_store and moves else None
            forward = partial(call.run_forward, inputs, weights)
            before = [] if call.policy == "store" else rebind.versions(tensors)
            keeping: AbstractContextManager[Kept] = (
                nullcontext(Kept()) if call.policy == "store" else call.block.keeping_buffers()
            )
            with keeping as call.kept:
                made, call.result = forward() if rebinder is None else rebinder.run(forward)
            if call.generators_before is not None:
                now = Generators.capture(call.runtime.device)
                call.generators_after = None if now.same(call.generators_before) else now
                call.interleaved = not multithreaded and call.info.multithreaded()
                if may_store and call.generators_after is not None:
                    call.policy = "store"
            leaves = [*inputs, *weights.values()]
            rebind.refuse_side_inputs(call.block.name, made, leaves, anchor)
            rebind.refuse_hidden_gradients(call.block.name, leaves)
            if call.policy != "store":
                rebind.refuse_changed_inputs(call.block.name, before, tensors)
            else:
                call.graph = _Graph(inputs, weights, made, rebinder)
        ctx.save_for_backward(*call.offload_inputs(tensors))
        outputs = tuple(t.detach() for t in made)
        ctx.mark_non_differentiable(*[o for o, t in zip(outputs, made, strict=True) if not t.requires_grad])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        refuse_create_graph(call.block.name)
        call.check_unchanged()
        saved = call.restore_inputs(ctx.saved_tensors)
        # The other micro-batches of a window have not come as far, and one of their sums may have the only slot.
        call.expect_gradients()
        with call.runtime.weights(call.block, "backward") as views:
            call.expect_gradients()
            graph = call.take_stored_graph(views) if call.policy == "store" else call.rebuild_graph(saved, views)
            input_grads, weight_grads = _differentiate(graph, grads)
            del graph
        if wants_weight_gradients():
            deliver_gradients(call.runtime, call.block, call.info.call_id, weight_grads)
        return (None, None, *input_grads)


def _differentiate(
    graph: _Graph, grads: tuple[torch.Tensor | None, ...]
) -> tuple[list[torch.Tensor | None], dict[tuple[int, int], torch.Tensor]]:
    """Gradients of the inputs, and of the weights by (slab, segment)."""
    inputs = graph.inputs
    pairs = [(t, g) for t, g in zip(graph.outputs, grads, strict=True) if g is not None and t.requires_grad]
    targets = [t for t in inputs if t.requires_grad]
    leaves = [(key, weight) for key, weight in graph.weights.items() if weight.requires_grad]
    if not pairs or not (targets or leaves):
        return [None] * len(inputs), {}
    outputs, by_output = zip(*pairs, strict=True)
    wanted = [*targets, *[weight for _, weight in leaves]]
    # Nested blocks must deliver weight gradients, whatever inputs the outer backward was called with.
    gradients = call_with({_inside_block: True}, torch.autograd.grad, outputs, wanted, by_output, allow_unused=True)
    by_input = iter(gradients[: len(targets)])
    input_grads = [next(by_input) if t.requires_grad else None for t in inputs]
    by_weight = zip([key for key, _ in leaves], gradients[len(targets) :], strict=True)
    return input_grads, {key: gradient for key, gradient in by_weight if gradient is not None}


_inside_block: ContextVar[bool] = ContextVar("megatrain_inside_block", default=False)
"""Whether a block's inner graph is being differentiated."""


def wants_weight_gradients() -> bool:
    """Whether this backward accumulates into parameters. False for `autograd.grad(...)` and `backward(inputs=...)`."""
    return _inside_block.get() or torch.autograd._is_checkpoint_valid()


def refuse_create_graph(name: str) -> None:
    """Raise if the current backward has `create_graph=True`: only then does autograd run it with gradients enabled."""
    if torch.is_grad_enabled():
        raise UnsupportedCall(
            f"create_graph=True was passed to a backward through {name}, whose gradients have no graph of their "
            "own, so a gradient penalty or another second derivative would be lost; leave such a term out, or train "
            "the model without an engine."
        )


def deliver_gradients(
    runtime: Runtime, block: Block, call_id: CallId, gradients: dict[tuple[int, int], torch.Tensor]
) -> None:
    """Run the users' parameter hooks on a block's weight gradients and add the gradients to the store."""
    for slab in block.slabs:
        of_slab = {segment: gradient for (index, segment), gradient in gradients.items() if index == slab.index}
        if not of_slab:
            continue
        parameters = {at: block.parameters[name] for name, (owner, at) in block.locations.items() if owner is slab}
        hooks = {segment: user_hooks(parameters[segment]) for segment in of_slab}
        for segment, gradient in of_slab.items():
            for hook in hooks[segment][0]:
                replaced = hook(gradient)
                gradient = gradient if replaced is None else replaced
            of_slab[segment] = gradient
        runtime.add_gradients(slab, call_id, of_slab)
        for segment in of_slab:
            for hook in hooks[segment][1]:
                hook(parameters[segment])
    runtime.backward_done(block)


def run(runtime: Runtime, block: Block, args: Args, kwargs: Kwargs, capture: Capture | None) -> Any:
    """Run a block, as a node of the outer graph if a weight or an input requires grad."""
    tensors, spec = flatten_tensors((args, kwargs))
    differentiable = tuple(i for i, tensor in enumerate(tensors) if tensor.requires_grad)
    if not torch.is_grad_enabled() or not (block.trainable or differentiable):
        shapes = tuple(tensor.shape for tensor in tensors) if capture is None and _is_plain((args, kwargs)) else None
        return _without_gradient(runtime, block, args, kwargs, shapes)
    versions = tuple(slab.version for slab in block.slabs)
    ambient, info, mode = AmbientState.capture(runtime.device), runtime.start_call(block), block.module.training
    generators = None if info.policy == "store" else Generators.capture(runtime.device)
    call = _Call(runtime, block, spec, differentiable, capture, ambient, info, versions, info.policy, mode, generators)
    outputs = _BlockNode.apply(call, rebind.make_anchor(), *tensors)  # type: ignore[no-untyped-call]
    result, call.result = call.result, None
    assert result is not None
    return apply_side_effects(result.unflatten(outputs), args, kwargs, capture)


def _is_plain(value: Any) -> bool:
    """Whether it consists of tensors and constants. A key/value cache does not: it would have a graph per layer."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str)


def _without_gradient(runtime: Runtime, block: Block, args: Args, kwargs: Kwargs, shapes: Shapes | None) -> Any:
    """Run a block without a node: evaluation, generation, or a frozen block on inputs without gradient.

    Without `shapes` it runs eagerly.
    """
    with runtime.weights(block, "inference") as views:
        weights = block.bind(views, leaves=False)

        def forward(compiled: CompiledCall | None) -> Any:
            return block.call(weights, args, kwargs, compiled=compiled)

        if shapes is None or block.compiled is None:
            result = forward(None)
        else:
            result = block.compiled.run(shapes, FROZEN if torch.is_grad_enabled() else EVALUATED, forward)
        addresses = rebind.Addresses(weights)
        tensors, spec = flatten_tensors(result)
        if all(addresses.find(tensor) is None for tensor in tensors):
            return result
        return spec.unflatten([*map(addresses.copy_if_inside, tensors)])
