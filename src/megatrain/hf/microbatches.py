"""Runs the micro-batches of a Trainer's step: together in a window, or each in its own `training_step` call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megatrain.geometry import window_sizes
from megatrain.hf.labels import LabelCount
from megatrain.hf.recovery import retry_after_oom
from megatrain.hf.subclass import DECLARATION, Subclass
from megatrain.hf.waits import WithoutWaits
from megatrain.telemetry.notices import announce

MOST = 64
"""How many sizes are remembered; the oldest are dropped."""
UNDERSTOOD = (torch.Tensor, str, bytes, bool, int, float, type(None))
Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Paths and shapes of the tensors in a micro-batch."""
Size = tuple[int, tuple[Shapes, ...]]
"""Micro-batches in the largest window of a step, and the shapes of each micro-batch, the largest first."""


class MicroBatches(WithoutWaits):
    """The part of `MegaMixin` that runs forward and backward."""

    _label_count: LabelCount
    micro_batches_are_independent: bool | None = None
    """Set this to True in a subclass whose overrides of `training_step`, `_prepare_inputs` and `compute_loss` do not
    depend on earlier micro-batches of the step: weights then travel once for all of them, and a micro-batch that runs
    out of GPU memory is done again. A class that overrides one of them further down declares it anew."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._micro_batches: list[Any] = []
        self._taken = 0
        """How many micro-batches of this step `training_step` has been called with."""
        self._losses: list[torch.Tensor] = []
        """Losses of a step whose micro-batches all ran in the first call."""
        self._said_in_order = False
        self._measured_sizes = MeasuredSizes()
        self._retried = False
        """Whether a part of this step was retried."""
        self._looked = False
        """Whether a step has run with its micro-batches one by one."""
        self._together = 1
        """Micro-batches in the largest window of this step."""
        self._subclass = Subclass(self)
        super().__init__(*args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        samples, items = super().get_batch_samples(*args, **kwargs)
        # Without blocks a window has no benefit: micro-batches run one by one, as in a stock Trainer.
        self._micro_batches = samples if self.engine.blocks else []
        self._taken, self._losses, self._retried = 0, [], False
        self._label_count.add(samples)
        return samples, items

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run one micro-batch. With windows, the first call runs the whole step; later calls return their losses."""
        step = super().training_step
        # Counted instead of looked up, because a loader may yield the same object several times.
        position, count = self._taken, len(self._micro_batches)
        listed = position < count and inputs is self._micro_batches[position]
        self._taken += listed
        if listed and position == 0 and count > 1 and not self._in_turn():
            tasks = [functools.partial(step, model, batch, *args, **kwargs) for batch in self._micro_batches]
            self._losses = self._guarded(lambda: self._run_windows(tasks), self._micro_batches)
        if self._losses and listed:
            return self._losses[position]
        last = listed and position == count - 1

        def single() -> torch.Tensor:
            self._together = 1
            with self._final_backward() if last else nullcontext():
                return step(model, inputs, *args, **kwargs)  # type: ignore[no-any-return]

        loss: torch.Tensor = self._guarded(single, [inputs])
        if last and not self._retried:
            self._measured_sizes.add(self._micro_batches, 1)
        return loss

    def _in_turn(self) -> bool:
        """Whether each micro-batch must run in its own call. The reason is announced once."""
        reason = self._subclass.why_in_turn
        if reason is not None and not self._said_in_order:
            announce(
                f"micro-batches run one after the other, so weights are fetched for each of them: {reason}, which may "
                f"depend on earlier micro-batches; if it does not, set {DECLARATION} = True in the Trainer's class"
            )
            self._said_in_order = True
        return reason is not None

    def _guarded(self, work: Callable[[], Any], batches: Sequence[Any]) -> Any:
        """Run a step, or one micro-batch, with a retry if the GPU runs out of memory."""
        if not self._subclass.repeatable:
            return work()
        done, again = retry_after_oom(self.engine, lambda: self._own_optimizer().zero_grad(), work)
        if again:
            # The retry kept less on the GPU than later steps do, so it proves nothing about their size.
            self._measured_sizes, self._retried = MeasuredSizes(), True
        else:
            self._measured_sizes.add(batches, self._together)
        return done

    def _run_windows(self, tasks: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        """Run a step window by window, with the planned or requested sizes, or as large as memory allows."""
        # Even independent micro-batches may call a block twice each, and a window then adds gradients in another order.
        # The first step runs in order to find out, because results must not depend on free memory.
        in_order = bool(self._subclass.declared) and (not self._looked or self.engine.revisits)
        windows = window_sizes(1 if in_order else self.engine.window_size(self._micro_batches[0]), len(tasks))
        self._together = max(windows)
        losses: list[torch.Tensor] = []
        for size in windows:
            done = len(losses) + size
            with self._final_backward() if done == len(tasks) else nullcontext():
                losses += self.engine.window(tasks[len(losses) : done], full_step=size == len(tasks))
        if in_order and self.engine.revisits and not self._looked:
            announce(
                "training steps run blocks more than once (two forwards or backwards), so micro-batches run one after "
                "the other and gradients are added in order"
            )
        self._looked = True
        return losses

    def _final_backward(self) -> AbstractContextManager[None]:
        """Let updates start in the backward, unless gradients are clipped or may be read before the step."""
        # A size that has not run yet may run out of memory, and a step cannot be undone once updates have started.
        untried = not self._measured_sizes.covers(self._micro_batches, self._together)
        if self.optimizer is None or untried or self._subclass.own_step:
            return nullcontext()
        clipped = bool(self.args.max_grad_norm and self.args.max_grad_norm > 0)
        return nullcontext() if clipped or self._gradients_are_watched() else self._own_optimizer().final_backward()


class MeasuredSizes:
    """Sizes of steps that have completed forward and backward, and therefore fit."""

    def __init__(self) -> None:
        self._sizes: list[Size] = []

    def add(self, batches: Sequence[Any], together: int) -> None:
        size = _size(batches, together)
        if size is not None and not self.covers(batches, together):
            self._sizes = [known for known in self._sizes if not _covers(size, known)][1 - MOST :]
            self._sizes.append(size)

    def covers(self, batches: Sequence[Any], together: int) -> bool:
        """Whether a step is no larger than a measured one: no more micro-batches, no tensor longer in any dimension."""
        size = _size(batches, together)
        return size is not None and any(_covers(known, size) for known in self._sizes)


def _size(batches: Sequence[Any], together: int) -> Size | None:
    """The size of a step, or None if it has values of unknown size."""
    found = [list(_leaves(batch, "")) for batch in batches]
    if not all(isinstance(leaf, UNDERSTOOD) for leaves in found for _, leaf in leaves):
        return None
    shapes = [
        tuple(sorted((path, tuple(leaf.shape)) for path, leaf in leaves if isinstance(leaf, torch.Tensor)))
        for leaves in found
    ]
    sized = sorted((sum(torch.Size(shape).numel() for _, shape in each), each) for each in shapes)
    return together, tuple(each for _, each in reversed(sized))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    # Tokenizers return mappings that are not dicts.
    if isinstance(value, Mapping | list | tuple):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(inner, f"{path}/{key}")
    else:
        yield path, value


def _covers(large: Size, small: Size) -> bool:
    return (
        small[0] <= large[0]
        and len(small[1]) <= len(large[1])
        and all(_within(*pair) for pair in zip(small[1], large[1], strict=False))
    )


def _within(small: Shapes, large: Shapes) -> bool:
    """Whether both have the same tensors, and none of `small` is longer in any dimension."""
    return len(small) == len(large) and all(
        name == other and len(shape) == len(limit) and all(a <= b for a, b in zip(shape, limit, strict=True))
        for (name, shape), (other, limit) in zip(small, large, strict=True)
    )
