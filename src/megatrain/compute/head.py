"""The head of a language model, computed in chunks of tokens so that only one chunk of logits exists at a time.

    logits     The model calls its output embedding and gets `LazyLogits` (compute/logits.py). Nothing is computed.
    loss       `Head.loss` replaces the model's loss function. It runs the head, the recorded operations and the
               cross-entropy chunk by chunk, and differentiates each chunk immediately.
    backward   The gradients are multiplied by the gradient of the loss and delivered as for every block.

In other cases (another loss, another shape, logits that were read) the model's own loss runs on the full logits. On a
piece of the first batch both losses are compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from megatrain.compute import node
from megatrain.compute.binding import untraced
from megatrain.compute.block import Block
from megatrain.compute.logits import LazyLogits, Pointwise
from megatrain.compute.loss import LinearLoss, cross_entropy
from megatrain.compute.rebind import make_anchor
from megatrain.compute.replay import AmbientState
from megatrain.errors import UnsupportedCall
from megatrain.store.gradient import CallId
from megatrain.stream.add import add_to
from megatrain.telemetry.notices import announce

CHECKED_TOKENS = 64
"""Positions of the first batch on which the chunked loss is compared with the model's own."""


@dataclass(eq=False)
class Head:
    """The head block of one engine. Without gradients, logits are computed at once unless `loss_only` is set."""

    runtime: node.Runtime
    block: Block
    model_loss: Callable[..., Any]
    """The model's original loss function."""
    features: int
    tokens: int
    """Tokens per chunk."""
    fused: bool
    """Whether to use MegaTrain's cross-entropy kernel."""
    enabled: bool = True

    def __post_init__(self) -> None:
        self._checked = False
        self._thread = threading.local()

    @contextmanager
    def set_loss_only(self, loss_only: bool) -> Iterator[None]:
        """Set whether the calling thread's forwards without gradients need only the loss."""
        before, self._thread.loss_only = self.loss_only, loss_only
        try:
            yield
        finally:
            self._thread.loss_only = before

    @property
    def loss_only(self) -> bool:
        """Whether the calling thread needs only the loss."""
        return getattr(self._thread, "loss_only", False)

    def can_defer(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this is a call of the head that can return lazy logits."""
        if not self.enabled or block is not self.block or kwargs or len(args) != 1:
            return False
        hidden = args[0]
        if not isinstance(hidden, torch.Tensor) or not hidden.is_floating_point():
            return False
        return block.trainable or hidden.requires_grad if torch.is_grad_enabled() else self.loss_only

    def logits(self, hidden: torch.Tensor, materialize: Callable[[], torch.Tensor]) -> LazyLogits:
        """Lazy logits. `materialize` computes all of them, under the autocast state of this call."""
        ambient = AmbientState.capture(self.runtime.device)
        graph = torch.is_grad_enabled()
        versions = [slab.version for slab in self.block.slabs]

        def compute() -> torch.Tensor:
            if versions != [slab.version for slab in self.block.slabs]:
                raise UnsupportedCall(
                    "these logits are computed on first use, and the weights have changed since the forward; read them "
                    "before optimizer.step(), or set head_chunk=0 to compute them in the forward."
                )
            with ambient.autocasting(), nullcontext() if graph else torch.no_grad():
                return materialize()

        return LazyLogits(compute, hidden, self.features, ambient.cast_dtype or hidden.dtype, graph=graph)

    @untraced
    def loss(self, logits: Any, labels: Any, vocab_size: int | None = None, **options: Any) -> Any:
        """Transformers' causal loss, chunk by chunk if the logits are still lazy."""
        lazy = isinstance(logits, LazyLogits) and not logits.computed and vocab_size == logits.shape[-1]
        shifted = options.get("shift_labels")
        targets = labels if shifted is None else shifted
        fits = lazy and targets is not None and targets.numel() == logits.shape[:-1].numel()
        ignore = options.get("ignore_index", -100)
        if fits and self.enabled and not self._checked:
            self._check(logits, targets if labels is None else labels, vocab_size, ignore)
        if not fits or not self.enabled:
            return self.model_loss(logits, labels, vocab_size, **options)
        targets = _shifted(labels, ignore) if shifted is None else shifted
        return self.chunked(logits, targets, options.get("num_items_in_batch"), ignore)

    @untraced
    def smoothed_loss(
        self, logits: Any, labels: torch.Tensor, items: Any, ignore_index: int, smoothing: float, shift: bool
    ) -> torch.Tensor | None:
        """Cross-entropy with smoothed labels, chunk by chunk; None if the logits are not lazy."""
        lazy = isinstance(logits, LazyLogits) and not logits.computed and self.enabled
        if not lazy or labels.shape != logits.shape[:-1]:
            return None
        targets = _shifted(labels, ignore_index) if shift else labels
        return self.chunked(logits, targets, items, ignore_index, smoothing)

    def chunked(
        self, logits: LazyLogits, targets: torch.Tensor, items: Any, ignore_index: int, smoothing: float = 0.0
    ) -> torch.Tensor:
        """Cross-entropy summed over the targets that are not ignored, divided by `items` (None: their number)."""
        hidden = logits.hidden.reshape(-1, logits.hidden.shape[-1])
        targets = targets.reshape(-1).to(hidden.device)
        divisor = (targets != ignore_index).sum() if items is None else items
        if isinstance(divisor, torch.Tensor):
            divisor = divisor.to(hidden.device)
        call = _ChunkedCall(self, logits.chain, targets, divisor, ignore_index, smoothing)
        if torch.is_grad_enabled() and logits.requires_grad:
            call.call_id = self.runtime.start_call(self.block).call_id
            loss: torch.Tensor = _ChunkedLoss.apply(call, make_anchor(), hidden)  # type: ignore[no-untyped-call]
            return loss
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        with torch.no_grad(), self.runtime.weights(self.block, "inference") as views:
            weights = self.block.bind(views, leaves=False)
            for start in range(0, hidden.shape[0], call.tokens):
                total += call.chunk(weights, hidden[start : start + call.tokens], start)
        return total

    def _check(self, logits: LazyLogits, labels_or_targets: torch.Tensor, vocab_size: int | None, ignore: int) -> None:
        """Compare both losses on a piece of the first batch. If they differ, use the model's own and announce it."""
        if logits.ndim != 3 or labels_or_targets.shape != logits.shape[:2]:
            self._checked = True
            return
        # Choose a piece with labels that are not ignored: prompts are often masked.
        counted = (labels_or_targets[:, 1:] != ignore).nonzero()
        if not len(counted):
            return
        self._checked = True
        row, first = counted[0].tolist()
        hidden = logits.hidden[row : row + 1, first : first + CHECKED_TOKENS].detach()
        labels = labels_or_targets[row : row + 1, first : first + CHECKED_TOKENS].to(hidden.device)
        with torch.no_grad(), self.set_loss_only(False):
            piece = self.block.module(hidden)
            for operation in logits.chain:
                piece = operation(piece)
            expected = self.model_loss(piece, labels, vocab_size, ignore_index=ignore)
            lazy = LazyLogits(lambda: piece, hidden, piece.shape[-1], hidden.dtype, logits.chain)
            chunked = self.chunked(lazy, _shifted(labels, ignore), None, ignore)
        tolerance = 1e-5 if logits.hidden.dtype == torch.float32 else 1e-2
        if not torch.isclose(expected.float(), chunked, rtol=tolerance, atol=tolerance, equal_nan=True):
            self.enabled = False
            announce(
                f"the chunked loss ({chunked.item():.6g}) differs from the model's own loss ({expected.item():.6g}): "
                "logits are computed whole"
            )


def _shifted(labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Labels shifted by one: the target of each token is the next one."""
    return functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


@dataclass
class _ChunkedCall:
    head: Head
    chain: tuple[Pointwise, ...]
    targets: torch.Tensor
    divisor: Any
    ignore_index: int
    smoothing: float = 0.0
    call_id: CallId = (-1, 0)

    @property
    def tokens(self) -> int:
        """Tokens per chunk. The plan of a fused loss has less memory per token than another one takes."""
        return max(1, self.head.tokens // 4) if self.head.fused and self.smoothing else self.head.tokens

    def differentiate(
        self, hidden: torch.Tensor, weights: Any, by_hidden: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[tuple[int, int], torch.Tensor]]:
        """The loss, and the gradients of the weights in FP32. The gradient of `hidden` is written to `by_hidden`."""
        leaves = {key: weight for key, weight in weights.items() if weight.requires_grad}
        size, linear = self.tokens, self._linear(hidden, weights)
        pieces = hidden.split(size)
        by_pieces = [None] * len(pieces) if by_hidden is None else by_hidden.split(size)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        by_weight: dict[tuple[int, int], torch.Tensor] = {}
        for number, (piece, by_piece) in enumerate(zip(pieces, by_pieces, strict=True)):
            piece, start = piece.detach(), number * size
            if linear is not None:
                targets = self.targets[start : start + size]
                total += linear.add(piece, targets, self.divisor, by_piece, bool(leaves))
                continue
            piece.requires_grad_(by_piece is not None)
            with torch.enable_grad():
                loss = self.chunk(weights, piece, start)
            wanted = [*([] if by_piece is None else [piece]), *leaves.values()]
            grads = list(torch.autograd.grad(loss, wanted, allow_unused=True)) if wanted else []
            total += loss.detach()
            if by_piece is not None:
                by_piece.copy_(grads.pop(0))
            _add(by_weight, dict(zip(leaves, grads, strict=True)))
            # Free this chunk's gradients before the next chunk is computed.
            del loss, grads
        if linear is not None and linear.by_weight is not None:
            by_weight = dict.fromkeys(leaves, linear.by_weight)
        return total, by_weight

    def _linear(self, hidden: torch.Tensor, weights: Any) -> LinearLoss | None:
        """The loss of a head that is one matrix and nothing else; None for another one."""
        bare = getattr(self.head.block.original, "__func__", None) is torch.nn.Linear.forward and len(weights) == 1
        if not self.head.fused or not bare or self.chain or self.smoothing:
            return None
        weight = next(iter(weights.values())).detach()
        return LinearLoss(weight, self.ignore_index) if LinearLoss.supports(hidden, weight) else None

    def chunk(self, weights: Any, hidden: torch.Tensor, start: int) -> torch.Tensor:
        logits = self.head.block.call(weights, (hidden,), {})
        for operation in self.chain:
            logits = operation(logits)
        targets = self.targets[start : start + hidden.shape[0]]
        total = cross_entropy(logits, targets, self.ignore_index, self.head.fused, self.smoothing)
        mean: torch.Tensor = total / self.divisor
        return mean


class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradients in the forward, while a chunk's logits exist; the backward only scales them."""

    @staticmethod
    def forward(ctx: Any, call: _ChunkedCall, anchor: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        head = call.head
        by_hidden = torch.empty_like(hidden) if hidden.requires_grad else None
        head.runtime.expect_gradients(head.block, call.call_id)
        with head.runtime.weights(head.block, "forward") as views:
            total, by_weight = call.differentiate(hidden, head.block.bind(views, leaves=True), by_hidden)
        torch.clear_autocast_cache()
        ctx.head, ctx.call_id, ctx.weights = head, call.call_id, list(by_weight)
        ctx.dtypes = {slab.index: slab.layout.dtype for slab in head.block.slabs}
        ctx.save_for_backward(by_hidden, *by_weight.values())
        return total

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        node.refuse_create_graph(ctx.head.block.name)
        by_hidden, *by_weight = ctx.saved_tensors
        if node.wants_weight_gradients():
            pairs = zip(ctx.weights, by_weight, strict=True)
            gradients = {(slab, segment): _scaled(g, scale, ctx.dtypes[slab]) for (slab, segment), g in pairs}
            node.deliver_gradients(ctx.head.runtime, ctx.head.block, ctx.call_id, gradients)
        return None, None, None if by_hidden is None else _scaled(by_hidden, scale, by_hidden.dtype)


def _add(sums: dict[tuple[int, int], torch.Tensor], gradients: dict[tuple[int, int], torch.Tensor | None]) -> None:
    """Add gradients in FP32: in BF16 the last of many chunks would be rounded away."""
    for key, gradient in gradients.items():
        if gradient is not None and key in sums:
            add_to(sums[key], gradient)
        elif gradient is not None:
            sums[key] = gradient.float()


def _scaled(gradient: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient times `scale` in FP32, rounded once to `dtype`, without a second FP32 copy."""
    # PyTorch would round a scalar to a BF16 gradient's dtype first.
    rounded, scale = torch.empty_like(gradient, dtype=dtype), scale.reshape(1)
    rows = max(1, (1 << 24) // max(1, gradient.shape[1:].numel()))
    for source, target in zip(gradient.split(rows), rounded.split(rows), strict=True):
        torch.mul(source, scale, out=target)
    return rounded
