"""The frozen decision, with what it takes and why: made before anything large is allocated, printed, kept."""

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
    LANES,
    PLACEMENT_SETTINGS,
    PLANNED_DEBUG_SETTINGS,
    PLANNED_SETTINGS,
    POLICIES,
    window_sizes,
)
from megatrain.hardware.machine import cuda_bytes
from megatrain.hardware.validation import Frozen, fields_of, is_count, is_rate, read_object, require
from megatrain.planner.memory import GIB, ROLES, TIERS, pinned_bytes
from megatrain.planner.run import Run, current_names
from megatrain.planner.simulate import StepEstimate
from megatrain.settings import Debug

FORMAT = 2
OLD_LANES = {"vram update": "gpu_update", "vram": "gpu_update", "hold": "refresh", "leave": "sums_out"}
"""Lane names in plans of earlier releases → names of today."""
BLOCK_LISTS = (*PLACEMENT_SETTINGS, "on_disk")
"""Fields that name blocks."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where state lives, what blocks keep, and what a step takes. Nothing in it changes the bits of a result."""

    model: str
    parameters: int
    matmul_parameters: int
    """Active per token, the head once."""
    machine: str
    run: Run
    resident: tuple[str, ...]
    """Blocks whose whole state is in VRAM; the states of the others are in RAM."""
    held_weights: tuple[str, ...]
    """Of the others, those whose weights have a copy in VRAM; the rest are fetched for every window."""
    held_gradients: tuple[str, ...]
    """Of the others, those whose gradient sum is in VRAM until its update."""
    streamed_states: tuple[str, ...]
    """Of those with both, the ones whose states come to VRAM for their update."""
    on_disk: tuple[str, ...]
    """Streamed blocks whose residual and moments are on disk."""
    blocks: int
    """How many blocks there are."""
    policy: dict[str, str]
    """Block names or patterns → policy, the first that matches: `Settings.policy`."""
    windows: tuple[int, ...]
    """Micro-batches that pass every block together, window by window."""
    slots: int
    grad_slots: int
    threads: int
    """Threads for updates on the CPU."""
    memory: dict[str, dict[str, int]]
    """Tier → role → bytes at the peak."""
    capacity: dict[str, int]
    """Tier → bytes it may take."""
    step: StepEstimate
    lossy: tuple[str, ...]
    """States that lose precision."""
    notes: tuple[str, ...] = ()

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
        """6 × (matmul parameters, head once) × tokens ÷ seconds; attention and recompute are not counted."""
        return 6 * self.matmul_parameters * self.run.tokens / self.step.seconds / 1e12

    def days_for(self, tokens: float) -> float:
        """Days that training on so many tokens takes."""
        return tokens / self.tokens_per_second / 86400

    @property
    def window(self) -> int | tuple[int, ...]:
        """The windows as `Settings.window`: one size for all, or the first ones and one for all after them."""
        sizes = list(self.windows)
        while len(sizes) > 1 and window_sizes(sizes[:-1], self.run.accumulation) == self.windows:
            sizes.pop()
        return sizes[0] if len(sizes) == 1 else tuple(sizes)

    @property
    def largest_window(self) -> int:
        """Most micro-batches that pass a block together."""
        return max(self.windows)

    def settings(self) -> dict[str, Any]:
        """The plan as settings of an engine."""
        slots = Debug(**{name: getattr(self, name) for name in PLANNED_DEBUG_SETTINGS})
        return {name: getattr(self, name) for name in PLANNED_SETTINGS} | {"policy": dict(self.policy), "debug": slots}

    @property
    def outside_allocator(self) -> int:
        """Bytes of its VRAM that CUDA takes beside PyTorch's allocator."""
        pinned = pinned_bytes([self.memory["ram"][role] for role in ROLES], bool(self.streamed_states))
        return int(cuda_bytes(pinned, self.largest_window))

    def total(self, tier: str) -> int:
        """Bytes of a tier at the peak."""
        return sum(self.memory[tier].values())

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT} | dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan back. Every field must be there, and no other; what is wrong is named."""
        data = read_object(text, "the plan")
        format = data.pop("format", None) if isinstance(data, dict) else None
        if format not in (1, FORMAT):
            raise SettingsError(f"this is not a plan of format 1 or {FORMAT}; make it again.")
        data = _with_current_lanes(_from_format1(data) if format == 1 else data)
        try:
            values = dict(fields_of(cls, data, "it"))
            for name in (*BLOCK_LISTS, "windows", "lossy", "notes"):
                require(isinstance(values[name], list), name, "must be a list")
                values[name] = tuple(values[name])
            values["step"] = StepEstimate(**fields_of(StepEstimate, values["step"], "step"))
            values["run"] = Run(**fields_of(Run, current_names(values["run"]), "run"))
            return cls(**values)
        except SettingsError as error:
            raise SettingsError(f"the plan cannot be read: {error}") from error

    def table(self, tokens: float = 1e9) -> str:
        """The plan in plain text; `tokens` is what the days are given for."""
        return "\n\n".join([self._headline(), _aligned(self._memory_rows()), self._details(tokens)])

    def _headline(self) -> str:
        run = self.run
        batch = f"{run.micro_batch} × {run.length} tokens"
        batch += f" × {run.accumulation} micro-batches" if run.accumulation > 1 else ""
        made = ("compiled" if run.compile else "eager") + (", padded" if run.padded else "")
        return (
            f"{self.model}: {self.parameters / 1e9:.2f}B parameters on {self.machine}\n"
            f"step: {batch} = {run.tokens:,} tokens, {run.precision}, {run.kind} with {run.moment_width} states, {made}"
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
        waits = [f"{step.waited[lane]:.2f} s for {lane}" for lane in LANES if step.waited[lane] >= 0.005]
        rows = [
            ["placement", self.placement],
            ["policy", ", ".join(f"{count} {policy}" for policy, count in self.policies.items())],
            ["windows", f"{_run_lengths(self.windows)} of {self.run.accumulation} micro-batches"],
            ["slots", f"{self.slots} for weights, {self.grad_slots} for gradients; {self.threads} threads update"],
            ["lanes", ", ".join(f"{lane} {step.busy[lane]:.2f} s" for lane in LANES if step.busy[lane] >= 0.005)],
            ["waits", ", ".join(waits) or "none"],
            ["step", f"{step.seconds:.2f} s, bound by {step.bottleneck}"],
            ["speed", f"{self.tokens_per_second:,.0f} tokens/s, {self.tflops:.0f} TFLOP/s"],
            ["time", f"{self.days_for(tokens):.1f} days for {tokens / 1e9:g}B tokens"],
            ["lossy", "; ".join(self.lossy) or "nothing"],
            *[["note", note] for note in self.notes],
        ]
        if self.on_disk:
            written = self.memory["disk"]["moments"] + self.memory["disk"]["residuals"]
            life = f"{written / 1e9:.0f} GB written per step, {written * 86400 / step.seconds / 1e12:.1f} TB a day"
            rows.insert(1, ["disk", f"states of {len(self.on_disk)} blocks, {life}"])
        return _aligned(rows, numbers=False)

    @property
    def placement(self) -> str:
        """Where blocks are, in words."""
        placed, sums = len(self.resident), len(self.held_gradients)
        streamed = self.blocks - placed - len(self.held_weights)
        weights = f"{placed} of {self.blocks} blocks resident, {len(self.held_weights)} held, {streamed} streamed"
        states = f", states of {len(self.streamed_states)} updated there" if self.streamed_states else ""
        return f"{weights}; gradient sums of {sums} more held{states}"

    @property
    def policies(self) -> dict[str, int]:
        """Policy → how many blocks have it."""
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


def _from_format1(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of a plan with windows of one size, nothing held, and some lanes less, as they are now. What is not as
    it should be stays, and is refused as such."""
    run, window, step = data.get("run"), data.get("window"), data.get("step")
    found: dict[str, Any] = {name: [] for name in PLACEMENT_SETTINGS if name != "resident"} | data
    accumulation: Any = run.get("accumulation", 1) if isinstance(run, dict) else None
    if window is not None and is_count(window, 1) and is_count(accumulation, 1):
        del found["window"]
        found["windows"] = list(window_sizes(window, accumulation))
    if isinstance(step, dict):
        added = dict.fromkeys(("refresh", "sums_out", "states_in", "states_out"), 0.0)
        spent = {name: added | step[name] for name in ("busy", "waited") if isinstance(step.get(name), dict)}
        found["step"] = step | spent
    return found


