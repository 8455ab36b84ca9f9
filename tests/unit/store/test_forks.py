"""A forked child reads its parent's weights without a copy. Everything that would change them raises."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests import forked
from tests.tiny import Stack, backward, differences, engine_of, roles, started

import megatrain as mt
from megatrain.store.ram import HostBuffer, HostMemory
from megatrain.stream.lanes import ThreadLanes

MIB = 1 << 20

WRITES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "data": lambda model, engine, optimizer: model.gain.data.copy_(torch.zeros(8)),
    "data=": lambda model, engine, optimizer: setattr(model.gain, "data", torch.zeros(8)),
    "in place": lambda model, engine, optimizer: model.entry.weight.detach().mul_(2.0),
    "a view": lambda model, engine, optimizer: model.entry.weight.data[1:3].zero_(),
    "grad": lambda model, engine, optimizer: setattr(model.gain, "grad", torch.zeros(8)),
    "grad in place": lambda model, engine, optimizer: model.entry.weight.grad.zero_(),
    "backward": lambda model, engine, optimizer: (optimizer.zero_grad(), backward(model, 9)),
    "accumulating": lambda model, engine, optimizer: backward(model, 9),
    "window": lambda model, engine, optimizer: engine.window([lambda: backward(model, 9)] * 2),
    "step": lambda model, engine, optimizer: optimizer.step(),
    "step without gradients": lambda model, engine, optimizer: (optimizer.zero_grad(), optimizer.step()),
    "load_state_dict": lambda model, engine, optimizer: model.load_state_dict(model.state_dict()),
    "optimizer state": lambda model, engine, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "new optimizer": lambda model, engine, optimizer: engine.optimizer(lr=1.0),
    "initialised": lambda model, engine, optimizer: torch.nn.init.ones_(model.entry.weight),
}


def with_gradients(**settings: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
    model, engine, optimizer = started(max_grad_norm=1.0, **settings)
    backward(model, 1)
    before = roles(engine) | {name: p.grad + 0 for name, p in model.named_parameters()}
    return model, engine, optimizer, before


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("lanes", ["sync", "threads"])
def test_writes_raise_one_sentence(write: str, lanes: str) -> None:
    model, engine, optimizer, before = with_gradients(lanes=lanes)
    ended = forked.run(lambda: WRITES[write](model, engine, optimizer))
    after = roles(engine) | {name: p.grad + 0 for name, p in model.named_parameters()}
    assert not differences(before, after)
    assert ended.raised is not None, ended
    kind, message = ended.raised
    # PyTorch wraps errors raised while loading a state dict.
    assert kind == ("RuntimeError" if write == "load_state_dict" else "ForkedProcess")
    assert f"process {os.getpid()}" in message
    assert "spawn" in message


def test_loading_a_checkpoint_raises_too(tmp_path: Any) -> None:
    model, engine, optimizer, before = with_gradients()
    engine.save(tmp_path, optimizer)
    for wanted in (None, optimizer):
        ended = forked.run(lambda wanted=wanted: engine.load(tmp_path, wanted))
        assert ended.raised is not None
        assert ended.raised[0] == "ForkedProcess"
    assert not differences(before, roles(engine) | {name: p.grad + 0 for name, p in model.named_parameters()})


def test_a_child_reads_and_saves(tmp_path: Any) -> None:
    model, engine, optimizer, before = with_gradients()

    def read() -> list[str]:
        engine.save(tmp_path, optimizer)
        found = roles(engine) | {name: p.grad + 0 for name, p in model.named_parameters()}
        return differences(before, found)

    assert forked.run(read) == forked.Ended([])
    engine.load(tmp_path, optimizer)
    assert not differences(before, roles(engine) | {name: p.grad + 0 for name, p in model.named_parameters()})


def test_a_child_can_run_the_model_where_lanes_are_inline() -> None:
    model, *_ = with_gradients()
    x = torch.ones(2, 8)
    with torch.no_grad():
        expected = model(x).tolist()

    def infer() -> Any:
        with torch.no_grad():
            return model(x).tolist()

    assert forked.run(infer) == forked.Ended(expected)


def test_lanes_of_the_parent_are_refused_at_once() -> None:
    model, *_ = with_gradients(lanes="threads")
    ended = forked.run(lambda: model(torch.ones(2, 8)))
    assert ended.raised is not None
    assert ended.raised[0] == "ForkedProcess"


def test_a_raw_write_ends_the_child_and_changes_nothing() -> None:
    _, engine, _, before = with_gradients()
    views = [parameter.stored() for parameter in engine.model.parameters()]
    flats = [engine.slabs[0].weight, engine.slabs[0].moments["exp_avg"].bytes, *views]
    for flat in flats:
        ended = forked.run(lambda flat=flat: flat.fill_(1))
        assert ended.signal == signal.SIGSEGV
    assert not differences({k: v for k, v in before.items() if "/" in k}, roles(engine))


def test_a_child_trains_a_model_of_its_own() -> None:
    def train() -> tuple[Any, Any]:
        model, engine, optimizer = started(lanes="threads")
        backward(model, 1)
        optimizer.step()
        found = model.gain.tolist()
        engine.close()
        return found, model.entry.weight.tolist()

    expected = train()
    _, parent, _ = started()
    assert forked.run(train) == forked.Ended(expected)
    assert not parent.closed


def test_a_grandchild_cannot_write_what_a_child_made() -> None:
    def child() -> Any:
        model, _, _ = started()
        return forked.run(lambda: model.gain.data.zero_()).raised

    ended = forked.run(child)
    assert ended.value[0] == "ForkedProcess"


def test_a_child_sees_updates_submitted_before_the_fork() -> None:
    """Lanes do not survive a fork, so the child could not wait for them."""
    model = Stack()
    lanes = ThreadLanes(seed=0, max_delay=0.05)
    engine = engine_of(model, lanes=lanes)
    optimizer = engine.optimizer(lr=0.1)
    for step in range(2):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    child = forked.start(lambda: [p.tolist() for p in model.parameters()])
    ended = forked.wait(child)
    assert ended.value == [p.tolist() for p in model.parameters()], ended
    engine.close()


def test_reading_costs_a_child_no_memory() -> None:
    """Private pages would add 64 MiB; the bound of 8 MiB leaves room for what the interpreter changes."""
    memory = HostMemory(pin=False, threads=1)
    buffer = memory.allocate(64 * MIB, transferred=True)
    buffer.bytes.fill_(3)

    def dirty() -> int:
        with open("/proc/self/smaps_rollup") as rollup:
            return sum(int(line.split()[1]) << 10 for line in rollup if line.startswith("Private_Dirty"))

    def read() -> tuple[int, int]:
        before = dirty()
        total = int(buffer.bytes.sum())
        return total, dirty() - before

    total, grown = forked.run(read).value
    assert total == 3 * 64 * MIB
    assert grown < 8 * MIB


def test_pinned_memory_stays_registered_when_a_child_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Driver:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            calls.append("unregister")
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver())
    memory = HostMemory(pin=True, threads=1)
    buffers = [memory.allocate(4096, transferred=True) for _ in range(3)]

    def drop() -> list[str]:
        memory.free(buffers[0])
        memory.unpin()
        del buffers[:]
        return calls

    assert forked.run(drop) == forked.Ended([])
    assert all(buffer.pinned for buffer in buffers)
    memory.free(buffers[0])
    assert calls == ["unregister"]


EXITS = """
import os, sys, multiprocessing
import torch
from tests.tiny import backward, differences, roles, started

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.tensor(model.entry.weight.tolist()[index])

