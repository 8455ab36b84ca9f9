"""Putting the chunked head in: which models get it, and the check that it gives their own loss."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from megatrain.compute.block import Block
from megatrain.compute.head import ChunkedHead, LazyLogits
from megatrain.engine.step import Step
from megatrain.engine.undo import Undo
from megatrain.geometry import chunk_tokens
from megatrain.model.heads import can_be_lazy, uses
from megatrain.telemetry.notices import announce

CHECKED_TOKENS = 64
"""Positions of the first batch on which the chunked loss is held against the model's own."""


class LazyHead:
    """Returns lazy logits from the head while training, and takes them in the model's loss function.

    In evaluation logits are computed at once, unless somebody has said that only the loss is wanted (`loss_only`).
    """

    def __init__(self, model: Any, step: Step, block: Block, own_loss: Callable[..., Any], tokens: int | None) -> None:
        features = model.get_output_embeddings().weight.shape[0]
        self.block = block
        # The module whose forward calls the loss function: under adapters it is inside the one the user holds.
        self.model = [m for m in model.modules() if uses(m, block.module, own_loss)][-1]
        self.head = ChunkedHead(step, block, features, tokens or chunk_tokens(features))
        self.own_loss = own_loss
        self._checked = False
        self.enabled = True
        self._wanted = threading.local()

    @classmethod
    def fits(cls, model: Any, blocks: list[Block], causal_loss: Any) -> Block | None:
        """The head's block, if the model is a causal LM whose loss is transformers' own."""
        if not can_be_lazy(model, causal_loss):
            return None
        head = model.get_output_embeddings()
        return next((block for block in blocks if block.module is head), None)

    def attach(self, undo: Undo) -> None:
        """Take the model's logits in its loss function, until the user gives it another."""
        undo.patch(self.model, "_loss_function", self.loss, yields=True)

    @contextmanager
    def wanting(self, loss_only: bool) -> Iterator[None]:
        """Whether forwards without gradients inside are for their loss alone."""
        before, self._wanted.loss_only = self.loss_only, loss_only
        try:
            yield
        finally:
            self._wanted.loss_only = before

    @property
    def loss_only(self) -> bool:
        """Whether the calling thread wants the loss alone."""
        return getattr(self._wanted, "loss_only", False)

    def takes(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call of a block is one that can be lazy."""
        if not self.enabled or block is not self.block or kwargs or len(args) != 1:
            return False
        hidden = args[0]
        if not isinstance(hidden, torch.Tensor) or not hidden.is_floating_point():
            return False
        return block.trainable or hidden.requires_grad if torch.is_grad_enabled() else self.loss_only

    def logits(self, hidden: torch.Tensor, whole: Callable[[], torch.Tensor]) -> LazyLogits:
        return self.head.lazy(hidden, whole)

    def loss(self, logits: Any, labels: Any, vocab_size: int | None = None, **options: Any) -> Any:
        """What transformers' causal loss computes, chunk by chunk if the logits are still lazy."""
        chunked = isinstance(logits, LazyLogits) and logits._computed is None and vocab_size == logits.shape[-1]
        targets = options.get("shift_labels") if options.get("shift_labels") is not None else labels
        if not chunked or not self.enabled or targets is None or targets.numel() != logits.shape[:-1].numel():
            return self.own_loss(logits, labels, vocab_size, **options)
        if not self._checked:
            self._check(logits, labels, vocab_size, options)
            if not self.enabled:
                return self.own_loss(logits, labels, vocab_size, **options)
        return self._chunked(logits, labels, **options)

    def _chunked(
        self,
        logits: LazyLogits,
        labels: torch.Tensor | None,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        if shift_labels is None:
            assert labels is not None
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        return self.head.loss(logits, shift_labels, num_items_in_batch, ignore_index)

    def _check(self, logits: LazyLogits, labels: Any, vocab_size: int | None, options: dict[str, Any]) -> None:
        """Once: a piece of the first batch through both; on a mismatch the model's own loss is used, announced."""
        given = options.get("shift_labels") if labels is None else labels
        ignore = options.get("ignore_index", -100)
        if logits.ndim != 3 or given is None or given.shape != logits.shape[:2]:
            self._checked = True
            return
        # A piece in which some labels count: prompts are often masked.
        counted = (given[:, 1:] != ignore).nonzero()
        if not len(counted):
            return
        self._checked = True
        row, first = counted[0].tolist()
        hidden = logits.hidden[row : row + 1, first : first + CHECKED_TOKENS].detach()
        labels = given[row : row + 1, first : first + CHECKED_TOKENS].to(hidden.device)
        with torch.no_grad(), self.wanting(loss_only=False):
            piece = self.block.module(hidden)
            for operation in logits.chain:
                piece = operation(piece)
            own = self.own_loss(piece, labels, vocab_size, ignore_index=ignore)
            shifted = functional.pad(labels, (0, 1), value=ignore)[..., 1:]
            lazy = LazyLogits(lambda: piece, hidden, piece.shape[-1], hidden.dtype, logits.chain)
            ours = self.head.loss(lazy, shifted, None, ignore)
        tolerance = 1e-5 if logits.hidden.dtype == torch.float32 else 1e-2
        if not torch.isclose(own.float(), ours, rtol=tolerance, atol=tolerance, equal_nan=True):
            self.enabled = False
            announce(
                f"the chunked loss ({ours.item():.6g}) is not this model's own ({own.item():.6g}): "
                "logits are computed whole"
            )
