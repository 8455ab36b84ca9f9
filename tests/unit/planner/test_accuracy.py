"""The planner against the runs of `benchmarks/accuracy.py` on three H200 machines, each as it was probed."""

import json
from pathlib import Path

import pytest
from tests.unit.planner.made_up import shape_of

from megatrain.hardware.machine import Machine
from megatrain.planner import plan

RUNS = json.loads((Path(__file__).parent / "accuracy.json").read_text())
"""Commit → the machine as it was probed there, and what every row took."""
CASES = [(commit, number) for commit, found in RUNS.items() for number in range(len(found["rows"]))]


@pytest.mark.parametrize(("commit", "number"), CASES)
def test_a_row_takes_what_was_measured(commit, number):
    row = RUNS[commit]["rows"][number]
    machine = Machine.from_json(json.dumps(RUNS[commit]["machine"]), commit)
    found = plan(
        shape_of(row["shape"]), machine=machine, batch=4, length=2048, accumulation=row["accumulation"],
        max_vram_gb=row["max_vram_gb"], compile=row.get("compile", False),
    )  # fmt: skip
    # Constants have changed since the first run, and with them two of its placements, by a block or two.
    assert abs(len(found.resident) - row["resident"]) <= 2
    assert row["seconds"] == pytest.approx(found.step.seconds, rel=0.1)
    if len(found.resident) == row["resident"]:
        for tier in ("vram", "ram"):
            planned, measured = found.total(tier) / (1 << 30), row[f"{tier}_gib"]
            assert measured <= planned
