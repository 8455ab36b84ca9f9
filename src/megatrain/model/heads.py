"""The head of a language model: whether its loss can be taken chunk by chunk, or needs the logits whole."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def output_of(model: Any) -> Any:
    """The module that makes logits, or None."""
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def can_be_lazy(model: Any, causal_loss: Any) -> bool:
    """Whether a model is a causal LM whose loss is transformers' own."""
    head = output_of(model)
    weight = getattr(head, "weight", None)
    return head is not None and weight is not None and weight.ndim == 2 and uses(model, head, causal_loss)


def uses(module: Any, head: torch.nn.Module, causal_loss: Any) -> bool:
    """Whether a module has transformers' causal loss for the output of this head."""
    loss = getattr(module, "loss_function", None)
    # An engine's chunked head stands in for it while it is attached.
    loss = getattr(getattr(loss, "__self__", None), "own_loss", loss)
    return loss is causal_loss and output_of(module) is head


def kind_of_logits(model: torch.nn.Module, blocks: Iterable[torch.nn.Module], causal_loss: Any) -> str:
    """What training has of a model's logits: "none", a "chunked" head's, or all of them "whole"."""
    head = output_of(model)
    if head is None:
        return "none"
    with _silent():
        return _kind(model, head, blocks, causal_loss)


def _kind(model: torch.nn.Module, head: torch.nn.Module, blocks: Iterable[torch.nn.Module], causal_loss: Any) -> str:
    if not can_be_lazy(model, causal_loss) or not any(module is head for module in blocks):
        return "whole"
    owner = [module for module in model.modules() if uses(module, head, causal_loss)][-1]
    try:
        source = inspect.getsource(inspect.unwrap(type(owner).forward))
    except (OSError, TypeError):
        return "chunked"
    # Others (most that have an encoder and a decoder) have it and write their loss out.
    return "chunked" if "loss_function" in source else "whole"


@contextmanager
def _silent() -> Iterator[None]:
    """transformers warns of configs that name no loss when one only looks which it is."""
    logger = logging.getLogger("transformers.modeling_utils")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
