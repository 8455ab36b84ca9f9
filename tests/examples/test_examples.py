"""Every file in examples/ runs unchanged, offline and on the CPU, and prints the expected output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {"lora": ("peft",), "trl_sft": ("trl", "datasets")}
PRINTS = {
    "finetune": (r"loss on held-out text: 5\.\d+ before, [12]\.\d+ after", r"stock transformers reloads 382,176 "),
    "own_loop": (r"step 30: loss [12]\.", r"saved and loaded again: held-out loss [12]\.\d+, equal"),
    "lora": (r"loss: 5\.\d+ at the start, 4\.\d+ at the end", r"PEFT reloads PeftModelForCausalLM"),
    "trl_sft": (r"loss: 4\.\d+ at the start, [23]\.\d+ at the end", r"stock transformers reloads 382,176 "),
    "plan_a_machine": (
        r"does not fit on rtx4090-64gb: .* of ram", r"makes it fit: .*'bf16-sr'", r"13\.02B parameters on rtx4090",
        r"batch of 1024 tokens: \d+", r"context: [\d,]+ tokens", r"largest model with an exact FP32 master: \d\.\dB",
    ),
    "resume": (r"stopped with exit status 143, saved \['checkpoint-4'\]", r"30 weights, 0 differ"),
}  # fmt: skip
"""Patterns that the output of each example must match."""


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == PRINTS.keys()


@pytest.mark.parametrize("example", PRINTS)
def test_example(example: str, tmp_path: Path) -> None:
    for package in NEEDS.get(example, ()):
        pytest.importorskip(package)
    run, temporary = tmp_path / "run", tmp_path / "tmp"
    run.mkdir()
    temporary.mkdir()
    environment = os.environ | {"PYTHONPATH": ":".join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(temporary)}
    command = [sys.executable, str(EXAMPLES / f"{example}.py")]
    done = subprocess.run(command, cwd=run, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for pattern in PRINTS[example]:
        assert re.search(pattern, done.stdout), f"{pattern!r} is not in\n{done.stdout[-4000:]}"
    assert not list(run.iterdir()), "an example must not write to the current directory"
    if example in NEEDS:
        (record,) = temporary.glob("*/run.jsonl")
        check_record(record, done.stdout)


def check_record(record: Path, printed: str) -> None:
    """The recorded losses match those that the Trainer logs: means of five steps, with three decimals."""
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    assert [step["step"] for step in steps] == list(range(1, 21))
    assert all(step["grad_norm"] > 0 and step["tokens"] > 0 and step["seconds"] > 0 for step in steps)
    losses = [step["loss"] for step in steps]
    first, last = re.search(r"loss: ([\d.]+) at the start, ([\d.]+) at the end", printed).groups()
    assert float(first) == pytest.approx(sum(losses[:5]) / 5, abs=1e-3)
    assert float(last) == pytest.approx(sum(losses[-5:]) / 5, abs=1e-3)
    assert lines[-1]["reason"] == "finished"
