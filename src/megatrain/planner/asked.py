"""What users ask, in the words of the planner: a machine, a run, and limits."""

from __future__ import annotations

import inspect
import os
from typing import Any

from megatrain.errors import SettingsError, UnknownSetting
from megatrain.hardware.machine import Machine, Reach
from megatrain.planner.run import Run
from megatrain.planner.search import OffloadDir
from megatrain.settings import Settings

LIMITS = ("max_vram_gb", "max_ram_gb", "offload_dir", "reach")


def machine_of(machine: Machine | str | os.PathLike[str] | None) -> Machine:
    """A machine, by its name or the path of a description if it is not one."""
    if machine is None:
        raise SettingsError(
            "a plan needs a machine: pass machine=mt.probe() for this one, the path of a description, or one of "
            f"{', '.join(Machine.shipped())}."
        )
    return machine if isinstance(machine, Machine) else Machine.load(machine)


def run_of(
    loaded: str,
    *,
    batch: int = 1,
    length: int = 2048,
    accumulation: int = 1,
    together: bool = True,
    optimizer: str = "adamw",
    clipping: bool = True,
    evaluation: int = 0,
    predictions: bool = True,
    head_chunk: int | None = None,
    trainer: bool = False,
    padded: bool = False,
    optimizer_compression: bool | str = False,
    precision: str | None = None,
    compile: bool = False,
    max_vram_gb: float | None = None,
    max_ram_gb: float | None = None,
    offload_dir: OffloadDir | None = None,
    reach: Reach | None = None,
) -> tuple[Run, dict[str, Any]]:
    """The run and the limits of a model that was loaded in some precision."""
    # Checked as everywhere else: unknown values are refused by the same sentences.
    Settings(max_vram_gb=max_vram_gb, max_ram_gb=max_ram_gb, precision=precision)
    run = Run(
        micro_batch=batch, length=length, accumulation=accumulation, precision=precision or loaded,
        optimizer_compression=optimizer_compression, kind=optimizer, compile=compile, clipping=clipping,
        evaluation=evaluation, predictions=predictions, head_chunk=head_chunk,
        trainer=trainer, padded=padded, together=together,
    )  # fmt: skip
    limits = {"max_vram_gb": max_vram_gb, "max_ram_gb": max_ram_gb, "offload_dir": offload_dir, "reach": reach}
    return run, limits


OPTIONS = tuple(inspect.signature(run_of).parameters)[1:]
"""What `plan` and the inverse questions take beside a model and a machine."""


def run_or(run: Run | None, loaded: str, options: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
    """A run that was given, with limits beside it; or the one that the options describe."""
    if unknown := [name for name in options if name not in OPTIONS]:
        raise UnknownSetting(f"unknown option {', '.join(unknown)}; a plan takes {', '.join(OPTIONS)}.")
    if run is None:
        return run_of(loaded, **options)
    if not isinstance(run, Run):
        raise SettingsError(f"run must be a Run, or left out, not {type(run).__name__}.")
    if twice := [name for name in options if name not in LIMITS]:
        raise SettingsError(f"{', '.join(twice)} cannot be given beside a run: set them in it, or leave it out.")
    return run, run_of(loaded, **options)[1]
