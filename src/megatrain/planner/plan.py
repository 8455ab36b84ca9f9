"""`Plan`: an immutable description of where state lives and what a step takes; printed, and saved as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatrain.errors import SettingsError
from megatrain.geometry import (
    GIB,
    LANES,
    PLACEMENT_SETTINGS,
    PLANNED_DEBUG_SETTINGS,
    PLANNED_SETTINGS,
    POLICIES,
    window_sizes,
)
from megatrain.hardware.machine import cuda_bytes
from megatrain.hardware.validation import Frozen, fields_of, is_count, is_rate, read_object, require
from megatrain.planner.memory import ROLES, TIERS, pinned_bytes
from megatrain.planner.run import Run
from megatrain.planner.simulate import StepEstimate
from megatrain.settings import Debug

FORMAT = 3
POLICY_WORDS = {"recompute": "recompute", "store": "store activations", "offload": "offload inputs and recompute"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where state lives, what blocks keep for the backward, and what a step takes. None of it changes results."""

    model: str
    parameters: int
    matmul_parameters: int
    """Parameters in matrix products that are active per token; the head counts once."""
    machine: str
    run: Run
    resident: tuple[str, ...]
    """Blocks with weights, gradient sum and states in VRAM. The state of all others is in RAM or on disk."""
    held_weights: tuple[str, ...]
    """Other blocks that keep a copy of their weights in VRAM. The weights of the rest are fetched for every window."""
    held_gradients: tuple[str, ...]
    """Other blocks whose gradient sum stays in VRAM until the update."""
    streamed_states: tuple[str, ...]
    """Blocks with held weights and gradients whose states are streamed to the GPU for the update."""
    on_disk: tuple[str, ...]
    """Blocks whose residual and moments are on disk."""
    weights_on_disk: tuple[str, ...]
    """Blocks whose frozen weights are on disk, and those that train if the block is in `on_disk` too."""
    gradients_on_disk: tuple[str, ...]
    """Blocks of `on_disk` whose gradients are on disk from the backward to the update."""
    blocks: int
    """Number of blocks."""
    policy: dict[str, str]
    """Block names or patterns → policy, as in `Settings.policy`. The first match applies."""
    windows: tuple[int, ...]
    """Micro-batches of each window of a step."""
    slots: int
    grad_slots: int
    threads: int
    """Threads for updates on the CPU."""
    memory: dict[str, dict[str, int]]
    """Tier → role → bytes at the peak."""
    capacity: dict[str, int]
    """Tier → bytes that the plan may take."""
    step: StepEstimate
    lossy: tuple[str, ...]
    """What is stored with less than FP32 precision."""
    notes: tuple[str, ...] = ()
    written: int
    """Bytes that a step writes to disk."""

    def __post_init__(self) -> None:
        _check(self)
        step = dataclasses.replace(self.step, busy=Frozen(self.step.busy), waited=Frozen(self.step.waited))
        object.__setattr__(self, "step", step)
        for name in ("policy", "memory", "capacity"):
            object.__setattr__(self, name, Frozen(getattr(self, name)))

    @property
    def tokens_per_second(self) -> float:
        return self.run.tokens / self.step.seconds

    @property
    def tflops(self) -> float:
        """6 × matmul parameters × tokens ÷ seconds. Attention and recomputation are not counted."""
        return 6 * self.matmul_parameters * self.run.tokens / self.step.seconds / 1e12

    def days_for(self, tokens: float) -> float:
        """Days to train on `tokens` tokens."""
        return tokens / self.tokens_per_second / 86400

    @property
    def window(self) -> int | tuple[int, ...]:
        """The windows as `Settings.window` takes them: one size, or sizes of which the last one repeats."""
        sizes = list(self.windows)
        while len(sizes) > 1 and window_sizes(sizes[:-1], self.run.accumulation) == self.windows:
            sizes.pop()
        return sizes[0] if len(sizes) == 1 else tuple(sizes)

    @property
    def largest_window(self) -> int:
        """Micro-batches in the largest window."""
        return max(self.windows)

    def settings(self) -> dict[str, Any]:
        """The plan as settings of an engine."""
        slots = Debug(**{name: getattr(self, name) for name in PLANNED_DEBUG_SETTINGS})
        return {name: getattr(self, name) for name in PLANNED_SETTINGS} | {"policy": dict(self.policy), "debug": slots}

    @property
    def outside_allocator(self) -> int:
        """Bytes of VRAM that CUDA takes outside PyTorch's allocator."""
        pinned = pinned_bytes([self.memory["ram"][role] for role in ROLES], bool(self.streamed_states))
        return int(cuda_bytes(pinned, self.largest_window))

    def total(self, tier: str) -> int:
        """Bytes of a tier at the peak."""
        return sum(self.memory[tier].values())

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT} | dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan that `to_json` wrote. Unknown and missing fields are errors."""
        data = read_object(text, "the plan")
        format = data.pop("format", None) if isinstance(data, dict) else None
        if format != FORMAT:
            raise SettingsError(f"this is not a plan of format {FORMAT}; make it again with megatrain.plan.")
        try:
            values = dict(fields_of(cls, data, "it"))
            for name in (*PLACEMENT_SETTINGS, "windows", "lossy", "notes"):
                require(isinstance(values[name], list), name, "must be a list")
                values[name] = tuple(values[name])
            values["step"] = StepEstimate(**fields_of(StepEstimate, values["step"], "step"))
            values["run"] = Run(**fields_of(Run, values["run"], "run"))
            return cls(**values)
        except SettingsError as error:
            raise SettingsError(f"the plan cannot be read: {error}") from error

    def table(self, tokens: float = 1e9) -> str:
        """The plan as plain text, with the days for `tokens` tokens."""
        return "\n\n".join([self._headline(), _aligned(self._memory_rows()), self._details(tokens)])

    def _headline(self) -> str:
        run = self.run
        batch = f"{run.micro_batch} × {run.length} tokens"
        batch += f" × {run.accumulation} micro-batches" if run.accumulation > 1 else ""
        mode = ("compiled" if run.compile else "eager") + (", padded" if run.padded else "")
        return (
            f"{self.model}: {self.parameters / 1e9:.2f}B parameters on {self.machine}\n"
            f"step: {batch} = {run.tokens:,} tokens, {run.precision}, {run.kind} with {run.moment_width} states, {mode}"
        )

    def _memory_rows(self) -> list[list[str]]:
        rows = [["GiB", *ROLES, "total", "of"]]
        for tier in TIERS:
            if not self.total(tier):
                continue
            values = [*(self.memory[tier][role] for role in ROLES), self.total(tier)]
            of = f"{self.capacity[tier] / GIB:.1f}" if self.capacity[tier] < 1 << 60 else "?"
            rows.append([tier, *(f"{nbytes / GIB:.2f}" for nbytes in values), of])
        return rows

    def _details(self, tokens: float) -> str:
        step = self.step
        busy = [f"{lane} {step.busy[lane]:.2f} s" for lane in LANES if step.busy[lane] >= 0.005]
        waits = [f"{step.waited[lane]:.2f} s for {lane}" for lane in LANES if step.waited[lane] >= 0.005]
        slots = f"slots: {self.slots} for weights, {self.grad_slots} for gradients"
        days = f"{self.days_for(tokens):.1f} days for {tokens / 1e9:g}B tokens"
        policies = [f"{count} {POLICY_WORDS[policy]}" for policy, count in self.policies.items()]
        rows = [
            *self._placement_rows(),
            ["policy", f"of {self.blocks} blocks: {', '.join(policies)}"],
            ["windows", f"{_run_lengths(self.windows)} micro-batches; {slots}"],
            ["lanes", ", ".join(busy)],
            [
                "step",
                f"{step.seconds:.2f} s, bound by {step.bottleneck}" + (f"; waits {', '.join(waits)}" if waits else ""),
            ],
            ["speed", f"{self.tokens_per_second:,.0f} tokens/s, {self.tflops:.0f} TFLOP/s, {days}"],
            ["lossy", "; ".join(self.lossy) or "nothing"],
            *[["note", note] for note in self.notes],
        ]
        if self.on_disk or self.weights_on_disk:
            rows.insert(1, ["disk", self._disk_row()])
        return _aligned(rows, numbers=False)

    def _disk_row(self) -> str:
        kept = {"states": self.on_disk, "gradients": self.gradients_on_disk, "weights": self.weights_on_disk}
        lists = [f"{what} of {len(names)} blocks" for what, names in kept.items() if names]
        a_day = self.written * 86400 / self.step.seconds
        wear = f"{self.written / 1e9:.0f} GB written per step, {a_day / 1e12:.1f} TB a day"
        return ", ".join([*lists, wear if self.written else "nothing written"])

    @property
    def placement(self) -> str:
        """How many blocks have which placement, in one line."""
        return (
            f"{len(self.resident)} of {self.blocks} blocks resident, {len(self.held_weights)} with held weights, "
            f"{len(self.held_gradients)} with held gradients, {len(self.streamed_states)} with streamed states"
        )

    def _placement_rows(self) -> list[list[str]]:
        threads, others = f"on {self.threads} CPU threads", self.blocks - len(self.resident)
        if not self.total("vram"):
            return [["placement", "all blocks in RAM: there is no GPU"], ["updates", threads]]
        resident = f"{len(self.resident)} of {self.blocks} blocks resident: weights, gradients and states in VRAM"
        if not others:
            return [["placement", resident], ["updates", "on the GPU"]]

        def split(names: Sequence[str], placed: str, rest: str) -> str:
            some = f"{len(names)} {placed}, the rest {rest}" if names else f"all {rest}"
            return f"of the other {others}: {some if len(names) < others else f'all {placed}'}"

        on_disk = bool(self.gradients_on_disk)
        return [
            ["placement", resident],
            ["weights", split(self.held_weights, "held in VRAM", "fetched for each window")],
            ["gradients", split(self.held_gradients, "summed in VRAM", f"in RAM{' or on disk' * on_disk}")],
            ["updates", split(self.streamed_states, "on the GPU with streamed states", threads)],
        ]

    @property
    def policies(self) -> dict[str, int]:
        """Policy → number of blocks."""
        counts = Counter(policy for name, policy in self.policy.items() if name != "*")
        counts[self.policy["*"]] += max(0, self.blocks - counts.total())
        return dict(+counts)

    def __str__(self) -> str:
        return self.table()


def format_parameters(parameters: int) -> str:
    """A number of parameters in a few characters."""
    if parameters < 1e5:
        return f"{parameters:,}"
    return f"{parameters / 1e9:.1f}B" if parameters >= 5e7 else f"{parameters / 1e6:.1f}M"


def _check(plan: Plan) -> None:
    """Raise `SettingsError` unless every field has a value that the planner could have produced."""
    for name in ("model", "machine"):
        require(isinstance(getattr(plan, name), str), name, "must be a string")
    for name in ("parameters", "matmul_parameters"):
        require(is_count(getattr(plan, name)), name, "must be a non-negative integer")
    for name in ("blocks", "slots", "grad_slots", "threads"):
        require(is_count(getattr(plan, name), 1), name, "must be an integer of at least 1")
    good = isinstance(plan.windows, tuple) and all(is_count(size, 1) for size in plan.windows)
    require(good and len(plan.windows) > 0, "windows", "must be integers of at least 1")
    for name in (*PLACEMENT_SETTINGS, "lossy", "notes"):
        value = getattr(plan, name)
        require(isinstance(value, tuple) and all(isinstance(text, str) for text in value), name, "must be strings")
    for name in PLACEMENT_SETTINGS:
        placed = getattr(plan, name)
        unique = len(set(placed)) == len(placed) <= plan.blocks
        require(unique, name, f"must name each of {plan.blocks} blocks at most once")
        require(name == "resident" or not set(placed) & set(plan.resident), name, "must not name a resident block")
    policy, run, step = plan.policy, plan.run, plan.step
    good = isinstance(policy, dict) and "*" in policy and all(chosen in POLICIES for chosen in policy.values())
    require(good, "policy", f"must map block names, and '*', to {', '.join(POLICIES)}")
    good = _maps(plan.memory, TIERS, lambda roles: _maps(roles, ROLES, is_count))
    require(good, "memory", f"must have bytes of {', '.join(ROLES)} in each of {', '.join(TIERS)}")
    require(_maps(plan.capacity, TIERS, is_count), "capacity", f"must have bytes of {', '.join(TIERS)}")
    require(is_count(plan.written), "written", "must be a number of bytes")
    require(isinstance(run, Run), "run", "must be a Run")
    for name in ("micro_batch", "length", "accumulation", "evaluation"):
        require(is_count(getattr(run, name)), f"run.{name}", "must be a non-negative integer")
    require(run.attention is None or isinstance(run.attention, str), "run.attention", "must be a string or null")
    require(sum(plan.windows) == run.accumulation, "windows", "must have every micro-batch of a step once")
    require(isinstance(step, StepEstimate), "step", "must be a StepEstimate")
    require(is_rate(step.seconds) and step.seconds > 0, "step.seconds", "must be a finite number above 0")
    for name in ("busy", "waited"):
        good = _maps(getattr(step, name), LANES, is_rate)
        require(good, f"step.{name}", f"must have seconds of {', '.join(LANES)}")
    require(step.bottleneck in tuple(LANES), "step.bottleneck", f"must be one of {', '.join(LANES)}")


def _maps(value: Any, names: Iterable[str], good: Callable[[Any], bool]) -> bool:
    """Whether it is a mapping with exactly these names and only good values."""
    return isinstance(value, dict) and set(value) == set(names) and all(map(good, value.values()))


def _run_lengths(windows: Sequence[int]) -> str:
    """Count and size of consecutive equal windows: "1 × 4, then 12 × 1"."""
    return ", then ".join(f"{len(list(equal))} × {size}" for size, equal in groupby(windows))


def _aligned(rows: Sequence[Sequence[str]], numbers: bool = True) -> str:
    """Rows as lines with aligned columns: the first left-aligned, numbers right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        others = [cell.rjust(width) if numbers else cell for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *others]).rstrip())
    return "\n".join(lines)
