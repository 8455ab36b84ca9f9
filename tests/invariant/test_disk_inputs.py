"""Inputs on disk: the bits of `recompute`, whatever happens between a forward and its backward."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import signal
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forked, small
from tests.invariant.test_homes import random_windows
from tests.parity import zoo
from tests.tiny import Stack, differences, engine_of, gradients, inputs, roles
from torch import nn

import megatrain as mt
from megatrain.errors import MegaTrainError, SettingsError, UnsupportedCall
from megatrain.stream.lanes import DiskLanes, SyncLanes, ThreadLanes

ROWS = 64
"""Long enough for inputs to leave the device."""
DEPTH = 7
LANES: dict[str, Callable[[], Any]] = {
    "sync": SyncLanes, "disk": DiskLanes, "delayed": lambda: ThreadLanes(seed=1, max_delay=2e-4),
}  # fmt: skip


def on_disk(folder: Path, *blocks: str, **more: Any) -> dict[str, Any]:
    return {
        "policy": "offload", "inputs_on_disk": blocks or ("*",), "offload_dir": folder, "allow_tmpfs": True, **more,
    }  # fmt: skip


Step = Callable[[Any, Any, Any, int], Any]
"""Of model, engine, optimizer and number of the step."""


def loss_of(model: nn.Module, seed: int, rows: int = ROWS) -> torch.Tensor:
    result: torch.Tensor = model(inputs(seed, rows)).square().mean()
    return result


def plain(model: Any, engine: Any, optimizer: Any, step: int) -> None:
    loss_of(model, step).backward()


def of_several_lengths(model: Any, engine: Any, optimizer: Any, step: int) -> None:
    for micro, rows in enumerate((64, 200, 33, 65)):
        loss_of(model, 4 * step + micro, rows + step).backward()


def two_graphs(model: Any, engine: Any, optimizer: Any, step: int) -> None:
    losses = [loss_of(model, 2 * step + micro) for micro in range(2)]
    for loss in losses if step % 2 else losses[::-1]:
        loss.backward()


def evaluation_between(model: Any, engine: Any, optimizer: Any, step: int) -> Any:
    loss = loss_of(model, step)
    with torch.no_grad():
        seen = model(inputs(50, ROWS))
    loss.backward()
    return seen


def fork_between(model: Any, engine: Any, optimizer: Any, step: int) -> Any:
    loss = loss_of(model, step)
    read = forked.run(lambda: float(model.gain.sum())).value
    loss.backward()
    return read


def abandoned_forward(model: Any, engine: Any, optimizer: Any, step: int) -> None:
    kept = loss_of(model, 30 + step)
    loss_of(model, step).backward()
    del kept


def interrupted(error: type[BaseException], model: Any, engine: Any, optimizer: Any, step: int) -> None:
    def interrupt(_: torch.Tensor) -> None:
        raise error

    for layer in (5, 1):
        hidden = model.entry(inputs(20 + step, ROWS))
        for number in range(DEPTH):
            hidden = model.layers[number](hidden)
            if number == layer:
                hidden.register_hook(interrupt)
        with contextlib.suppress(error):
            hidden.square().mean().backward()
        optimizer.zero_grad()
    plain(model, engine, optimizer, step)


def window_that_fails(model: Any, engine: Any, optimizer: Any, step: int) -> None:
    def micro_batch(number: int, fails: bool) -> None:
        loss = loss_of(model, 10 * step + number)
        if fails:
            raise ZeroDivisionError
        loss.backward()

    with contextlib.suppress(ZeroDivisionError):
        engine.window([partial(micro_batch, number, number == 1) for number in range(3)])
    engine.window([partial(micro_batch, number, False) for number in range(6)])


def input_of_two_layers(model: Any, engine: Any, optimizer: Any, step: int) -> None:
    hidden = model.entry(inputs(step, ROWS))
    both = [model.layers[number](hidden) for number in (0, 1)]
    (both[0] * model.layers[2](both[1]) * model.gain).square().mean().backward()


STEPS = [
    plain, of_several_lengths, two_graphs, evaluation_between, fork_between, abandoned_forward,
    partial(interrupted, ZeroDivisionError), partial(interrupted, KeyboardInterrupt), window_that_fails,
    input_of_two_layers,
]  # fmt: skip


def name_of(step: Any) -> str:
    return step.__name__ if hasattr(step, "__name__") else f"{step.func.__name__} by {step.args[0].__name__}"


def train(step: Step, **settings: Any) -> list[Any]:
    model = Stack(depth=DEPTH)
    engine = engine_of(model, **settings)
    optimizer = engine.optimizer(lr=0.1, max_grad_norm=0.5)
    seen: list[Any] = []
    for number in range(3):
        seen += [step(model, engine, optimizer, number), gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    seen.append(roles(engine))
    engine.close()
    return seen


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("step", STEPS, ids=name_of)
def test_ways_to_run_a_step_are_bitwise(tmp_path: Path, step: Step, lanes: str) -> None:
    expected = train(step, lanes=SyncLanes())
    assert differences(train(step, lanes=LANES[lanes](), **on_disk(tmp_path)), expected) == []
    some = on_disk(tmp_path, "entry", "layers.[135]")
    assert differences(train(step, lanes=LANES[lanes](), **some), expected) == []


# ---- language models: dropout, several inputs per layer, random settings


def random_settings(seed: int) -> dict[str, Any]:
    """Random policies and homes; the inputs of some blocks with policy `offload` are on disk."""
    source = random.Random(seed)
    blocks = ["model.embed_tokens", *(f"model.layers.{number}" for number in range(6)), "model.norm", "lm_head"]
    policies = {block: source.choice(["recompute", "store", "offload", "offload", "offload"]) for block in blocks}
    disk = [block for block in blocks if source.random() < 0.4]
    return {
        "policy": policies,
        "inputs_on_disk": [block for block in blocks if policies[block] == "offload" and source.random() < 0.7],
        "resident": [block for block in blocks if block not in disk and source.random() < 0.2],
        "on_disk": disk,
        "weights_on_disk": disk if source.random() < 0.5 else [],
        "gradients_on_disk": disk if source.random() < 0.5 else [],
        "offload_dir": tempfile.gettempdir(),
        "allow_tmpfs": True,
        "slots": source.randint(1, 4),
    }


def language_model(seed: int | None) -> list[Any]:
    model = small.llama(num_hidden_layers=6, attention_dropout=0.1).train()
    lanes = SyncLanes() if seed is None or seed % 3 == 0 else ThreadLanes(seed=seed, max_delay=2e-4)
    engine = engine_of(model, lanes=lanes, precision="bf16", **({} if seed is None else random_settings(seed)))
    optimizer = engine.optimizer(lr=1e-2, max_grad_norm=1.0)
    seen: list[Any] = []

    def micro_batch(number: int) -> torch.Tensor:
        loss = model(**small.batch(2, seed=number)).loss
        loss.backward()
        return loss.detach()

    for step in range(2):
        tasks = [partial(micro_batch, 5 * step + k) for k in range(5)]
        for size in [1] * 5 if seed is None else random_windows(1000 * seed + step):
            seen += engine.window(tasks[:size])
            del tasks[:size]
        optimizer.step()
        optimizer.zero_grad()
    seen += [optimizer.grad_norm, roles(engine)]
    engine.close()
    return seen


@pytest.fixture(scope="module")
def recomputed() -> list[Any]:
    return language_model(None)


@pytest.mark.parametrize("seed", range(12))
def test_random_policies_homes_and_windows_are_bitwise(seed: int, recomputed: list[Any]) -> None:
    assert differences(language_model(seed), recomputed) == [], random_settings(seed)


@pytest.mark.parametrize("family", ["gemma3n_text", "zamba2"])
def test_layers_with_several_inputs_are_bitwise(family: str, tmp_path: Path) -> None:
    def run(**settings: Any) -> list[Any]:
        model = zoo.build(family, attention_dropout=0.1)
        engine = engine_of(model, **settings)
        seen = []
        for number in range(2):
            torch.manual_seed(number)
            loss = model(**zoo.batch(family, number, length=20, padded=number == 1)).loss
            loss.backward()
            seen += [loss.detach(), gradients(model)]
        engine.close()
        return seen

    assert differences(run(lanes=LANES["delayed"](), **on_disk(tmp_path)), run()) == []


# ---- threads, ends, misuse


def test_several_threads_that_train_are_bitwise(tmp_path: Path) -> None:
    """Each has its own graph; backwards overlap, in an order that nothing predicts."""

    def run(together: bool, **settings: Any) -> Any:
        model = Stack(depth=DEPTH)
        engine = engine_of(model, **settings)
        found: dict[int, Any] = {}

        def work(seed: int) -> None:
            for repeat in range(3):
                x = inputs(seed + repeat, ROWS).requires_grad_()
                (gradient,) = torch.autograd.grad(model(x).square().mean(), [x])
                found[seed + repeat] = gradient

        threads = [threading.Thread(target=work, args=(10 * number,)) for number in range(3)]
        for thread in threads:
            thread.start()
            if not together:
                thread.join()
        for thread in threads:
            thread.join()
        engine.close()
        return dict(sorted(found.items()))

    expected = run(False)
    assert len(expected) == 9
    assert differences(run(True, lanes=LANES["delayed"](), **on_disk(tmp_path)), expected) == []


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("ends", ["close", "release"])
def test_an_engine_ends_while_inputs_are_on_disk(tmp_path: Path, ends: str, lanes: str) -> None:
    model = Stack(depth=DEPTH)
    engine = engine_of(model, lanes=LANES[lanes](), **on_disk(tmp_path))
    loss = loss_of(model, 0)
    before = {name: value + 0 for name, value in model.state_dict().items()}
    getattr(engine, ends)()
    # Inline lanes still work after `close`, and the files are closed by `release`.
    refused = contextlib.nullcontext() if (ends, lanes) == ("close", "sync") else pytest.raises(MegaTrainError)
    with refused:
        loss.backward()
    del loss
    gc.collect()
    assert differences({name: value + 0 for name, value in model.state_dict().items()}, before) == []
    engine.release()
    with engine_of(model, lanes=LANES[lanes](), **on_disk(tmp_path)):
        loss_of(model, 0).backward()


def test_a_second_backward_is_refused(tmp_path: Path) -> None:
    model = Stack(depth=DEPTH)
    with engine_of(model, **on_disk(tmp_path)):
        loss = loss_of(model, 0)
        loss.backward(retain_graph=True)
        with pytest.raises(UnsupportedCall, match="ran twice, and policy 'offload' keeps its input for one"):
            loss.backward()


def repeat_until_interrupted(action: Callable[[], None], seconds: float) -> None:
    """Repeat it until a Ctrl-C, which is sent again if it was lost: Python drops one that is raised in a finalizer."""
    ended = threading.Event()

    def interrupt() -> None:
        wait = seconds
        while not ended.wait(wait):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            wait = 20.0

    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        while True:
            action()
    except KeyboardInterrupt:
        pass
    finally:
        ended.set()
        thread.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("lanes", ["disk", "delayed"])
def test_ctrl_c_at_any_time_changes_nothing_later(tmp_path: Path, lanes: str) -> None:
    """A step that is interrupted leaves copies, writes and reads pending; the next one has the right gradients."""

    def backward(model: Stack, seed: int, rows: int = ROWS) -> None:
        loss_of(model, seed, rows).backward()

    plain_model, model = Stack(depth=DEPTH), Stack(depth=DEPTH)
    with engine_of(plain_model):
        backward(plain_model, 0)
        expected = gradients(plain_model)
    source, seeds = random.Random(lanes), itertools.count(1)

    def next_backward() -> None:
        seed = next(seeds)
        backward(model, seed, ROWS + seed % 50)

    with engine_of(model, lanes=LANES[lanes](), **on_disk(tmp_path)) as engine:
        optimizer = engine.optimizer(lr=0.1)
        for _ in range(25):
            repeat_until_interrupted(next_backward, source.uniform(1e-4, 0.1))
            optimizer.zero_grad()
            backward(model, 0)
            assert differences(gradients(model), expected) == []
            optimizer.zero_grad()


def test_ram_and_disk_do_not_grow_with_steps(tmp_path: Path) -> None:
    model = Stack(depth=DEPTH)
    with engine_of(model, lanes=LANES["delayed"](), **on_disk(tmp_path)) as engine:
        disk, held = engine._placement.disk, []
        assert disk is not None
        for step in range(12):
            abandoned_forward(model, engine, None, step)
            held.append((engine._memory.allocated_bytes, disk.allocated_bytes, [file.end for file in disk.files]))
        assert held[1:] == held[1:2] * 11
        assert held[0][1] > 0


def test_a_pattern_without_offloaded_inputs_is_refused(tmp_path: Path) -> None:
    some = {"layers.*": "offload", "*": "recompute"}
    assert engine_of(Stack(), **on_disk(tmp_path, "*", policy=some)).closed is False
    said = r"inputs_on_disk='entry' matches entry, whose policy is 'recompute': only policy 'offload' takes"
    with pytest.raises(SettingsError, match=said):
        engine_of(Stack(), **on_disk(tmp_path, "entry", policy=some))
    with pytest.raises(SettingsError, match=r"inputs_on_disk='nothing' matches no block"):
        engine_of(Stack(), **on_disk(tmp_path, "nothing"))
    with pytest.raises(SettingsError, match="inputs_on_disk name blocks; name a directory for them with offload_dir"):
        engine_of(Stack(), policy="offload", inputs_on_disk=["*"])
    with pytest.raises(SettingsError, match=r"inputs_on_disk must be a list of patterns, such as \['layers"):
        mt.init(inputs_on_disk="layers.*")


def test_a_model_of_one_block_is_warned_about(tmp_path: Path, announced: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    with engine_of(model, **on_disk(tmp_path)):
        assert any("inputs_on_disk=('*',) has no effect on a model of one block" in m for m in announced.messages)


def test_a_trainer_uses_it(tmp_path: Path) -> None:
    def run(name: str, **settings: Any) -> Any:
        mt.init(device="cpu", **settings)
        args = small.arguments(tmp_path / name, max_steps=3, gradient_accumulation_steps=2, max_grad_norm=0.5)
        trainer = mt.Trainer(model=small.llama(num_hidden_layers=6), args=args, train_dataset=small.rows())
        trainer.train()
        return trainer

    expected = small.snapshot(run("in RAM").model)
    debug = mt.Debug(allow_tmpfs=True)
    trainer = run("on disk", policy="offload", inputs_on_disk=["*"], offload_dir=tmp_path / "scratch", debug=debug)
    assert small.same(small.snapshot(trainer.model), expected)
    assert trainer.engine.counters.bytes_disk_out == trainer.engine.drive.written > 0
