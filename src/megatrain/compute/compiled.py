"""Compiled blocks: the stateless call through `torch.compile`, one graph per structure and shape.

Weights are arguments, so layers that differ only in weights share a graph. The first shape is compiled as static; if
lengths vary, one more compilation makes them dynamic. A structure that cannot be compiled runs eagerly, with a notice.
A forward that ran compiled is recomputed compiled: eager code would draw different dropout masks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch.func import functional_call

from megatrain.compute.binding import call_with
from megatrain.errors import MegaTrainError
from megatrain.process import compile_limits
from megatrain.telemetry.notices import announce
from megatrain.telemetry.progress import progress

MAX_GRAPHS = 64
"""Compilations per call site before an error is raised. Dynamo would silently fall back to eager."""


_recomputing: ContextVar[bool] = ContextVar("megatrain_recomputing", default=False)


def _call(module: torch.nn.Module, state: Mapping[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
    # `state` has every name, tied ones too. With tie_weights=True dynamo would compile each layer separately.
    return functional_call(module, dict(state), args, kwargs, tie_weights=False)


class CannotCompile(MegaTrainError):
    """Compiling a block failed; the cause is attached."""


class Compiled:
    """The compiled stateless call, and the structures that cannot be compiled."""

    def __init__(self) -> None:
        # Imported here: it takes seconds, and engines that do not compile do without it.
        from megatrain.compute.partition import backend

        self._compiled: Any = torch.compile(_call, backend=backend(_call, _recomputing.get))
        self._uncompilable: set[Hashable] = set()
        self._called: set[str] = set()

    @staticmethod
    def graphs() -> int:
        """Graphs compiled in this process so far."""
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    def can_compile(self, structure: Hashable) -> bool:
        return structure not in self._uncompilable

    def run_eagerly(self, structure: Hashable, name: str, reason: CannotCompile) -> None:
        """Run blocks of this structure eagerly from now on, and announce it."""
        self._uncompilable.add(structure)
        cause = reason.__cause__
        announce(
            f"{name} blocks cannot be compiled here and run eagerly ({type(cause).__name__}: {_first_line(cause)})"
        )

    def _bar(self, name: str) -> AbstractContextManager[Any]:
        """For the first call of a class, which compiles."""
        if name in self._called:
            return nullcontext()
        self._called.add(name)
        return progress(None, "", f"Compiling {name}")

    def __call__(
        self, module: torch.nn.Module, state: Mapping[str, torch.Tensor], args: Any, kwargs: Any, recompute: bool
    ) -> Any:
        before = self.graphs()
        try:
            with compile_limits(MAX_GRAPHS), self._bar(type(module.block).__name__):
                result = call_with({_recomputing: recompute}, self._compiled, module, state, args, kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit as cause:
            raise MegaTrainError(
                f"a block was compiled {MAX_GRAPHS} times for different shapes; pad batches to a few lengths, or "
                "set compile=False."
            ) from cause
        except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as cause:
            raise CannotCompile(
                f"a {type(module.block).__name__} that ran compiled could not be compiled again "
                f"({_first_line(cause)}); eager code would draw other random numbers, so set compile=False."
            ) from cause
        if self.graphs() > before:
            announce(f"compiled {type(module.block).__name__} ({self.graphs()} graphs so far)")
        return result


def structure_of(module: torch.nn.Module) -> Hashable:
    """A key that is equal for blocks that differ only in weights and position."""
    return tuple(
        (
            path,
            type(inner),
            tuple((name, p.shape, p.dtype) for name, p in inner._parameters.items() if p is not None),
            tuple((k, v) for k, v in vars(inner).items() if isinstance(v, bool | str) and k != "training"),
        )
        for path, inner in module.named_modules()
    )


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
