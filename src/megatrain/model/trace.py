"""Measures the activation memory of layers by running the model on the meta device, where tensors have only sizes.

Used for layers that the planner's formula does not cover. The whole model runs, because only it knows the arguments of
its layers. Of identical layers only the first is measured; the others return its output.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megatrain import generators

LENGTHS = (256, 512, 768)
"""Sequence lengths to measure: multiples of the chunk sizes of mixers (64 to 256)."""
SHORT_LENGTHS = (8, 16, 24)
"""Lengths for layers that loop over tokens, which is slow, or that have fewer positions."""
MAX_VALUE_READS = 10_000
"""Per run: a loop that waits for a value would never end."""
LayerBytes = tuple[int, int, int]
"""Bytes of graph, work and forward, as in `TracedLayer`."""
MIN_QUADRATIC_SHARE = 0.05
"""A quadratic term is accepted if it is at least this share of the size at the longest length (proportionally less for
shorter lengths). Attention scores exceed it; a peak that moves to another operation does not."""


@dataclass(frozen=True)
class SizeFormula:
    """Bytes in BF16 as a function of tokens and of pairs of tokens in a sequence."""

    fixed: float
    token: float
    pair: float

    def at(self, tokens: int, length: int) -> float:
        """Bytes for `tokens` tokens in sequences of `length`."""
        return self.fixed + tokens * (self.token + self.pair * length)


@dataclass(frozen=True)
class TracedLayer:
    """The measured sizes of a layer."""

    graph: SizeFormula
    """What the graph keeps for the backward, including the layer's input, without weights."""
    work: SizeFormula
    """The peak above `graph` in forward and backward, without gradients of weights."""
    forward: SizeFormula
    """The peak of a forward without gradients."""


def trace(model: torch.nn.Module, layers: Iterable[str], encoder_decoder: bool) -> dict[str, TracedLayer]:
    """Sizes by layer name, for layers that a forward on text reaches; empty if the forward fails.

    `model` must be on the meta device.
    """
    model.to(torch.bfloat16).train()
    # The user's model may have layers that its config does not describe.
    modules = dict(model.named_modules())
    named = {name: modules[name] for name in layers if name in modules}
    short = _runs(model, named, SHORT_LENGTHS[:2], encoder_decoder)
    if not short:
        return {}
    by_token = short[1][1] - short[0][1] > SHORT_LENGTHS[1] - SHORT_LENGTHS[0]
    long = [] if by_token else _runs(model, named, LENGTHS, encoder_decoder)
    runs = long or short + _runs(model, named, SHORT_LENGTHS[2:], encoder_decoder)
    if len(runs) < len(SHORT_LENGTHS):
        return {}
    lengths = LENGTHS if long else SHORT_LENGTHS
    counted = [sizes for sizes, _ in runs]
    return {
        name: _traced(lengths, [sizes[name] for sizes in counted])
        for name in counted[0]
        # A layer that the model calls without gradients keeps nothing, so its graph is unknown.
        if all(sizes.get(name, (0,))[0] for sizes in counted)
    }


def _runs(
    model: torch.nn.Module, layers: Mapping[str, torch.nn.Module], lengths: tuple[int, ...], encoder_decoder: bool
) -> list[tuple[dict[str, LayerBytes], int]]:
    """One run per length; empty if one fails."""
    # Layer drop draws random numbers. Seed for reproducible plans, and preserve the state for training.
    try:
        with generators.preserved(torch.device("cpu")):
            torch.default_generator.manual_seed(0)  # does not seed the GPU
            random.seed(0)
            numpy.random.seed(0)
            return [_run(model, layers, length, encoder_decoder) for length in lengths]
    except Exception:
        # A model's code may raise anything on tensors without values. The planner then uses its formula.
        return []


def _traced(lengths: tuple[int, ...], counted: list[LayerBytes]) -> TracedLayer:
    graph, work, forward = zip(*counted, strict=True)
    share = MIN_QUADRATIC_SHARE * lengths[-1] / LENGTHS[-1]
    graph_size = _fit(lengths, graph, share)
    # At short lengths a moving peak looks like attention scores, but scores are also in the graph.
    share = share if graph_size.pair or lengths == LENGTHS else 1.0
    return TracedLayer(graph_size, _fit(lengths, work, share), _fit(lengths, forward, share))


def _fit(lengths: tuple[int, ...], sizes: Sequence[int], share: float) -> SizeFormula:
    """Fit a quadratic through three equidistant points, or an upper bound if there is none with these signs."""
    spacing, last = lengths[1] - lengths[0], lengths[2]
    pair = (sizes[2] - 2 * sizes[1] + sizes[0]) / (2 * spacing * spacing)
    if pair * last * last < share * sizes[2]:
        pair = 0.0
    one, two = (size - pair * length * length for size, length in zip(sizes[1:], lengths[1:], strict=True))
    token = max(0.0, (two - one) / spacing)
    return SizeFormula(max(0.0, two - token * last), token, pair)


