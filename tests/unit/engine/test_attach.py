"""Attaching runs a list of steps. If one of them fails, the model and the process are restored."""

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
def _collect_engines() -> None:
    """Collect engines that other tests have left open."""
    gc.collect()
    gc.collect()


def used_model(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model with user changes in every place that an engine changes."""
    model = small.llama(**changes).to(dtype)
    model.gradient_checkpointing_enable()
    model.config.use_cache = True
    model.model.norm.weight.requires_grad_(False)
    layer, save = model.model.layers[1], model.save_pretrained
    inner_forward = layer.forward
    layer.forward = lambda *args, **kwargs: inner_forward(*args, **kwargs)
    model.save_pretrained = lambda *args, **kwargs: save(*args, **kwargs)
    layer.register_forward_hook(lambda *_: None)
    model.register_forward_pre_hook(lambda *_: None)
    model.loss_function = model.loss_function
    return model


def snapshot_of(model: nn.Module) -> list[Any]:
    """The full state of a model: objects by identity, tensors by their bits."""

    def state(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return type(value), value.dtype, value.device, value.requires_grad, value.detach().clone()
        if isinstance(value, dict):
            return type(value), {key: state(item) for key, item in value.items()}
        return value

    modules = list(model.modules())
    tied = [[i for i, p in enumerate(model.parameters(recurse=True)) if p is q] for q in model.parameters()]
    return [[(type(m), {k: state(v) for k, v in vars(m).items() if k != "_modules"}) for m in modules], modules, tied]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one is other or one == other)


def process_state() -> tuple[Any, ...]:
    dynamo = torch._dynamo.config
    limits = dynamo.recompile_limit, dynamo.accumulated_recompile_limit, dynamo.fail_on_recompile_limit_hit
    lanes = {thread for thread in threading.enumerate() if thread.name.startswith("megatrain-")}
    return sys.getswitchinterval(), limits, lanes


def assert_untouched(model: Any, before: list[Any], process: tuple[Any, ...]) -> None:
    assert same(snapshot_of(model), before)
    assert process_state() == process
    loss = model(**small.batch()).loss
    loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    assert float(model(**small.batch()).loss.detach()) < float(loss.detach())


@pytest.mark.parametrize(
    ("loaded", "precision"), [(torch.float32, "fp32"), (torch.float32, "bf16"), (torch.float16, "bf16")], ids=str
)
@pytest.mark.parametrize("number", range(len(ATTACH_STEPS)), ids=lambda number: ATTACH_STEPS[number].__name__)
def test_a_failed_step_undoes_the_steps_before_it(
    monkeypatch: pytest.MonkeyPatch, number: int, loaded: torch.dtype, precision: str
) -> None:
    model = used_model(loaded)
    before, process = snapshot_of(model), process_state()

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


def interrupted_at(line: Any, work: Callable[[], Any]) -> dict[Any, None]:
    """Raise SIGINT before the given line of engine/ and return the lines that ran. The interrupt may be deferred."""
    lines: dict[Any, None] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if Path(frame.f_code.co_filename).parent != ENGINE:
            return None
        if event == "line":
            lines[here := (frame.f_code, frame.f_lineno)] = None
            if here == line:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return lines


def test_ctrl_c_at_any_line_of_attaching() -> None:
    """Every 23rd line is tested."""
    model = used_model(num_hidden_layers=2)
    mt.Engine(model, device="cpu").release()  # runs imports that happen on first use
    lines = interrupted_at(None, lambda: mt.Engine(model, device="cpu", debug=mt.Debug(lanes="threads")))
    model._megatrain_engine.release()
    before, process = snapshot_of(model), process_state()
    for line in list(lines)[-1::-23]:
        with pytest.raises(KeyboardInterrupt):
            interrupted_at(line, lambda: mt.Engine(model, device="cpu", debug=mt.Debug(lanes="threads")))
        assert same(snapshot_of(model), before), line
    assert_untouched(model, before, process)


def test_close_and_release_restore_user_changes() -> None:
    model = used_model()
    before, process = snapshot_of(model), process_state()
    engine = mt.Engine(model, device="cpu", debug=mt.Debug(lanes="threads"))
    assert not model.is_gradient_checkpointing
    assert process_state() != process
    engine.close()
    assert process_state() == process
    assert not same(snapshot_of(model), before)
    engine.release()
    assert_untouched(model, before, process)
    engine.release()
    assert model.is_gradient_checkpointing


def test_an_interrupted_close_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    process = process_state()
    engine = mt.Engine(small.llama(), device="cpu", debug=mt.Debug(lanes="threads"))

    def interrupted(**_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine._lanes, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    assert engine.closed
    assert process_state() != process
    engine.close()
    assert process_state() == process


def test_a_dropped_engine_restores_the_process() -> None:
    gc.collect()
    process = process_state()
    mt.Engine(small.llama(), device="cpu", debug=mt.Debug(lanes="threads"))
    gc.collect()
    assert process_state() == process


def test_pending_updates_do_not_keep_a_dropped_engine_alive() -> None:
    started, proceed = threading.Event(), threading.Event()

    def dropped() -> weakref.ref[mt.Engine]:
        model = small.llama()
        engine = mt.Engine(model, device="cpu", debug=mt.Debug(lanes="threads"))
        optimizer = engine.optimizer(lr=1e-3)
        model(**small.batch()).loss.backward()
        engine._lanes["update"].submit(lambda: (started.set(), proceed.wait(30))[0], label="in the way")
        optimizer.step()
        started.wait(30)
        return weakref.ref(engine)

    engine = dropped()
    # Closing the lanes waits for their jobs, so the job must end while the engine is collected.
    threading.Timer(0.2, proceed.set).start()
    gc.collect()
    assert engine() is None


def test_a_failing_undo_does_not_stop_the_others() -> None:
    undone: list[int] = []
    undo = Undo()
    undo.add(lambda: undone.append(0))
    undo.add(lambda: 1 / 0)
    undo.add(lambda: undone.append(2))
    with pytest.raises(ZeroDivisionError):
        undo.run()
    undo.run()
    assert undone == [2, 0]
