"""Compiles the layers of a model before its first step: a forward, as far as the last structure to be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from megatrain import generators
from megatrain.compute import attributes

if TYPE_CHECKING:
    from megatrain.engine.session import Engine


class _AllCompiled(BaseException):
    """Ends the forward: every structure has been called. No handler of errors in a model catches it."""


def compile_layers(engine: Engine, forward: Callable[[], object]) -> None:
    """Run a forward of the model in training mode until every structure is compiled, or found not to be.

    A structure whose layers are frozen may have calls with and without gradients, so all of them are called. Weights,
    gradients, buffers, random numbers and the attributes of modules are as before.
    """

    waiting = {block.module: block.compiled for block in engine.blocks if block.compiled is not None}

    def stop_if_complete(module: torch.nn.Module, _: Any) -> None:
        if all(compiled.trained for compiled in waiting.values()):
            raise _AllCompiled
        waiting.pop(module, None)

    model = engine.model
    before = attributes.recorded(model)
    hooks = [block.module.register_forward_pre_hook(stop_if_complete) for block in engine.blocks]
    try:
        with generators.preserved(engine.device), _preserved_buffers(model), torch.enable_grad():
            model.train()
            with suppress(_AllCompiled):
                forward()
    finally:
        for hook in hooks:
            hook.remove()
        attributes.put_back(before)
        engine.forget_forward()


@contextmanager
def _preserved_buffers(model: torch.nn.Module) -> Iterator[None]:
    """Restore the buffers that are changed inside."""
    owned = [(module, name) for module in model.modules() for name in module._buffers]
    before = [
        (module, name, buffer, buffer._version, buffer.clone())
        for module, name in owned
        if (buffer := module._buffers[name]) is not None
    ]
    try:
        yield
    finally:
        # The running statistics of a BatchNorm change without a new version, but its counter has one.
        if any(
            module._buffers[name] is not buffer or buffer._version != old for module, name, buffer, old, _ in before
        ):
            with torch.no_grad():
                for module, name, buffer, _, content in before:
                    module._buffers[name] = buffer.copy_(content)
