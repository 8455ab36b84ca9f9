"""The input of a plan: the run, the machine and the limits. A plan chooses none of it; most of it changes results."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

from megatrain.aliases import Aliased, renamed
from megatrain.errors import SettingsError, UnknownSetting
from megatrain.geometry import OPTIMIZER_MOMENTS, PRECISIONS
from megatrain.hardware.machine import AvailableMemory, Machine
from megatrain.settings import Settings, moment_width

MachineLike = Machine | str | os.PathLike[str] | None
OPTION_NAMES = {"micro_batch": "batch", "kind": "optimizer"}
"""Fields of a run → the names of the options that set them, where they differ."""
FIELDS = {option: field for field, option in OPTION_NAMES.items()}


class Limits(TypedDict, total=False):
    """How much of a machine a plan may use. By default all of its memory, and no disk."""

    max_vram_gb: float | None
    max_ram_gb: float | None
    offload_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
    available: AvailableMemory | None
    """What is free on the machine now."""


LIMITS = tuple(Limits.__annotations__)
OPTIONS = (
    "batch", "length", "accumulation", "together", "tried_in_turn", "optimizer", "clipping", "evaluation",
    "predictions", "head_chunk", "trainer", "padded", "optimizer_compression", "precision", "compile", *LIMITS,
)  # fmt: skip
"""What `plan` and `largest_*` take beside a model and a machine: fields of a run, and limits."""


class _Aliased(Aliased):
    def current_names(cls, values: dict[str, Any]) -> dict[str, Any]:
        if "width" not in values:
            return values
        renamed("width of a Run", "optimizer_compression")
        others = {name: value for name, value in values.items() if name != "width"}
        return others | {"optimizer_compression": False if values["width"] == "fp32" else values["width"]}


@dataclass(frozen=True, kw_only=True)
class Run(metaclass=_Aliased):
    """The shape of one optimizer step, which a run repeats."""

    micro_batch: int = 1
    """Sequences in a micro-batch."""
    length: int = 2048
    """Tokens in a sequence."""
    accumulation: int = 1
    """Micro-batches in a step."""
    together: bool = True
    """Whether micro-batches may share a window. False: they run one after the other, which some Trainers need."""
    tried_in_turn: bool = False
    """Whether those of the first step run one after the other all the same, to find out if a window would add gradients
    in another order (hf/microbatches.py). Sums then take the same memory as in windows of one."""
    precision: str = "bf16"
    """"bf16" (exact FP32 master as BF16 + residual), "fp32", or "bf16-sr" (no master)."""
    optimizer_compression: bool | str = False
    """How the optimizer's moments are kept, as in `Settings`."""
    kind: str = "adamw"
    """"adamw", "lion" or "sgd"."""
    compile: bool = False
    """Whether layers run through torch.compile."""
    clipping: bool = True
    """Whether the gradient norm is clipped. Updates then wait for the end of the backward."""
    evaluation: int = 0
    """Tokens in an evaluation batch; 0: no evaluation."""
    predictions: bool = True
    """Whether an evaluation needs all logits. False: it needs the loss alone."""
    head_chunk: int | None = None
    """Tokens whose logits are in memory at once; 0: all of a micro-batch, for a loss that needs them; None: MegaTrain
    chooses."""
    trainer: bool = False
    """Whether a Trainer runs the steps. Its own work between steps is then added."""
    padded: bool = False
    """Whether sequences of a batch differ in length, so that attention gets a mask."""
    attention: str | None = None
    """"sdpa", "eager"...; None: what transformers chose for the model."""

    def __post_init__(self) -> None:
        for name in ("micro_batch", "length", "accumulation"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SettingsError(f"{OPTION_NAMES.get(name, name)} must be an integer of at least 1, not {value!r}.")
        if isinstance(self.evaluation, bool) or not isinstance(self.evaluation, int) or self.evaluation < 0:
            raise SettingsError(f"evaluation must be a number of tokens, not {self.evaluation!r}.")
        if self.head_chunk is not None and (type(self.head_chunk) is not int or self.head_chunk < 0):
            raise SettingsError(f"head_chunk must be a number of tokens, 0 or None, not {self.head_chunk!r}.")
        for name in ("together", "tried_in_turn", "compile", "clipping", "predictions", "trainer", "padded"):
            if not isinstance(getattr(self, name), bool):
                raise SettingsError(f"{name} must be True or False, not {getattr(self, name)!r}.")
        moment_width(self.optimizer_compression)
        if self.optimizer_compression is True:
            object.__setattr__(self, "optimizer_compression", self.moment_width)
        for name, known in (("precision", PRECISIONS), ("kind", OPTIMIZER_MOMENTS)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in known:
                raise SettingsError(f"{OPTION_NAMES.get(name, name)} must be one of {', '.join(known)}, not {value!r}.")

    @property
    def moment_width(self) -> str:
        """How moments are stored in memory: fp32, bf16, 8bit or 4bit."""
        return moment_width(self.optimizer_compression)

    @property
    def width(self) -> str:
        renamed("width of a Run", "moment_width")
        return self.moment_width

    @property
    def micro_tokens(self) -> int:
        """Tokens in a micro-batch."""
        return self.micro_batch * self.length

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.micro_tokens * self.accumulation

    @property
    def itemsize(self) -> int:
        """Bytes of a weight, a gradient and an activation."""
        return 4 if self.precision == "fp32" else 2

    @property
    def moments(self) -> int:
        """How many moments the optimizer keeps per parameter."""
        return OPTIMIZER_MOMENTS[self.kind]


def resolve_machine(machine: MachineLike) -> Machine:
    """A `Machine`, loaded by name or path if needed."""
    if machine is None:
        raise SettingsError(
            "a plan needs a machine: pass machine=mt.probe() for this one, the path of a description, or one of "
            f"{', '.join(Machine.shipped())}."
        )
    return machine if isinstance(machine, Machine) else Machine.load(machine)


def split(options: Mapping[str, Any]) -> tuple[dict[str, Any], Limits]:
    """Split options into fields of a run and limits."""
    fields = {FIELDS.get(name, name): value for name, value in options.items() if name not in LIMITS}
    return fields, cast(Limits, {name: value for name, value in options.items() if name in LIMITS})


def resolve_run(run: Run | None, loaded_precision: str, options: Mapping[str, Any]) -> tuple[Run, Limits]:
    """The given run and the limits in `options`; without one, the run that `options` describe."""
    if unknown := [name for name in options if name not in OPTIONS]:
        raise UnknownSetting(f"unknown option {', '.join(unknown)}; a plan takes {', '.join(OPTIONS)}.")
    if run is not None and not isinstance(run, Run):
        raise SettingsError(f"run must be a Run, or left out, not {type(run).__name__}.")
    fields, limits = split(options)
    if run is not None and fields:
        conflicting = [name for name in options if name not in LIMITS]
        raise SettingsError(f"{', '.join(conflicting)} cannot be given beside a run: set them in it, or leave it out.")
    # `Settings` checks these values, with the same messages as everywhere else.
    precision = options.get("precision")
    Settings(max_vram_gb=options.get("max_vram_gb"), max_ram_gb=options.get("max_ram_gb"), precision=precision)
    return run or Run(**fields | {"precision": precision or loaded_precision}), limits
