"""A Trainer's checkpoints: written by the engine, complete or not there, and found again."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from megatrain import files
from megatrain.checkpoint import manifest, replace, states, weights
from megatrain.engine.session import Engine
from megatrain.errors import CheckpointError, OutOfRam
from megatrain.hf import stock
from megatrain.hf.recovery import RamStop
from megatrain.optim.optimizer import Optimizer
from megatrain.telemetry.notices import announce, warn

SCHEDULER_FILE = "scheduler.pt"


class Checkpoints:
    """The part of `MegaMixin` that saves and loads."""

    engine: Engine
    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    control: Any
    callback_handler: Any
    _ram_stop: RamStop
    _own_optimizer: Callable[[], Optimizer]

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None and not hasattr(self.model, "save_pretrained"):
            state_dict = weights.without_aliases(self.engine.host_state_dict())
        super()._save(output_dir, state_dict)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As ever, and on the disk when it returns. A checkpoint is synced as a whole when it is sealed."""
        if not self.engine.closed:
            self.engine.ready_to_save()
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        directory = Path(output_dir or self.args.output_dir)
        if not _internal_call and directory.is_dir():
            for path in directory.iterdir():
                if path.is_file() and not path.is_symlink():
                    files.sync(path)
            files.sync_directory(directory)
            files.sync_names(directory)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As ever, then the manifest, and only then are older checkpoints deleted: one complete one is always there.

        What a run that ends for want of RAM leaves is to be resumed, also if only weights were asked for.
        """
        short, limit = self._ram_stop.reason is not None, self.args.save_total_limit
        if short and not self._ram_stop.unsaved(self.state.global_step):
            # The epoch's end may want it once more; what is complete is not put at risk while RAM is short.
            return
        resumable = short or not self.args.save_only_model
        self.engine.ready_to_save()
        stopwatch = files.Stopwatch()
        run_dir = self._get_output_dir(trial=trial)  # type: ignore[attr-defined]
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        folder = os.path.join(run_dir, name)
        # It may be there already: of a run before, or of this step (the end of an epoch saves too).
        with replace.rewriting(folder) as before:
            with changed(self.args, save_total_limit=None, save_only_model=not resumable):
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
            listed = replace.carry(before, Path(folder))
            if resumable:
                nbytes = states.seal(self.model, self._own_optimizer(), folder, listed)
                self._ram_stop.sealed = (self.state.global_step, folder)
            else:
                nbytes = files.sync_tree(folder, listed)
                files.sync_names(folder)
        announce(stopwatch.report(name, nbytes))
        rotate_checkpoints(
            output_dir=run_dir,
            save_total_limit=limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=True,
        )

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        try:
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **kwargs)  # type: ignore[misc]
        except OutOfRam:
            self._save_if_short(model, trial)
            raise
        self._save_if_short(model, trial)

    def _save_if_short(self, model: Any, trial: Any) -> None:
        """An evaluation that finds nothing better takes back that a checkpoint is wanted (save_strategy="best")."""
        if self._ram_stop.unsaved(self.state.global_step):
            self._save_checkpoint(model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        # With save_total_limit=1 all checkpoints but the best are deleted here.
        short = self._ram_stop.reason is not None
        with changed(self.args, save_total_limit=None) if short else nullcontext():
            return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        path = os.path.join(output_dir, SCHEDULER_FILE)
        files.before("write", path)
        torch.save(self.lr_scheduler.state_dict(), path)
        states.save_optimizer(self.model, self._own_optimizer(), output_dir)
        state = stock.stock_state(self._own_optimizer())
        if state is not None:
            # With this file and without our folder it would be taken for a stock Trainer's (`is_stock`).
            files.sync_directory(output_dir)
            path = os.path.join(output_dir, stock.FILE)
            files.before("write", path)
            torch.save(state, path)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if (folder / manifest.FOLDER).is_dir():
            states.load_optimizer(self.model, self._own_optimizer(), checkpoint)
        elif (folder / stock.FILE).is_file():
            announce(f"{checkpoint} was written by a stock Trainer: taking over its AdamW state")
            stored = torch.load(folder / stock.FILE, map_location="cpu", weights_only=True)
            self._own_optimizer().load_state_dict(stored)
        else:
            raise CheckpointError(
                f"{checkpoint} holds no optimizer state; to start from its weights alone, load the model from it "
                "and train without resume_from_checkpoint."
            )
        if (folder / SCHEDULER_FILE).is_file():
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_FILE, weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if (Path(resume_from_checkpoint) / manifest.FOLDER).is_dir():
            # Here, not where the optimizer is loaded: weights have changed by then.
            self.create_optimizer()  # type: ignore[attr-defined]
            states.check_optimizer(self.model, self._own_optimizer(), resume_from_checkpoint)
        weights.load_model(self.model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        weights.load_model(self.model, self.state.best_model_checkpoint)


def last_complete(output_dir: str) -> str:
    """The newest checkpoint that was written to its end; incomplete ones are skipped, announced."""
    numbered = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-\d+")
    found = sorted(filter(numbered.fullmatch, replace.names(output_dir)), key=lambda name: int(name.split("-")[-1]))
    for name in reversed(found):
        try:
            path = replace.find(Path(output_dir) / name)
            if not is_stock(path):
                manifest.verify(path)
        except (CheckpointError, OSError) as reason:
            warn(f"{name} was skipped: {reason}")
        else:
            return str(path)
    raise CheckpointError(
        f"resume_from_checkpoint=True, but {output_dir} holds no complete checkpoint ({len(found)} incomplete)."
    )


def is_stock(path: Path) -> bool:
    """Whether a stock Trainer wrote this checkpoint."""
    return not (path / manifest.FOLDER).exists() and (path / stock.FILE).exists()


@contextmanager
def changed(arguments: Any, **values: Any) -> Iterator[None]:
    """Training arguments with other values, for a while."""
    before = {name: getattr(arguments, name) for name in values}
    try:
        for name, value in values.items():
            setattr(arguments, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(arguments, name, value)
