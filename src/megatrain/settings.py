"""What the user asks for. `megatrain.init` stores one `Settings`; an `Engine` takes overrides of its fields."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from megatrain.aliases import Aliased, renamed
from megatrain.errors import SettingsError, UnknownSetting
from megatrain.geometry import PLACEMENT_SETTINGS, POLICIES, PRECISIONS, WIDTHS

COMPRESSIONS = (False, True, *[width for width in WIDTHS if width != "fp32"], "lossless")
KERNELS = ("native", "reference")
LANES = ("auto", "sync", "threads", "cuda")
CHANGE_RESULTS = ("device", "precision", "optimizer_compression", "head_chunk", "compile")
"""The settings that change bits of results."""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


class _Choices(metaclass=Aliased):
    given: frozenset[str]
    """The fields that were set, also those that were set to their default: one that was asked for is a choice."""

    def __new__(cls, **values: Any) -> Self:
        made = super().__new__(cls)
        object.__setattr__(made, "given", frozenset(values))
        return made

    def chosen(self) -> dict[str, Any]:
        """The fields that were set, with their values."""
        return {name: getattr(self, name) for name in self.given}


@dataclass(frozen=True, kw_only=True, repr=False)
class Debug(_Choices):
    """How an engine works inside. None of it changes bits of results; it is for tests and for finding faults."""

    slots: int = 3
    """Weight slots per ring: 1 means no prefetch, 2 is double buffering. A plan decides it if it is not set here."""
    grad_slots: int = 2
    """Gradient slots per ring. A plan decides it if it is not set here."""
    lanes: Any = "auto"
    """"auto", "sync" (everything inline), "threads" (CPU threads), "cuda", or a `Lanes` object."""
    kernels: str = "native"
    """"native", or "reference" for the slow PyTorch arithmetic that gives the same bits."""
    pin: bool = True
    """Pin host memory for transfers; False: go through a pinned staging ring."""

    def __post_init__(self) -> None:
        for name in ("slots", "grad_slots"):
            if not _is_count(value := getattr(self, name)):
                raise SettingsError(f"{name} must be an integer of at least 1, not {value!r}.")
        if isinstance(self.lanes, str) and self.lanes not in LANES:
            raise SettingsError(f"lanes must be one of {', '.join(LANES)}, or a Lanes object, not {self.lanes!r}.")
        if self.kernels not in KERNELS:
            raise SettingsError(f"kernels must be one of {', '.join(KERNELS)}, not {self.kernels!r}.")

    def __repr__(self) -> str:
        return f"Debug({', '.join(f'{name}={value!r}' for name, value in sorted(self.chosen().items()))})"


DEBUG = tuple(field.name for field in fields(Debug))


def _debug(value: Any) -> Debug:
    if not isinstance(value, Debug):
        raise SettingsError(f"debug must be a megatrain.Debug, not {value!r}.")
    return value


class _HadDebug(Aliased):
    """`Settings` had the fields of `Debug` as its own."""

    def current_names(cls, values: dict[str, Any]) -> dict[str, Any]:
        old = {name: value for name, value in values.items() if name in DEBUG}
        if not old:
            return values
        renamed(
            ", ".join(f"{name}=..." for name in old), f"debug=megatrain.Debug({', '.join(f'{n}=...' for n in old)})"
        )
        others = {name: value for name, value in values.items() if name not in DEBUG}
        return others | {"debug": Debug(**_debug(values.get("debug", Debug())).chosen() | old)}


@dataclass(frozen=True, kw_only=True)
class Settings(_Choices, metaclass=_HadDebug):
    """Limits and choices of a run. Only those in `CHANGE_RESULTS` change bits of results."""

    offload_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    """Directory, or several, for state that does not fit in RAM."""
    max_vram_gb: float | None = None
    """Most GPU memory this process may take, in GiB; None: all of it."""
    max_ram_gb: float | None = None
    """Most host RAM that this process may take, in GiB; None: what is free."""
    optimizer_compression: bool | str = False
    """How the optimizer's moments are kept: False (FP32), True (= "4bit"), "bf16", "8bit" or "4bit", which lose
    precision; or "lossless", which keeps FP32 in memory and compresses it on disk."""
    plan: Any = "auto"
    """A `Plan` of `megatrain.plan`: decides `resident`, holds, `policy`, `window` and slots where they are not set.
    "auto": a Trainer on a GPU makes one; an engine without a Trainer has none. None: no plan, all blocks stream."""
    machine: Any = None
    """What a Trainer plans with: a description (a name of `Machine.shipped()`, a path, a `Machine`); None: measured."""
    length: int | None = None
    """Most tokens in a sequence that a Trainer plans for; None: what its data shows."""
    device: str | None = None
    """"cuda", "cuda:N" or "cpu"; None: CUDA if there is one, else the CPU, announced."""
    precision: str | None = None
    """"bf16" or "fp32"; None: what the model was loaded in. "bf16-sr": BF16 weights without an FP32 master, rounded
    stochastically."""
    resident: Sequence[str] = ()
    """Patterns of names of blocks whose state stays in GPU memory and is updated there; the others stream."""
    held_weights: Sequence[str] = ()
    """The same of blocks whose weights have a copy in GPU memory that outlives one use: their state is in RAM and is
    updated there, and their weights travel once per step."""
    held_gradients: Sequence[str] = ()
    """The same of blocks whose FP32 gradient sum stays in GPU memory from the first micro-batch of a step to its
    update. A resident block's always does."""
    streamed_states: Sequence[str] = ()
    """The same of blocks whose residual and moments live in RAM and come to the GPU to be updated there; their weights
    and gradients must be held."""
    policy: str | Mapping[str, str] = "recompute"
    """What a block keeps for its backward: "recompute", "store" or "offload"; or patterns of block names → policy."""
    compile: bool = False
    """Compile blocks with `torch.compile`, once per structure and shape; changes the last bits of results."""
    window: int | Sequence[int] | None = None
    """Most micro-batches of a Trainer step that pass a block together; None: as many as fit. A list has the sizes of a
    step's windows in order, the last one repeated as long as needed."""
    head_chunk: int | None = None
    """Tokens per chunk of the head and its loss; None: a constant of the vocabulary; 0: logits are computed whole."""
    record: bool = True
    """Whether a Trainer appends `run.jsonl` in its output directory; an engine without a Trainer has `record(path)`."""
    debug: Debug = Debug()
    """How the engine works inside, for tests and for finding faults."""

    def __post_init__(self) -> None:
        for name in ("max_vram_gb", "max_ram_gb"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < math.inf):
                raise SettingsError(f"{name} must be a positive number of GiB or None, not {value!r}.")
        if isinstance(self.plan, str | bool | int | float) and self.plan != "auto":
            raise SettingsError(f"plan must be 'auto', None or a Plan of megatrain.plan, not {self.plan!r}.")
        if self.precision is not None and self.precision not in PRECISIONS:
            raise SettingsError(f"precision must be one of {', '.join(PRECISIONS)} or None, not {self.precision!r}.")
        moment_width(self.optimizer_compression)
        for name in PLACEMENT_SETTINGS:
            value = getattr(self, name)
            if isinstance(value, str):
                raise SettingsError(f"{name} must be a list of patterns, such as [{value!r}], not a string.")
            object.__setattr__(self, name, tuple(value))  # nobody changes it afterwards, and it compares with a plan's
        policies = [self.policy] if isinstance(self.policy, str) else list(self.policy.values())
        if unknown := [policy for policy in policies if policy not in POLICIES]:
            raise SettingsError(f"policy must be one of {', '.join(POLICIES)}, not {unknown[0]!r}.")
        if self.length is not None and not _is_count(self.length):
            raise SettingsError(f"length must be a number of tokens or None, not {self.length!r}.")
        sizes = self.window if isinstance(self.window, list | tuple) else [self.window]
        if self.window is not None and not (sizes and all(map(_is_count, sizes))):
            raise SettingsError(
                f"window must be a number of micro-batches, a list of them or None, not {self.window!r}."
            )
        if self.head_chunk is not None and (not isinstance(self.head_chunk, int) or self.head_chunk < 0):
            raise SettingsError(f"head_chunk must be a number of tokens, 0 or None, not {self.head_chunk!r}.")
        if not isinstance(self.record, bool):
            raise SettingsError(f"record must be True or False, not {self.record!r}; engine.record(path) names a file.")
        _debug(self.debug)
        if self.device is not None and str(self.device).split(":")[0] not in ("cpu", "cuda"):
            raise SettingsError(f"device must be 'cuda', 'cuda:N', 'cpu' or None, not {self.device!r}.")

    @property
    def moment_width(self) -> str:
        """How moments are stored in memory: fp32, bf16, 8bit or 4bit."""
        return moment_width(self.optimizer_compression)

    def differing(self, others: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that have another value here than in `others`, with the value they have."""
        flat = {**others, **others["debug"].chosen()} if "debug" in others else others
        own = {name: getattr(self.debug if name in DEBUG else self, name) for name in flat if name != "debug"}
        return {name: value for name, value in own.items() if _spelled(value) != _spelled(flat[name])}

    if not TYPE_CHECKING:  # or every name would be one to a type checker

        def __getattr__(self, name: str) -> Any:
            if name not in DEBUG:
                raise AttributeError(f"Settings has no attribute {name!r}")
            renamed(f"settings.{name}", f"settings.debug.{name}")
            return getattr(self.debug, name)

    def override(self, **changes: Any) -> Settings:
        """A copy with some fields set; an unknown name is an error, never ignored.

        `dataclasses.replace` would set every field.
        """
        changes = Settings.current_names(changes)
        known = {field.name for field in fields(self)}
        if unknown := sorted(set(changes) - known):
            raise UnknownSetting(f"unknown setting {unknown[0]!r}; known settings are {', '.join(sorted(known))}.")
        if "debug" in changes:
            changes["debug"] = Debug(**self.debug.chosen() | _debug(changes["debug"]).chosen())
        return Settings(**self.chosen() | changes)


def moment_width(compression: Any) -> str:
    """How moments are stored in memory under an `optimizer_compression`: fp32, bf16, 8bit or 4bit."""
    # 1 and 0 are equal to True and False, and no width.
    if not isinstance(compression, bool | str) or compression not in COMPRESSIONS:
        raise SettingsError(
            f"optimizer_compression must be False, True, 'bf16', '8bit', '4bit' or 'lossless', not {compression!r}."
        )
    if compression in (False, "lossless"):
        return "fp32"
    return "4bit" if compression is True else str(compression)


def _spelled(value: Any) -> Any:
    """One policy for all blocks, and one size for all windows, can be written in two ways."""
    if isinstance(value, str):
        return {"*": value}
    return (value,) if isinstance(value, int) else value


_current = Settings()


def current() -> Settings:
    """The settings of the last `megatrain.init`, or the defaults."""
    return _current


def store(settings: Settings) -> None:
    """Make `settings` the ones that new engines start from."""
    global _current
    _current = settings
