"""The planner against the runs of `benchmarks/accuracy.py` on six H200 machines, each as it was probed."""

import json
from pathlib import Path

import pytest
from tests.unit.planner.made_up import shape_of

from megatrain.hardware.machine import Machine
from megatrain.planner import plan

RUNS = json.loads((Path(__file__).parent / "accuracy.json").read_text())
"""Commit → the machine as it was probed there, and what every row took."""
CASES = [(commit, number) for commit, found in RUNS.items() for number in range(len(found["rows"]))]
OPTIONS = ("max_vram_gb", "accumulation", "compile", "precision", "optimizer_compression")
TAKEN_AHEAD = list(RUNS)[2:]
"""Runs in which VRAM of a plan was taken when the engine attached, so that what is held here is that steps fit in it;
`test_memory.py` holds tensors alone."""
FARTHER_OFF = {"gpt2-xl": 0.15}
"""Whose steps the host bounds, and more so while the CPU updates."""


@pytest.mark.parametrize(("commit", "number"), CASES)
def test_a_row_takes_what_was_measured(commit, number):
    row = RUNS[commit]["rows"][number]
    machine = Machine.from_json(json.dumps(RUNS[commit]["machine"]), commit)
    options = {name: row[name] for name in OPTIONS if name in row}
    shape = shape_of(row["shape"], row.get("layers"))
    found = plan(shape, machine=machine, batch=row.get("batch", 4), length=row.get("length", 2048), **options)
    assert len(found.resident) == row["resident"]
    assert row["seconds"] == pytest.approx(found.step.seconds, rel=FARTHER_OFF.get(row["shape"], 0.1))
    for tier in ("vram", "ram"):
        planned, measured = found.total(tier) / (1 << 30), row[f"{tier}_gib"]
        assert measured <= planned
        assert commit not in TAKEN_AHEAD or planned - measured <= max(0.5, 0.05 * planned)
