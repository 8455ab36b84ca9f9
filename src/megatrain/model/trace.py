"""What a layer keeps and needs, counted: its operations are run on the meta device, where tensors have sizes only.

For layers that the planner's formula was not made for. The whole model is run, since only it knows what its layers are
called with; of layers that are alike the first is counted, and the others give what it gave.
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
"""Tokens in a sequence; multiples of the chunks that mixers cut sequences into (64 to 256)."""
SHORT_LENGTHS = (8, 16, 24)
"""The same for layers that go through a sequence token by token, which is slow, or whose positions end before that."""
MAX_VALUE_READS = 10_000
"""In one run: a loop that waits for a value would never end."""
LayerBytes = tuple[int, int, int]
"""Of graph, work and forward, as in `TracedLayer`."""
MIN_QUADRATIC_SHARE = 0.05
"""Growth with the square of the length is believed if it is this share of what the longest sequence takes (of shorter
ones, less in proportion): scores of attention are more by then, and peaks that change places are less."""


@dataclass(frozen=True)
class SizeFormula:
    """Bytes in BF16, by tokens and by pairs of tokens of a sequence."""

    fixed: float
    token: float
    pair: float

    def at(self, tokens: int, length: int) -> float:
        """With so many tokens, in sequences of this length."""
        return self.fixed + tokens * (self.token + self.pair * length)


@dataclass(frozen=True)
class TracedLayer:
    """A layer as it was counted."""

    graph: SizeFormula
    """What its graph keeps for the backward, its input included, its weights not."""
    work: SizeFormula
    """The most that is there above this, in forward or backward, gradients of weights apart."""
    forward: SizeFormula
    """Peak of a forward that keeps no graph."""


def trace(model: torch.nn.Module, layers: Iterable[str], encoder_decoder: bool) -> dict[str, TracedLayer]:
    """Layers by name → what was counted, of those that a forward of text reaches; none if it fails.

    `model` is on the meta device; `encoder_decoder`: it has an encoder and a decoder.
    """
    model.to(torch.bfloat16).train()
    # A model may have been given layers that its config does not have.
    there = dict(model.named_modules())
    named = {name: there[name] for name in layers if name in there}
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
        # Nothing is kept by a layer that the model calls without gradients, and later with them.
        if all(sizes.get(name, (0,))[0] for sizes in counted)
    }


def _runs(
    model: torch.nn.Module, layers: Mapping[str, torch.nn.Module], lengths: tuple[int, ...], encoder_decoder: bool
) -> list[tuple[dict[str, LayerBytes], int]]:
    """A run for each length; none if they fail."""
    # Models that leave layers out by chance draw numbers: plans are always the same, and training draws what it would.
    try:
        with generators.preserved(torch.device("cpu")):
            torch.default_generator.manual_seed(0)  # not the GPU's as well
            random.seed(0)
            numpy.random.seed(0)
            return [_run(model, layers, length, encoder_decoder) for length in lengths]
    except Exception:
        # Whatever a model's code makes of tensors without values; the planner then has its formula.
        return []


def _traced(lengths: tuple[int, ...], counted: list[LayerBytes]) -> TracedLayer:
    graph, work, forward = zip(*counted, strict=True)
    share = MIN_QUADRATIC_SHARE * lengths[-1] / LENGTHS[-1]
    kept = _fit(lengths, graph, share)
    # Of a few tokens, a peak that moved looks the same as scores: these are kept too.
    share = share if kept.pair or lengths == LENGTHS else 1.0
    return TracedLayer(kept, _fit(lengths, work, share), _fit(lengths, forward, share))


def _fit(lengths: tuple[int, ...], sizes: Sequence[int], share: float) -> SizeFormula:
    """Through three points that are equally far apart; above them, if they are on no such curve."""
    apart, last = lengths[1] - lengths[0], lengths[2]
    pair = (sizes[2] - 2 * sizes[1] + sizes[0]) / (2 * apart * apart)
    if pair * last * last < share * sizes[2]:
        pair = 0.0
    one, two = (size - pair * length * length for size, length in zip(sizes[1:], lengths[1:], strict=True))
    token = max(0.0, (two - one) / apart)
    return SizeFormula(max(0.0, two - token * last), token, pair)


def _run(
    model: torch.nn.Module, layers: Mapping[str, torch.nn.Module], length: int, encoder_decoder: bool
) -> tuple[dict[str, LayerBytes], int]:
    """One forward: what was counted of each layer that is called, and how many operations that took."""
    counted: dict[Any, tuple[LayerBytes, Any, int]] = {}
    # Layers of one class with parameters of the same shapes are alike.
    kinds = {
        name: (type(layer), *((inner, parameter.shape) for inner, parameter in layer.named_parameters()))
        for name, layer in layers.items()
    }
    called: list[str] = []

    def standing_in(name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        kind = kinds[name]
        called.append(name)
        if kind not in counted:
            counted[kind] = _count(layers[name], forward, args, kwargs)
        return counted[kind][1]

    try:
        for name, layer in layers.items():
            layer.__dict__["forward"] = partial(standing_in, name, layer.forward)
        ids = torch.zeros(1, length, dtype=torch.long, device="meta")
        more = {"decoder_input_ids": ids} if encoder_decoder else {}
        with torch.inference_mode(False), torch.enable_grad(), _FusedAttention():
            model(input_ids=ids, use_cache=False, **more)
    finally:
        for layer in layers.values():
            layer.__dict__.pop("forward", None)
    return {name: counted[kinds[name]][0] for name in called}, sum(operations for _, _, operations in counted.values())


def _count(layer: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[LayerBytes, Any, int]:
    """What one call takes, its output, and how many operations it took."""
    args, kwargs = tree_map(_detach, (args, kwargs))
    inputs = _tensors((args, kwargs))
    weights = list(layer.parameters())
    theirs = {_storage(tensor) for tensor in (*inputs, *weights)}
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    # Masks, positions and what an encoder gave are there once for all layers.
    shared = theirs - {_storage(tensor) for tensor in wanted[:1]}
    # Its input is there whether an operation keeps it or not.
    kept = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in wanted[:1]}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in shared:
            kept[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # with its history, a node that keeps what it made would keep itself

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        graph = forward(*args, **kwargs)
    keeps = sum(kept.values())
    output = tree_map(_detach, graph)
    del graph
    with torch.no_grad(), _LiveBytes(theirs) as alone:
        forward(*args, **kwargs)
    trains = [weight for weight in weights if weight.requires_grad]
    try:
        # Gradients of weights are the planner's to count: they do not grow with tokens.
        layer.requires_grad_(False)
        with _LiveBytes(theirs) as live:
            result = [t for t in _tensors(forward(*args, **kwargs)) if t.requires_grad]
            there = live.now
            if result:
                towards = [torch.empty_like(tensor) for tensor in result]
                torch.autograd.grad(result, wanted, towards, allow_unused=True)
    finally:
        for weight in trains:
            weight.requires_grad_(True)
    return (keeps, live.peak - there, alone.peak), output, live.operations


def _detach(value: Any) -> Any:
    """A tensor apart from the graph that it came from."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _LiveBytes(TorchDispatchMode):
    """Bytes of all tensors that came to be, as long as they are there."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = known
        self._sizes: dict[int, tuple[int, Any]] = {}
        self.now = self.peak = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._known and key not in self._sizes:
                self._sizes[key] = storage.nbytes(), weakref.ref(storage, partial(self._gone, key))
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
        return result

    def _gone(self, key: int, _: Any) -> None:
        self.now -= self._sizes.pop(key)[0]


class _FusedAttention(TorchFunctionMode):
    """Attention as GPUs have it, and answers where the model asks for values: no token is padding, masks hide none."""

    _answers = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.__bool__, torch.Tensor.__contains__) and args[0].is_meta:
            self._answers += 1
            if self._answers > MAX_VALUE_READS:
                raise RecursionError(f"the model asked for a value {MAX_VALUE_READS:,} times")
            return func is torch.Tensor.__bool__
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, key, value = (*args, *(kwargs[n] for n in ("query", "key", "value") if n in kwargs))[:3]
            groups = kwargs.get("enable_gqa") and query.shape[-1] == value.shape[-1] <= 256
            # No kernel spreads heads otherwise: scores are then written out, here too.
            if query.shape[:-2] == key.shape[:-2] or groups:
                mask = (*args, *[None] * 4)[3] if "attn_mask" not in kwargs else kwargs["attn_mask"]
                return _AttentionNode.apply(query, key, value, mask)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


class _AttentionNode(torch.autograd.Function):
    """Keeps queries, keys, values, a mask, its output and a number per query; the backward sums in FP32."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        # As kernels write it: like the queries, else with heads after tokens. Another order is copied for what follows.
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
