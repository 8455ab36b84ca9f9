"""The inverse questions: the largest batch, context or model that a machine can train."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatrain.hardware.machine import Machine
from megatrain.model.shapes import BlockShape, ModelShape, SlabShape, describe
from megatrain.planner.plan import Plan
from megatrain.planner.run import Run
from megatrain.planner.search import Search, solve

MOST = 1 << 24
"""Where the search for a batch or a length ends."""


@dataclass(frozen=True)
class Answer:
    """The largest value, and the plan for it."""

    value: int
    plan: Plan


def largest_batch(shape: ModelShape, machine: Machine, run: Run, **limits: Any) -> Answer:
    """Most sequences of `run.length` tokens in a micro-batch. Raises `NotEnoughMemory` if not even one fits."""
    return _largest(shape, machine, lambda value: dataclasses.replace(run, micro_batch=value), limits)


def largest_context(shape: ModelShape, machine: Machine, run: Run, **limits: Any) -> Answer:
    """Most tokens in a sequence of a micro-batch of `run.micro_batch`; in multiples of 64."""
    found = _largest(shape, machine, lambda value: dataclasses.replace(run, length=64 * value), limits)
    return Answer(64 * found.value, found.plan)


def largest_model(machine: Machine, run: Run, family: Iterable[Any] | None = None, **limits: Any) -> Answer:
    """Most parameters: of a family (models, configs or shapes), or of dense decoders made up for the question."""
    if family is not None:
        shapes = sorted((describe(member) for member in family), key=lambda shape: -shape.parameters)
        for shape in shapes[:-1]:
            if Search(shape, machine, run, **limits).fits():
                return Answer(shape.parameters, solve(shape, machine, run, **limits))
        return Answer(shapes[-1].parameters, solve(shapes[-1], machine, run, **limits))

    def fits(width: int, depth: int) -> bool:
        return Search(dense_shape(width, depth), machine, run, **limits).fits()

    width = _most(lambda width: fits(width, width), 512)
    depth = _most(lambda depth: fits(width, depth), 4 * width)
    shape = dense_shape(width, max(1, depth))
    return Answer(shape.parameters, solve(shape, machine, run, **limits))


def dense_shape(width: int, depth: int, vocabulary: int = 128256) -> ModelShape:
    """A decoder of common proportions: hidden size 128 × `width`, MLP 3.5 times that, 8 key/value heads."""
    hidden, intermediate, kv = 128 * width, 448 * width, 128 * min(8, width)

    def block(name: str, kind: str, matrices: int, vectors: int) -> BlockShape:
        layer = kind == "layer"
        numel = matrices + vectors
        slab = SlabShape(parameters=numel, numel=numel, vectors=vectors, trains=True, itemsize=None)
        return BlockShape(
            name=name, kind=kind, slabs=(slab,), matmul_parameters=matrices if kind in ("layer", "head") else 0,
            expert_matmul_parameters=0, hidden_size=hidden, intermediate_size=intermediate, experts=0,
            experts_per_token=0, expert_biases=False, heads=width if layer else 0,
            kv_heads=min(8, width) if layer else 0, head_dim=128 if layer else 0, norms=2 if layer else 0,
            fused_norms=0, head_norms=False, span=0, tied=False,
        )  # fmt: skip

    layer = hidden * (2 * hidden + 2 * kv + 3 * intermediate)
    blocks = [
        block("embedding", "embedding", hidden * vocabulary, 0),
        *[block(f"layers.{index}", "layer", layer, 2 * hidden) for index in range(depth)],
        block("norm", "other", 0, hidden),
        block("head", "head", hidden * vocabulary, 0),
    ]
    name = f"dense {sum(b.parameters for b in blocks) / 1e9:.1f}B ({depth} layers of {hidden})"
    return ModelShape(name=name, blocks=tuple(blocks), vocab_size=vocabulary, precision="bf16", attention="sdpa")


def _largest(shape: ModelShape, machine: Machine, made: Callable[[int], Run], limits: dict[str, Any]) -> Answer:
    value = max(1, _most(lambda value: Search(shape, machine, made(value), **limits).fits(), MOST))
    return Answer(value, solve(shape, machine, made(value), **limits))


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest value up to a limit that fits, if all below the first that does not do; 0: none."""
    if not fits(1):
        return 0
    low = 1
    while low < limit and fits(min(limit, 2 * low)):
        low = min(limit, 2 * low)
    high = min(limit + 1, 2 * low)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
