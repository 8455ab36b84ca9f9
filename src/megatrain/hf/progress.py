"""A line for every step: a step can take minutes, and a stock Trainer may be silent for hundreds of them."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback

from megatrain.telemetry.notices import announce


class StepLines(TrainerCallback):
    """Announces each step that the Trainer itself does not log."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_log:
            return
        optimizer = self._trainer._own_optimizer()
        announce(
            f"step {state.global_step}/{state.max_steps}: grad norm {optimizer.grad_norm:.4g}, "
            f"lr {optimizer.param_groups[0]['lr']:.3g}, {time.perf_counter() - self._began:.2f} s"
        )
