"""`megatrain.plan`: what a run takes on this machine or another; and an engine that follows a plan."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from typing import Any

from megatrain.engine.probing import probe
from megatrain.errors import SettingsError
from megatrain.hardware.machine import Machine
from megatrain.planner import Plan
from megatrain.planner import plan as solve
from megatrain.settings import Settings
from megatrain.telemetry.notices import announce


def plan(model_or_config: Any, *, machine: Machine | str | os.PathLike[str] | None = None, **options: Any) -> Plan:
    """The fastest plan for a model, a config or a name: where every byte lives, and what a step takes.

    On this machine, which is measured if it has not been, or on a described one: a name of `Machine.shipped()`, the
    path of a description, or a `Machine`. `options`: `batch`, `length`, `accumulation`, `optimizer`, `clipping`,
    `compile`, `evaluation` (tokens in a batch of it), `predictions` (whether its logits are looked at), and
    `max_vram_gb`, `max_ram_gb`, `offload_dir`, `optimizer_compression`, `precision` as in `mt.init`. Raises
    `NotEnoughMemory` with what would make it fit.
    """
    here = machine if machine is not None else probe(offload_dir=options.get("offload_dir"))
    return solve(model_or_config, machine=here, **options)


def follow(settings: Settings) -> Settings:
    """The settings with what their plan decides filled in; what the user has set stays."""
    decided = settings.plan
    if decided is None or decided == "auto":
        return replace(settings, plan=None)
    if not isinstance(decided, Plan):
        raise SettingsError(f"plan must be a Plan, as megatrain.plan makes it, not {type(decided).__name__}.")
    if decided.on_disk:
        raise SettingsError(
            f"the plan puts states of {len(decided.on_disk)} blocks on disk, and the disk tier is not in this version; "
            "plan without offload_dir."
        )
    defaults = {field.name: field.default for field in fields(Settings)}
    announce(f"the plan:\n{decided.table()}")
    chosen = decided.settings()
    return replace(settings, **{name: chosen[name] for name in chosen if getattr(settings, name) == defaults[name]})
