"""`plan`, and the largest batch, context or model that a machine can train."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatrain.errors import SettingsError
from megatrain.geometry import GIB
from megatrain.model.shapes import BlockShape, ModelShape, SlabShape, describe
from megatrain.planner.plan import Plan, format_parameters
from megatrain.planner.run import MachineLike, Run, resolve_machine, resolve_run
from megatrain.planner.search import Search

SEARCH_LIMIT = 1 << 24
"""The largest batch, and the largest length in steps of 64, that is tried."""


@dataclass(frozen=True, repr=False)
class Answer:
    """The largest value, and the plan for it."""

    value: int
    plan: Plan
    sought: str = "value"
    """What it is the largest of: batch, context or model."""

    def __str__(self) -> str:
        plan, run = self.plan, self.plan.run
        answer = {
            "batch": f"{self.value:,} sequences of {run.length:,} tokens",
            "context": f"{self.value:,} tokens per sequence, {run.micro_batch} per micro-batch",
            "model": f"{plan.model}, {format_parameters(self.value)} parameters",
        }.get(self.sought, f"{self.value:,}")
        tier = "vram" if plan.total("vram") else "ram"
        of = f" of {plan.capacity[tier] / GIB:.1f}" if plan.capacity[tier] < 1 << 60 else ""
        held = f"{plan.total(tier) / GIB:.1f}{of} GiB {tier.upper()}"
        return f"largest {self.sought}: {answer} (plan: {plan.step.seconds:.2f} s per step, {held})"

    __repr__ = __str__


def plan(model_or_config: Any, *, machine: MachineLike = None, **options: Any) -> Plan:
    """The fastest plan for a model, a config or a name, on a machine (its name, a path, or a `Machine`).

    `options` are fields of a `Run` (`batch` is its `micro_batch`, `optimizer` its `kind`) and `Limits`. Raises
    `NotEnoughMemory` with what would make it fit.
    """
    return _search(model_or_config, machine, None, options).plan()


def largest_batch(model_or_config: Any, machine: MachineLike = None, run: Run | None = None, **options: Any) -> Answer:
    """The most sequences of `length` tokens in a micro-batch. Takes the options of `plan`, or a `Run` and limits."""
    return _largest(_search(model_or_config, machine, run, options), "batch")


def largest_context(
    model_or_config: Any, machine: MachineLike = None, run: Run | None = None, **options: Any
) -> Answer:
    """The most tokens in a sequence, in multiples of 64, with `batch` sequences in a micro-batch."""
    return _largest(_search(model_or_config, machine, run, options), "length", step=64)


def largest_model(
    machine: MachineLike = None, run: Run | None = None, family: Iterable[Any] | None = None, **options: Any
) -> Answer:
    """The most parameters: of a family (models, configs, names or shapes), or of dense decoders."""
    machine = resolve_machine(machine)

    def fits(shape: ModelShape) -> bool:
        return _search(shape, machine, run, options).fits()

    if family is not None:
        shapes = sorted(map(describe, _members(family)), key=lambda shape: -shape.parameters)
        shape = next((shape for shape in shapes if fits(shape)), shapes[-1])
    else:
        width = max(1, _largest_fitting(lambda width: fits(dense_shape(width, width)), 512))
        shape = dense_shape(width, max(1, _largest_fitting(lambda depth: fits(dense_shape(width, depth)), 4 * width)))
    return Answer(shape.parameters, _search(shape, machine, run, options).plan(), "model")


def dense_shape(width: int, depth: int, vocabulary: int = 128256) -> ModelShape:
    """A dense decoder: hidden size 128 × `width`, MLP 3.5 times that, 8 key/value heads."""
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
            fused_norms=0, head_norms=False, span=0, attends=layer, tied=False,
        )  # fmt: skip

    layer = hidden * (2 * hidden + 2 * kv + 3 * intermediate)
    blocks = [
        block("embedding", "embedding", hidden * vocabulary, 0),
        *[block(f"layers.{index}", "layer", layer, 2 * hidden) for index in range(depth)],
        block("norm", "other", 0, hidden),
        block("head", "head", hidden * vocabulary, 0),
    ]
    name = f"dense {format_parameters(sum(b.parameters for b in blocks))} ({depth} layers of {hidden})"
    return ModelShape(name=name, blocks=tuple(blocks), vocab_size=vocabulary, precision="bf16", attention="sdpa")


def _members(family: Any) -> list[Any]:
    if not isinstance(family, Iterable) or isinstance(family, str | Mapping):
        raise SettingsError(f"family must be a list of models, configs or names, not {type(family).__name__}.")
    members = list(family)
    if not members:
        raise SettingsError("family has no members: name at least one model, or leave it out.")
    return members


def _search(model_or_config: Any, machine: MachineLike, run: Run | None, options: dict[str, Any]) -> Search:
    resolved, shape = resolve_machine(machine), describe(model_or_config)
    run, limits = resolve_run(run, shape.precision, options)
    return Search(shape, resolved, run, **limits)


def _largest(search: Search, name: str, step: int = 1) -> Answer:
    """The largest multiple of `step` that fits as an option's value."""
    value = step * max(1, _largest_fitting(lambda steps: search.changed(**{name: step * steps}).fits(), SEARCH_LIMIT))
    return Answer(value, search.changed(**{name: value}).plan(), "context" if name == "length" else name)


def _largest_fitting(fits: Callable[[int], bool], limit: int) -> int:
    """The largest value up to `limit` that fits, or 0. Assumes that everything below a fitting value fits too."""
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
