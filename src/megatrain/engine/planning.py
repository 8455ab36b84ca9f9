"""The public functions that need no engine (`init`, `probe`, `plan`, `largest_*`), and applying a plan to settings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from megatrain import planner
from megatrain import settings as settings_module
from megatrain.errors import SettingsError
from megatrain.hardware import inventory
from megatrain.hardware import probe as hardware_probe
from megatrain.hardware.compilers import compiles, missing
from megatrain.hardware.machine import Machine
from megatrain.model.loading import keep_in_files
from megatrain.optim.update import update_rates
from megatrain.planner import Answer, Plan, Run
from megatrain.planner.run import resolve_machine
from megatrain.settings import Settings
from megatrain.telemetry.notices import announce, warn

MachineLike = Machine | str | os.PathLike[str] | None
LIMITS = ("max_vram_gb", "max_ram_gb")
RUN_OPTIONS = ("optimizer_compression", "precision", "compile", "head_chunk", "length")
NOT_PLAN_OPTIONS = ("machine", "device", "plan", "record", "drive_tbw", "max_drive_tb")
"""Settings that a plan does not depend on."""
_UNSET: Any = object()


def init(
    offload_dir: Any = _UNSET, max_vram_gb: Any = _UNSET, optimizer_compression: Any = _UNSET, **more: Any
) -> Settings:
    """Set the defaults of all engines and trainers created afterwards, and return them.

    `more` are the other fields of `Settings`. A second call replaces the first.
    """
    inventory.refuse_distributed()
    first = {"offload_dir": offload_dir, "max_vram_gb": max_vram_gb, "optimizer_compression": optimizer_compression}
    settings = Settings().override(**{name: value for name, value in first.items() if value is not _UNSET}, **more)
    if settings.machine is not None and not isinstance(settings.machine, Machine):
        Machine.load(settings.machine)  # raise now, not after the model has been loaded
    inventory.choose_device(settings.device)
    settings_module.store(settings)
    keep_in_files(settings.offload_dir is not None)
    return settings


def probe(*, device: str | None = None, offload_dir: Any = None, refresh: bool = False) -> Machine:
    """Describe this machine: what this process may use, and how fast it is. Measuring takes under 20 seconds.

    Results are cached; `refresh` measures again. Disk speed is measured only for the directories in `offload_dir`.
    """
    rates = partial(update_rates, threads=inventory.update_threads())
    return hardware_probe.probe(device=device, offload_dir=offload_dir, refresh=refresh, update_rates=rates)


def plan(model_or_config: Any, *, machine: MachineLike = None, **options: Any) -> Plan:
    """The fastest plan for a model, a config or a model name: where every byte is stored, and how long a step takes.

    `machine` is a `Machine`, a name in `Machine.shipped()` or the path of a description. The default is this machine,
    which is measured if necessary. Options are `batch`, `length`, `accumulation`, `together` (whether micro-batches may
    run in a window), `optimizer`, `clipping`, `padded` (sequences of a batch differ in length), `evaluation` (tokens in
    an evaluation batch), `predictions` (whether evaluation reads the logits), and as in `mt.init`: `max_vram_gb`,
    `max_ram_gb`, `offload_dir`, `optimizer_compression`, `precision`, `compile`, `head_chunk` (0 if the loss reads the
    logits). Except for `offload_dir`, the defaults are those of `mt.init`.

    Raises `NotEnoughMemory`, with what would make it fit.
    """
    resolved, options = _resolve_machine(machine, options), _with_defaults(options)
    return planner.plan(model_or_config, machine=resolved, **_with_compile(options, resolved))


def plan_for_trainer(model: Any, machine: MachineLike, **options: Any) -> Plan:
    """`plan` without the defaults of `megatrain.init`."""
    return planner.plan(model, machine=_resolve_machine(machine, options), **options)


def largest_batch(model_or_config: Any, machine: MachineLike = None, run: Run | None = None, **options: Any) -> Answer:
    """The largest number of sequences per micro-batch that fits (`value`), and its plan (`plan`).

    Options are those of `megatrain.plan` except `batch`. Raises `NotEnoughMemory` if not even one sequence fits.
    """
    resolved, options = _resolve_machine(machine, options), _with_defaults(options, run, "batch")
    return planner.largest_batch(model_or_config, resolved, run, **_with_compile(options, resolved, run))


def largest_context(
    model_or_config: Any, machine: MachineLike = None, run: Run | None = None, **options: Any
) -> Answer:
    """The largest sequence length that fits, in multiples of 64 tokens, and its plan. See `largest_batch`."""
    resolved, options = _resolve_machine(machine, options), _with_defaults(options, run, "length")
    return planner.largest_context(model_or_config, resolved, run, **_with_compile(options, resolved, run))


def largest_model(
    machine: MachineLike = None, run: Run | None = None, family: Iterable[Any] | None = None, **options: Any
) -> Answer:
    """The largest model that fits, in parameters, and its plan: of `family` (models, configs or names), or of generated
    dense decoders. See `largest_batch`."""
    resolved, options = _resolve_machine(machine, options), _with_defaults(options, run)
    return planner.largest_model(resolved, run, family, **_with_compile(options, resolved, run))


def _with_defaults(options: dict[str, Any], run: Run | None = None, searched: str | None = None) -> dict[str, Any]:
    """The options, completed with the defaults of `megatrain.init`. Warns about those without effect."""
    defaults = {name: value for name, value in settings_module.current().chosen().items() if value is not None}
    usable = LIMITS if run is not None else (*LIMITS, *RUN_OPTIONS)
    if unused := [name for name in defaults if name not in (*LIMITS, *RUN_OPTIONS, *NOT_PLAN_OPTIONS)]:
        warn(f"a plan ignores {_format_options(defaults, unused)} of megatrain.init")
    if searched in options:
        warn(f"{_format_options(options, [searched])} has no effect: it is what this call searches for")
    return {name: defaults[name] for name in usable if name in defaults and name != searched} | options


def _format_options(values: Mapping[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"{name}={values[name]!r}" for name in sorted(names))


def _with_compile(options: dict[str, Any], machine: MachineLike, run: Run | None = None) -> dict[str, Any]:
    """The options with `compile` as a run has it: "auto" compiles on a GPU."""
    if run is not None or options.get("compile", "auto") != "auto":
        return options
    return options | {"compile": resolve_machine(machine).gpu is not None}


def _resolve_machine(machine: MachineLike, options: dict[str, Any]) -> MachineLike:
    """The requested machine, else that of `megatrain.init`, else this one, measured."""
    defaults = settings_module.current()
    machine = defaults.machine if machine is None else machine
    device: dict[str, Any] = {} if defaults.device is None else {"device": defaults.device}
    return machine if machine is not None else probe(offload_dir=options.get("offload_dir"), **device)


def resolve_compile(settings: Settings, device: torch.device) -> bool:
    """Whether an engine compiles its layers. Announces why "auto" does not on a GPU."""
    if settings.compile != "auto" or device.type != "cuda":
        return compiles(settings.compile, device.type)
    if (why := missing(device.type)) is not None:
        announce(f"layers run eagerly, not compiled: {why}")
        return False
    return settings.plan is None or bool(settings.plan.run.compile)


def apply_plan(settings: Settings) -> Settings:
    """The settings, completed with those of their plan. Values set by the user take precedence."""
    chosen = settings.plan
    if chosen is None or chosen == "auto":
        if chosen == "auto" and "plan" in settings.given:
            warn("plan='auto' has no effect on an engine without a Trainer; pass plan=megatrain.plan(model, ...)")
        _warn_unplanned(settings, None)
        return settings.override(plan=None)
    if not isinstance(chosen, Plan):
        raise SettingsError(f"plan must be a Plan, as megatrain.plan makes it, not {type(chosen).__name__}.")
    _warn_unplanned(settings, chosen)
    followed = Settings(**chosen.settings()).override(**settings.chosen())
    if other := followed.differing(chosen.settings()):
        warn(f"{_format_options(other, other)} overrides the plan: memory and time will differ from it")
    return followed


def _warn_unplanned(settings: Settings, chosen: Plan | None) -> None:
    """Warn about settings that only affect planning if no plan was made with them."""
    used: set[str] = set()
    if chosen is not None:
        used |= {"length"} if settings.length == chosen.run.length else set()
        used |= {"machine"} if _name(settings.machine) == chosen.machine else set()
    if unused := [name for name in ("length", "machine") if getattr(settings, name) is not None and name not in used]:
        why = "no plan is made here; a Trainer makes one" if chosen is None else "the plan is for something else"
        warn(f"{_format_options(vars(settings), unused)} has no effect: {why}")


def _name(machine: Machine | str | os.PathLike[str] | None) -> str | None:
    return None if machine is None else machine.name if isinstance(machine, Machine) else Machine.load(machine).name
