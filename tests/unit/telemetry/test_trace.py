"""`megatrain trace` writes the record of a run in the format that Perfetto reads."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests import small
from tests.tiny import engine_of
from typer.testing import CliRunner

from megatrain.cli.main import app

STEP = '{"event": "step", "time": "2026-01-01T00:00:00+00:00"}'


def record_run(directory: Path, steps: int = 4) -> None:
    engine = engine_of(small.llama())
    optimizer = engine.optimizer()
    with engine.record(directory) as record:
        for _ in range(steps):
            loss = engine.model(**small.batch()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            record.log(loss=loss)
    engine.close()


def run_trace(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["trace", *arguments])


def test_a_run_that_was_resumed(tmp_path: Path) -> None:
    record_run(tmp_path)
    record_run(tmp_path)
    with (tmp_path / "run.jsonl").open("a") as file:
        file.write('{"event": "st')  # killed
    assert run_trace(str(tmp_path)).exit_code == 0
    assert run_trace(str(tmp_path / "run.jsonl"), "--out", str(tmp_path / "other.json")).exit_code == 0
    text = (tmp_path / "trace.json").read_text()
    assert text == (tmp_path / "other.json").read_text()
    events = json.loads(text)["traceEvents"]
    for run in (0, 1):
        events_of_run = [event for event in events if event["pid"] == run]
        named = {e["args"]["name"]: e["tid"] for e in events_of_run if e["name"] == "thread_name"}
        assert {"steps", "compute", "h2d", "d2h"} <= named.keys()
        steps = [event for event in events_of_run if event["ph"] == "X" and event["tid"] == named["steps"]]
        assert [step["name"] for step in steps] == ["step 1", "step 2", "step 3", "step 4"]
        for one, next_step in pairwise(steps):
            assert one["ts"] + one["dur"] <= next_step["ts"] + 1e-3
        # The spans of the third step are inside it, within a microsecond of rounding at each end.
        spans = [event for event in events_of_run if event["ph"] == "X" and event["tid"] == named["compute"]]
        assert spans
        assert all(steps[2]["ts"] - 2 <= s["ts"] <= steps[2]["ts"] + steps[2]["dur"] + 2 for s in spans)
        counters = [event["name"] for event in events_of_run if event["ph"] == "C"]
        assert counters.count("loss") == counters.count("RAM (GiB)") == 4
        assert "VRAM (GiB)" not in counters, "there is no GPU"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("hello\n", "is not the record of a run"),
        ("[1, 2]\n", "is not the record of a run"),
        (STEP + "\n", "missing or wrong fields (KeyError('step'))"),
        (STEP[:-1] + ', "step": 1, "seconds": "soon"}\n', "missing or wrong fields (TypeError"),
        (STEP[:-1] + ', "step": 1}\n' + STEP.replace("step", "spans") + "\n", "missing or wrong fields (KeyError"),
        (STEP[:-1] + ', "step": 1, "memory": 3}\n', "missing or wrong fields (AttributeError"),
        ("", "has no step yet"),
    ],
)
def test_files_that_are_not_a_run(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_text(content)
    done = run_trace(str(path))
    assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1)
    assert message in done.stderr


def test_a_directory_without_a_run_and_a_run_without_a_step(tmp_path: Path) -> None:
    assert "run.jsonl cannot be read" in run_trace(str(tmp_path)).stderr
    record_run(tmp_path, steps=0)
    assert "has no step yet" in run_trace(str(tmp_path)).stderr
    record_run(tmp_path)
    assert "cannot be written" in run_trace(str(tmp_path), "--out", str(tmp_path / "none" / "t.json")).stderr


def test_the_record_is_not_overwritten(tmp_path: Path) -> None:
    record_run(tmp_path)
    before = (tmp_path / "run.jsonl").read_bytes()
    done = run_trace(str(tmp_path), "--out", str(tmp_path / "run.jsonl"))
    assert (done.exit_code, "is the record itself" in done.stderr) == (2, True)
    assert (tmp_path / "run.jsonl").read_bytes() == before


def test_a_file_without_lines_is_not_read_to_its_end(tmp_path: Path) -> None:
    done = run_trace("/dev/zero", "--out", str(tmp_path / "trace.json"))
    assert (done.exit_code, "is not the record of a run" in done.stderr) == (1, True)
