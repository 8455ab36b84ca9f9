"""What an engine puts on a model so that its interface keeps working: inputs, saving, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from megatrain.errors import ModelMoved
from megatrain.model.hooks import Hooks, refuse_cache

if TYPE_CHECKING:
    from megatrain.engine.session import Engine

_ATTACHED = "_megatrain_engine"


def engine_of(model: torch.nn.Module) -> Engine | None:
    """The engine a model belongs to, open or closed."""
    return getattr(model, _ATTACHED, None)


class Surface:
    """Instance attributes and one hook of the root module; `remove` takes them away again."""

    def __init__(self, model: Any, engine: Engine, hooks: Hooks, begin_pass: Callable[[], None]) -> None:
        self._model = model
        self._engine = engine
        self._hooks = hooks
        self._begin_pass = begin_pass
        self._takes_cache = "use_cache" in inspect.signature(model.forward).parameters
        self._handle = model.register_forward_pre_hook(self._prepare, prepend=True, with_kwargs=True)
        self._placed = [_ATTACHED]
        object.__setattr__(model, _ATTACHED, engine)
        if hasattr(type(model), "save_pretrained"):
            self._own_save = model.save_pretrained
            self._place("save_pretrained", self._save_pretrained)
        if hasattr(type(model), "resize_token_embeddings"):
            self._place("resize_token_embeddings", _refuse_resize)

    def remove(self) -> None:
        self._handle.remove()
        for name in self._placed:
            self._model.__dict__.pop(name, None)

    def _place(self, name: str, function: Callable[..., Any]) -> None:
        setattr(self._model, name, function)
        self._placed.append(name)

    def _prepare(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Before the model's forward: inputs to the compute device; no key/value cache where gradients are wanted."""
        self._begin_pass()
        device = self._engine.device
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        if self._takes_cache and torch.is_grad_enabled():
            refuse_cache(self._hooks, module.training, kwargs)
            kwargs["use_cache"] = False
        return args, kwargs

    def _save_pretrained(self, save_directory: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
        # Views of host memory: stock code would bring whole shards to the GPU to make them contiguous.
        state = self._engine.host_state_dict() if state_dict is None else state_dict
        return self._own_save(save_directory, *args, state_dict=state, **kwargs)


def _refuse_resize(*_: Any, **__: Any) -> Any:
    raise ModelMoved("the embeddings of a model that belongs to an engine cannot be resized: do it before attaching.")
