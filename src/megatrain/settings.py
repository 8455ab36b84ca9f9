"""`Settings` of engines and trainers. `megatrain.init` stores the defaults; an `Engine` takes overrides."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from megatrain.aliases import Aliased, renamed
from megatrain.errors import SettingsError, UnknownSetting
from megatrain.geometry import PATTERN_SETTINGS, POLICIES, PRECISIONS, WIDTHS

COMPRESSIONS = (False, True, *[width for width in WIDTHS if width != "fp32"], "lossless")
KERNELS = ("native", "reference")
CODINGS = ("auto", "always", "never")
DISK_IO = ("auto", "threads", "uring")
LANES = ("auto", "sync", "threads", "cuda")
CHANGE_RESULTS = ("device", "precision", "optimizer_compression", "head_chunk", "compile")
"""The settings that change results."""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


class _Choices(metaclass=Aliased):
    given: frozenset[str]
    """The fields that were set explicitly, even to their default."""

    def __new__(cls, **values: Any) -> Self:
        made = super().__new__(cls)
        object.__setattr__(made, "given", frozenset(values))
        return made

    def chosen(self) -> dict[str, Any]:
        """The fields that were set, with their values."""
        return {name: getattr(self, name) for name in self.given}


@dataclass(frozen=True, kw_only=True, repr=False)
class Debug(_Choices):
    """Internals of an engine, for tests and debugging. None of them changes results."""

    slots: int = 3
    """Weight slots per ring: 1 means no prefetch, 2 is double buffering. If not set, a plan chooses it."""
    grad_slots: int = 2
    """Gradient slots per ring. If not set, a plan chooses it."""
    lanes: Any = "auto"
    """"auto", "sync" (everything inline), "threads" (CPU threads), "cuda", or a `Lanes` object."""
    kernels: str = "native"
    """"native", or "reference" for the slow PyTorch arithmetic that gives the same bits."""
    pin: bool = True
    """Pin host memory for transfers. False: copy through a pinned staging ring."""
    allow_tmpfs: bool = False
    """Accept an `offload_dir` in RAM."""
    disk_coding: str = "auto"
    """Whether optimizer_compression="lossless" codes moments on disk: "auto" (if that is faster here), "always" or
    "never"."""
    disk_io: str = "auto"
    """How `offload_dir` is read and written: by "threads", by io_uring ("uring"), or "auto": by threads, unless
    io_uring is measured to be faster there."""

    def __post_init__(self) -> None:
        for name in ("slots", "grad_slots"):
            if not _is_count(value := getattr(self, name)):
                raise SettingsError(f"{name} must be an integer of at least 1, not {value!r}.")
        if isinstance(self.lanes, str) and self.lanes not in LANES:
            raise SettingsError(f"lanes must be one of {', '.join(LANES)}, or a Lanes object, not {self.lanes!r}.")
        if self.disk_coding not in CODINGS:
            raise SettingsError(f"disk_coding must be one of {', '.join(CODINGS)}, not {self.disk_coding!r}.")
        if self.disk_io not in DISK_IO:
            raise SettingsError(f"disk_io must be one of {', '.join(DISK_IO)}, not {self.disk_io!r}.")
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
    """Accepts the fields of `Debug`, which `Settings` had in an earlier release."""

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
    """Limits and choices of a run. Only those in `CHANGE_RESULTS` change results."""

    offload_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    """One or several directories on drives, for state that does not fit in RAM, and for `inputs_on_disk`. If all fits,
    no state is written."""
    drive_tbw: float | None = None
    """What each drive of `offload_dir` is rated for, in TB written. None: what its health log implies, or 600 TB per TB
    of its size."""
    max_drive_tb: float | None = None
    """The most that a run may write to `offload_dir`, in TB; a Trainer then saves a checkpoint and stops."""
    max_vram_gb: float | None = None
    """The most GPU memory that this process may take, in GiB. None: all of it."""
    max_ram_gb: float | None = None
    """The most host RAM that this process may take, in GiB. None: what is free."""
    optimizer_compression: bool | str = False
    """How the optimizer's moments are stored: False (FP32), True (= "4bit"), "bf16", "8bit" or "4bit", which lose
    precision; or "lossless": FP32 in memory, compressed in checkpoints and, where that is faster, on disk."""
    plan: Any = "auto"
    """A `Plan` of `megatrain.plan`: decides `resident`, holds, `policy`, `window` and slots where they are not set.
    "auto": a Trainer on a GPU makes one; an engine without a Trainer has none. None: no plan, all blocks stream."""
    machine: Any = None
    """The machine that a Trainer plans for: a name of `Machine.shipped()`, a path or a `Machine`. None: this one."""
    length: int | None = None
    """The longest sequence, in tokens, that a Trainer plans for. None: found in its data."""
    device: str | None = None
    """"cuda", "cuda:N" or "cpu"; None: CUDA if there is one, else the CPU, announced."""
    precision: str | None = None
    """"bf16" or "fp32"; None: what the model was loaded in. "bf16-sr": BF16 weights without an FP32 master, rounded
    stochastically."""
    resident: Sequence[str] = ()
    """Patterns of block names. Their weights, gradients and states stay in GPU memory; other blocks are streamed."""
    held_weights: Sequence[str] = ()
    """Patterns of block names. A copy of their weights stays in GPU memory, so that it is copied once per step. Their
    states are in RAM, where the CPU updates them."""
    held_gradients: Sequence[str] = ()
    """Patterns of block names. Their FP32 gradient sum stays in GPU memory from the first micro-batch of a step to the
    update, as that of a resident block does."""
    streamed_states: Sequence[str] = ()
    """Patterns of block names. Their residual and moments are in RAM and are streamed to the GPU for the update. Their
    weights and gradients must be held."""
    on_disk: Sequence[str] = ()
    """Patterns of block names. Their residual and moments are on disk, in `offload_dir`, and are read, updated and
    written once per step."""
    weights_on_disk: Sequence[str] = ()
    """Patterns of block names. Their frozen weights are on disk, in `offload_dir`, and are read for every use. Weights
    that train are there too if the block is also in `on_disk`."""
    gradients_on_disk: Sequence[str] = ()
    """Patterns of block names that are also in `on_disk`. Their gradients are written to `offload_dir` in the backward
    and read for the update. Gradients of further micro-batches are summed in RAM, so use one window per step."""
    inputs_on_disk: Sequence[str] = ()
    """Patterns of block names with policy "offload". Their inputs are written to `offload_dir` in the forward and read
    ahead of the backward."""
    policy: str | Mapping[str, str] = "recompute"
    """What a block keeps for its backward: "recompute", "store" or "offload"; or patterns of block names → policy."""
    compile: bool | str = "auto"
    """Compile layers with `torch.compile`, which changes the last bits of results. "auto": on a GPU, if Triton and a C
    compiler are there. True: on the CPU too. An engine's settings have True or False."""
    window: int | Sequence[int] | None = None
    """The most micro-batches of a Trainer step that share one fetch of a block. None: as many as fit. A list has the
    sizes of a step's windows in order; the last one repeats."""
    head_chunk: int | None = None
    """Tokens per chunk of the head and its loss. None: depends on the vocabulary; 0: all logits at once."""
    record: bool = True
    """Whether a Trainer appends `run.jsonl` in its output directory; an engine without a Trainer has `record(path)`."""
    debug: Debug = Debug()
    """Internals, for tests and debugging."""

    def __post_init__(self) -> None:
        for name in ("max_vram_gb", "max_ram_gb", "drive_tbw", "max_drive_tb"):
            unit = "GiB" if name.endswith("_gb") else "TB"
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < math.inf):
                raise SettingsError(f"{name} must be a positive number of {unit} or None, not {value!r}.")
        if isinstance(self.plan, str | bool | int | float) and self.plan != "auto":
            raise SettingsError(f"plan must be 'auto', None or a Plan of megatrain.plan, not {self.plan!r}.")
        if self.precision is not None and self.precision not in PRECISIONS:
            raise SettingsError(f"precision must be one of {', '.join(PRECISIONS)} or None, not {self.precision!r}.")
        moment_width(self.optimizer_compression)
        for name in PATTERN_SETTINGS:
            value = getattr(self, name)
            if isinstance(value, str):
                raise SettingsError(f"{name} must be a list of patterns, such as [{value!r}], not a string.")
            patterns = tuple(value) if isinstance(value, Iterable) else (value,)
            if wrong := [pattern for pattern in patterns if not isinstance(pattern, str)]:
                raise SettingsError(f"{name} must be a list of patterns of block names, not {wrong[0]!r}.")
            object.__setattr__(self, name, patterns)  # immutable, and comparable with a plan's
        policies = self.policy if isinstance(self.policy, Mapping) else {"*": self.policy}
        if unknown := [policy for policy in policies.values() if policy not in POLICIES]:
            raise SettingsError(f"policy must be one of {', '.join(POLICIES)}, not {unknown[0]!r}.")
        if wrong := [pattern for pattern in policies if not isinstance(pattern, str)]:
            raise SettingsError(f"policy must have patterns of block names as keys, not {wrong[0]!r}.")
        if not isinstance(self.compile, bool) and self.compile != "auto":
            raise SettingsError(f"compile must be 'auto', True or False, not {self.compile!r}.")
        if self.length is not None and not _is_count(self.length):
            raise SettingsError(f"length must be a number of tokens or None, not {self.length!r}.")
        sizes = self.window if isinstance(self.window, list | tuple) else [self.window]
        if self.window is not None and not (sizes and all(map(_is_count, sizes))):
            raise SettingsError(
                f"window must be a number of micro-batches, a list of them or None, not {self.window!r}."
            )
        # Not isinstance: True and False are integers too.
        if self.head_chunk is not None and (type(self.head_chunk) is not int or self.head_chunk < 0):
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
        """The fields with another value here than in `others`, with their values here."""
        flat = {**others, **others["debug"].chosen()} if "debug" in others else others
        here = {name: getattr(self.debug if name in DEBUG else self, name) for name in flat if name != "debug"}
        return {name: value for name, value in here.items() if _long_form(value) != _long_form(flat[name])}

    if not TYPE_CHECKING:  # a type checker would accept every attribute

        def __getattr__(self, name: str) -> Any:
            if name not in DEBUG:
                raise AttributeError(f"Settings has no attribute {name!r}")
            renamed(f"settings.{name}", f"settings.debug.{name}")
            return getattr(self.debug, name)

    def override(self, **changes: Any) -> Settings:
        """A copy with some fields set. An unknown name is an error.

        `dataclasses.replace` would mark every field as set.
        """
        changes = Settings.current_names(changes)
        known = {field.name for field in fields(self)}
        if unknown := sorted(set(changes) - known):
            raise UnknownSetting(f"unknown setting {unknown[0]!r}; known settings are {', '.join(sorted(known))}.")
        if "debug" in changes:
            changes["debug"] = Debug(**self.debug.chosen() | _debug(changes["debug"]).chosen())
        return Settings(**self.chosen() | changes)


def moment_width(compression: Any) -> str:
    """How moments are stored in memory for an `optimizer_compression`: fp32, bf16, 8bit or 4bit."""
    # 1 == True and 0 == False, but integers are refused.
    if not isinstance(compression, bool | str) or compression not in COMPRESSIONS:
        raise SettingsError(
            f"optimizer_compression must be False, True, 'bf16', '8bit', '4bit' or 'lossless', not {compression!r}."
        )
    if compression in (False, "lossless"):
        return "fp32"
    return "4bit" if compression is True else str(compression)


def _long_form(value: Any) -> Any:
    """The long form of a policy for all blocks, or of one size for all windows."""
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
