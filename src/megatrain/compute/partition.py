"""How `torch.compile` splits a layer into a forward and a backward graph.

The forward keeps what products and attention need and make. Everything cheaper (norms, activations, casts) is computed
again in the backward: for a Llama layer this keeps a third less than PyTorch's default, and takes no longer.

A recompute needs what the forward kept, not what it returned, so its graph leaves out the last product. What remains
has the same kernels in the same order, so its bits are those of the forward.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import CodeType
from typing import Any

import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

log = logging.getLogger(__name__)

aten, prims = torch.ops.aten, torch.ops.prims
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
ATTENTION = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}
RECOMPUTE_POINTWISE = {
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
}
"""Settings of AOTAutograd's partitioner. Products, reductions and random operations are still never computed again."""
Graph = Callable[..., Any]


class _NothingToLeaveOut(Exception):
    """The forward graph has no product that a recompute could do without."""


def backend(whole_call: Any, recomputing: Callable[[], bool]) -> Callable[[GraphModule, list[Any]], Graph]:
    """A backend for `torch.compile(whole_call)`: Inductor, with graphs split as above.

    A call is a recompute if `recomputing()`. Both graphs come of one trace, so that a length has the same kernels in
    the forward and in the recompute.
    """
    code: CodeType = whole_call.__code__

    def compile_graph(traced: GraphModule, inputs: list[Any]) -> Graph:
        with torch._functorch.config.patch(RECOMPUTE_POINTWISE):
            recompute: Any = None
            # What a part of the call returns is used by the other parts.
            if _is_whole(traced, code):
                copied, patches = copy.deepcopy(traced), {"custom_partitioner_fn": _WithoutLastProduct()}
                with suppress(_NothingToLeaveOut):
                    recompute = compile_fx(copied, [*inputs], config_patches=patches)
            forward: Any = compile_fx(traced, inputs)

        def graph(*tensors: Any) -> Any:
            return recompute(*tensors) if recompute is not None and recomputing() else forward(*tensors)

        return graph

    return compile_graph


def _is_whole(traced: GraphModule, code: CodeType) -> bool:
    """Whether a graph is all that a call computes: it ends where the function returns, and not at a graph break."""
    reason: Any = traced.compile_subgraph_reason
    last = reason.user_stack[-1]
    return not reason.graph_break and (last.filename, last.name) == (code.co_filename, code.co_name)


class _WithoutLastProduct(CustomPartitionerFn):
    """Splits a joint graph for a recompute."""

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **options: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **options)
        leave_out_last_product(forward, options["num_fwd_outputs"])
        return forward, backward

    def uuid(self) -> Any:
        """Part of the key under which compiled graphs are cached on disk."""
        return get_hash_for_files((__file__,))


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
    static = all(isinstance(size, int) for node in _nodes(returned) for size in node.meta["val"].shape)
    if not products or not static or not _is_apart(operations, removed, products):
        raise _NothingToLeaveOut
    for position, node in enumerate(returned):
        if node in removed:
            value = node.meta["val"]
            size, options = (list(value.shape), list(value.stride())), {"dtype": value.dtype, "device": value.device}
            with forward.graph.inserting_before(result):
                returned[position] = forward.graph.call_function(aten.empty_strided.default, size, options)
            returned[position].meta = dict(node.meta)
    result.args = ((*returned, *kept),)
    forward.graph.eliminate_dead_code()
    forward.recompile()
    log.debug("a recompute leaves out %d products, %d operations of %d", len(products), len(removed), len(operations))


def _is_apart(operations: list[Node], removed: set[Node], products: set[Node]) -> bool:
    """Whether no operation that is removed could have been fused with one that stays.

    What stays comes before the products. What is removed comes after one, or reads only what other kernels than fused
    ones made, and is the only one to read it.
    """
    before, after = _with_inputs(products), set(products)
    for node in operations:
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
    """What an operation reads, views looked through."""
    return {source for read in node.all_input_nodes for source in (_sources(read) if _is_view(read) else {read})}


def _readers(node: Node) -> set[Node]:
    """The operations that read a value, views of it included."""
    readers = {reader for user in node.users for reader in (_readers(user) if _is_view(user) else {user})}
    return {reader for reader in readers if reader.op != "output"}


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
