"""Compiled blocks: the stateless call through `torch.compile`, one compiled graph per structure and shape.

Layers that differ only in weights share a graph, since weights are arguments. A first shape is compiled as it is; when
lengths vary, one more compilation makes them dynamic. What cannot be compiled runs eagerly, announced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.func import functional_call

from megatrain.errors import MegaTrainError
from megatrain.telemetry.notices import announce

MOST_GRAPHS = 64
"""Compilations per call site before it is an error: beyond it dynamo would fall back to eager in silence."""


def _call(module: torch.nn.Module, state: Mapping[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
    # Every name is given, tied ones too; looking for ties would make each layer a structure of its own to dynamo.
    return functional_call(module, dict(state), args, kwargs, tie_weights=False)


class Compiled:
    """The stateless call, compiled; eager for good once compiling has failed."""

    def __init__(self) -> None:
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, MOST_GRAPHS)
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * MOST_GRAPHS)
        config.fail_on_recompile_limit_hit = True
        self._compiled: Any = torch.compile(_call)

    @staticmethod
    def graphs() -> int:
        """Graphs compiled in this process so far."""
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    def __call__(self, module: torch.nn.Module, state: Mapping[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
        # Evaluation and generation run eagerly: the graph without gradients has other bits, and caches break graphs.
        if self._compiled is None or not torch.is_grad_enabled():
            return _call(module, state, args, kwargs)
        before = self.graphs()
        try:
            result = self._compiled(module, state, args, kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit as cause:
            raise MegaTrainError(
                f"a block was compiled {MOST_GRAPHS} times for different shapes; pad batches to a few lengths, or "
                "set compile=False."
            ) from cause
        except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as cause:
            self._compiled = None
            announce(f"blocks cannot be compiled here and run eagerly ({type(cause).__name__}: {_first_line(cause)})")
            return _call(module, state, args, kwargs)
        if self.graphs() > before:
            announce(f"compiled {type(module.block).__name__} ({self.graphs()} graphs so far)")
        return result


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
