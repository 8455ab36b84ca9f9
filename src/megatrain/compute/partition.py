"""How `torch.compile` splits a layer into a forward and a backward graph.

The forward keeps what products and attention need and make. Everything cheaper (norms, activations, casts) is computed
again in the backward: for a Llama layer this keeps a third less than PyTorch's default, and takes no longer.

A recompute needs what the forward kept, not what it returned, so its graph leaves out the last product. What remains
has the same kernels in the same order, so its bits are those of the forward.

A graph with dynamic sizes is compiled for the largest sizes of its class (compute/hints.py).
"""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import CodeType
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._dynamo.exc import exceptions_allowed_to_be_fallback
from torch._functorch import partitioners
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from megatrain import process
from megatrain.compute import hints

log = logging.getLogger(__name__)

aten, prims = torch.ops.aten, torch.ops.prims
PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._grouped_mm.default,
}
ATTENTION = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}
PARTITIONER = {
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
}
"""Settings of AOTAutograd. Products, reductions and random operations are still never computed again."""
if "force_non_lazy_backward_lowering" in torch._functorch.config.get_config_copy():
    # The backward is compiled with the forward, so that it cannot fail later.
    PARTITIONER["force_non_lazy_backward_lowering"] = True
Graph = Callable[..., Any]


class _NothingToLeaveOut(Exception):
    """The forward graph has no product that a recompute could do without."""


def backend(
    code: CodeType, recomputing: Callable[[], bool], recomputes: bool
) -> Callable[[GraphModule, list[Any]], Graph]:
    """A backend for `torch.compile` of a function with this code: Inductor, with graphs split as above.

    A call is a recompute if `recomputing()`. Both graphs come of one trace, so that a length has the same kernels in
    the forward and in the recompute. Without `recomputes` there is one graph for both.
    """
    process.allow_grouped_products()

    def compile_graph(traced: GraphModule, inputs: list[Any]) -> Graph:
        try:
            return compile_both(traced, inputs)
        except exceptions_allowed_to_be_fallback as error:
            # Dynamo would run the operation eagerly, between two graphs.
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def compile_both(traced: GraphModule, inputs: list[Any]) -> Graph:
        patches: dict[str, Any] = {}
        if torch.are_deterministic_algorithms_enabled() and "deterministic" in torch._inductor.config.get_config_copy():
            # No kernel is chosen by timing it.
            patches["deterministic"] = True
        with process.partition_settings(PARTITIONER), hints.largest_sizes(traced) as sizes:
            recompute: Any = None
            # What a part of the call returns is used by the other parts.
            if recomputes and torch.is_grad_enabled() and _is_whole(traced, code):
                with suppress(_NothingToLeaveOut):
                    split = patches | {"custom_partitioner_fn": _Partitioner(sizes, leave_out=True)}
                    recompute = compile_fx(copy.deepcopy(traced), [*inputs], config_patches=split)
            split = patches | {"custom_partitioner_fn": _Partitioner(sizes)}
            forward: Any = compile_fx(traced, inputs, config_patches=split)

        def graph(*tensors: Any) -> Any:
            return recompute(*tensors) if recompute is not None and recomputing() else forward(*tensors)

        return graph

    return compile_graph


def _is_whole(traced: GraphModule, code: CodeType) -> bool:
    """Whether a graph is all that a call computes: it ends where the function returns, and not at a graph break."""
    reason: Any = traced.compile_subgraph_reason
    last = reason.user_stack[-1]
    return not reason.graph_break and (last.filename, last.name) == (code.co_filename, code.co_name)


class _Partitioner(CustomPartitionerFn):
    """Splits a joint graph, and with `leave_out` leaves out of the forward what a recompute does not need."""

    def __init__(self, sizes: tuple[int, ...], leave_out: bool = False) -> None:
        self._sizes, self._leave_out = sizes, leave_out

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **options: Any) -> Any:
        forward, backward = partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **options)
        if self._leave_out:
            leave_out_last_product(forward, options["num_fwd_outputs"])
        return forward, backward

    def uuid(self) -> Any:
        """Part of the key under which compiled graphs are cached on disk."""
        return get_hash_for_files((__file__, hints.__file__), repr((self._sizes, self._leave_out)))


