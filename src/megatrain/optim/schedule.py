"""Schedules updates: after the norm is known, in forward order, on the update lanes.

`step()` only submits work. The next forward fetches a block once that block's update is done, so updates overlap with
it. Without clipping, updates do not wait for the norm: in a backward that is declared the step's last, a slab is
updated as soon as its gradient is complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from megatrain.errors import NonFiniteGradients, UnsupportedCall
from megatrain.geometry import TIERS
from megatrain.optim.rules import Rule
from megatrain.optim.update import Kernel, update_slab
from megatrain.store.gradient import Gradient, Snapshot
from megatrain.store.slab import Slab
from megatrain.store.ticket import DONE, Ticket, Wait
from megatrain.stream.disk import DiskStates, DiskStream
from megatrain.stream.disk_gradients import DiskGradients
from megatrain.stream.lanes import Lanes
from megatrain.stream.norm import global_norm, gradient_square_sum, snapshot_square_sum
from megatrain.stream.states import StagedStates, StateStream
from megatrain.stream.sums_out import SumsOut
from megatrain.telemetry.counters import Counters
from megatrain.telemetry.notices import listed, warn

RuleTable = Mapping[int, Mapping[int, Rule]]
"""Rules, with their hyperparameters, by slab and segment."""
MAX_SKIPPED_IN_A_ROW = 10
"""Consecutive steps with a non-finite norm after which `check` raises."""


def clip_factor(norm: float, max_norm: float) -> float:
    """The factor for gradients of this norm; 1 if the norm is not finite."""
    # As torch.nn.utils.clip_grad_norm_.
    return min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0


@dataclass
class Outcome:
    """The result of one step; filled in on the update lane."""

    ticket: Ticket = DONE
    norm: float = math.nan
    clip: float = 1.0
    skipped: bool = False


@dataclass
class Progress:
    """Says which parts of the model have taken one step. Update lanes add to it."""

    parts: int
    """How many parts the step updates, as far as that is known."""
    submitted: bool = False
    """Whether an update of this step was submitted."""
    updated: list[str] = field(default_factory=list)
    next: Progress | None = None

    def begin_next(self, parts: int) -> Progress:
        """The progress of the next step; this one if nothing of it was submitted."""
        if self.submitted:
            self.next = Progress(parts)
            return self.next
        self.parts = parts
        return self

    def __str__(self) -> str:
        said = f"{len(self.updated)} of {self.parts} parts of the model had taken the step"
        said += f" ({listed(self.updated)})" if self.updated else ""
        # Updates of other parts do not wait for a late write.
        if self.next is not None and self.next.updated:
            said += f", and {len(self.next.updated)} of them the next one ({listed(self.next.updated)})"
        return f"{said}."


@dataclass
class _EarlyStep:
    """A step whose updates may start during its backward; without an owner, they may not."""

    rules: RuleTable = field(default_factory=dict)
    owner: object = None
    outcome: Outcome = field(default_factory=Outcome)
    started: dict[int, str] = field(default_factory=dict)
    """Slabs whose update was submitted: index → name."""
    updates: list[Ticket] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    sums: dict[int, float] = field(default_factory=dict)
    """Sums of squares of their gradients: the next step's gradients may arrive before the norm is computed."""


