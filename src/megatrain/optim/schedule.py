"""When updates run: released together once the norm is known, in forward order, on the update lane.

`step()` only submits. The next forward fetches a block when that block's update is done, so the optimizer runs under
the forward that follows it. Without clipping nothing has to wait for the norm: in a backward that is known to be the
step's last, a slab is updated as soon as its gradient is complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from megatrain.errors import NonFiniteGradients, UnsupportedCall
from megatrain.geometry import TIERS
from megatrain.optim.rules import Rule
from megatrain.optim.update import Kernel, update_slab
from megatrain.store.gradient import Gradient, Snapshot
from megatrain.store.slab import Slab
from megatrain.store.ticket import DONE, Ticket, Wait
from megatrain.stream.lanes import Lanes
from megatrain.stream.norm import global_norm, gradient_square_sum, snapshot_square_sum
from megatrain.stream.states import StateStream
from megatrain.stream.sums_out import SumsOut
from megatrain.telemetry.counters import Counters
from megatrain.telemetry.notices import warn

RuleTable = Mapping[int, Mapping[int, Rule]]
"""Rules, with their hyperparameters, by slab and segment."""
MAX_SKIPPED_IN_A_ROW = 10
"""Steps in a row with a non-finite norm before the run is stopped."""


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of this norm are multiplied by; those of a norm that is not finite stay as they are."""
    # torch.nn.utils.clip_grad_norm_ divides by the same sum.
    return min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0


@dataclass
class Outcome:
    """What became of one step; filled in on the update lane."""

    ticket: Ticket = DONE
    norm: float = math.nan
    clip: float = 1.0
    skipped: bool = False


@dataclass
class _EarlyStep:
    """A step whose updates may start in its backward; without an owner, none."""

    rules: RuleTable = field(default_factory=dict)
    owner: object = None
    outcome: Outcome = field(default_factory=Outcome)
    started: dict[int, str] = field(default_factory=dict)
    """Slabs whose update has been submitted: index → name."""
    updates: list[Ticket] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    """Names of those whose update has run."""
    sums: dict[int, float] = field(default_factory=dict)
    """Their gradients' sums of squares: the next step's gradients may land before the norm is taken."""


