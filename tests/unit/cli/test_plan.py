"""`megatrain plan` prints a table or JSON. Refusals exit 3 and wrong usage exits 2, with one line and no traceback."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import megatrain as mt
from megatrain.cli import plan as command
from megatrain.cli.main import app
from megatrain.planner.run import OPTIONS

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1000, "dtype": "bfloat16",
}  # fmt: skip
MACHINE = "rtx4090-64gb"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def assert_error_line(result: Result, code: int, *words: str) -> None:
    """Check that stderr has one line with these words and that stdout is empty."""
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.stdout == ""
    assert result.stderr.startswith("megatrain: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize("part", ["", "config.json"])
def test_prints_only_the_table(folder: Path, part: str) -> None:
    result = run(folder / part, "--machine", MACHINE, "--batch", 2, "--length", 512, "--accumulation", 3)
    assert result.exit_code == 0, result.output
    expected_plan = mt.plan(folder / part, machine=MACHINE, batch=2, length=512, accumulation=3)
    assert result.stdout == expected_plan.table() + "\n"


def test_json_is_the_plan(folder: Path) -> None:
    options = ("--optimizer-compression", "8bit", "--precision", "fp32", "--compile", "--no-clipping", "--padded")
    result = run(folder, "--machine", MACHINE, *options, "--head-chunk", 0, "--optimizer", "lion", "--json")
    expected_plan = mt.plan(
        folder, machine=MACHINE, optimizer_compression="8bit", precision="fp32", compile=True, clipping=False,
        padded=True, head_chunk=0, optimizer="lion",
    )  # fmt: skip
    assert mt.Plan.from_json(result.stdout) == expected_plan


def test_every_option_of_a_plan_is_available() -> None:
    options = set(inspect.signature(command.plan).parameters) - set(command.OTHERS)
    set_by_the_program = {"available", "trainer", "tried_in_turn"}
    assert options == set(OPTIONS) - set_by_the_program


def test_largest(folder: Path) -> None:
    limits = ("--machine", MACHINE, "--max-vram-gb", 8)
    batch = mt.Plan.from_json(run(folder, *limits, "--largest", "batch", "--json").stdout)
    assert batch == mt.largest_batch(folder, MACHINE, max_vram_gb=8).plan
    context = mt.Plan.from_json(run(folder, *limits, "--largest", "context", "--json").stdout)
    assert context == mt.largest_context(folder, MACHINE, max_vram_gb=8).plan
    assert run(folder, *limits, "--largest", "model").exit_code == 2


def test_tokens(folder: Path) -> None:
    assert "days for 20B tokens" in run(folder, "--machine", MACHINE, "--tokens", 2e10).stdout


def test_a_machine_can_be_read_from_a_file(folder: Path, tmp_path: Path) -> None:
    description = tmp_path / "mine.json"
    description.write_text(mt.Machine.load(MACHINE).to_json())
    assert run(folder, "--machine", description).stdout == run(folder, "--machine", MACHINE).stdout


# ---- refusals


def test_a_refusal_prints_one_line(folder: Path) -> None:
    assert_error_line(
        run(folder, "--machine", MACHINE, "--max-ram-gb", 0.5, "--max-vram-gb", 1.5), 3, "does not fit", "GiB"
    )


def test_a_refusal_as_json(folder: Path) -> None:
    result = run(folder, "--machine", MACHINE, "--max-ram-gb", 0.5, "--max-vram-gb", 1.5, "--json")
    with pytest.raises(mt.Refusal) as raised:
        mt.plan(folder, machine=MACHINE, max_ram_gb=0.5, max_vram_gb=1.5)
    assert result.exit_code == 3
    assert result.stderr == f"megatrain: {raised.value}\n"
    refused = json.loads(result.stdout)["refused"]
    assert refused["message"] == str(raised.value)
    assert refused["tier"] == raised.value.tier
    assert refused["shortfall_gb"] == raised.value.shortfall_gb
    assert [suggestion["changes"] for suggestion in refused["suggestions"]] == [
        dict(suggestion.changes) for suggestion in raised.value.suggestions
    ]
    assert refused["suggestions"]


# ---- wrong usage


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--machine", "no-such-machine"], "rtx4090-64gb"),
        (["--machine", "."], "Is a directory"),
        (["--machine", MACHINE, "--precision", "fp8"], "bf16-sr"),
        (["--machine", MACHINE, "--optimizer-compression", "2bit"], "'8bit'"),
        (["--machine", MACHINE, "--optimizer", "adam"], "adamw"),
        (["--machine", MACHINE, "--batch", "0"], "batch"),
        (["--machine", MACHINE, "--max-ram-gb", "nan"], "max_ram_gb"),
        (["--device", "tpu"], "'cuda:N'"),
        (["--device", "cuda:x"], "'cuda:N'"),
        (["--device", "cpu", "--offload-dir", "/no/such/directory"], "/no/such/directory"),
    ],
)
def test_unusable_values(folder: Path, arguments: list[str], words: str) -> None:
    assert_error_line(run(folder, *arguments), 2, words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no config.json"),
        (b"{nope", "not a valid JSON"),
        (b"\xff\xfe", "cannot be used"),
        (b"[1]", "model_type"),
        (b'{"model_type": "no-such-type"}', "no-such-type"),
        (b'{"model_type": "llama", "hidden_size": "wide"}', "expected int, got str"),
        (b'{"model_type": "llama", "hidden_act": "no-such"}', "cannot build a model"),
        (b'{"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}', "trust_remote_code=True"),
    ],
)
def test_unusable_configs(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert_error_line(run(tmp_path, "--machine", MACHINE), 2, words)


@pytest.mark.parametrize("name", ["/no/such/model", "./model", "config.json", "~/no/such/model"])
def test_a_missing_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_error_line(run(name, "--machine", MACHINE), 2, f"no file or directory {name!r}")


@pytest.mark.parametrize("name", ["company/model", "llama", "two words", ""])
def test_an_unknown_model_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert_error_line(run(name, "--machine", MACHINE), 2, f"no config was found for {name!r}")


def test_other_errors_exit_1(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 0}))
    assert_error_line(run(tmp_path, "--machine", MACHINE), 1, "no repeated layers")


# ---- in a subprocess


def run_in_subprocess(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatrain", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "80", "NO_COLOR": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def test_output_to_a_pipe(folder: Path) -> None:
    done = run_in_subprocess("plan", folder, "--machine", MACHINE)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == mt.plan(folder, machine=MACHINE).table() + "\n"
    assert "\x1b" not in done.stdout


def test_a_refusal_to_a_pipe(folder: Path) -> None:
    done = run_in_subprocess("plan", folder, "--machine", MACHINE, "--max-ram-gb", 0.5, "--max-vram-gb", 1.5)
    assert (done.returncode, done.stdout) == (3, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_wrong_usage() -> None:
    assert run().exit_code == 2
    assert run("model", "--batch", "many").exit_code == 2
    assert run("model", "--no-such-option").exit_code == 2