def _run(
    model: torch.nn.Module, layers: Mapping[str, torch.nn.Module], length: int, encoder_decoder: bool
) -> tuple[dict[str, LayerBytes], int]:
    """Run one forward: the sizes of each layer that is called, and the number of operations measured."""
    counted: dict[Any, tuple[LayerBytes, Any, int]] = {}
    # Layers of one class with the same parameter shapes are identical.
    kinds = {
        name: (type(layer), *((inner, parameter.shape) for inner, parameter in layer.named_parameters()))
        for name, layer in layers.items()
    }
    called: list[str] = []

    def measured_forward(name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        kind = kinds[name]
        called.append(name)
        if kind not in counted:
            counted[kind] = _count(layers[name], forward, args, kwargs)
        return counted[kind][1]

    try:
        for name, layer in layers.items():
            layer.__dict__["forward"] = partial(measured_forward, name, layer.forward)
        ids = torch.zeros(1, length, dtype=torch.long, device="meta")
        decoder_inputs = {"decoder_input_ids": ids} if encoder_decoder else {}
        with torch.inference_mode(False), torch.enable_grad(), _FusedAttention():
            model(input_ids=ids, use_cache=False, **decoder_inputs)
    finally:
        for layer in layers.values():
            layer.__dict__.pop("forward", None)
    return {name: counted[kinds[name]][0] for name in called}, sum(operations for _, _, operations in counted.values())


def _count(layer: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[LayerBytes, Any, int]:
    """Measure one call: its sizes, its output and the number of operations."""
    args, kwargs = tree_map(_detach, (args, kwargs))
    inputs = _tensors((args, kwargs))
    weights = list(layer.parameters())
    inputs_and_weights = {_storage(tensor) for tensor in (*inputs, *weights)}
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    # Masks, positions and encoder outputs exist once for all layers.
    shared = inputs_and_weights - {_storage(tensor) for tensor in wanted[:1]}
    # The input is kept whether an operation saves it or not.
    saved = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in wanted[:1]}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in shared:
            saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # a node that saves its own output would form a cycle

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        graph = forward(*args, **kwargs)
    graph_bytes = sum(saved.values())
    output = tree_map(_detach, graph)
    del graph
    with torch.no_grad(), _LiveBytes(inputs_and_weights) as inference:
        forward(*args, **kwargs)
    trains = [weight for weight in weights if weight.requires_grad]
    try:
        # The planner counts gradients of weights itself.
        layer.requires_grad_(False)
        with _LiveBytes(inputs_and_weights) as live:
            result = [t for t in _tensors(forward(*args, **kwargs)) if t.requires_grad]
            before_backward = live.now
            if result:
                grad_outputs = [torch.empty_like(tensor) for tensor in result]
                torch.autograd.grad(result, wanted, grad_outputs, allow_unused=True)
    finally:
        for weight in trains:
            weight.requires_grad_(True)
    return (graph_bytes, live.peak - before_backward, inference.peak), output, live.operations


def _detach(value: Any) -> Any:
    """Detach a tensor from its graph, keeping `requires_grad`."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all live tensors that were created inside."""

    def __init__(self, excluded: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._excluded = excluded
        self._sizes: dict[int, tuple[int, Any]] = {}
        self.now = self.peak = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._excluded and key not in self._sizes:
                self._sizes[key] = storage.nbytes(), weakref.ref(storage, partial(self._freed, key))
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
        return result

    def _freed(self, key: int, _: Any) -> None:
        self.now -= self._sizes.pop(key)[0]


class _FusedAttention(TorchFunctionMode):
    """Replaces attention with a fused kernel's sizes, and answers value checks as if there were no padding."""

    _value_reads = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.__bool__, torch.Tensor.__contains__) and args[0].is_meta:
            self._value_reads += 1
            if self._value_reads > MAX_VALUE_READS:
                raise RecursionError(f"the model asked for a value {MAX_VALUE_READS:,} times")
            return func is torch.Tensor.__bool__
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, key, value = (*args, *(kwargs[n] for n in ("query", "key", "value") if n in kwargs))[:3]
            groups = kwargs.get("enable_gqa") and query.shape[-1] == value.shape[-1] <= 256
            # No fused kernel supports other head layouts; PyTorch then materializes the scores.
            if query.shape[:-2] == key.shape[:-2] or groups:
                mask = (*args, *[None] * 4)[3] if "attn_mask" not in kwargs else kwargs["attn_mask"]
                return _AttentionNode.apply(query, key, value, mask)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


class _AttentionNode(torch.autograd.Function):
    """Saves what a fused kernel saves: queries, keys, values, mask, output and one number per query."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        # The memory layout of a kernel's output: that of the queries, else heads after tokens.
        output = torch.empty_like(query)
        if query.shape[-1] != value.shape[-1]:
            *batch, heads, tokens, _ = query.shape
            output = query.new_empty((*batch, tokens, heads, value.shape[-1])).transpose(-3, -2)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors[:4]
        sums = torch.empty_like(query, dtype=torch.float32)
        learned = mask is not None and ctx.needs_input_grad[3]
        to_mask = torch.empty_like(mask) if learned else None
        return sums.to(query.dtype), torch.empty_like(key), torch.empty_like(value), to_mask