@dataclass(eq=False)
class Updates:
    """Norms and updates of one engine's slabs."""

    slabs: Sequence[Slab]
    kernels: dict[str, Kernel]
    """By tier."""
    lanes: Lanes
    sums_out: SumsOut
    states: StateStream
    counters: Counters

    def __post_init__(self) -> None:
        self._skipped_in_a_row = 0
        self._early = _EarlyStep()
        self._partial_step: NonFiniteGradients | None = None
        self._last = Outcome()

    # ---- updates that start in the backward

    def start_early(self, rules: RuleTable, owner: object) -> None:
        """The backward that follows is the step's last, and nothing is clipped: update slabs as they complete."""
        self.check()
        if self.early_started:
            raise UnsupportedCall(
                "final_backward() was entered again before step(): updates have started in the first one, and its "
                "gradients would be used twice; enter it around the last backward of a step only."
            )
        self._early = _EarlyStep(rules, owner)

    @property
    def early(self) -> bool:
        """Whether updates may start in the present backward."""
        return self._early.owner is not None

    @property
    def early_started(self) -> bool:
        """Whether updates of a step that has not been taken yet have started."""
        return bool(self._early.started)

    def gradient_complete(self, slab: Slab) -> None:
        """All gradients of a slab have been given; its update may start now if early updates are allowed."""
        early = self._early
        if slab.index in early.started or slab.index not in early.rules or not slab.grad.present:
            return
        early.started[slab.index] = slab.name

        def update_factor(gradient: Snapshot) -> float | None:
            early.sums[slab.index] = _scaled_square_sum(gradient)
            early.outcome.skipped |= not math.isfinite(early.sums[slab.index])
            if early.outcome.skipped:
                return None
            early.updated.append(slab.name)
            return gradient.scale

        try:
            early.updates.append(self._submit(slab, slab.grad.snapshot(), early.rules[slab.index], update_factor))
        finally:
            self.states.send_weights()

    def refuse_late(self, gradient: Gradient) -> None:
        """A gradient for a slab whose update is already under way would be lost."""
        if gradient.index in self._early.started:
            raise UnsupportedCall(
                f"{gradient.name} got another gradient after its update had started: inside `final_backward()` the "
                "backward must be the last of the step, and run every block as often as the forward did."
            )

    def abandon(self) -> None:
        """The step was not taken after all; what has been updated stays so."""
        early, self._early = self._early, _EarlyStep()
        if early.started:
            for slab in self.slabs:
                if slab.index in early.started:
                    # Used up: a later step must not apply it again.
                    slab.grad.clear()
            warn(
                f"a step was abandoned after the updates of {len(early.started)} of {len(self.slabs)} parts of the "
                f"model had started ({_listed(early.started.values())}): these are updated, the others are not"
            )

    # ---- a step

    def norm(self) -> float:
        """The global gradient norm now; waits for the backward to finish."""
        sums = []
        for slab in self.slabs:
            if slab.grad.present:
                value = snapshot_square_sum(slab.grad.read())
                parts = slab.grad.active()
                if len(parts) == 1:
                    parts[0].square_sum = torch.tensor(value, dtype=torch.float64)
                sums.append(value * slab.grad.scale**2)
        return global_norm(sums)

    def scale(self, factor: float) -> None:
        """Multiply all gradients that there are now; done where they are used, or before they are changed."""
        for slab in self.slabs:
            if slab.grad.present:
                slab.grad.scale *= factor

    def submit_step(self, rules: RuleTable, max_norm: float | None, order: Sequence[Slab], owner: object) -> Outcome:
        """Submit one step: first the norm, then every slab that has a gradient, in the given order."""
        for slab in self.slabs:
            slab.require_owner()
        self.check()
        gradients = {slab.index: slab.grad.snapshot() for slab in self.slabs if slab.grad.present}
        for slab in self.slabs:
            if slab.index in gradients:
                self.sums_out.allocate(slab, gradients[slab.index])
                self.states.allocate(slab)
        early = self._take_early(rules, owner)
        outcome = early.outcome
        # What has started took its own sum, and says whether it moved anything.
        waits = [Wait("update", ticket) for ticket in early.updates]
        remaining = {s.index: s for s in self.slabs if s.index in gradients and s.index not in early.started}
        waits += self._measure([slab for slab in remaining.values() if slab.grad.on_device], gradients)
        outcome.ticket = self.lanes.submit(
            "update",
            "norm",
            lambda: self._compute_outcome(early, gradients, max_norm),
            reads=[gradients[index].order for index, slab in remaining.items() if not slab.grad.on_device],
            after=waits,
            label="norm",
        )

        def update_factor(gradient: Snapshot) -> float | None:
            return None if outcome.skipped else outcome.clip * gradient.scale

        try:
            for slab in order:
                if slab.index in remaining and slab.index in rules:
                    self._submit(
                        slab, gradients[slab.index], rules[slab.index], update_factor, Wait("norm", outcome.ticket)
                    )
        finally:
            # Also of a step that fails: what was updated on the device is not what RAM has.
            self.states.send_weights()
        self._last = outcome
        return outcome

    def wait_for_outcome(self) -> None:
        """Wait until it is known what became of the last step."""
        self._last.ticket.wait()

    def check(self) -> None:
        """Raise in the user's thread what the update lane found."""
        partial_step, self._partial_step = self._partial_step, None
        if partial_step is not None:
            raise partial_step
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            count, self._skipped_in_a_row = self._skipped_in_a_row, 0
            raise NonFiniteGradients(
                f"{count} steps in a row had a non-finite gradient norm (the last was {self._last.norm}); every one "
                "was skipped and the weights are unchanged: lower the learning rate, check the data, or "
                "resume from a checkpoint."
            )

    def _take_early(self, rules: RuleTable, owner: object) -> _EarlyStep:
        """What has started of this optimizer's step; another optimizer's stays until its own step."""
        early = self._early
        if early.owner is not owner:
            return _EarlyStep(rules)
        if any(rules.get(index) != early.rules[index] for index in early.started):
            raise UnsupportedCall(
                "a learning rate (or another option of a group) was changed between final_backward() and step(), when "
                "updates had already started with the old one; change it before final_backward() or after step()."
            )
        self._early = _EarlyStep()
        # Work that is under way refers to it, and must not keep an engine that nobody has any more.
        early.owner = None
        return early

    def _measure(self, slabs: Sequence[Slab], gradients: dict[int, Snapshot]) -> list[Wait]:
        """Norms of sums that lie on the device, taken there, all in one piece of work; what the norm waits for."""
        if not slabs:
            return []
        chosen = [gradients[slab.index] for slab in slabs]
        square_sums = torch.zeros(len(slabs), dtype=torch.float64, pin_memory=chosen[0].flat.is_cuda)
        gradients |= {
            slab.index: replace(gradients[slab.index], square_sum=square_sums[i]) for i, slab in enumerate(slabs)
        }

        def measure() -> None:
            square_sums.copy_(torch.stack([gradient_square_sum(gradient) for gradient in chosen]), non_blocking=True)

        reads = [gradient.order for gradient in chosen]
        return [Wait("measured", self.lanes.submit("gpu_update", "measure", measure, reads=reads, label="norms"))]

    def _submit(
        self,
        slab: Slab,
        gradient: Snapshot,
        rules: Mapping[int, Rule],
        update_factor: Callable[[Snapshot], float | None],
        *after: Wait,
    ) -> Ticket:
        """An update, where the slab's states are or come to; `update_factor` says, when it runs, what gradients are
        multiplied by, or that nothing is to be changed (None)."""
        # The weights that compute or a copy may still be reading are written, so it comes after them.
        staged = self.states.stage(slab)
        state = staged or slab.open(writes=("weight", "states"))
        tier = "vram" if staged is not None else slab.homes.states.tier
        gradient = gradient if staged is not None else self.sums_out.send(slab, gradient)

        def work() -> None:
            factor = update_factor(gradient)
            if factor is not None:
                update_slab(state, gradient, rules, factor, self.kernels[tier])

        ticket = self.lanes.submit(
            TIERS[tier].update_lane, "update", work, reads=[gradient.order], writes=state.writes, after=after,
            label=slab.name,
        )  # fmt: skip
        slab.version += 1
        if staged is not None:
            self.states.send_back(staged)
        return ticket

    def _compute_outcome(self, early: _EarlyStep, gradients: Mapping[int, Snapshot], max_norm: float | None) -> None:
        outcome = early.outcome
        for index in gradients.keys() - early.sums.keys():
            early.sums[index] = _scaled_square_sum(gradients[index])
        outcome.norm = global_norm(early.sums[index] for index in sorted(gradients))
        outcome.skipped |= not math.isfinite(outcome.norm)
        if not outcome.skipped:
            outcome.clip = 1.0 if max_norm is None else clip_factor(outcome.norm, max_norm)
            self._skipped_in_a_row = 0
            self.counters.steps += 1
            return
        self._skipped_in_a_row += 1
        self.counters.skipped_steps += 1
        if early.updated:
            self._partial_step = NonFiniteGradients(
                f"the gradient norm is {outcome.norm}, found after {len(early.updated)} parts of the model had been "
                f"updated in the backward ({_listed(early.updated)}); the others are unchanged. Resume from the "
                "last checkpoint; with max_grad_norm set, such a step is skipped as a whole."
            )
            return
        warn(
            f"the gradient norm is {outcome.norm}: the step was skipped and nothing changed "
            f"({self.counters.skipped_steps} skipped so far, {self._skipped_in_a_row} in a row; the run stops at "
            f"{MAX_SKIPPED_IN_A_ROW})"
        )


def _scaled_square_sum(gradient: Snapshot) -> float:
    return snapshot_square_sum(gradient) * gradient.scale**2


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:3])}, …, {names[-1]}"
