"""Sums of several windows: what earlier windows have accumulated is fetched before it is needed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.tiny import Layer, Stack, backward, differences, engine_of, gradients

from megatrain.store.ticket import Ticket
from megatrain.stream.lanes import SyncLanes

Log = list[tuple[str, str]]


class Recorded(SyncLanes):
    """Notes which sums are fetched and sent."""

    def __init__(self, log: Log) -> None:
        self._log = log
        super().__init__()

    def submit(self, lane: str, job: str, *args: Any, label: str = "", **options: Any) -> Ticket:
        if job in ("resume", "land sum"):
            self._log.append((job, label))
        return super().submit(lane, job, *args, label=label, **options)


def second_window(**settings: Any) -> Log:
    """What happens in the second of two windows of two micro-batches."""
    log: Log = []
    model = Stack()
    names = {layer: f"layers.{index}" for index, layer in enumerate(model.layers)}

    class Noted(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            log.append(("compute", names[self]))
            return super().forward(x)

    for layer in model.layers:
        layer.__class__ = Noted
    with engine_of(model, lanes=Recorded(log), precision="bf16", **settings) as engine:
        for window in range(2):
            log.clear()
            engine.window([partial(backward, model, 2 * window + number) for number in range(2)])
    return [entry for entry in log if entry[1].startswith("layers.")]


def position(log: Log, job: str, index: int) -> int:
    """When a sum is fetched or sent, or the first of two micro-batches recomputes the layer."""
    found = [at for at, entry in enumerate(log) if entry == (job, f"layers.{index}")]
    assert len(found) == (4 if job == "compute" else 1)
    return found[2 if job == "compute" else 0]


def test_a_sum_is_fetched_while_the_block_before_it_is_computed() -> None:
    log = second_window(grad_slots=2)
    for index in (1, 0):
        assert position(log, "compute", index + 1) < position(log, "resume", index)
        # The other micro-batch has still to compute that block.
        assert position(log, "resume", index) < position(log, "land sum", index + 1)


def test_with_one_slot_a_sum_is_fetched_when_the_backward_of_its_block_begins() -> None:
    log = second_window(grad_slots=1)
    for index in (1, 0):
        assert position(log, "land sum", index + 1) < position(log, "resume", index)
        assert position(log, "resume", index) < position(log, "compute", index)


@pytest.mark.parametrize("change", ["write", "drop", "clear"])
def test_a_sum_that_changes_after_it_was_fetched_is_fetched_again(change: str) -> None:
    """A hook of one layer changes the gradient of the layer whose sum is on its way."""

    def changed(slots: int) -> Any:
        model, calls = Stack(), 0

        def hook(_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                return  # the first micro-batch has not asked for the sum yet
            layer = model.layers[0]
            assert layer.scale.grad is not None
            if change == "write":
                layer.scale.grad.mul_(2)
            else:
                for parameter in [layer.scale] if change == "drop" else [layer.scale, layer.shift]:
                    parameter.grad = None

        with engine_of(model, precision="bf16", grad_slots=slots) as engine:
            engine.window([partial(backward, model, number) for number in range(2)])
            model.layers[1].scale.register_post_accumulate_grad_hook(hook)
            engine.window([partial(backward, model, 2 + number) for number in range(2)])
            assert calls == 2
            return gradients(model)

    # With one slot, the sum is fetched after the hook has run for both micro-batches.
    assert differences(changed(2), changed(1)) == []


class Mark:
    lane = queue = "compute"
    done = False

    def __init__(self, number: int) -> None:
        self.number = number

    def wait(self) -> None: ...

    def order_stream(self) -> None: ...


class Marked(SyncLanes):
    """Compute runs behind the host, as on a GPU."""

    marks = 0

    def mark(self) -> Ticket:
        self.marks += 1
        return Mark(self.marks)


def test_after_a_failed_window_slots_wait_for_what_was_added() -> None:
    model, lanes, before = Stack(), Marked(), []
    with engine_of(model, lanes=lanes, precision="bf16", grad_slots=1) as engine:
        engine.window([partial(backward, model, number) for number in range(2)])

        def fails() -> None:
            backward(model, 2)
            before.append(lanes.marks)
            raise RuntimeError("stop")

        with pytest.raises(RuntimeError, match="stop"):
            engine.window([fails, partial(backward, model, 3)])
        readers = [ticket for slot in engine._step.drain.rings[True].all for ticket in slot.order._readers.values()]
        assert any(isinstance(ticket, Mark) and ticket.number > before[0] for ticket in readers)
