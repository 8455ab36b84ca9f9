"""`megatrain.plan`: what a run takes on this machine or another; and an engine that follows a plan."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from megatrain import planner
from megatrain.engine.probing import probe
from megatrain.errors import SettingsError
from megatrain.hardware.machine import Machine
from megatrain.planner import Answer, Plan, Run
from megatrain.settings import Settings
from megatrain.telemetry.notices import announce

MachineLike = Machine | str | os.PathLike[str] | None


def plan(model_or_config: Any, *, machine: MachineLike = None, **options: Any) -> Plan:
    """The fastest plan for a model, a config or a name: where every byte lives, and what a step takes.

    On this machine, which is measured if it has not been, or on a described one: a name of `Machine.shipped()`, the
    path of a description, or a `Machine`. `options`: `batch`, `length`, `accumulation`, `together` (whether its
    micro-batches may pass a block together), `optimizer`, `clipping`, `padded` (sequences of a batch differ in length),
    `evaluation` (tokens in a batch of it), `predictions` (whether its logits are looked at), and `max_vram_gb`,
    `max_ram_gb`, `offload_dir`, `optimizer_compression`, `precision`, `compile`, `head_chunk` (0 for a loss that looks
    at logits) as in `mt.init`. Raises `NotEnoughMemory` with what would make it fit.
    """
    return planner.plan(model_or_config, machine=_here(machine, options), **options)


def largest_batch(model_or_config: Any, machine: MachineLike = None, run: Run | None = None, **options: Any) -> Answer:
    """The most sequences in a micro-batch that fit, as `value`, and the plan for them, as `plan`.

    For a model, a config or a name, on this machine or another, with the options of `megatrain.plan`; `batch` is what
    is looked for. Raises `NotEnoughMemory` if not even one fits.
    """
    return planner.largest_batch(model_or_config, _here(machine, options), run, **options)


def largest_context(
    model_or_config: Any, machine: MachineLike = None, run: Run | None = None, **options: Any
) -> Answer:
    """The same for the most tokens in a sequence, in multiples of 64."""
    return planner.largest_context(model_or_config, _here(machine, options), run, **options)


def largest_model(
    machine: MachineLike = None, run: Run | None = None, family: Iterable[Any] | None = None, **options: Any
) -> Answer:
    """The same for the most parameters: of a family (models, configs or names), or of dense decoders made up for it."""
    return planner.largest_model(_here(machine, options), run, family, **options)


def _here(machine: MachineLike, options: dict[str, Any]) -> MachineLike:
    """The machine that was asked for, or this one as it was measured."""
    return machine if machine is not None else probe(offload_dir=options.get("offload_dir"))


def follow(settings: Settings) -> Settings:
    """The settings with what their plan decides filled in; what the user has set stays."""
    decided = settings.plan
    if decided is None or decided == "auto":
        return settings.override(plan=None)
    if not isinstance(decided, Plan):
        raise SettingsError(f"plan must be a Plan, as megatrain.plan makes it, not {type(decided).__name__}.")
    if decided.on_disk:
        raise SettingsError(
            f"the plan puts states of {len(decided.on_disk)} blocks on disk, and the disk tier is not in this version; "
            "plan without offload_dir."
        )
    announce(f"the plan:\n{decided.table()}")
    return settings.override(**decided.settings() | settings.chosen())
