"""The sizes that Inductor optimizes a graph with dynamic sizes for: the largest of their class.

Left to itself, it takes the first ones that come. Its choices (in how many parts a sum is computed, say), and so the
bits, would depend on the order of lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._functorch import partitioners
from torch._guards import TracingContext
from torch._inductor import ir, sizevars
from torch._inductor.codegen import simd, triton
from torch.fx import GraphModule
from torch.fx.experimental import symbolic_shapes

from megatrain import process
from megatrain.compute.binding import call_with

LEAST_ROWS, LEAST_LENGTH = 8, 4096
"""Batches of up to 8 × 4096 share a graph with dynamic sizes. A larger size is rounded up to a power of two."""
Plain = Callable[..., Any]

_choosing: ContextVar[bool] = ContextVar("megatrain_choosing", default=False)


def size_class(size: int, rows: bool) -> int:
    """The largest size that shares a graph with this one. `rows`: of the first dimension of a batch."""
    return size if size < 2 else max(LEAST_ROWS if rows else LEAST_LENGTH, 1 << (size - 1).bit_length())


@contextmanager
def largest_sizes(traced: GraphModule) -> Iterator[tuple[int, ...]]:
    """Inside, Inductor optimizes for the largest sizes of their class. Yields those.

    Guards still see the actual sizes, so that each length gets the graph that holds for it.
    """
    env: Any = TracingContext.get().fake_mode.shape_env  # type: ignore[union-attr]
    # Renamed between versions of PyTorch.
    values = vars(env)["backed_var_to_val" if "backed_var_to_val" in vars(env) else "var_to_val"]
    largest: dict[sympy.Symbol, int] = {}
    arguments = [node.meta["example_value"] for node in traced.graph.find_nodes(op="placeholder")]
    for shape in (argument.shape for argument in arguments if isinstance(argument, torch.Tensor)):
        for dim, size in enumerate(shape):
            symbol = size.node.expr if isinstance(size, torch.SymInt) else None
            if symbol in values:
                most = size_class(int(values[symbol]), rows=dim == 0 and len(shape) > 1)
                largest[symbol] = max(most, largest.get(symbol, 0))
    for number in (argument.node.expr for argument in arguments if isinstance(argument, torch.SymInt)):
        if number in values:
            largest.setdefault(number, size_class(int(values[number]), rows=False))
    env.var_to_hint_override.update(largest)
    with process.replaced((owner, name, partial(_around, own)) for owner, name, own in HINTS):
        yield tuple(largest.values())


def _around(own: Callable[..., Any], plain: Any) -> Any:
    function: Plain = plain.__func__ if isinstance(plain, staticmethod) else plain

    @wraps(function)
    def hint(*args: Any, **options: Any) -> Any:
        return own(function, *args, **options)

    return staticmethod(hint) if isinstance(plain, staticmethod) else hint


def _of_size(plain: Plain, size: Any, fallback: int | None = None) -> int:
    """The hint for a size."""
    if isinstance(size, torch.SymInt):
        env = size.node.shape_env
        expr = sympy.sympify(size.node.expr.xreplace(env.replacements).xreplace(env.var_to_hint_override))
        size = int(expr) if expr.is_Integer else size
    return int(plain(size, fallback))


# ---- PyTorch 2.12 and later


def _of_expression(
    plain: Plain, env: Any, expr: Any, precomputed_replacements: Mapping[Any, Any], fallback: Any = None
) -> int:
    """The hint for an expression, with all overrides. PyTorch applies them only to sizes that have no value yet."""
    for known in (env.replacements, precomputed_replacements, env.replacements, env.var_to_hint_override):
        expr = sympy.sympify(expr).xreplace(known)
    return int(plain(env, expr, precomputed_replacements, fallback))


# ---- PyTorch 2.11, where guards and choices often ask the same function


def _of_choice(plain: Plain, allocator: Any, expr: Any, fallback: int | None = None) -> int:
    expr = allocator.remove_precomputed_replacements(allocator.simplify(expr))
    return int(plain(allocator, expr.xreplace(allocator.var_to_hint_override), fallback))


def _symbolic(plain: Plain, allocator: Any, expr: Any, use_user_provided_hint_override: bool = False) -> Any:
    return plain(allocator, expr, use_user_provided_hint_override or _choosing.get())


def _choose(plain: Plain, *args: Any, **options: Any) -> Any:
    """Call a function whose hints are for its choices."""
    return call_with({_choosing: True}, plain, *args, **options)


def _guard(plain: Plain, *args: Any, **options: Any) -> Any:
    """Call a function whose hints are for guards."""
    return call_with({_choosing: False}, plain, *args, **options)


HINTS: tuple[tuple[Any, str, Callable[..., Any]], ...]
"""The functions that PyTorch asks for the size to optimize for."""
if "_optimization_hint_base" in vars(sizevars):
    HINTS = (
        (sizevars, "_optimization_hint_base", _of_expression),
        (symbolic_shapes, "_optimization_hint_base", _of_expression),
        (partitioners, "optimization_hint", _of_size),
    )
else:
    HINTS = (
        (partitioners, "size_hint", _of_size),
        (sizevars.SizeVarAllocator, "optimization_hint", _of_choice),
        (sizevars.SizeVarAllocator, "symbolic_hint", _symbolic),
        (sizevars.SizeVarAllocator, "size_hint_or_throw", _guard),
        (ir.Reduction, "num_splits", _choose),
        (simd.SIMDScheduling, "_codegen_mix_order_reduction", _choose),
        (triton.TritonKernel, "codegen_kernel", _choose),
    )