@dataclass(eq=False)
class Updates:
    """Norms and updates of one engine's slabs."""

    slabs: Sequence[Slab]
    kernels: dict[str, Kernel]
    """By tier."""
    lanes: Lanes
    sums_out: SumsOut
    states: StateStream
    disk: DiskStream
    gradients: DiskGradients
    counters: Counters

    def __post_init__(self) -> None:
        self._skipped_in_a_row = 0
        self._early = _EarlyStep()
        self._partial_step: NonFiniteGradients | None = None
        self._last = Outcome()
        self._progress = self.disk.transfers.progress = Progress(sum(s.trains for s in self.slabs))

    # ---- updates that start during the backward

    def start_early(self, rules: RuleTable, owner: object) -> None:
        """The next backward is the step's last, without clipping: update slabs as their gradients complete."""
        self.check()
        if self.early_started:
            raise UnsupportedCall(
                "final_backward() was entered again before step(): updates have started in the first one, and its "
                "gradients would be used twice; enter it around the last backward of a step only."
            )
        self._early = _EarlyStep(rules, owner)
        self._begin_step(len(rules))

    @property
    def early(self) -> bool:
        """Whether updates may start during the current backward."""
        return self._early.owner is not None

    @property
    def early_started(self) -> bool:
        """Whether updates have started for a step that was not taken yet."""
        return bool(self._early.started)

    def gradient_complete(self, slab: Slab) -> None:
        """The slab's gradient is complete: submit its update if early updates are allowed."""
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
        """Raise if the slab's update was already submitted: another gradient would be lost."""
        if gradient.index in self._early.started:
            raise UnsupportedCall(
                f"{gradient.name} got another gradient after its update had started: inside `final_backward()` the "
                "backward must be the last of the step, and run every block as often as the forward did."
            )

    def abandon(self) -> None:
        """Drop a step that is not taken. Updates that have started cannot be undone."""
        early, self._early = self._early, _EarlyStep()
        if early.started:
            for slab in self.slabs:
                if slab.index in early.started:
                    # A later step must not apply it again.
                    slab.grad.clear()
            warn(
                f"a step was abandoned after the updates of {len(early.started)} of {len(self.slabs)} parts of the "
                f"model had started ({listed([*early.started.values()])}): these are updated, the others are not"
            )

    # ---- a step

    def norm(self) -> float:
        """The current global gradient norm; waits for the gradients."""
        present = [slab for slab in self.slabs if slab.grad.present]
        found = [_square_sum(slab.grad) for slab in present]
        # All at once: every copy from the device is a wait.
        on_device = [value for value in found if value.is_cuda]
        copied = iter(torch.stack(on_device).tolist() if on_device else ())
        sums = [next(copied) if value.is_cuda else float(value) for value in found]
        for slab, value in zip(present, sums, strict=True):
            parts = slab.grad.active()
            if len(parts) == 1:
                parts[0].square_sum = torch.tensor(value, dtype=torch.float64)
        return global_norm(value * slab.grad.scale**2 for slab, value in zip(present, sums, strict=True))

    def scale(self, factor: float) -> None:
        """Multiply all current gradients, lazily: where they are used, or before they are changed."""
        for slab in self.slabs:
            if slab.grad.present:
                slab.grad.scale *= factor

    def submit_step(self, rules: RuleTable, max_norm: float | None, order: Sequence[Slab], owner: object) -> Outcome:
        """Submit the norm, then the update of every slab with a gradient, in the given order."""
        before = {slab.index: slab.version for slab in self.slabs}
        try:
            return self._submit_step(rules, max_norm, order, owner)
        except BaseException:
            moved = [slab for slab in self.slabs if slab.version != before[slab.index]]
            for slab in moved:
                slab.grad.clear()  # a later step must not apply it again
            if moved:
                warn(
                    f"a step failed after updates of {len(moved)} of {len(self.slabs)} parts of the model had been "
                    "submitted: these are updated and the others are not; resume from the last checkpoint"
                )
            raise

    def _submit_step(self, rules: RuleTable, max_norm: float | None, order: Sequence[Slab], owner: object) -> Outcome:
        for slab in self.slabs:
            slab.require_owner()
        self.check()
        gradients = {slab.index: slab.grad.snapshot() for slab in self.slabs if slab.grad.present}
        for slab in self.slabs:
            if slab.index in gradients:
                self.sums_out.allocate(slab, gradients[slab.index])
                self.states.allocate(slab)
                self.disk.rings_of(slab).allocate(slab)
                self.gradients.rings.allocate(slab)
        early = self._take_early(rules, owner)
        if not early.started:
            self._begin_step(len(gradients.keys() & rules.keys()))
        outcome = early.outcome
        # Early updates computed their own sum of squares, and record whether they changed anything.
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
                    norm = Wait("norm", outcome.ticket)
                    self._submit(slab, gradients[slab.index], rules[slab.index], update_factor, norm)
        finally:
            # Also if the step fails: weights updated on the device differ from those in RAM.
            self.states.send_weights()
        self.disk.read_ahead()
        self._last = outcome
        return outcome

    def wait_for_outcome(self) -> None:
        self._last.ticket.wait()

    def check(self) -> None:
        """Raise, in the user's thread, errors that the update lane found, and failures of the disk again and again."""
        if self.disk.transfers.failed is not None:
            raise self.disk.transfers.failed
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

    def _begin_step(self, parts: int) -> None:
        self._progress = self.disk.transfers.progress = self._progress.begin_next(parts)

    def _take_early(self, rules: RuleTable, owner: object) -> _EarlyStep:
        """The early updates of this optimizer's step; another optimizer's stay until its own step."""
        early = self._early
        if early.owner is not owner:
            return _EarlyStep(rules)
        if any(rules.get(index) != early.rules[index] for index in early.started):
            raise UnsupportedCall(
                "a learning rate (or another option of a group) was changed between final_backward() and step(), when "
                "updates had already started with the old one; change it before final_backward() or after step()."
            )
        self._early = _EarlyStep()
        # Submitted work refers to it and must not keep a dropped engine alive.
        early.owner = None
        return early

    def _measure(self, slabs: Sequence[Slab], gradients: dict[int, Snapshot]) -> list[Wait]:
        """Compute sums of squares of device sums, in one piece of work; returns what the norm waits for."""
        if not slabs:
            return []
        chosen = [gradients[slab.index] for slab in slabs]
        square_sums = torch.zeros(len(slabs), dtype=torch.float64, pin_memory=chosen[0].flat.is_cuda)
        for slab, square_sum in zip(slabs, square_sums, strict=True):
            gradients[slab.index] = replace(gradients[slab.index], square_sum=square_sum)

        def measure() -> None:
            try:
                found = [gradient_square_sum(gradient) for gradient in chosen]
            except torch.OutOfMemoryError as error:
                said = str(error).split(". ")[0]
                warn(f"{said}: the gradient norm is computed again, after cached memory was freed")
                torch.cuda.empty_cache()
                found = [gradient_square_sum(gradient) for gradient in chosen]
            square_sums.copy_(torch.stack(found), non_blocking=True)

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
        """Submit an update in the tier of the slab's states, or on the device if they are streamed there. When it runs,
        `update_factor` returns what to multiply gradients by, or None to change nothing."""
        staged = self.states.stage(slab) or self.disk.stage(slab)
        state = staged or slab.open(writes=("weight", "states"))
        tier = "vram" if isinstance(staged, StagedStates) else slab.homes.states.tier
        gradient = gradient if tier == "vram" else self.gradients.fetch(slab, self.sums_out.send(slab, gradient))
        progress = self._progress
        progress.submitted = True

        def work() -> None:
            factor = update_factor(gradient)
            if factor is not None:
                update_slab(state, gradient, rules, factor, self.kernels[tier])
                state.changed = True
                progress.updated.append(slab.name)
            elif isinstance(staged, DiskStates):
                self.disk.skip(staged)

        ticket = self.lanes.submit(
            TIERS[tier].update_lane, "update", work, reads=[gradient.order], writes=state.writes, after=after,
            label=slab.name,
        )  # fmt: skip
        slab.version += 1
        if isinstance(staged, StagedStates):
            self.states.send_back(staged)
        elif isinstance(staged, DiskStates):
            self.disk.send_back(staged)
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
                f"updated in the backward ({listed(early.updated)}); the others are unchanged. Resume from the "
                "last checkpoint; with max_grad_norm set, such a step is skipped as a whole."
            )
            return
        warn(
            f"the gradient norm is {outcome.norm}: the step was skipped and nothing changed "
            f"({self.counters.skipped_steps} skipped so far, {self._skipped_in_a_row} in a row; the run stops at "
            f"{MAX_SKIPPED_IN_A_ROW})"
        )


def _square_sum(gradient: Gradient) -> torch.Tensor:
    """The sum of squares of a gradient, before scaling. One that is on disk is not read if its sum is known."""
    active = gradient.active()
    known = active[0].square_sum if len(active) == 1 else None
    if known is None:
        return gradient_square_sum(gradient.read())
    active[0].order.until_readable()
    return known


def _scaled_square_sum(gradient: Snapshot) -> float:
    return snapshot_square_sum(gradient) * gradient.scale**2
