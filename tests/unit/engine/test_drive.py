"""What a run writes to disk: counted, shown, and limited."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests import small
from tests.tiny import Stack, backward, engine_of, inputs
from transformers import TrainerCallback

import megatrain as mt
from megatrain.engine.drive import DriveLife
from megatrain.errors import CheckpointError, DriveLimit, SettingsError
from megatrain.hardware import smart
from megatrain.hardware.smart import Wear
from megatrain.store.disk import DiskMemory

DISK: dict[str, Any] = {"on_disk": ["*"], "debug": mt.Debug(allow_tmpfs=True)}


def test_the_rating_is_that_of_the_drive_or_of_its_size(tmp_path: Path) -> None:
    memory = DiskMemory([tmp_path / "a", tmp_path / "b"], allow_tmpfs=True)
    system = os.statvfs(tmp_path)
    # Both directories are on one drive.
    assert DriveLife(memory, None, None).rating == 600 * system.f_blocks * system.f_frsize
    assert DriveLife(memory, 300, None).rating == 300e12
    memory.close()


@pytest.mark.parametrize(("tbw", "level"), [(1e9, "INFO"), (1e-9, "WARNING")])
def test_a_run_that_takes_a_tenth_of_the_rating_is_warned_about(
    tmp_path: Path, tbw: float, level: str, announced: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(Stack(), offload_dir=tmp_path, drive_tbw=tbw, **DISK)
    engine.optimizer(lr=0.1)
    announced.clear()
    engine.drive.forecast(1000)
    (line,) = announced.records
    assert line.levelname == level
    # Five slabs with two moments, a page each.
    total = 1000 * 5 * 2 * 4096
    assert f"{total / 1e12:.3g} TB in 1000 steps: {total / tbw / 1e12:.2%} of" in line.getMessage()


def test_nothing_is_said_without_states_on_disk(announced: pytest.LogCaptureFixture) -> None:
    engine = engine_of(Stack(), max_drive_tb=1e-9)
    announced.clear()
    engine.drive.forecast(1000)
    assert announced.records == []
    assert engine.drive.spent() is None


def test_an_engine_takes_no_step_beyond_the_limit(tmp_path: Path) -> None:
    model = Stack()
    engine = engine_of(model, offload_dir=tmp_path, max_drive_tb=100_000 / 1e12, **DISK)
    optimizer = engine.optimizer(lr=0.1)
    taken: list[int] = []

    def steps() -> None:
        for seed in range(20):
            backward(model, seed)
            optimizer.step()
            optimizer.zero_grad()
            taken.append(seed)

    with pytest.raises(DriveLimit, match=r"1.23e-07 TB were written to disk, and max_drive_tb=1e-07, so no"):
        steps()
    # A step writes one page per moment and slab: 40,960 bytes.
    assert len(taken) == 3
    engine.save(tmp_path / "saved", optimizer)


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    """A limit holds for the whole run, however often it is resumed, and nothing is counted twice."""

    def started(**settings: Any) -> tuple[Stack, mt.Engine, Any]:
        model = Stack()
        engine = engine_of(model, offload_dir=tmp_path / "scratch", **DISK, **settings)
        return model, engine, engine.optimizer(lr=0.1)

    def step(model: Stack, optimizer: Any) -> None:
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()

    model, engine, optimizer = started()
    step(model, optimizer)
    engine.save(tmp_path / "saved", optimizer)
    saved = engine.drive.written
    step(model, optimizer)
    engine.synchronize()
    assert engine._placement.disk is not None
    assert engine.drive.written == engine._placement.disk.written_bytes > saved
    engine.load(tmp_path / "saved", optimizer)
    assert engine.drive.written == engine._placement.disk.written_bytes, "the same run, which wrote more"
    engine.close()

    model, engine, optimizer = started(max_drive_tb=saved / 1e12)
    assert engine.drive.written < saved
    engine.load(tmp_path / "saved", optimizer)
    assert engine.drive.written >= saved
    backward(model, 0)
    with pytest.raises(DriveLimit):
        optimizer.step()
    engine.close()


def test_inputs_of_blocks_count(tmp_path: Path) -> None:
    """Two micro-batches with an input of two pages for each of three layers."""
    more: dict[str, Any] = {"policy": "offload", "inputs_on_disk": ["layers.*"], "debug": mt.Debug(allow_tmpfs=True)}
    model = Stack()
    engine = engine_of(model, offload_dir=tmp_path, max_drive_tb=100_000 / 1e12, **more)
    optimizer = engine.optimizer(lr=0.1)
    assert engine.drive.per_step == 0
    taken: list[int] = []

    def steps() -> None:
        for seed in range(20):
            for micro in range(2):
                model(inputs(2 * seed + micro, 200)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            taken.append(engine.drive.per_step)

    with pytest.raises(DriveLimit, match=r"1.47e-07 TB were written to disk, and max_drive_tb=1e-07, so no"):
        steps()
    assert taken == [2 * 3 * 8192] * 2
    engine.quiesce()  # one counts what was submitted, the other what was moved
    assert engine.drive.written == engine.counters.bytes_disk_out == 3 * 2 * 3 * 8192


def test_a_trainer_stops_with_a_checkpoint_and_records_what_it_wrote(
    tmp_path: Path, announced: pytest.LogCaptureFixture
) -> None:
    mt.init(device="cpu", offload_dir=tmp_path / "scratch", max_drive_tb=1e-6, **DISK)
    out = tmp_path / "out"
    args = small.arguments(out, max_steps=50, save_strategy="no", max_grad_norm=0.5, logging_steps=99)
    trainer = mt.Trainer(model=small.llama(), args=args, train_dataset=small.rows())
    with pytest.raises(
        DriveLimit, match=r"were written to disk.*was stopped after step \d+ and saved in .*; raise max"
    ):
        trainer.train()
    step = trainer.state.global_step
    assert 0 < step < 50
    assert (out / f"checkpoint-{step}" / "megatrain" / "manifest.json").exists()
    lines = [json.loads(line) for line in (out / "run.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    assert len(steps) == step
    # The last writes may follow the line of their step.
    assert steps[-1]["disk"]["total"] == sum(line["disk"]["written"] for line in steps) <= trainer.engine.drive.written
    assert 0 < steps[-1]["disk"]["share"] < 1
    assert lines[-1]["reason"] == "drive_limit"
    said = [message for message in announced.messages if message.startswith("step ")]
    pattern = r"[\d.e-]+ GB written to disk, [\d.e-]+ TB so far \(\d+\.\d\d% of the drive's rating\)"
    assert said
    assert all(re.search(pattern, message) for message in said), said
    mt.init(device="cpu")
    again = mt.Trainer(model=small.llama(1), args=small.arguments(out, max_steps=step + 1), train_dataset=small.rows())
    assert again.train(resume_from_checkpoint=True).global_step == step + 1


@pytest.mark.parametrize("name", ["drive_tbw", "max_drive_tb"])
def test_limits_are_positive_numbers(name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name} must be a positive number of TB"):
        mt.init(**{name: 0})


def test_a_checkpoint_that_will_not_fit_beside_the_states_is_announced(
    tmp_path: Path, announced: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mt.init(device="cpu", offload_dir=tmp_path / "scratch", **DISK)
    args = small.arguments(tmp_path / "out", max_steps=1, save_strategy="steps", save_steps=5, max_grad_norm=0.5)
    trainer = mt.Trainer(model=small.llama(), args=args, train_dataset=small.rows())
    trainer.train()
    assert not any("saving will fail" in message for message in announced.messages)
    # A real full drive would affect other tests.
    monkeypatch.setattr("megatrain.files.free_bytes", lambda path: 1000)
    trainer = mt.Trainer(model=small.llama(), args=args, train_dataset=small.rows())
    with pytest.raises(CheckpointError, match="could not be saved"):
        trainer.train()
    assert any("saving will fail" in message for message in announced.messages)


def test_checkpoints_need_room_beside_frozen_weights_on_disk(
    tmp_path: Path, announced: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step writes nothing there."""

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            raise InterruptedError

    frozen: dict[str, Any] = {"weights_on_disk": ["model.layers.*"], "debug": mt.Debug(allow_tmpfs=True)}
    mt.init(device="cpu", offload_dir=tmp_path / "scratch", **frozen)
    model = small.llama()
    model.model.layers.requires_grad_(False)
    args = small.arguments(tmp_path / "out", max_steps=1, save_strategy="steps", save_steps=1)
    monkeypatch.setattr("megatrain.files.free_bytes", lambda path: 1000)
    trainer = mt.Trainer(model=model, args=args, train_dataset=small.rows(), callbacks=[Stop()])
    with pytest.raises(InterruptedError):
        trainer.train()
    assert trainer.engine.drive.per_step == 0
    held = sum(slab.layout.nbytes for slab in trainer.engine.slabs if slab.weight_on_disk)
    assert held > 0
    assert any(f"beside the {held / 1e9:.3g} GB of state on disk" in message for message in announced.messages)


