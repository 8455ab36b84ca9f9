"""Saves and loads the checkpoints of a Trainer. A checkpoint is complete or does not exist."""

from __future__ import annotations

import gc
import os
import re
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.utils._pytree import tree_map
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from megatrain import files
from megatrain.checkpoint import lock, manifest, replace, space, states, weights
from megatrain.engine.kernels import check_resume, facts_of_run
from megatrain.errors import CheckpointError, DirectoryInUse, MegaTrainError, OutOfRam
from megatrain.hf.checkpoint_list import STOCK_STATES, rotate
from megatrain.hf.optimizers import Optimizing, changed
from megatrain.hf.progress import RunRecord
from megatrain.hf.recovery import RamStop
from megatrain.hf.sigterm import EvaluationCut, Termination
from megatrain.optim.optimizer import Optimizer
from megatrain.telemetry.notices import announce, warn

SCHEDULER_FILE = "scheduler.pt"
BEST = ("best_metric", "best_global_step", "best_model_checkpoint")
STOCK: dict[str, Any] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
"""Kinds whose state a stock Trainer can load."""
STOCK_BYTES = 256 << 20
"""States up to this size (small models, adapters) are also written in the format of a stock Trainer."""
ONE_SAVE = re.compile(r"(optimizer|scheduler)\.pt|rng_state[^/]*\.pth")
"""Files of a Trainer's checkpoint that belong to one save."""


