"""Everything that MegaTrain uses from transformers' internals. A version that lacks one of them is rejected by name."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.errors import UnsupportedCall, UnsupportedTransformers

OLDEST = "5.17"


@dataclass(frozen=True)
class TransformersApi:
    """Classes and functions of the installed transformers."""

    layer: type[torch.nn.Module]
    """Marks decoder layers in almost every architecture."""
    cache: type
    """Base class of key/value caches."""
    collector: Any
    """Context variable with the outputs that are being captured."""
    causal_loss: Any
    """The loss function of causal language models, which the chunked head replaces."""

    def active_capture(self) -> OutputCapture | None:
        """The outputs that transformers captures in this forward (`output_router_logits`, `output_attentions`...)."""
        outer = self.collector.get()
        return OutputCapture(self.collector, outer) if outer else None

    def without_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Remove caches from a block's arguments: the recompute would write to them again. Raise if one has content."""
        caches: list[Any] = [value for value in (*args, *kwargs.values()) if isinstance(value, self.cache)]
        if any(map(_is_filled, caches)):
            raise UnsupportedCall(
                "the model was called with a filled key/value cache while gradients are enabled (prefix tuning does "
                "so), but streamed blocks are recomputed in the backward, which no cache survives; wrap the call in "
                "torch.no_grad(), or pass no past_key_values."
            )
        args = tuple(None if isinstance(value, self.cache) else value for value in args)
        kwargs = {key: None if isinstance(value, self.cache) else value for key, value in kwargs.items()}
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        return args, kwargs

    def refuse_cache(self, training: bool, kwargs: dict[str, Any]) -> None:
        """Raise if a key/value cache is asked for while gradients are enabled."""
        if kwargs.get("use_cache") and not training:
            raise UnsupportedCall(
                "a key/value cache was requested while gradients are enabled, but streamed blocks are recomputed in "
                "the backward, which no cache survives; wrap the call in torch.no_grad(), or pass use_cache=False."
            )


def _is_filled(cache: Any) -> bool:
    try:
        return bool(cache.get_seq_length() > 0)
    except ValueError:
        # All its layers are of linear attention.
        return bool(cache.has_previous_state())


def load() -> TransformersApi:
    """Import everything; raises `UnsupportedTransformers` for what is missing."""
    return TransformersApi(
        layer=_find("transformers.modeling_layers", "GradientCheckpointingLayer"),
        cache=_find("transformers.cache_utils", "Cache"),
        collector=_find("transformers.utils.output_capturing", "_active_collector"),
        causal_loss=_find("transformers.loss.loss_utils", "ForCausalLMLoss"),
    )


def require(module: str, name: str) -> None:
    """Raise `UnsupportedTransformers` if the installed version lacks something."""
    _find(module, name)


def _find(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as cause:
        try:
            version = importlib.import_module("transformers").__version__
        except ImportError:
            version = "missing"
        raise UnsupportedTransformers(
            f"transformers {version} has no {module}.{name}, which MegaTrain hooks into; "
            f"install transformers>={OLDEST} (pip install 'transformers>={OLDEST}')."
        ) from cause


def config_of(module: torch.nn.Module) -> Any:
    """The module's transformers config, or None. Other libraries' `config` attributes are ignored."""
    from transformers import PretrainedConfig

    config = getattr(module, "config", None)
    return config if isinstance(config, PretrainedConfig) else None


class OutputCapture:
    """The outputs captured in one forward, at the start of a block."""

    def __init__(self, collector: Any, outer: dict[str, Any]) -> None:
        self._collector = collector
        self._outer = outer
        # Transformers' hooks depend on the number of entries (the first hidden state is special), so an inner collector
        # starts with as many, in the forward and in the recompute.
        self._before = {key: len(entries) for key, entries in outer.items() if not key.startswith("_")}
        self._options = {key: value for key, value in outer.items() if key.startswith("_")}

    def inside(self, call: Callable[[], Any]) -> tuple[Any, dict[str, list[Any]]]:
        inner: dict[str, Any] = {key: [None] * count for key, count in self._before.items()} | self._options
        token = self._collector.set(inner)
        try:
            result = call()
        finally:
            self._collector.reset(token)
        return result, {key: inner[key][count:] for key, count in self._before.items()}

    def replay(self, recorded: dict[str, list[Any]]) -> None:
        for key, entries in recorded.items():
            self._outer[key].extend(entries)


# ---- the head: whether its loss can be computed in chunks


def output_embedding(model: Any) -> Any:
    """The module that computes the logits, or None."""
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def can_chunk_loss(model: Any, causal_loss: Any) -> bool:
    """Whether a model is a causal LM that uses transformers' own loss."""
    head = output_embedding(model)
    weight = getattr(head, "weight", None)
    return head is not None and weight is not None and weight.ndim == 2 and uses_causal_loss(model, head, causal_loss)


def uses_causal_loss(module: Any, head: torch.nn.Module, causal_loss: Any) -> bool:
    """Whether a module applies transformers' causal loss to the output of this head."""
    if output_embedding(module) is not head:
        return False  # before its loss is read: transformers warns of a module that names none
    loss = getattr(module, "loss_function", None)
    # While an engine is attached, its chunked head replaces the loss.
    loss = getattr(getattr(loss, "__self__", None), "model_loss", loss)
    return loss is causal_loss


@dataclass(frozen=True)
class Logits:
    """How training computes the logits of a model."""

    kind: str
    """"none", "chunked" or "whole"."""
    fp32: bool = False
    """Whether the model casts them to FP32."""
    bare: bool = False
    """Whether they are the product with one matrix and nothing else."""


def logits_of(model: torch.nn.Module, blocks: Iterable[torch.nn.Module], causal_loss: Any) -> Logits:
    """Found in the model's classes and in the source of its forward."""
    head = output_embedding(model)
    if head is None:
        return Logits("none")
    # Reading `loss_function` makes transformers warn about configs that name no loss.
    logger = logging.getLogger("transformers.modeling_utils")
    before, logger.disabled = logger.disabled, True
    try:
        chunks = can_chunk_loss(model, causal_loss) and any(module is head for module in blocks)
        owners = [module for module in model.modules() if chunks and uses_causal_loss(module, head, causal_loss)]
    finally:
        logger.disabled = before
    if not owners:
        return Logits("whole")
    try:
        source = inspect.getsource(inspect.unwrap(type(owners[-1]).forward))
    except (OSError, TypeError):
        return Logits("chunked", fp32=True)
    # Some models (most encoder-decoders) have a loss function but do not call it.
    kind = "chunked" if "loss_function" in source else "whole"
    fp32 = re.search(r"logits.*float", source) is not None
    assigned = re.findall(r"(?m)^\s*logits(?:\[.*\])?\s[-+*/]?=\s", source)
    matrix = type(head) is torch.nn.Linear and head.bias is None
    return Logits(kind, fp32, bare=matrix and len(assigned) == 1 and not fp32)