def _with_current_lanes(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of a plan, with the lanes of its step under the names of today."""
    step = data.get("step")
    if not isinstance(step, dict):
        return data

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {OLD_LANES.get(lane, lane): spent for lane, spent in value.items()}
        return OLD_LANES.get(value, value) if isinstance(value, str) else value

    return data | {"step": {name: renamed(value) for name, value in step.items()}}


def _check(plan: Plan) -> None:
    """Every field is what the planner makes, so that all that is asked of a plan has an answer."""
    for name in ("model", "machine"):
        require(isinstance(getattr(plan, name), str), name, "must be a text")
    for name in ("parameters", "matmul_parameters"):
        require(is_count(getattr(plan, name)), name, "must be a whole number, not negative")
    for name in ("blocks", "slots", "grad_slots", "threads"):
        require(is_count(getattr(plan, name), 1), name, "must be a whole number of at least 1")
    good = isinstance(plan.windows, tuple) and all(is_count(size, 1) for size in plan.windows)
    require(good and len(plan.windows) > 0, "windows", "must be whole numbers of at least 1")
    for name in (*BLOCK_LISTS, "lossy", "notes"):
        value = getattr(plan, name)
        require(isinstance(value, tuple) and all(isinstance(text, str) for text in value), name, "must be texts")
    for name in BLOCK_LISTS:
        placed = getattr(plan, name)
        once = len(set(placed)) == len(placed) <= plan.blocks
        require(once, name, f"must name each of {plan.blocks} blocks once at the most")
        require(name == "resident" or not set(placed) & set(plan.resident), name, "must not name a resident block")
    policy, run, step = plan.policy, plan.run, plan.step
    good = isinstance(policy, dict) and "*" in policy and all(chosen in POLICIES for chosen in policy.values())
    require(good, "policy", f"must map block names, and '*', to {', '.join(POLICIES)}")
    good = _maps(plan.memory, TIERS, lambda roles: _maps(roles, ROLES, is_count))
    require(good, "memory", f"must have bytes of {', '.join(ROLES)} in each of {', '.join(TIERS)}")
    require(_maps(plan.capacity, TIERS, is_count), "capacity", f"must have bytes of {', '.join(TIERS)}")
    require(isinstance(run, Run), "run", "must be a Run")
    for name in ("micro_batch", "length", "accumulation", "evaluation"):
        require(is_count(getattr(run, name)), f"run.{name}", "must be a whole number, not negative")
    require(run.attention is None or isinstance(run.attention, str), "run.attention", "must be a text or null")
    require(sum(plan.windows) == run.accumulation, "windows", "must have every micro-batch of a step once")
    require(isinstance(step, StepEstimate), "step", "must be a StepEstimate")
    require(is_rate(step.seconds) and step.seconds > 0, "step.seconds", "must be a finite number above 0")
    for name in ("busy", "waited"):
        good = _maps(getattr(step, name), LANES, is_rate)
        require(good, f"step.{name}", f"must have seconds of {', '.join(LANES)}")
    require(step.bottleneck in tuple(LANES), "step.bottleneck", f"must be one of {', '.join(LANES)}")


def _maps(value: Any, names: Iterable[str], good: Callable[[Any], bool]) -> bool:
    """Whether it is a mapping from exactly these names to what is good."""
    return isinstance(value, dict) and set(value) == set(names) and all(map(good, value.values()))


def _run_lengths(windows: Sequence[int]) -> str:
    """Sizes in order, equal ones once: "4, then 12 × 1"."""
    runs = [(size, len(list(alike))) for size, alike in groupby(windows)]
    return ", then ".join(f"{times} × {size}" if times > 1 else str(size) for size, times in runs)


def _aligned(rows: Sequence[Sequence[str]], numbers: bool = True) -> str:
    """Columns of equal width, the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        others = [cell.rjust(width) if numbers else cell for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *others]).rstrip())
    return "\n".join(lines)
