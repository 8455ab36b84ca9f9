"""What an engine puts on a model so that its interface keeps working: inputs, saving, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from megatrain.engine.undo import Undo
from megatrain.errors import ModelMoved
from megatrain.model.hooks import Hooks, refuse_cache
from megatrain.store.export import ExportTensor, exported
from megatrain.store.parameter import StoreTensor

if TYPE_CHECKING:
    from megatrain.engine.session import Engine

SHARD_BYTES = 2 << 30
"""Weights that have to be copied to be saved are written in shards of about this size."""
_ATTACHED = "_megatrain_engine"


def engine_of(model: torch.nn.Module) -> Engine | None:
    """The engine a model belongs to, open or closed."""
    return getattr(model, _ATTACHED, None)


class Surface:
    """Instance attributes and one hook of the root module."""

    def __init__(self, model: Any, engine: Engine, hooks: Hooks, begin_pass: Callable[[Any], None]) -> None:
        self._model = model
        self._engine = engine
        self._hooks = hooks
        self._begin_pass = begin_pass
        self._takes_cache = "use_cache" in inspect.signature(model.forward).parameters

    def place(self, undo: Undo) -> None:
        model = self._model
        undo.add(model.register_forward_pre_hook(self._prepare, prepend=True, with_kwargs=True).remove)
        undo.patch(model, _ATTACHED, self._engine)
        if hasattr(type(model), "save_pretrained"):
            self._own_save = model.save_pretrained
            undo.patch(model, "save_pretrained", self._save_pretrained)
        if hasattr(type(model), "resize_token_embeddings"):
            undo.patch(model, "resize_token_embeddings", _refuse_resize)

    def _prepare(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Before the model's forward: inputs to the compute device; no key/value cache where gradients are wanted."""
        self._begin_pass((args, kwargs))
        device = self._engine.device
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        if self._takes_cache and torch.is_grad_enabled():
            refuse_cache(self._hooks, module.training, kwargs)
            kwargs["use_cache"] = False
        return args, kwargs

    def _save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        signature = inspect.signature(self._own_save)
        call = signature.bind(*args, **kwargs)
        rest = next((name for name, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), "")
        # PEFT names the state dict only in its **kwargs.
        options = call.arguments if "state_dict" in signature.parameters else call.arguments.setdefault(rest, {})
        given = options.get("state_dict")
        state = options["state_dict"] = self._engine.host_state_dict() if given is None else exported(given)
        copied = any(isinstance(tensor, ExportTensor) and tensor.copies for tensor in state.values())
        if copied and "max_shard_size" in signature.parameters:
            # A shard is in host memory as a whole while it is written.
            call.arguments.setdefault("max_shard_size", self._engine.ram.portion(SHARD_BYTES))
        with self._config_as_saved():
            return self._own_save(*call.args, **call.kwargs)

    @contextmanager
    def _config_as_saved(self) -> Iterator[None]:
        """`save_pretrained` writes the dtype of the model into its config; the file gets that of the weights saved."""
        config: Any = getattr(self._model, "config", None)
        first = next((p for p in self._model.parameters() if p.is_floating_point()), None)
        if not hasattr(type(config), "save_pretrained") or not isinstance(first, StoreTensor):
            yield
            return
        dtype = str(ExportTensor.of(first).dtype).removeprefix("torch.")

        def save(*args: Any, **kwargs: Any) -> Any:
            # What is in the instance would be written too.
            config.__dict__.pop("save_pretrained", None)
            before, config.dtype = config.dtype, dtype
            try:
                return config.save_pretrained(*args, **kwargs)
            finally:
                config.dtype = before

        config.__dict__["save_pretrained"] = save
        try:
            yield
        finally:
            config.__dict__.pop("save_pretrained", None)


def _refuse_resize(*_: Any, **__: Any) -> Any:
    raise ModelMoved("the embeddings of a model that belongs to an engine cannot be resized: do it before attaching.")