def leave_out_last_product(forward: GraphModule, outputs: int) -> None:
    """Replace the first `outputs` results of a forward graph by uninitialized tensors, and remove what made them.

    Refused if that removes no product, or could change the kernels of what stays.
    """
    result = forward.graph.output_node()
    values: Any = result.args[0]
    returned, kept = list(values[:outputs]), list(values[outputs:])
    operations = [node for node in forward.graph.nodes if node.op == "call_function"]
    needed = _with_inputs([*_nodes(kept), *(node for node in operations if node.is_impure())])
    removed = {node for node in operations if node not in needed}
    products = {node for node in removed if node.target in PRODUCTS}
    sizes = _size_nodes(forward)
    empty = {node: _empty(node.meta["val"], sizes) for node in _nodes(returned) if node in removed}
    if not products or None in empty.values() or not _is_apart(operations, removed, products):
        raise _NothingToLeaveOut
    for position, node in enumerate(returned):
        if (make := empty.get(node)) is not None:
            options = {"dtype": node.meta["val"].dtype, "device": node.meta["val"].device}
            with forward.graph.inserting_before(result):
                returned[position] = forward.graph.call_function(*make, options)
            returned[position].meta = dict(node.meta)
    result.args = ((*returned, *kept),)
    forward.graph.eliminate_dead_code()
    forward.recompile()
    log.debug("a recompute leaves out %d products, %d operations of %d", len(products), len(removed), len(operations))


def _size_nodes(forward: GraphModule) -> dict[Any, Node]:
    """The nodes that are dynamic sizes, by what they are."""
    return {node.meta["val"].node.expr: node for node in forward.graph.nodes if _is_size(node)}


def _empty(value: torch.Tensor, sizes: Mapping[Any, Node]) -> tuple[OpOverload, tuple[Any, ...]] | None:
    """The operation that makes an uninitialized tensor like this one; None if a dynamic size of it is not known."""
    shape, strides = (
        [size if isinstance(size, int) else size.node.expr for size in of] for of in (value.shape, value.stride())
    )
    if all(isinstance(size, int) for size in shape):
        return aten.empty_strided.default, (shape, strides)
    contiguous = [sympy.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    known = [size if isinstance(size, int) else sizes.get(size) for size in shape]
    return (aten.empty.memory_format, (known,)) if None not in known and contiguous == strides else None


def _is_apart(operations: list[Node], removed: set[Node], products: set[Node]) -> bool:
    """Whether no operation that is removed could have been fused with one that stays.

    What stays comes before the products. What is removed comes after one, or reads only what other kernels than fused
    ones made, and is the only one to read it.
    """
    before, after = _with_inputs(products), set(products)
    for node in (node for node in operations if not _is_size(node)):
        if node not in removed:
            if node not in before and not _is_view(node):
                return False
        elif node.target not in PRODUCTS and not _is_view(node):
            if not _is_pointwise(node):
                return False
            sources = _sources(node)
            if not (sources & after) and not all(
                source in removed or (not _is_fused(source) and _readers(source) <= removed) for source in sources
            ):
                return False
        if node.all_input_nodes and after.intersection(node.all_input_nodes):
            after.add(node)
    return True


def _nodes(values: Iterable[Any]) -> list[Node]:
    return [value for value in values if isinstance(value, Node)]


def _with_inputs(nodes: Iterable[Node]) -> set[Node]:
    """The nodes, and all that they are computed from."""
    found: set[Node] = set()
    pending = [*nodes]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _sources(node: Node) -> set[Node]:
    """The tensors that an operation reads, views looked through."""
    tensors = [read for read in node.all_input_nodes if not _is_size(read)]
    return {source for read in tensors for source in (_sources(read) if _is_view(read) else {read})}


def _readers(node: Node) -> set[Node]:
    """The operations that read a value, views of it included."""
    readers = {reader for user in node.users for reader in (_readers(user) if _is_view(user) else {user})}
    return {reader for reader in readers if reader.op != "output"}


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _is_view(node: Node) -> bool:
    """Whether a node is another look at a value that another one made."""
    return node.target is operator.getitem or (isinstance(node.target, OpOverload) and bool(node.target.is_view))


def _is_fused(node: Node) -> bool:
    """Whether Inductor may fuse an operation with its readers: it calls a library for products and attention."""
    return node.op == "call_function" and node.target not in PRODUCTS and node.target not in ATTENTION


def _is_pointwise(node: Node) -> bool:
    if node.target is prims.convert_element_type.default:
        return True
    tags = node.target.tags if isinstance(node.target, OpOverload) else ()
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
