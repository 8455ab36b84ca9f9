"""What users ask before there is an engine: `megatrain.init`, `probe`, `plan` and what fits; and following a plan."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from megatrain import planner
from megatrain import settings as settings_module
from megatrain.errors import SettingsError
from megatrain.hardware import inventory
from megatrain.hardware import probe as hardware_probe
from megatrain.hardware.machine import Machine
from megatrain.optim.update import update_rates
from megatrain.planner import Answer, Plan, Run
from megatrain.settings import Settings
from megatrain.telemetry.notices import warn

MachineLike = Machine | str | os.PathLike[str] | None
LIMITS = ("max_vram_gb", "max_ram_gb")
RUN_OPTIONS = ("optimizer_compression", "precision", "compile", "head_chunk", "length")
NOT_PLAN_OPTIONS = ("machine", "device", "plan", "record")
"""Settings that are no option of a plan, and do not contradict one."""
_UNSET: Any = object()


def init(
    offload_dir: Any = _UNSET, max_vram_gb: Any = _UNSET, optimizer_compression: Any = _UNSET, **more: Any
) -> Settings:
    """Set the defaults of every engine and trainer made from here on; returns them.

    `more` are the other fields of `Settings`. Values are checked here; what the hardware makes of them is announced
    when an engine is attached. A second call replaces the first.
    """
    inventory.refuse_distributed()
    first = {"offload_dir": offload_dir, "max_vram_gb": max_vram_gb, "optimizer_compression": optimizer_compression}
    settings = Settings().override(**{name: value for name, value in first.items() if value is not _UNSET}, **more)
    if settings.machine is not None and not isinstance(settings.machine, Machine):
        Machine.load(settings.machine)  # a name that is not there is refused now, not after the model has been loaded
    inventory.choose_device(settings.device)
    settings_module.store(settings)
    return settings


def probe(*, device: str | None = None, offload_dir: Any = None, refresh: bool = False) -> Machine:
    """Describe this machine: what this process may use of it, and how fast that is, measured in under 20 seconds.

    What was measured before is read from the cache unless `refresh`. The speed of a disk is measured only for the
    directories in `offload_dir`.
    """
    rates = partial(update_rates, threads=inventory.update_threads())
    return hardware_probe.probe(device=device, offload_dir=offload_dir, refresh=refresh, update_rates=rates)


def plan(model_or_config: Any, *, machine: MachineLike = None, **options: Any) -> Plan:
    """The fastest plan for a model, a config or a name: where every byte lives, and what a step takes.

    On this machine, which is measured if it has not been, or on a described one: a name of `Machine.shipped()`, the
    path of a description, or a `Machine`. `options`: `batch`, `length`, `accumulation`, `together` (whether its
    micro-batches may pass a block together), `optimizer`, `clipping`, `padded` (sequences of a batch differ in length),
    `evaluation` (tokens in a batch of it), `predictions` (whether its logits are looked at), and `max_vram_gb`,
    `max_ram_gb`, `offload_dir`, `optimizer_compression`, `precision`, `compile`, `head_chunk` (0 for a loss that looks
    at logits) as in `mt.init`. What is left out is as `mt.init` was given it, but for `offload_dir`. Raises
    `NotEnoughMemory` with what would make it fit.
    """
    return planner.plan(model_or_config, machine=_resolve_machine(machine, options), **_with_defaults(options))


def plan_for_trainer(model: Any, machine: MachineLike, **options: Any) -> Plan:
    """The same with these options alone."""
    return planner.plan(model, machine=_resolve_machine(machine, options), **options)


def largest_batch(model_or_config: Any, machine: MachineLike = None, run: Run | None = None, **options: Any) -> Answer:
    """The most sequences in a micro-batch that fit, as `value`, and the plan for them, as `plan`.

    For a model, a config or a name, on this machine or another, with the options of `megatrain.plan`; `batch` is what
    is looked for. Raises `NotEnoughMemory` if not even one fits.
    """
    options = _with_defaults(options, run, "batch")
    return planner.largest_batch(model_or_config, _resolve_machine(machine, options), run, **options)


def largest_context(
    model_or_config: Any, machine: MachineLike = None, run: Run | None = None, **options: Any
) -> Answer:
    """The same for the most tokens in a sequence, in multiples of 64."""
    options = _with_defaults(options, run, "length")
    return planner.largest_context(model_or_config, _resolve_machine(machine, options), run, **options)


def largest_model(
    machine: MachineLike = None, run: Run | None = None, family: Iterable[Any] | None = None, **options: Any
) -> Answer:
    """The same for the most parameters: of a family (models, configs or names), or of dense decoders made up for it."""
    return planner.largest_model(_resolve_machine(machine, options), run, family, **_with_defaults(options, run))


def _with_defaults(options: dict[str, Any], run: Run | None = None, searched: str | None = None) -> dict[str, Any]:
    """The options of a question, completed by what `megatrain.init` was given; what has no effect is named."""
    given = {name: value for name, value in settings_module.current().chosen().items() if value is not None}
    usable = LIMITS if run is not None else (*LIMITS, *RUN_OPTIONS)
    if unused := [name for name in given if name not in (*LIMITS, *RUN_OPTIONS, *NOT_PLAN_OPTIONS)]:
        warn(f"{_format_options(given, unused)} of megatrain.init: a plan does not take this into account")
    if searched in options:
        warn(f"{_format_options(options, [searched])} has no effect: it is what is looked for")
    return {name: given[name] for name in usable if name in given and name != searched} | options


def _format_options(values: Mapping[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"{name}={values[name]!r}" for name in sorted(names))


def _resolve_machine(machine: MachineLike, options: dict[str, Any]) -> MachineLike:
    """The machine that was asked for, here or in `megatrain.init`; or this one as it was measured."""
    asked = settings_module.current()
    machine = asked.machine if machine is None else machine
    device: dict[str, Any] = {} if asked.device is None else {"device": asked.device}
    return machine if machine is not None else probe(offload_dir=options.get("offload_dir"), **device)


def apply_plan(settings: Settings) -> Settings:
    """The settings with what their plan decides filled in; what the user has set stays."""
    decided = settings.plan
    if decided is None or decided == "auto":
        if decided == "auto" and "plan" in settings.given:
            warn("plan='auto' has no effect on an engine without a Trainer; pass plan=megatrain.plan(model, ...)")
        _warn_unplanned(settings, None)
        return settings.override(plan=None)
    if not isinstance(decided, Plan):
        raise SettingsError(f"plan must be a Plan, as megatrain.plan makes it, not {type(decided).__name__}.")
    if decided.on_disk:
        raise SettingsError(
            f"the plan puts states of {len(decided.on_disk)} blocks on disk, and the disk tier is not in this version; "
            "plan without offload_dir."
        )
    _warn_unplanned(settings, decided)
    followed = Settings(**decided.settings()).override(**settings.chosen())
    if other := followed.differing(decided.settings()):
        warn(f"{_format_options(other, other)} overrides the plan: memory and time will not be as planned")
    return followed


def _warn_unplanned(settings: Settings, decided: Plan | None) -> None:
    """Settings that say what to plan with have no effect if no plan is made."""
    used: set[str] = set()
    if decided is not None:
        used |= {"length"} if settings.length == decided.run.length else set()
        used |= {"machine"} if _name(settings.machine) == decided.machine else set()
    if unused := [name for name in ("length", "machine") if getattr(settings, name) is not None and name not in used]:
        why = "no plan is made here; a Trainer makes one" if decided is None else "a plan for something else was given"
        warn(f"{_format_options(vars(settings), unused)} has no effect: {why}")


def _name(machine: Machine | str | os.PathLike[str] | None) -> str | None:
    return None if machine is None else machine.name if isinstance(machine, Machine) else Machine.load(machine).name