class Checkpoints(Optimizing):
    """The part of `MegaMixin` that saves and loads."""

    control: Any
    callback_handler: Any
    _ram_stop: RamStop
    _termination: Termination
    run_record: RunRecord
    _failure: tuple[int, str] | None = None
    """Step and message of the last failed save, until one succeeds."""

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None and not hasattr(self.model, "save_pretrained"):
            state_dict = weights.without_aliases(self.engine.host_state_dict())
        super()._save(output_dir, state_dict)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save and sync the model. Files of a checkpoint are synced later, when it is sealed."""
        if not self.engine.closed:
            self.engine.ready_to_save()
        super().save_model(output_dir, _internal_call)
        directory = Path(output_dir or self.args.output_dir)
        if not _internal_call and directory.is_dir():
            for path in directory.iterdir():
                if path.is_file() and not path.is_symlink():
                    files.sync(path)
            files.sync_directory(directory)
            files.sync_names(directory)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint, seal it, and only then delete older ones, so that a complete one always exists.

        A run that stops early saves a resumable checkpoint even with save_only_model. If the disk fails, the incomplete
        checkpoint is deleted and SaveFailed is raised.
        """
        if self._ending and not self._unsaved:
            # The end of an epoch may save again. A complete checkpoint is not put at risk while RAM is short.
            return
        run_dir = self._get_output_dir(trial=trial)
        folder = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        try:
            with ExitStack() as lasting:
                lasting.callback(lock.acquire(run_dir))
                self._write_checkpoint(model, trial, folder)
                keep = (folder, self.state.best_model_checkpoint)
                rotate(run_dir, self.args.save_total_limit, keep)
        except (DirectoryInUse, OSError, RuntimeError, SafetensorError) as error:
            reason = str(error) if isinstance(error, DirectoryInUse | space.NoRoom) else space.fault_of(error)
            if reason is None:
                raise
            raise SaveFailed(f"{folder} could not be saved: {reason.rstrip('.')}.") from error
        self._failure = None

    def _write_checkpoint(self, model: Any, trial: Any, folder: str) -> None:
        resumable = self._ending or not self.args.save_only_model
        optimizer = self._own_optimizer() if resumable else None
        self.engine.ready_to_save()
        stopwatch = files.Stopwatch()
        nbytes = space.needed(self.model, self.engine.host_state_dict(), optimizer)
        space.require(folder, nbytes + (_stock_bytes(optimizer) if optimizer is not None else 0))
        # It may exist already: from an earlier run, or from this step (the end of an epoch saves too).
        with replace.rewriting(folder) as before:
            try:
                with changed(self.args, save_total_limit=None, save_only_model=not resumable):
                    super()._save_checkpoint(model, trial)
                listed = replace.carry(before, Path(folder), ONE_SAVE)
                nbytes = states.seal(self.model, optimizer, folder, listed, facts_of_run(self.engine))
            except BaseException:
                with suppress(OSError):
                    files.remove_tree(folder)
                raise
        if resumable:
            self._ram_stop.sealed = (self.state.global_step, folder)
        announce(stopwatch.report(os.path.basename(folder), nbytes))
        self.run_record.saved(folder, stopwatch.seconds)

    @property
    def _ending(self) -> bool:
        """Whether the run is stopping before its last step."""
        return self._ram_stop.reason is not None or self._termination.requested

    @property
    def _unsaved(self) -> bool:
        """Whether the current step has no resumable checkpoint yet."""
        return self._ram_stop.sealed is None or self._ram_stop.sealed[0] != self.state.global_step

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        best = {name: getattr(self.state, name) for name in BEST}
        try:
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **kwargs)
        except SaveFailed as failure:
            # The best model must be one that exists.
            self.state.__dict__.update(best)
            self._go_on_after(failure)
        except EvaluationCut:
            self.control.should_evaluate = False
            warn("SIGTERM: the evaluation was stopped early")
        except OutOfRam:
            self._save_if_ending(model, trial)
            raise
        self._save_if_ending(model, trial)

    def _stop_with_a_checkpoint(self, error: MegaTrainError) -> None:
        """A step did not fit in RAM and did not run: save the state of the previous steps, then raise."""
        step = self.state.global_step
        if step == 0:
            return
        if self._ram_stop.moved and self._unsaved:
            error.add_note(
                f"megatrain: no checkpoint of step {step} was saved, since updates of the step after it had started; "
                "resume from the one before."
            )
            return
        try:
            self.engine.ready_to_save()
            self.optimizer.zero_grad()
            gc.collect()
            self._ram_stop.reason = str(error).partition(";")[0]
            self._save_if_ending(self.model, self._trial)
        except MegaTrainError as obstacle:
            self._ram_stop.reason = None
            error.add_note(f"megatrain: no checkpoint of step {step} was saved, since {obstacle}")
            return
        self._ram_stop.check()

    def _save_if_ending(self, model: Any, trial: Any) -> None:
        """Save if the run is stopping, even if save_strategy="best" would skip this checkpoint."""
        if not self._ending:
            return
        self.control.should_training_stop = True
        failed_here = self._failure is not None and self._failure[0] == self.state.global_step
        if self._unsaved and not failed_here:
            try:
                self._save_checkpoint(model, trial)
            except SaveFailed as failure:
                self._go_on_after(failure)
            else:
                self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _go_on_after(self, failure: SaveFailed) -> None:
        self._failure = (self.state.global_step, str(failure))
        # `on_save` is not called, so no callback resets this.
        self.control.should_save = False
        rest = "" if self._ending else "; training goes on, and the next save tries again"
        warn(f"{str(failure).rstrip('.')}{rest}")

    def _check_last_save(self) -> None:
        """Raise if the last checkpoint of a run could not be saved, so that the process does not end normally."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(
                f"the run ended after step {self.state.global_step}, but its last checkpoint is missing: "
                f"{failure[1]} The trained weights are in memory: free some disk space, then call save_model()."
            )

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        # With save_total_limit=1 all checkpoints but the best are deleted here.
        unfinished = self._ending or self._failure is not None
        with changed(self.args, save_total_limit=None) if unfinished else nullcontext():
            return super()._finalize_training(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        path = os.path.join(output_dir, SCHEDULER_FILE)
        files.before("write", path)
        torch.save(self.lr_scheduler.state_dict(), path)
        optimizer, ram = self._own_optimizer(), self.engine.ram
        states.save_optimizer(self.model, optimizer, output_dir, ram.portion(states.SHARD_BYTES))
        if 0 < _stock_bytes(optimizer) <= ram.portion(STOCK_BYTES):
            # If this file reached the disk before MegaTrain's directory, it would look like a stock checkpoint.
            files.sync_directory(output_dir)
            path = os.path.join(output_dir, STOCK_STATES)
            files.before("write", path)
            defaults = STOCK[optimizer.kind]([torch.empty(0)]).defaults
            state = optimizer.state_dict()
            groups = [defaults | group for group in state["param_groups"]]
            # No residuals: the saved weights have both halves of a master. torch has no state before the first step.
            stepped = {
                number: {name: value for name, value in entry.items() if name != "residual"}
                for number, entry in state["state"].items()
                if entry["step"]
            }
            # Cloned, because torch.save writes the whole storage of a view.
            moments = tree_map(lambda moment: moment.cpu().clone(), stepped)
            torch.save({"state": moments, "param_groups": groups}, path)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if (folder / manifest.FOLDER).is_dir():
            with self.engine.preparation.timing("load_checkpoint"):
                states.load_optimizer(self.model, self._own_optimizer(), checkpoint)
        elif (folder / STOCK_STATES).is_file():
            announce(f"{checkpoint} was written by a stock Trainer: taking over its AdamW state")
            stored = torch.load(folder / STOCK_STATES, map_location="cpu", weights_only=True)
            self._own_optimizer().load_state_dict(stored)
        else:
            raise CheckpointError(
                f"{checkpoint} holds no optimizer state; to start from its weights alone, load the model from it "
                "and train without resume_from_checkpoint."
            )
        if (folder / SCHEDULER_FILE).is_file():
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_FILE, weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._follow_model()
        if (Path(resume_from_checkpoint) / manifest.FOLDER).is_dir():
            # Checked here, because weights have changed by the time the optimizer is loaded.
            self.create_optimizer()
            saved = states.check_optimizer(self.model, self._own_optimizer(), resume_from_checkpoint)
            check_resume(self.engine, saved, resume_from_checkpoint)
        with self.engine.preparation.timing("load_checkpoint"):
            weights.load_model(self.model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if not os.path.isdir(best):
            warn(f"the best model was in {best}, which no longer exists: the model keeps the weights of the last step")
            return
        weights.load_model(self.model, best)


class SaveFailed(CheckpointError):
    """A checkpoint could not be written. Nothing of it remains, and older ones are unchanged."""


def _stock_bytes(optimizer: Optimizer) -> int:
    """Bytes of the state in the format of torch's optimizer, with which a stock Trainer can resume.

    0 if it is not written: torch has no such optimizer, the state is too large to be written twice, or some of it is on
    disk and may not fit in RAM.
    """
    if optimizer.kind not in STOCK or optimizer.moment_width != "fp32" or optimizer.has_states_on_disk:
        return 0
    nbytes = optimizer.moment_bytes()
    return nbytes if nbytes <= STOCK_BYTES else 0
