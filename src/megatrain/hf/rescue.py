"""After the drive of the optimizer states has failed, a Trainer saves the weights that can still be read.

They go to `rescue-<step>`, an ordinary Hugging Face directory that no run resumes from: it has no optimizer states, and
some parts of the model may have taken a step that others have not. `rescue.json` in it says which, and which weights
are rounded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from megatrain import files
from megatrain.checkpoint import adapters, lock, replace, space
from megatrain.checkpoint.weights import without_aliases
from megatrain.engine.session import Engine
from megatrain.errors import DiskFailed, DiskFull
from megatrain.telemetry.notices import listed, warn

PREFIX = "rescue"
REPORT = "rescue.json"


def rescue(trainer: Any, error: BaseException) -> None:
    """Save the weights if the error is that of a drive and they are not in a checkpoint. Never raises: if it fails, a
    note of the error says why."""
    stop, step = trainer._ram_stop, trainer.state.global_step
    if not _drive_failed(error) or not _trained(trainer.engine):
        return
    if stop.sealed is not None and stop.sealed[0] == step and not stop.moved:
        return
    folder = os.path.join(trainer._get_output_dir(trial=trainer._trial), f"{PREFIX}-{step}")
    try:
        survivors = trainer.engine.survivors()
        if lost := survivors.lost(_written(trainer)):
            error.add_note(
                f"megatrain: no weights were saved, since those of {len(lost)} parts of the model ({listed(lost)}) "
                "are on the drive and cannot be read; resume from the last checkpoint."
            )
            return
        _save(trainer, folder, survivors, error)
    except Exception as failure:
        said = space.fault_of(failure) or str(failure) or type(failure).__name__
        error.add_note(f"megatrain: the weights in memory could not be saved in {folder}: {said.rstrip('.')}.")
        return
    rounded = ""
    if survivors.rounded:
        rounded = (
            f"; weights of {len(survivors.rounded)} parts ({listed(survivors.rounded)}) are rounded to BF16, since "
            "the rest of their FP32 values could not be read"
        )
    warn(
        f"the weights in memory were saved in {folder}, without optimizer states: {_progress(trainer.engine)}"
        f"{rounded}; {REPORT} in it has the details, from_pretrained loads it, and resume_from_checkpoint=True uses "
        "the last checkpoint"
    )


def _written(trainer: Any) -> Iterable[Any]:
    """The slabs that are saved: of a model with adapters, those of the adapters alone."""
    if not getattr(trainer.model, "peft_config", None):
        return list(trainer.engine.slabs)
    return {target.slab.index: target.slab for target in adapters.targets(trainer.model)}.values()


def _save(trainer: Any, folder: str, survivors: Any, error: BaseException) -> None:
    state = survivors.exported(trainer.model.state_dict())
    if not hasattr(trainer.model, "save_pretrained"):
        state = without_aliases(state)
    with ExitStack() as lasting:
        lasting.callback(lock.acquire(os.path.dirname(folder)))
        replacement = lasting.enter_context(replace.replacing(folder))
        space.require(replacement.fresh, space.needed(trainer.model, state, None))
        trainer._save(str(replacement.fresh), state)
        report = {
            "error": str(error),
            "global_step": trainer.state.global_step,
            "optimizer_steps": _steps(trainer.engine),
            "rounded_to_bf16": survivors.rounded,
        }
        files.write(replacement.fresh / REPORT, json.dumps(report, indent=2) + "\n")
        files.sync_tree(replacement.fresh, files.regular_files(replacement.fresh))
        replacement.commit()


def _drive_failed(error: BaseException | None) -> bool:
    """Whether a drive failed during training. `DiskFull` comes before it."""
    while error is not None:
        if isinstance(error, DiskFailed):
            return not isinstance(error, DiskFull)
        error = error.__cause__
    return False


def _steps(engine: Engine) -> dict[str, int]:
    """Optimizer steps of each part of the model that trains."""
    return {slab.name: max(slab.steps) for slab in engine.slabs if slab.trains}


def _trained(engine: Engine) -> bool:
    return any(_steps(engine).values())


def _progress(engine: Engine) -> str:
    steps = _steps(engine)
    last = max(steps.values())
    behind = [name for name, count in steps.items() if count < last]
    if not behind:
        return f"all parts of the model have taken step {last}"
    taken = len(steps) - len(behind)
    return f"{taken} of {len(steps)} parts of the model have taken step {last}, not {listed(behind)}"
