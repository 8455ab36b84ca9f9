"""What a Trainer does when memory runs out: retry the step with less GPU memory, or save a checkpoint and stop. It also
stops when the run has written as much to disk as it may.

A retried step has the same result to the bit: gradients are dropped, random generators are restored, and only what is
kept on the GPU changes: first stored graphs, then held state (engine/memory_limit.py).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from megatrain import files
from megatrain.engine.session import Engine
from megatrain.errors import DriveLimit, MegaTrainError, OutOfRam
from megatrain.generators import Generators
from megatrain.telemetry.notices import warn

Result = TypeVar("Result")


def retry_after_oom(engine: Engine, zero_grad: Callable[[], None], work: Callable[[], Result]) -> tuple[Result, bool]:
    """Run the work of a step. If the GPU runs out of memory, undo it and retry with less.

    Returns the result, and whether the retry was needed.
    """
    clean = not any(slab.grad.present for slab in engine.slabs)
    versions = [slab.version for slab in engine.slabs]
    buffers = [(name, buffer, buffer._version) for name, buffer in engine.model.named_buffers()]
    generators = Generators.capture(engine.device)

    def obstacle() -> str | None:
        """Why the step cannot be undone; None: it can."""
        if not clean:
            return "gradients of earlier micro-batches had been summed already"
        if versions != [slab.version for slab in engine.slabs]:
            return "updates had started in its backward, so that some weights have moved"
        now = dict(engine.model.named_buffers())
        for name, buffer, version in buffers:
            if now.get(name) is not buffer or buffer._version != version:
                return f"its forward had changed the buffer {name}"
        if engine.memory_limit.exhausted:
            return "blocks already keep nothing on the GPU for their backward; use fewer tokens at a time"
        return None

    try:
        return work(), False
    except torch.OutOfMemoryError as error:
        if (reason := obstacle()) is not None:
            error.add_note(f"megatrain: the step could not be done again, since {reason}.")
            raise
        # Running copies still write to memory that is freed with the error.
        engine.quiesce()
        said = str(error).split(". ")[0]
    # The error is freed by now, and with it the frames that held the failed step's tensors.
    zero_grad()
    generators.restore()
    _free(engine)
    warn(
        f"{said}: the step was undone and is repeated with less kept on the GPU, which is slower and gives the "
        "same bits; use fewer tokens per micro-batch if this continues"
    )
    with engine.memory_limit.with_less_memory():
        return work(), True


def grad_norm_with_retry(engine: Engine) -> float:
    """The gradient norm. If the GPU runs out of memory, free what can be freed and retry.

    For the retry all lanes are idle, caches are empty and the plan's limit is lifted.
    """
    try:
        return engine.grad_norm()
    except torch.OutOfMemoryError as error:
        engine.quiesce()
        said = str(error).split(". ")[0]
    _free(engine)
    warn(f"{said}: the gradient norm is computed again, after cached memory was freed")
    engine.memory_limit.apply(False)
    try:
        return engine.grad_norm()
    finally:
        engine.memory_limit.apply()


def _free(engine: Engine) -> None:
    gc.collect()
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()


def _check_room(engine: Engine, args: Any, state: Any) -> None:
    """Warn if what is on disk leaves no room for the checkpoints that the run adds."""
    if (held := engine.drive.held) is None:
        return
    each = 0
    for slab in engine.slabs:
        each += sum(s.numel * dtype.itemsize for s, dtype in zip(slab.layout.segments, slab.saved, strict=True))
        each += sum(buffer.nbytes for buffer in slab.state_buffers())
    count, free = _added_checkpoints(args, state), files.free_bytes(args.output_dir)
    if free < count * each:
        warn(
            f"a checkpoint takes about {each / 1e9:.3g} GB, and the run adds up to {count} before it deletes one, but "
            f"{free / 1e9:.3g} GB are free in {args.output_dir}, beside the {held / 1e9:.3g} GB of state "
            "on disk: saving will fail unless there is more by then; save_total_limit keeps fewer"
        )


def _added_checkpoints(args: Any, state: Any) -> int:
    """How many checkpoints a run adds at most. An old one is deleted after the new one is complete."""
    every = {"steps": state.save_steps, "epoch": state.max_steps / max(1, state.num_train_epochs)}
    left = state.max_steps - state.global_step
    saves = int(left // (every.get(args.save_strategy) or left or 1))
    if args.save_total_limit is not None:
        there = len([*Path(args.output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")])
        saves = min(saves, args.save_total_limit + 1 - there)
    return max(1, saves)


class RamStop(TrainerCallback):
    """Stops a run at the end of a step, with a checkpoint, when RAM is running out or `max_drive_tb` is reached."""

    def __init__(self, engine: Callable[[], Engine]) -> None:
        self._engine = engine
        self.reason: str | None = None
        self.error: type[MegaTrainError] = OutOfRam
        """What `check` raises."""
        self.sealed: tuple[int, str] | None = None
        """Step and directory of the last checkpoint of this run that can be resumed."""
        self._versions: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.reason = self.sealed = None
        self.error = OutOfRam
        self._engine().drive.forecast(state.max_steps - state.global_step)
        if args.save_strategy != "no":
            _check_room(self._engine(), args, state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._versions = [slab.version for slab in self._engine().slabs]

    @property
    def moved(self) -> bool:
        """Whether weights have changed since the last step began. Updates may start in its backward."""
        return self._versions != [slab.version for slab in self._engine().slabs]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._versions = [slab.version for slab in self._engine().slabs]
        # After the last step nothing needs RAM.
        if state.global_step < state.max_steps:
            self.reason = self._engine().ram.short()
            if self.reason is None and (spent := self._engine().drive.spent()) is not None:
                self.reason, self.error = spent, DriveLimit
        if self.reason is not None:
            control.should_save = control.should_training_stop = True

    def check(self) -> None:
        """Raise `OutOfRam` or `DriveLimit` if the run was stopped."""
        reason, self.reason = self.reason, None
        if reason is None:
            return
        remedy = "free memory" if self.error is OutOfRam else "raise max_drive_tb"
        if self.sealed is None:
            raise self.error(
                f"{reason}, so the run was stopped; no checkpoint was saved, since this Trainer overrides saving. "
                f"Weights and optimizer states are intact: save them, then {remedy}."
            )
        step, folder = self.sealed
        raise self.error(
            f"{reason}, so the run was stopped after step {step} and saved in {folder}; {remedy}, then "
            f"train(resume_from_checkpoint={folder!r})."
        )