def row(number):
    return sum(model.entry.weight.tolist()[number])

def leave_a_with():
    with engine:
        sys.exit(7)

def drop():
    global model, engine, optimizer
    del model, engine, optimizer

model, engine, optimizer = started(lanes="threads")
engine.window([lambda: backward(model, 3)] * 2)
before = roles(engine)
for leave in (lambda: None, leave_a_with, lambda: engine.close(), lambda: engine.release(), drop):
    if os.fork() == 0:
        leave()
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
loader = torch.utils.data.DataLoader(Rows(), num_workers=4, multiprocessing_context="fork")
assert torch.equal(torch.cat(list(loader)), model.entry.weight + 0)
with multiprocessing.get_context("fork").Pool(3) as pool:
    assert pool.map(row, range(8)) == [sum(values) for values in model.entry.weight.tolist()]
assert not differences(before, roles(engine))
optimizer.step()
engine.window([lambda: backward(model, 4)] * 2)
optimizer.step()
assert differences(before, roles(engine))
engine.close()
print("went on")
"""


def test_the_parent_continues_after_children_end() -> None:
    """Children end normally, in a `with`, after closing, releasing or dropping the engine, as loader workers, in a
    pool.
    """
    done = subprocess.run(
        [sys.executable, "-c", EXITS],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["went on"]
    assert "Exception ignored" not in done.stderr, done.stderr


def test_freed_buffers_are_not_protected() -> None:
    """Their addresses may belong to other memory by then."""
    buffer = HostBuffer(MIB, threads=1)
    view = buffer.bytes
    memory = HostMemory(pin=False, threads=1)
    kept = memory.allocate(MIB, transferred=False)
    memory.free(kept)
    del kept
    assert forked.run(lambda: int(view.sum())) == forked.Ended(0)
    # While a view of a dropped buffer is alive, its memory stays shared and protected.
    del buffer
    assert forked.run(lambda: view.fill_(1)).signal == signal.SIGSEGV
    assert not view.any()


def test_the_error_is_public() -> None:
    assert issubclass(mt.errors.ForkedProcess, mt.errors.MegaTrainError)
