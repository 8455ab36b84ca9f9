"""When updates run: released together once the norm is known, in forward order, on the update lane.

`step()` only submits. The next forward fetches a block when that block's update is done, so the optimizer runs under
the forward that follows it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from megatrain.errors import NonFiniteGradients
from megatrain.optim.adamw import Hyper
from megatrain.optim.update import Kernel, update_slab
from megatrain.store.slab import Slab, Snapshot
from megatrain.store.ticket import DONE, Ticket
from megatrain.stream.lanes import Lanes
from megatrain.stream.norm import snapshot_square_sum, total
from megatrain.telemetry.counters import Counters
from megatrain.telemetry.notices import warn

PATIENCE = 10
"""Steps in a row with a non-finite norm before the run is stopped."""


class Outcome:
    """What became of one step; filled in on the update lane."""

    def __init__(self) -> None:
        self.ticket: Ticket = DONE
        self.norm = math.nan
        self.clip = 1.0
        self.skipped = False

    def decide(self, norm: float, max_norm: float | None) -> None:
        self.norm = norm
        self.skipped = not math.isfinite(norm)
        if max_norm is not None and not self.skipped:
            # torch.nn.utils.clip_grad_norm_ divides by the same sum.
            self.clip = min(1.0, max_norm / (norm + 1e-6))


class Updates:
    """Norms and updates of one engine's slabs."""

    def __init__(self, slabs: Sequence[Slab], kernel: Kernel, lanes: Lanes, counters: Counters) -> None:
        self._kernel = kernel
        self._slabs = slabs
        self._lanes = lanes
        self._counters = counters
        self._in_a_row = 0
        self.last: Outcome | None = None

    def norm(self) -> float:
        """The global gradient norm now; waits for the backward to finish."""
        sums = []
        for slab in self._slabs:
            if slab.grad.present:
                value = snapshot_square_sum(slab.grad.look())
                parts = slab.grad.active()
                if len(parts) == 1:
                    parts[0].square_sum = torch.tensor(value, dtype=torch.float64)
                sums.append(value)
        return total(sums)

    def release(
        self, hypers: Mapping[int, Mapping[int, Hyper]], max_norm: float | None, order: Sequence[Slab]
    ) -> Outcome:
        """Submit one step: first the norm, then every slab that has a gradient, in the given order."""
        self.check()
        gradients = {slab.index: slab.grad.snapshot() for slab in self._slabs if slab.grad.present}
        outcome = Outcome()
        outcome.ticket = self._lanes.update.submit(
            lambda: self._decide(outcome, [gradients[i] for i in sorted(gradients)], max_norm),
            after=[slab.grad.merged().landed for slab in self._slabs if slab.index in gradients],
            label="norm",
        )
        for slab in order:
            if slab.index not in gradients:
                continue
            if slab.index in hypers:
                self._submit(slab, gradients[slab.index], hypers[slab.index], outcome)
            else:
                # Nothing updates it, but the norm still reads its gradient: the next one must not land before.
                slab.grad.merged().landed = outcome.ticket
        self.last = outcome
        return outcome

    def check(self) -> None:
        """Raise in the user's thread what the update lane found out."""
        if self._in_a_row >= PATIENCE:
            count, self._in_a_row = self._in_a_row, 0
            norm = self.last.norm if self.last is not None else math.nan
            raise NonFiniteGradients(
                f"{count} steps in a row had a non-finite gradient norm (the last was {norm}); every one was "
                "skipped and weights are as they were before them: lower the learning rate, check the data, or "
                "resume from a checkpoint."
            )

    def _submit(self, slab: Slab, gradient: Snapshot, hypers: Mapping[int, Hyper], outcome: Outcome) -> None:
        def work() -> None:
            if not outcome.skipped:
                update_slab(slab, gradient, hypers, outcome.clip, self._kernel)

        # After `read`: a copy to the device may still be reading the weights that this writes.
        slab.written = self._lanes.update.submit(work, after=(outcome.ticket, slab.read), label=slab.name)
        slab.version += 1

    def _decide(self, outcome: Outcome, gradients: list[Snapshot], max_norm: float | None) -> None:
        outcome.decide(total(snapshot_square_sum(gradient) for gradient in gradients), max_norm)
        if not outcome.skipped:
            self._in_a_row = 0
            self._counters.steps += 1
            return
        self._in_a_row += 1
        self._counters.skipped_steps += 1
        warn(
            f"the gradient norm is {outcome.norm}: step skipped, nothing was changed "
            f"({self._counters.skipped_steps} skipped so far, {self._in_a_row} in a row, {PATIENCE} stop the run)"
        )
