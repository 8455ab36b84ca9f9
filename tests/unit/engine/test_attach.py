"""Attaching is one list of steps: whichever of them fails, the model and the process are what they were."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tests import small
from torch import nn

import megatrain as mt
from megatrain.engine import attach
from megatrain.engine.attach import ATTACH_STEPS
from megatrain.engine.undo import Undo

ENGINE = Path(attach.__file__).parent


@pytest.fixture(autouse=True, scope="module")
def alone() -> None:
    """Engines that other tests have left open end before these begin."""
    gc.collect()
    gc.collect()


def used_model(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model on which its user has put something everywhere an engine does."""
    model = small.llama(**changes).to(dtype)
    model.gradient_checkpointing_enable()
    model.config.use_cache = True
    model.model.norm.weight.requires_grad_(False)
    layer, save = model.model.layers[1], model.save_pretrained
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs)
    model.save_pretrained = lambda *args, **kwargs: save(*args, **kwargs)
    layer.register_forward_hook(lambda *_: None)
    model.register_forward_pre_hook(lambda *_: None)
    model.loss_function = model.loss_function
    return model


def photograph(model: nn.Module) -> list[Any]:
    """Everything that a model consists of; objects by identity, tensors by their bits."""

    def seen(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return type(value), value.dtype, value.device, value.requires_grad, value.detach().clone()
        if isinstance(value, dict):
            return type(value), {key: seen(item) for key, item in value.items()}
        return value

    modules = list(model.modules())
    tied = [[i for i, p in enumerate(model.parameters(recurse=True)) if p is q] for q in model.parameters()]
    return [[(type(m), {k: seen(v) for k, v in vars(m).items() if k != "_modules"}) for m in modules], modules, tied]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one is other or one == other)


def of_process() -> tuple[Any, ...]:
    dynamo = torch._dynamo.config
    limits = dynamo.recompile_limit, dynamo.accumulated_recompile_limit, dynamo.fail_on_recompile_limit_hit
    lanes = {thread for thread in threading.enumerate() if thread.name.startswith("megatrain-")}
    return sys.getswitchinterval(), limits, lanes


def assert_untouched(model: Any, before: list[Any], process: tuple[Any, ...]) -> None:
    assert same(photograph(model), before)
    assert of_process() == process
    loss = model(**small.batch()).loss
    loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    assert float(model(**small.batch()).loss.detach()) < float(loss.detach())


@pytest.mark.parametrize(
    ("loaded", "precision"), [(torch.float32, "fp32"), (torch.float32, "bf16"), (torch.float16, "bf16")], ids=str
)
@pytest.mark.parametrize("number", range(len(ATTACH_STEPS)), ids=lambda number: ATTACH_STEPS[number].__name__)
def test_a_step_that_fails_undoes_all_before_it(
    monkeypatch: pytest.MonkeyPatch, number: int, loaded: torch.dtype, precision: str
) -> None:
    model = used_model(loaded)
    before, process = photograph(model), of_process()

    def fails(self: attach.Attachment) -> None:
        ATTACH_STEPS[number](self)
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(attach, "ATTACH_STEPS", (*ATTACH_STEPS[:number], fails, *ATTACH_STEPS[number + 1 :]))
        with pytest.raises(ZeroDivisionError):
            mt.Engine(model, device="cpu", precision=precision, debug=mt.Debug(lanes="threads"), compile=True)
    assert_untouched(model, before, process)
    with mt.Engine(model, device="cpu") as engine:
        model(**small.batch()).loss.backward()
        engine.optimizer().step()


def interrupted_at(place: Any, work: Callable[[], Any]) -> dict[Any, None]:
    """A Ctrl-C before a line of engine/, which may be deferred; the lines that were run."""
    lines: dict[Any, None] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if Path(frame.f_code.co_filename).parent != ENGINE:
            return None
        if event == "line":
            lines[here := (frame.f_code, frame.f_lineno)] = None
            if here == place:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return lines


def test_ctrl_c_at_any_line_of_it() -> None:
    """A sample of them: every 23rd."""
    model = used_model(num_hidden_layers=2)
    mt.Engine(model, device="cpu").release()  # imports what is imported on first use
    lines = interrupted_at(None, lambda: mt.Engine(model, device="cpu", debug=mt.Debug(lanes="threads")))
    model._megatrain_engine.release()
    before, process = photograph(model), of_process()
    for place in list(lines)[-1::-23]:
        with pytest.raises(KeyboardInterrupt):
            interrupted_at(place, lambda: mt.Engine(model, device="cpu", debug=mt.Debug(lanes="threads")))
        assert same(photograph(model), before), place
    assert_untouched(model, before, process)


def test_closing_and_releasing_put_back_what_users_had() -> None:
    model = used_model()
    before, process = photograph(model), of_process()
    engine = mt.Engine(model, device="cpu", debug=mt.Debug(lanes="threads"))
    assert not model.is_gradient_checkpointing
    assert of_process() != process
    engine.close()
    assert of_process() == process
    assert not same(photograph(model), before)
    engine.release()
    assert_untouched(model, before, process)
    engine.release()
    assert model.is_gradient_checkpointing


def test_a_closing_that_was_interrupted_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    process = of_process()
    engine = mt.Engine(small.llama(), device="cpu", debug=mt.Debug(lanes="threads"))

    def interrupted(**_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine._lanes, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    assert engine.closed
    assert of_process() != process
    engine.close()
    assert of_process() == process


def test_an_engine_that_is_dropped_is_undone_in_the_process() -> None:
    gc.collect()
    process = of_process()
    mt.Engine(small.llama(), device="cpu", debug=mt.Debug(lanes="threads"))
    gc.collect()
    assert of_process() == process


def test_updates_under_way_do_not_keep_an_engine_that_was_dropped() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def dropped() -> weakref.ref[mt.Engine]:
        model = small.llama()
        engine = mt.Engine(model, device="cpu", debug=mt.Debug(lanes="threads"))
        optimizer = engine.optimizer(lr=1e-3)
        model(**small.batch()).loss.backward()
        engine._lanes["update"].submit(lambda: (begun.set(), go_on.wait(30))[0], label="in the way")
        optimizer.step()
        begun.wait(30)
        return weakref.ref(engine)

    engine = dropped()
    # Ending its lanes waits for what they do.
    threading.Timer(0.2, go_on.set).start()
    gc.collect()
    assert engine() is None


def test_an_undo_that_fails_does_not_keep_the_others() -> None:
    undone: list[int] = []
    undo = Undo()
    undo.add(lambda: undone.append(0))
    undo.add(lambda: 1 / 0)
    undo.add(lambda: undone.append(2))
    with pytest.raises(ZeroDivisionError):
        undo.run()
    undo.run()
    assert undone == [2, 0]
