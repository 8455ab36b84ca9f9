"""Checkpoints of an output directory, in the order they were sealed: which one to resume from, and which to delete."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from megatrain import files
from megatrain.checkpoint import adapters, finite, manifest, replace
from megatrain.errors import CheckpointError
from megatrain.hf import stock
from megatrain.telemetry.notices import announce, warn

STATE_FILE = "trainer_state.json"
_NUMBERED = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


@dataclass(frozen=True)
class Found:
    """One checkpoint. `sequence` is its place in the order of sealing; None: it has no valid manifest."""

    path: Path
    step: int
    sequence: int | None
    marked: bool = False


def is_stock(path: Path) -> bool:
    """Whether a stock Trainer wrote this checkpoint."""
    return not (path / manifest.FOLDER).exists() and (path / stock.FILE).is_file()


def require_resumable(path: Path) -> None:
    """Raise a sentence that says what is there, in transformers' own words, unless a run can be resumed from it."""
    if not path.exists():
        raise CheckpointError(f"Can't find a valid checkpoint at {path}: it does not exist.")
    if not path.is_dir():
        raise CheckpointError(f"Can't find a valid checkpoint at {path}: it is a file, not a directory.")
    if (fault := finite.fault(_verified(path))) is not None:
        warn(f"resuming from {path} since it was named, but {fault}")


def _without_states(path: Path) -> str:
    weights = [*path.glob("*.safetensors"), *path.glob("pytorch_model*.bin"), *adapters.found_in(path)]
    if weights and (path / STATE_FILE).is_file():
        return _weights_only(path)
    if weights:
        return (
            f"{path} holds weights, but neither {STATE_FILE} nor an optimizer's state: it is a saved model, or a "
            "checkpoint that was not written to its end. To start from its weights, load the model from it and train "
            "without resume_from_checkpoint."
        )
    listed = sorted(os.listdir(path))
    holds = f"it holds {', '.join(listed[:3])}{'...' if len(listed) > 3 else ''}" if listed else "it is empty"
    return f"Can't find a valid checkpoint at {path}: {holds}."


def _weights_only(path: Path) -> str:
    return (
        f"{path} was saved with save_only_model=True: it holds weights only, no optimizer's state to resume with. To "
        "start from its weights, load the model from it and train without resume_from_checkpoint."
    )


def last_complete(output_dir: str) -> str:
    """The newest checkpoint that a run can be resumed from; what is passed over is named.

    Ours come in the order of sealing. One of a stock Trainer is newer than ours if its step is higher.
    """
    found = _all(output_dir)
    sealed = sorted((f for f in found if f.sequence is not None), key=lambda f: (f.sequence, f.step))
    others = sorted((f for f in found if f.sequence is None), key=lambda f: f.step)
    while sealed or others:
        newest = others if others and (not sealed or others[-1].step > sealed[-1].step) else sealed
        path = newest.pop().path
        try:
            if (fault := finite.fault(_verified(path))) is not None:
                raise CheckpointError(
                    f"{fault}; to use it all the same, name it: resume_from_checkpoint={str(path)!r}."
                )
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
    """The manifest of a checkpoint that can be resumed from; a stock Trainer's has none."""
    if is_stock(path):
        return {}
    if not (path / manifest.FOLDER).exists():
        raise CheckpointError(_without_states(path))
    content = manifest.verify(path)
    if content.get("weights_only"):
        raise CheckpointError(_weights_only(path))
    return content


def _all(run_dir: str | os.PathLike[str]) -> list[Found]:
    found = []
    for name in replace.names(run_dir):
        numbered = _NUMBERED.fullmatch(name)
        path = replace.find(Path(run_dir) / name) if numbered else Path()
        if numbered is None or not path.is_dir():
            continue
        try:
            content = manifest.read(path)
        except (CheckpointError, OSError):
            found.append(Found(path, int(numbered[1]), None))
        else:
            found.append(Found(path, int(numbered[1]), content.get("sequence", 0), finite.fault(content) is not None))
    return found


def rotate(run_dir: str, limit: int | None, keep: Collection[str | None]) -> None:
    """Delete the oldest complete checkpoints until `limit` are left; those in `keep` stay.

    What is not complete neither counts nor is deleted. A marked checkpoint counts only among marked ones, so that it
    pushes out nothing that can be resumed from. A stock Trainer's are older than ours.
    """
    if limit is None or limit <= 0:
        return
    try:
        _rotate(run_dir, limit, keep)
    except OSError as error:
        warn(f"{run_dir} could not be searched for old checkpoints: {error}")


def _rotate(run_dir: str, limit: int, keep: Collection[str | None]) -> None:
    protected = {os.path.realpath(path) for path in keep if path is not None}
    complete = [f for f in _all(run_dir) if f.sequence is not None or _written_by_stock(f.path)]
    complete.sort(key=lambda f: (-1 if f.sequence is None else f.sequence, f.step))
    for marked in (False, True):
        group = [f for f in complete if f.marked == marked]
        spare = [f for f in group if os.path.realpath(f.path) not in protected]
        excess = len(group) - max(limit, len(group) - len(spare))
        for old in spare[: max(0, excess)]:
            _delete(old)


def _written_by_stock(path: Path) -> bool:
    return not (path / manifest.FOLDER).exists() and (path / STATE_FILE).is_file()


def _delete(old: Found) -> None:
    try:
        files.remove_tree(old.path)
    except OSError as error:
        warn(f"{old.path} could not be deleted ({error.strerror}); save_total_limit asks for it")
    else:
        if old.sequence is None:
            announce(f"{old.path}, which a stock Trainer wrote, was deleted: save_total_limit asks for it")
