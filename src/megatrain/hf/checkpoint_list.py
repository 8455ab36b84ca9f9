"""The checkpoints of an output directory, oldest first: which one to resume from, and which to delete."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from megatrain import files
from megatrain.checkpoint import adapters, finite, manifest, replace
from megatrain.errors import CheckpointError
from megatrain.telemetry.notices import announce, warn

STATE_FILE = "trainer_state.json"
STOCK_STATES = "optimizer.pt"
"""The optimizer's state as a stock Trainer reads and writes it."""
_NUMBERED = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint. `sequence` orders complete checkpoints by age; None: it has no valid manifest."""

    path: Path
    step: int
    sequence: int | None
    marked: bool
    """Whether it holds NaN or infinite values."""


def require_resumable(path: Path) -> None:
    """Raise unless a run can be resumed from it. The message starts as that of transformers does."""
    if not path.is_dir():
        what = "is a file, not a directory" if path.exists() else "does not exist"
        raise CheckpointError(f"Can't find a valid checkpoint at {path}: it {what}.")
    if (fault := finite.fault(_verified(path))) is not None:
        warn(f"resuming from {path} as requested, although {fault}")


def last_complete(output_dir: str) -> str:
    """The newest checkpoint that a run can be resumed from. Skipped ones are named in a warning.

    MegaTrain's are ordered by sequence. One of a stock Trainer is newer than these if its step is higher.
    """
    found = _all(output_dir)
    sealed = [f for f in found if f.sequence is not None]
    others = [f for f in found if f.sequence is None]
    while sealed or others:
        newest = others if others and (not sealed or others[-1].step > sealed[-1].step) else sealed
        path = newest.pop().path
        try:
            if (fault := finite.fault(_verified(path))) is not None:
                raise CheckpointError(f"{fault}; to use it anyway, pass resume_from_checkpoint={str(path)!r}.")
        except (CheckpointError, OSError) as reason:
            warn(f"{path.name} was skipped: {reason}")
        else:
            return str(path)
    numbers = f"{len(found)} that cannot be resumed from" if found else "no checkpoint at all"
    raise CheckpointError(
        f"No valid checkpoint found in output directory ({output_dir}), which holds {numbers}; "
        "resume_from_checkpoint=True needs one."
    )


def _verified(path: Path) -> dict[str, object]:
    """Check a checkpoint; returns its manifest, which is empty for that of a stock Trainer."""
    if (path / manifest.FOLDER).exists():
        content = manifest.verify(path)
        if not content.get("weights_only"):
            return content
        complete = True
    elif (path / STOCK_STATES).is_file():
        return {}
    elif any((*path.glob("*.safetensors"), *path.glob("pytorch_model*.bin"), *adapters.found_in(path))):
        complete = (path / STATE_FILE).is_file()
    else:
        listed = sorted(os.listdir(path))
        holds = f"it holds {', '.join(listed[:3])}{'...' if len(listed) > 3 else ''}" if listed else "it is empty"
        raise CheckpointError(f"Can't find a valid checkpoint at {path}: {holds}.")
    raise CheckpointError(
        (
            f"{path} was saved with save_only_model=True: it has weights but no optimizer state to resume from. "
            if complete
            else f"{path} has weights, but neither {STATE_FILE} nor an optimizer state: it is a saved model, or an "
            "incomplete checkpoint. "
        )
        + "To start from its weights, load the model from it and train without resume_from_checkpoint."
    )


def _all(run_dir: str) -> list[SavedCheckpoint]:
    """All checkpoints, oldest first. Those without a valid manifest come first, ordered by step."""
    found = []
    for name in replace.names(run_dir):
        numbered = _NUMBERED.fullmatch(name)
        if numbered and (path := replace.find(Path(run_dir) / name)).is_dir():
            sequence, marked = None, False
            with suppress(CheckpointError, OSError):
                content = manifest.read(path)
                sequence, marked = content.get("sequence", 0), finite.fault(content) is not None
            found.append(SavedCheckpoint(path, int(numbered[1]), sequence, marked))
    return sorted(found, key=lambda f: (-1 if f.sequence is None else f.sequence, f.step))


def rotate(run_dir: str, limit: int | None, keep: Collection[str | None]) -> None:
    """Delete the oldest complete checkpoints until `limit` remain. Those in `keep` stay.

    What is not complete neither counts nor is deleted. A marked checkpoint counts only among marked ones, so that it
    pushes out nothing that can be resumed from. A stock Trainer's are older than ours.
    """
    if limit is None or limit <= 0:
        return
    try:
        complete = [f for f in _all(run_dir) if f.sequence is not None or _written_by_stock(f.path)]
    except OSError as error:
        warn(f"{run_dir} could not be searched for old checkpoints: {error}")
        return
    protected = {os.path.realpath(path) for path in keep if path is not None}
    for marked in (False, True):
        group = [f for f in complete if f.marked == marked]
        spare = [f for f in group if os.path.realpath(f.path) not in protected]
        for old in spare[: max(0, len(group) - limit)]:
            try:
                files.remove_tree(old.path)
            except OSError as error:
                warn(
                    f"{old.path} could not be deleted ({error.strerror}), as save_total_limit requires; delete it by "
                    "hand"
                )
            else:
                if old.sequence is None:
                    announce(f"{old.path}, which a stock Trainer wrote, was deleted, as save_total_limit requires")


def _written_by_stock(path: Path) -> bool:
    return not (path / manifest.FOLDER).exists() and (path / STATE_FILE).is_file()
