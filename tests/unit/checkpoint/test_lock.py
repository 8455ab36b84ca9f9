"""Only one process at a time writes to an output directory."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests import small

import megatrain as mt
from megatrain.checkpoint import lock
from megatrain.errors import DirectoryInUse

HOLDER = """
import sys, time
from megatrain.checkpoint import lock
lock.acquire(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    """Another process that holds the lock of the directory."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_process_is_refused_with_the_pid_of_the_first(tmp_path: Path, holder: Any) -> None:
    with pytest.raises(DirectoryInUse, match=rf"another process \(pid {holder.pid} on "):
        lock.acquire(tmp_path)
    holder.kill()
    holder.wait()
    release = lock.acquire(tmp_path)
    release()
    assert list(tmp_path.iterdir()) == []


def test_a_process_can_acquire_the_lock_several_times(tmp_path: Path) -> None:
    first, second = lock.acquire(tmp_path), lock.acquire(tmp_path / ".." / tmp_path.name)
    assert (tmp_path / lock.FILE).exists()
    first()
    assert (tmp_path / lock.FILE).exists()
    second()
    assert not (tmp_path / lock.FILE).exists()


def test_a_lock_file_deleted_during_acquire_is_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process deletes the file between open and flock."""
    flock, calls = fcntl.flock, []

    def delete_first(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            (tmp_path / lock.FILE).unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", delete_first)
    release = lock.acquire(tmp_path)
    assert len(calls) == 2
    assert (tmp_path / lock.FILE).exists()
    release()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, announced: pytest.LogCaptureFixture, code: int
) -> None:
    def unable(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", unable)
    lock.acquire(tmp_path)()
    assert any("cannot be locked" in line for line in announced.messages)


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """The child can outlive a killed parent, as a DataLoader worker can."""
    script = f"""
import os, time
from megatrain.checkpoint import lock
lock.acquire({str(tmp_path)!r})
child = os.fork()
if child == 0:
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        with pytest.raises(DirectoryInUse):
            lock.acquire(tmp_path)
        parent.kill()
        parent.wait()
        os.kill(child, 0)
        lock.acquire(tmp_path)()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_cannot_release_the_lock(tmp_path: Path) -> None:
    release = lock.acquire(tmp_path)
    child = os.fork()
    if child == 0:
        release()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / lock.FILE).exists()
    release()


# ---- in a Trainer


def new_trainer(directory: Path, seed: int = 0, **changes: Any) -> Any:
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    return mt.Trainer(
        model=small.llama(seed), args=small.arguments(directory, **options | changes), train_dataset=small.rows()
    )


def test_a_second_run_is_refused_before_anything_is_deleted(tmp_path: Path, holder: Any) -> None:
    old_checkpoint = tmp_path / "checkpoint-1"
    old_checkpoint.mkdir()
    (old_checkpoint / "trainer_state.json").write_text("{}")
    trainer = new_trainer(tmp_path)
    before = small.snapshot(trainer.model)
    with pytest.raises(DirectoryInUse, match=f"pid {holder.pid}"):
        trainer.train()
    assert small.same(before, small.snapshot(trainer.model))
    assert sorted(path.name for path in tmp_path.iterdir()) == [lock.FILE, "checkpoint-1"]


def test_a_run_that_saves_nothing_needs_no_lock(tmp_path: Path, holder: Any) -> None:
    trainer = new_trainer(tmp_path, save_strategy="no", save_total_limit=None)
    trainer.train()
    trainer.evaluate(small.rows(4))
    assert trainer.state.global_step == 2


def test_two_trainers_of_one_process(tmp_path: Path) -> None:
    """The second Trainer trains in a callback of the first."""
    import transformers

    class Inner(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                new_trainer(tmp_path, seed=1, save_total_limit=None).train()

    outer = new_trainer(tmp_path, save_total_limit=None, save_steps=2)
    outer.add_callback(Inner())
    outer.train()
    assert not (tmp_path / lock.FILE).exists()


def test_the_lock_is_released_after_an_error(tmp_path: Path) -> None:
    class Failing(mt.Trainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no loss")

    trainer = Failing(
        model=small.llama(), args=small.arguments(tmp_path, save_strategy="steps"), train_dataset=small.rows()
    )
    with pytest.raises(RuntimeError, match="no loss"):
        trainer.train()
    assert not (tmp_path / lock.FILE).exists()


def test_workers_of_a_killed_run_do_not_keep_the_lock(tmp_path: Path) -> None:
    script = f"""
import os, sys, time, torch
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests import small
import megatrain as mt
torch.set_num_threads(1)

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        if index > 8 and torch.utils.data.get_worker_info() is not None:
            print("worker", os.getpid(), flush=True)
            time.sleep(600)
        return small.rows(1)[0]

args = small.arguments({str(tmp_path)!r}, max_steps=32, save_strategy="steps", save_steps=1, dataloader_num_workers=1,
    train_sampling_strategy="sequential")
mt.Trainer(model=small.llama(), args=args, train_dataset=Slow()).train()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    worker = next(int(line.split()[1]) for line in process.stdout if line.startswith("worker"))
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / lock.FILE).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(DirectoryInUse):
            lock.acquire(tmp_path)
        process.kill()
        process.wait()
        lock.acquire(tmp_path)()
    finally:
        os.kill(worker, signal.SIGKILL)
        process.kill()
