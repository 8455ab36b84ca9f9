"""A line for every step: a step can take minutes, and a stock Trainer may be silent for hundreds of them. One more if
steps take another time than the plan has, since what it goes by may then be wrong."""

from __future__ import annotations

import statistics
import time
from typing import Any

from transformers import TrainerCallback

from megatrain.telemetry.notices import announce

FIRST = 4
"""Steps that are not looked at: in the first ones memory is allocated and layers are compiled."""
LOOKED_AT = 8
OFF = 1.25
"""How many times as long, or as short, a step may take before it is said."""


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
            # Of the norm what the Trainer has taken already: asking the optimizer would wait for every update.
            norm = self._trainer.step_norm
            normed = "" if norm is None else f"grad norm {norm:.4g}, "
            announce(f"step {state.global_step}/{state.max_steps}: {normed}lr {self._lr:.3g}, {seconds:.2f} s")
        if len(self._seconds) == FIRST + LOOKED_AT and self.planned is not None:
            taken = statistics.median(self._seconds[FIRST:])
            if line := compared(taken, self.planned, self._trainer.engine.settings.plan.run.padded):
                announce(line)

    @property
    def planned(self) -> float | None:
        """Seconds of a step, if they were planned for the machine that runs."""
        engine = self._trainer.engine
        here = engine.device.type == "cuda" and engine.settings.machine is None
        return engine.settings.plan.step.seconds if here and engine.settings.plan is not None else None


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
