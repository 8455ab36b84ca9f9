"""The micro-batches of a Trainer's step: together in a window, or one after the other, each at its own call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megatrain.engine.session import Engine
from megatrain.geometry import windows_of
from megatrain.hf.recovery import twice
from megatrain.hf.subclass import DECLARATION, Subclass
from megatrain.hf.tried import Tried
from megatrain.optim.optimizer import Optimizer
from megatrain.telemetry.notices import announce


class MicroBatches:
    """The part of `MegaMixin` that runs forward and backward."""

    engine: Engine
    args: Any
    optimizer: Any
    callback_handler: Any
    _own_optimizer: Callable[[], Optimizer]
    _gradients_are_watched: Callable[[], bool]

    micro_batches_are_independent: bool | None = None
    """Set this to True in a subclass whose overrides of `training_step`, `_prepare_inputs` and `compute_loss` do not
    depend on earlier micro-batches of the step: weights then travel once for all of them, and a micro-batch that runs
    out of GPU memory is done again. A class that overrides one of them further down declares it anew."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._micro_batches: list[Any] = []
        self._taken = 0
        """Micro-batches of this step that `training_step` has been called with."""
        self._losses: list[torch.Tensor] = []
        """Of a step whose micro-batches ran at the first call."""
        self._said_in_order = False
        self._tried = Tried()
        self._retried = False
        """Whether a part of this step took a second try."""
        self._looked = False
        """Whether a step's micro-batches have been through one by one."""
        self._together = 1
        """Micro-batches of this step that pass a block together."""
        self._subclass = Subclass(self)
        super().__init__(*args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        samples, items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        # Without blocks nothing is shared between micro-batches: they come one by one, as in a stock Trainer.
        self._micro_batches = samples if self.engine.blocks else []
        self._taken, self._losses, self._retried = 0, [], False
        return samples, items

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One micro-batch. In a window the first call runs all of the step, and later calls return their losses."""
        step = super().training_step  # type: ignore[misc]
        position = self._position(inputs)
        if position == 0 and len(self._micro_batches) > 1 and not self._in_turn():
            tasks = [functools.partial(step, model, batch, *args, **kwargs) for batch in self._micro_batches]
            self._losses = self._guarded(lambda: self._run_windows(tasks), self._micro_batches)
        if self._losses and position is not None:
            return self._losses[position]
        last = position is not None and position == len(self._micro_batches) - 1
        single = functools.partial(self._single, step, last, model, inputs, *args, **kwargs)
        loss: torch.Tensor = self._guarded(single, [inputs])
        if last and not self._retried:
            self._tried.add(self._micro_batches, 1)
        return loss

    def _position(self, inputs: Any) -> int | None:
        """Which of the step's micro-batches this is; None for a call with something else.

        Counted, not searched for: a loader may give the same object several times.
        """
        if self._taken == len(self._micro_batches) or inputs is not self._micro_batches[self._taken]:
            return None
        self._taken += 1
        return self._taken - 1

    def _in_turn(self) -> bool:
        """Whether each micro-batch must run at its own call; said once."""
        reason = self._subclass.why_in_turn
        if reason is not None and not self._said_in_order:
            announce(
                f"micro-batches run one after the other, so weights travel for each of them: {reason}, which may "
                f"depend on earlier micro-batches; if it does not, set {DECLARATION} = True in the Trainer's class"
            )
            self._said_in_order = True
        return reason is not None

    def _guarded(self, work: Callable[[], Any], batches: Sequence[Any]) -> Any:
        """A step, or one micro-batch of it that comes alone, with a second try if the GPU runs out of memory."""
        if not self._subclass.repeatable:
            return work()
        done, again = twice(self.engine, lambda: self._own_optimizer().zero_grad(), work)
        if again:
            # What was done again had less kept than later steps keep: no size has been through with that.
            self._tried, self._retried = Tried(), True
        else:
            self._tried.add(batches, self._together)
        return done

    def _single(self, step: Callable[..., torch.Tensor], last: bool, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._together = 1
        with self._final_backward() if last else nullcontext():
            return step(*args, **kwargs)

    def _run_windows(self, tasks: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        """The micro-batches of a step, window by window: as planned or asked for, else as many as there is room for."""
        in_order = self._adds_in_order()
        windows = windows_of(1 if in_order else self.engine.window_size(self._micro_batches[0]), len(tasks))
        self._together = max(windows)
        losses: list[torch.Tensor] = []
        for size in windows:
            done = len(losses) + size
            with self._final_backward() if done == len(tasks) else nullcontext():
                losses += self.engine.window(tasks[len(losses) : done], whole=size == len(tasks))
        if self._adds_in_order() and self.engine.revisits and not self._looked:
            announce(
                "micro-batches pass blocks more than once (two forwards or backwards in one training step): "
                "they run one after the other, so that gradients are added in order"
            )
        self._looked = True
        return losses

    def _adds_in_order(self) -> bool:
        """Whether a window holds one micro-batch only, whatever there is room for.

        If micro-batches pass a block twice, a window adds gradients in another order than they come in one by one. The
        first step shows it: bits must not depend on how much memory is free.
        """
        return not self._subclass.passes_once(self.engine.revisits if self._looked else None)

    def _final_backward(self) -> AbstractContextManager[None]:
        """Let updates start in the backward, unless gradients are clipped, or wanted before the step."""
        # A size that has not been through may run out of memory, and a step that has begun to update stays begun.
        untried = not self._tried.covers(self._micro_batches, self._together)
        if self.optimizer is None or untried or self._subclass.own_step:
            return nullcontext()
        clipped = bool(self.args.max_grad_norm and self.args.max_grad_norm > 0)
        return nullcontext() if clipped or self._gradients_are_watched() else self._own_optimizer().final_backward()
