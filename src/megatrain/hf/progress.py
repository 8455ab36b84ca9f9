"""What a Trainer's run tells its user: a record in `run.jsonl`, a line for every step, and one if steps do not take as
long as planned."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Any

import torch
from transformers import TrainerCallback

from megatrain import settings as settings_module
from megatrain.optim.pending import PendingNorm
from megatrain.telemetry.notices import announce
from megatrain.telemetry.record import FILE, Record, ending

SECRET = re.compile(r"(^|_)(token|secret|password|key)$", re.IGNORECASE)
"""Names of arguments that are not written."""
FIRST = 4
"""Steps that are not looked at: in the first ones memory is allocated and layers are compiled."""
LOOKED_AT = 8
OFF = 1.25
"""How many times as long, or as short, a step may take before it is said."""


class RunRecord(TrainerCallback):
    """Records a Trainer's run in its output directory, with the mean loss of every step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._directory = ""
        self._loss: torch.Tensor | None = None
        self._record = Record(None, {})
        self._record.close()  # a closed record ignores what it is told

    @contextmanager
    def running(self, directory: str) -> Iterator[None]:
        """Record the run inside into this directory, and why it ended."""
        self._directory = directory
        try:
            yield
        except BaseException as error:
            self._record.close(**self._ending(error))
            raise
        self._record.close(**self._ending(None))

    def _ending(self, error: BaseException | None) -> dict[str, str]:
        trainer = self._trainer
        if trainer._termination.requested:
            return ending(error) | {"reason": "sigterm"}
        if trainer._ram_stop.reason is not None:
            reason = ending(trainer._ram_stop.error())["reason"]
            return {"reason": reason, "error": trainer._ram_stop.reason}
        if trainer._failure is not None and error is None:
            return {"reason": "failed", "error": trainer._failure[1]}
        return ending(error)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._record.close()
        engine = self._trainer.engine
        recorded = settings_module.current().record and engine.settings.record
        path = f"{self._directory}/{FILE}" if recorded else None
        more = {"arguments": chosen(args), "max_steps": state.max_steps} if recorded else {}
        self._record = engine.open_record(path, step=state.global_step, **more)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._loss = None

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch in the Trainer's order, without a wait."""
        loss = loss.detach().float()
        self._loss = loss if self._loss is None else self._loss + loss

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        norm = self._trainer.step_norm
        # A norm that the step computes is recorded with the step.
        self._record.log(loss=self._loss, grad_norm=None if isinstance(norm, PendingNorm) else norm)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._record.flush()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        named = {str(name): value for name, value in (metrics or {}).items()}
        self._record.write("evaluation", step=state.global_step, **named)
        self._trainer.engine.restart_step()

    def saved(self, path: str, seconds: float) -> None:
        self._record.write("save", path=path, seconds=seconds)
        self._trainer.engine.restart_step()

    def newest(self) -> dict[str, Any]:
        """Number, loss, gradient norm and tokens of the newest step whose loss is known."""
        return self._record.newest()


def chosen(args: Any) -> dict[str, Any]:
    """The arguments that differ from their defaults, without secrets."""
    defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(args)}
    values = {name: getattr(args, name) for name in defaults}
    changed = {name: value for name, value in values.items() if value is not None and value != defaults[name]}
    return dict(_without_secrets(changed))


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_secrets(inner) for key, inner in value.items() if not SECRET.search(str(key))}
    return [_without_secrets(inner) for inner in value] if isinstance(value, list) else value


class Pace(TrainerCallback):
    """Announces each step that the Trainer itself does not log, and once if steps do not take what was planned."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._began = self._lr = 0.0
        self._seconds: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._seconds = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.perf_counter()
        self._trainer.step_norm = None

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # At the end of the step the scheduler has moved on.
        self._lr = float(self._trainer.optimizer.param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds = time.perf_counter() - self._began
        self._seconds.append(seconds)
        if not control.should_log:
            values = f"{self._losses(state.global_step, seconds)}lr {self._lr:.3g}, {seconds:.2f} s"
            drive = self._trainer.engine.drive
            if drive.per_step:
                share = drive.written / drive.rating
                values += f", {drive.per_step / 1e9:.3g} GB written to disk, {drive.written / 1e12:.3g} TB so far"
                values += f" ({share:.2%} of the drive's rating)"
            announce(f"step {state.global_step}/{state.max_steps}: {values}", recorded=False)
        if len(self._seconds) == FIRST + LOOKED_AT and self.planned is not None:
            taken = statistics.median(self._seconds[FIRST:])
            if line := compared(taken, self.planned, self._trainer.engine.settings.plan.run.padded):
                announce(line)

    def _losses(self, step: int, seconds: float) -> str:
        """Loss, norm and speed of this step, or loss and norm of the last one if the GPU has not come to it."""
        newest = self._trainer.run_record.newest()
        loss, norm, tokens = (newest.get(name) for name in ("loss", "grad_norm", "tokens"))
        if loss is None:
            return ""
        known = f"loss {loss:.4g}" + ("" if norm is None else f", grad norm {norm:.4g}")
        if newest["step"] != step:
            return f"{known} (of step {newest['step']}), "
        return f"{known}, " + (f"{tokens / seconds:,.0f} tokens/s, " if tokens else "")

    @property
    def planned(self) -> float | None:
        """Seconds of a step, if they were planned for the machine that runs."""
        engine = self._trainer.engine
        for_this_machine = engine.device.type == "cuda" and engine.settings.machine is None
        plan = engine.settings.plan
        return plan.step.seconds if for_this_machine and plan is not None else None


def compared(taken: float, planned: float, padded: bool) -> str | None:
    """What to say of a step, if anything; padded batches are often shorter than the longest, which is planned."""
    said = f"steps take {taken:.2f} s, the plan has {planned:.2f}: "
    if taken > OFF * planned:
        return said + (
            "something else may be running on this machine, or the model or its loss does more than the plan knows"
        )
    if taken * OFF < planned and not padded:
        return said + (
            "the machine was perhaps measured in a bad moment; megatrain.probe(refresh=True) measures it again, and "
            "the next run may be planned better"
        )
    return None