@pytest.mark.parametrize(
    ("changes", "there", "count"),
    [
        ({"save_strategy": "steps", "save_steps": 2}, 0, 5),
        ({"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}, 0, 2),
        # It deletes one before it adds a second.
        ({"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}, 1, 1),
        ({"save_strategy": "steps", "save_steps": 2, "save_total_limit": 9}, 3, 5),
        # 16 rows in batches of 2: 8 steps in an epoch, and a part of the second.
        ({"save_strategy": "epoch"}, 0, 2),
        ({"save_strategy": "steps", "save_steps": 100}, 0, 1),
    ],
)
def test_every_checkpoint_of_a_run_is_counted(
    tmp_path: Path, announced: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any],
    there: int, count: int,
) -> None:  # fmt: skip
    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            raise InterruptedError

    mt.init(device="cpu", offload_dir=tmp_path / "scratch", **DISK)
    for number in range(there):
        (tmp_path / "out" / f"checkpoint-{number}").mkdir(parents=True)
    args = small.arguments(tmp_path / "out", max_steps=10, max_grad_norm=0.5, **changes)

    def free(nbytes: int) -> list[str]:
        announced.clear()
        monkeypatch.setattr("megatrain.files.free_bytes", lambda path: nbytes)
        trainer = mt.Trainer(model=small.llama(), args=args, train_dataset=small.rows(), callbacks=[Stop()])
        with pytest.raises(InterruptedError):
            trainer.train()
        return [message for message in announced.messages if message.startswith("a checkpoint takes about")]

    (said,) = free(0)
    assert f"the run adds up to {count} before it deletes one" in said
    # An FP32 weight and two FP32 moments per parameter; padding is counted too.
    each = 12 * small.llama().num_parameters()
    assert len(free(int(0.95 * each * count))) == 1
    assert free(2 * each * count) == []


def test_the_rating_follows_what_the_drive_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, announced: pytest.LogCaptureFixture
) -> None:
    disk = DiskMemory([tmp_path], allow_tmpfs=True)
    by_size = DriveLife(disk, None, None).rating
    reports = {"new": [Wear(10**12, 1)], "used": [Wear(30 * 10**12, 10)], "two": [Wear(10**13, 10), Wear(10**13, 20)]}
    found = {}
    for name, wear in reports.items():
        monkeypatch.setattr(smart, "wear_of", lambda device, wear=wear: wear)
        found[name] = DriveLife(disk, None, None).rating
    assert found == {"new": by_size, "used": 300e12, "two": 150e12}
    assert DriveLife(disk, 5.0, None).rating == 5e12, "the user's own figure counts"
    assert [line for line in announced.messages if "30 TB written in its life and 10% of it used" in line]
    disk.close()


@pytest.mark.parametrize("gradients", [(), ("*",)], ids=["", "gradients too"])
@pytest.mark.parametrize("lanes", ["sync", "threads"])
def test_steps_that_write_less_count_as_much_as_they_write(
    tmp_path: Path, lanes: str, gradients: tuple[str, ...]
) -> None:
    """Updates in the backward, skipped steps, blocks without a gradient, writes by users."""
    model = Stack()
    on_disk: dict[str, Any] = {"offload_dir": tmp_path, "on_disk": ["*"], "gradients_on_disk": gradients}
    engine = engine_of(model, lanes=lanes, allow_tmpfs=True, **on_disk)
    optimizer = engine.optimizer(lr=0.1)
    engine.synchronize()
    # Two moments and the gradient of five slabs, a page each. The gradient of `gain` comes from no block: it is in RAM.
    whole = (10 + 4 * len(gradients)) * 4096
    assert engine.drive.settled == engine.drive.written == 0
    assert engine.drive.per_step == whole + len(gradients) * 4096

    def step(expected: int, factor: float = 1.0, max_norm: float | None = None, **options: Any) -> None:
        before = engine.drive.settled
        optimizer.max_grad_norm = max_norm
        with optimizer.final_backward():
            (model(inputs(0), **options).square().mean() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not optimizer.step_was_skipped:
            assert engine.drive.settled == before + expected
        engine.synchronize()
        assert engine.drive.settled == engine.drive.written == before + expected

    for _ in range(3):
        step(whole)
    step(whole, max_norm=1.0)
    for _ in range(2):
        step(whole - 10 * 4096, factor=float("inf"), max_norm=1.0)
    step(whole - (2 + len(gradients)) * 4096, skip=(1,))
    before = engine.drive.settled
    engine.slabs[0].moments["exp_avg"].buffer.zero(0, 4)
    assert engine.drive.settled == engine.drive.written == before + 4096
    step(whole)
    engine.close()
