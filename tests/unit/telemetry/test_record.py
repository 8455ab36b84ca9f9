"""`run.jsonl` has an exact line for every step. Errors of the file do not stop the run."""

from __future__ import annotations

import json
import os
import select
import signal
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests import forked, small
from tests.tiny import differences, engine_of, roles

import megatrain as mt
from megatrain.errors import OutOfRam, SettingsError
from megatrain.telemetry import notices
from megatrain.telemetry.lines import LineFile
from megatrain.telemetry.record import Record
from megatrain.telemetry.trace import read


def lines(path: Path, event: str | None = None) -> list[dict[str, Any]]:
    """The lines of the file, or those of one event, read as strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    events = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    return [line for line in events if event in (None, line["event"])]


def training_loop(path: Path | None, steps: int = 4, late: bool = False, **settings: Any) -> tuple[Any, list[float]]:
    """A training loop with two micro-batches per step."""
    engine = engine_of(small.llama(), **settings)
    optimizer = engine.optimizer(lr=1e-2, max_grad_norm=1.0)
    record = None if path is None else engine.record(path)
    losses = []
    for step in range(steps):
        micro_losses = []
        for micro in range(2):
            loss = engine.model(**small.batch(seed=2 * step + micro)).loss / 2
            loss.backward()
            micro_losses.append(loss.detach())
        losses.append(float(sum(micro_losses)))
        if record is not None and not late:
            record.log(loss=sum(micro_losses))
        optimizer.step()
        if record is not None and late:
            record.log(loss=sum(micro_losses))
        optimizer.zero_grad()
    return engine, losses


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("lanes", ["sync", "threads"])
def test_steps_of_a_training_loop(tmp_path: Path, late: bool, lanes: str) -> None:
    engine, losses = training_loop(tmp_path / "run.jsonl", late=late, lanes=lanes)
    engine.close()
    start, *_, end = lines(tmp_path / "run.jsonl")
    assert (start["event"], start["format"], start["resumed_from_step"]) == ("start", 1, None)
    assert start["model"] == {"class": "LlamaForCausalLM", "blocks": 6, "parameters": 25824, "trainable": 25824}
    assert start["precision"] == {"compute": "fp32", "saved": "fp32"}
    assert (start["optimizer"]["kind"], start["optimizer"]["moments"]) == ("adamw", "fp32")
    assert (end["event"], end["reason"], end["step"]) == ("end", "finished", 4)
    steps = lines(tmp_path / "run.jsonl", "step")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert [step["loss"] for step in steps] == losses
    assert all(step["tokens"] == 2 * 2 * small.LENGTH and step["learning_rate"] == 1e-2 for step in steps)
    assert all(step["grad_norm"] > 0 and step["seconds"] > 0 and step["memory"]["ram"] > 0 for step in steps)
    assert all(step["tokens_per_second"] == pytest.approx(32 / step["seconds"], abs=1) for step in steps)
    assert all(step["busy"]["compute"] <= step["seconds"] for step in steps)
    for step in steps:
        assert list(step["weight_uses"]) == ["arrived", "late", "missed"]
        assert step["weight_uses"]["arrived"] > 0
    assert end["weight_uses"] == {name: sum(step["weight_uses"][name] for step in steps) for name in end["weight_uses"]}
    (spans,) = lines(tmp_path / "run.jsonl", "spans")
    assert spans["step"] == 3
    assert {"forward model.layers.0", "backward model.layers.0"} <= {label for _, label, *_ in spans["spans"]}


def test_recording_is_bitwise_neutral(tmp_path: Path) -> None:
    recorded, _ = training_loop(tmp_path / "run.jsonl")
    unrecorded, _ = training_loop(None)
    assert not differences(roles(recorded), roles(unrecorded))


def test_missing_directories_are_created(tmp_path: Path) -> None:
    engine, _ = training_loop(tmp_path, steps=1)
    engine.record(tmp_path / "new" / "other.jsonl")
    engine.close()
    assert lines(tmp_path / "run.jsonl", "step")
    assert [line["event"] for line in lines(tmp_path / "new" / "other.jsonl")] == ["start", "end"]


def test_logged_values(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    engine = engine_of(small.llama())
    optimizer = engine.optimizer()
    with engine.record(tmp_path) as record:
        loss = engine.model(**small.batch()).loss
        table = {"a": [1, torch.tensor(2), numpy.longdouble(3)]}
        record.log(loss=loss, name="first", table=table)
        table["a"].clear()  # must not change the logged value
        record.log(name="second", tensor=torch.tensor(0.5, dtype=torch.bfloat16))
        loss.backward()
        optimizer.step()
        notices.announce("something was decided")
        with pytest.raises(SettingsError, match=r"rows is a tensor of shape \(2,\)"):
            record.log(rows=torch.zeros(2))
        with pytest.raises(SettingsError, match="seconds cannot be logged"):
            record.log(seconds=1)
        engine.save(tmp_path / "saved", optimizer)
    record.log(loss=1.0)  # ignored: the record is closed
    (step,) = lines(tmp_path / "run.jsonl", "step")
    assert (step["loss"], step["name"], step["tensor"]) == (loss.item(), "second", 0.5)
    assert step["table"] == {"a": [1, 2, "3.0"]}
    assert {"event", "time", "text"} == set(lines(tmp_path / "run.jsonl", "notice")[0])
    assert lines(tmp_path / "run.jsonl", "save")[0]["path"] == str(tmp_path / "saved")
    assert not [listener for listener in notices.listeners if listener == record._write_notice]


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    engine = engine_of(small.llama())
    optimizer = engine.optimizer(max_grad_norm=1.0)
    record = engine.record(tmp_path)
    (engine.model(**small.batch()).loss * float("nan")).backward()
    record.log(loss=torch.tensor(float("nan")), rate=float("-inf"), listed=[1.0, float("inf")])
    optimizer.step()
    engine.close()
    (step,) = lines(tmp_path / "run.jsonl", "step")
    assert (step["loss"], step["rate"], step["listed"], step["grad_norm"]) == (None, None, [1.0, None], None)
    assert step["not_finite"] == {"loss": "nan", "rate": "-inf", "listed.1": "inf", "grad_norm": "nan"}
    assert step["skipped"] is True


def test_tokens_exclude_padding_and_dropped_micro_batches(tmp_path: Path) -> None:
    engine = engine_of(small.llama())
    optimizer = engine.optimizer()
    engine.record(tmp_path)
    batch = small.batch()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 3:] = 0
    engine.model(**batch).loss.backward()
    optimizer.zero_grad()  # dropped
    with torch.no_grad():
        engine.model(**batch)
    engine.model(**batch, attention_mask=mask).loss.backward()
    optimizer.step()
    engine.close()
    (step,) = lines(tmp_path / "run.jsonl", "step")
    assert step["tokens"] == int(mask.sum())


@pytest.mark.parametrize(
    ("error", "reason"),
    [(KeyboardInterrupt(), "interrupted"), (OutOfRam("none left"), "out_of_ram"), (ValueError("bad\nrow"), "failed")],
)
def test_the_reason_of_the_end_is_recorded(tmp_path: Path, error: BaseException, reason: str) -> None:
    engine = engine_of(small.llama())
    engine.record(tmp_path)

    def run() -> None:
        with engine:
            raise error

    with pytest.raises(type(error)):
        run()
    end = lines(tmp_path / "run.jsonl", "end")[-1]
    assert end["reason"] == reason
    assert end["error"].startswith(type(error).__name__)
    assert "\n" not in end["error"]


def test_a_resumed_loop_appends_and_continues_the_step_count(tmp_path: Path) -> None:
    engine = engine_of(small.llama())
    optimizer = engine.optimizer()
    engine.record(tmp_path)
    for _ in range(2):
        engine.model(**small.batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.save(tmp_path / "saved", optimizer)
    engine.close()
    for after in (False, True):
        engine = engine_of(small.llama())
        optimizer = engine.optimizer()
        if after:
            engine.record(tmp_path)
        engine.load(tmp_path / "saved", optimizer)
        if not after:
            engine.record(tmp_path)
        engine.model(**small.batch()).loss.backward()
        optimizer.step()
        engine.close()
    events = lines(tmp_path / "run.jsonl")
    assert [line["resumed_from_step"] for line in events if line["event"] == "start"] == [None, 2, None]
    [loaded] = [line for line in events if line["event"] == "load"]
    assert loaded["step"] == 2
    assert loaded["seconds"] > 0
    assert [line["step"] for line in events if line["event"] == "step"] == [1, 2, 3, 3]


def test_a_device_that_failed_does_not_hide_the_error(tmp_path: Path) -> None:
    def settle(wait: bool) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(ValueError, match="the first error"), Record(tmp_path / "run.jsonl", {}, settle=settle):
        raise ValueError("the first error")
    assert lines(tmp_path / "run.jsonl", "end")[0]["error"] == "ValueError: the first error"


def test_forwards_without_an_open_record_are_not_counted(tmp_path: Path) -> None:
    engine = engine_of(small.llama())
    engine.model(**small.batch())
    engine.record(tmp_path).close()
    engine.model(**small.batch())
    assert engine._step.recording._tokens == []


# ---- the file


def test_an_incomplete_last_line_is_ended_first(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"event": "start", "time": "2026-01-01T00:00:00+00:00"}\n{"event": "st')
    engine_of(small.llama()).record(path).close()
    assert [line["event"] for line in read(path)] == ["start", "start", "end"]


@pytest.mark.parametrize("fault", ["full", "directory", "no directory"])
def test_an_unwritable_file_does_not_stop_the_run(
    tmp_path: Path, fault: str, announced: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.jsonl"
    if fault == "full":
        path.symlink_to("/dev/full")
    elif fault == "directory":
        path.mkdir()
        (path / "run.jsonl").mkdir()
    else:
        (tmp_path / "file").touch()
        path = tmp_path / "file" / "run.jsonl"
    engine, _ = training_loop(path, steps=2)
    engine.close()
    assert sum("cannot be written" in line and "goes on" in line for line in announced.messages) == 1


def test_a_line_that_does_not_fit_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    file = LineFile(path)
    file.append("one")
    real, calls = os.write, []

    def write(descriptor: int, data: bytes) -> int:
        if descriptor != file._descriptor:
            return real(descriptor, data)
        calls.append(data)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[:2])

    monkeypatch.setattr(os, "write", write)
    file.append("two")
    file.append("three")
    assert path.read_text() == "one\n"
    assert len(calls) == 2, "nothing must be written after the first error"


def test_a_deleted_file_is_noticed(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    file = LineFile(tmp_path / "run.jsonl")
    file.append("one")
    (tmp_path / "run.jsonl").rename(tmp_path / "moved.jsonl")
    file.append("two")
    assert (tmp_path / "moved.jsonl").read_text() == "one\ntwo\n"
    (tmp_path / "moved.jsonl").unlink()
    file.append("three")
    file.append("four")
    assert sum("it was deleted" in line for line in announced.messages) == 1
    assert not list(tmp_path.iterdir())


def test_two_runs_do_not_record_into_one_file(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    first = LineFile(tmp_path / "run.jsonl")
    second = LineFile(tmp_path / "run.jsonl")
    second.append("mine")
    first.append("kept")
    assert (tmp_path / "run.jsonl").read_text() == "kept\n"
    assert any("another run is recorded in it" in line for line in announced.messages)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    engine = engine_of(small.llama())
    record = engine.record(tmp_path)
    child = os.fork()
    if child == 0:
        try:
            record.write("child")
            notices.announce("in the child")
            record.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    record.write("parent")
    engine.close()
    assert [line["event"] for line in lines(tmp_path / "run.jsonl")] == ["start", "parent", "end"]


def test_sigkill_leaves_a_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def train() -> None:
        engine = engine_of(small.llama())
        optimizer = engine.optimizer()
        record = engine.record(path)
        while True:
            loss = engine.model(**small.batch()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            record.log(loss=loss)

    child = forked.start(train)
    while not select.select([child[1]], [], [], 0.02)[0]:
        if path.exists() and path.read_bytes().count(b"\n") >= 6:
            os.kill(child[0], signal.SIGKILL)
            break
    assert forked.wait(child).signal == signal.SIGKILL
    events = [line for line in read(path) if line["event"] == "step"]
    assert [line["step"] for line in events] == list(range(1, len(events) + 1))
    assert len(events) >= 4
    engine_of(small.llama()).record(path).close()
    assert [line["event"] for line in read(path)][-2:] == ["start", "end"]


def test_record_must_be_a_bool(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="record must be True or False"):
        mt.init(record=str(tmp_path))
