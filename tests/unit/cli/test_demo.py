"""The demo trains, compares with plain PyTorch and reports. The byte tokenizer round-trips any text."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from typer.testing import CliRunner

from megatrain._version import __version__
from megatrain.cli import main as cli
from megatrain.cli.chart import curves
from megatrain.cli.demo import NEXT, SPECIAL, VOCAB_SIZE, byte_tokenizer, learning_rate, printable, run_demo, verdict
from megatrain.errors import SettingsError

TOKENIZER = byte_tokenizer()


# ---- the byte tokenizer


@given(st.text() | st.lists(st.sampled_from([*SPECIAL, " ", "\n", "é", "a", "\0"])).map("".join))
def test_any_text_round_trips(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert TOKENIZER.decode(ids) == text
    if not any(token in text for token in SPECIAL):
        assert bytes(ids) == text.encode()


def test_ids() -> None:
    assert len(TOKENIZER) == VOCAB_SIZE == 259
    assert (TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id) == (256, 257, 258)
    assert TOKENIZER.convert_tokens_to_ids(list(SPECIAL)) == [256, 257, 258]


def test_saved_and_loaded(tmp_path: Path) -> None:
    byte_tokenizer(max_length=64).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))  # must not select Llama's tokenizer
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "We the People,  naïve <eos> 🙂\r\n"
    assert loaded(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.model_max_length == 64


def test_bundled_text() -> None:
    folder = resources.files("megatrain.cli").joinpath("text")
    text = folder.joinpath("us-founding.txt").read_text(encoding="ascii")
    assert 50_000 < len(text) < 60_000
    assert text.startswith("The Declaration of Independence")
    assert "We the People of the United States" in text
    assert set(text) <= {"\n", *map(chr, range(32, 127))}
    assert "public domain" in folder.joinpath("README.md").read_text()


# ---- the demo


def test_demo(tmp_path: Path) -> None:
    out = tmp_path / "model"
    result = CliRunner().invoke(cli.app, ["demo", "--steps", "8", "--device", "cpu", "--out", str(out)])
    assert result.exit_code == 0, result.output
    for words in (
        "MegaTrain",
        "plain PyTorch",
        "difference",
        "0.4M parameters",
        "3 slots",
        "reloaded",
        "step 8",
        "⠤",
        "We the",
    ):
        assert words in result.output
    assert (out / "model.safetensors").exists()
    # A process that does not import megatrain can load the output and generate.
    code = f"""
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (kind.from_pretrained({str(out)!r}) for kind in (AutoModelForCausalLM, AutoTokenizer))
tokens = model.generate(**tokenizer("We", return_tensors="pt"), max_new_tokens=5, min_new_tokens=5)
assert tokens.shape == (1, 7)
assert not any(name.startswith("megatrain") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_demo_bf16() -> None:
    result = CliRunner().invoke(cli.app, ["demo", "--steps", "8", "--device", "cpu", "--precision", "bf16"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("columns", [30, 80])
def test_demo_output_in_an_ascii_pipe(columns: int) -> None:
    """The untrained model writes arbitrary bytes. The output is plain ASCII, without colours and not too wide."""
    environment = os.environ | {"PYTHONPATH": ":".join(filter(None, sys.path)), "PYTHONIOENCODING": "ascii:strict"}
    command = [sys.executable, "-m", "megatrain", "demo", "--steps", "3", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, env=environment | {"NO_COLOR": "1", "COLUMNS": str(columns)})
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode("ascii").splitlines()
    assert "\x1b" not in "".join(lines)
    assert max(map(len, lines[:-6])) <= 80  # all lines but the commands, which are not wrapped
    assert any(line.strip().startswith("6 |") for line in lines)


def test_commands_to_try_next_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[3]
    monkeypatch.chdir(root)
    for command, _ in NEXT:
        program, *arguments = shlex.split(command)
        if program == "{megatrain}":
            result = CliRunner().invoke(cli.app, arguments)
            assert result.exit_code == 0, result.output
        else:
            assert (root / arguments[0]).is_file()


@pytest.mark.parametrize("loss", [5.0, math.nan])
def test_exit_code_when_the_loss_does_not_fall(loss: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> str | None:
        return verdict([5.0, 5.0, loss, loss], 0.0, "fp32")

    monkeypatch.setattr("megatrain.cli.demo.run_demo", broken)
    result = CliRunner().invoke(cli.app, ["demo"])
    assert result.exit_code == 1
    assert "the loss did not fall" in result.output


def test_verdict() -> None:
    falling = [5.0, 4.0, 3.0, 2.0]
    assert verdict(falling, 1e-4, "fp32") is None
    assert verdict(falling, 0.05, "bf16") is None
    assert verdict(falling, 0.3, "bf16") is not None
    assert "2.0e-03 apart" in str(verdict(falling, 2e-3, "fp32"))
    assert verdict(falling, math.nan, "fp32") is not None
    assert verdict([5.0, 4.0], 0.0, "fp32") is None


def test_learning_rate() -> None:
    rates = [learning_rate(step, 20) for step in range(20)]
    assert max(rates) == 1.0
    assert rates[0] == 0.5
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert 0.1 <= rates[-1] < 0.15


def test_bad_precision_exits_with_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingsError):
        run_demo(steps=2, device="cpu", precision="fp8", out=None)
    monkeypatch.setattr(sys, "argv", ["megatrain", "demo", "--precision", "fp8"])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("megatrain: precision must be one of")
    assert error.count("\n") == 1


def test_out_that_cannot_be_written_to_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"--out .*file/model cannot be written to: Not a directory"):
        run_demo(steps=2, device="cpu", precision="fp32", out=tmp_path / "file" / "model")


# ---- the loss curves


def draw(line: list[float], marked: list[float], *, steps: int, width: int = 48, ascii_only: bool = False) -> list[str]:
    return curves(line, marked, steps=steps, width=width, height=9, ascii_only=ascii_only).plain.splitlines()


def test_both_curves_are_visible() -> None:
    falling = [5.0 - step / 10 for step in range(40)]
    equal_curves = draw(falling, falling, steps=40, ascii_only=True)
    # 40 steps from 5.0 to 1.1 in 40 columns and rows of 0.5: one sign per column, every fourth is a mark.
    signs = [next(row[8 + column] for row in equal_curves[:9] if row[8 + column] != " ") for column in range(40)]
    assert signs == ["o" if column % 4 == 2 else "*" for column in range(40)]
    different_curves = draw(falling, [5.0] * 40, steps=40, ascii_only=True)
    assert different_curves[0].count("o") == 10
    assert sum(row.count("*") for row in different_curves[:9]) == 39  # a mark covers one sign in the first row
    assert [row.split("|")[0].strip() for row in equal_curves[:9]] == ["5", "", "4", "", "3", "", "2", "", "1"]
    assert equal_curves[-1].split() == ["1", "20", "step", "40"]


def test_the_line_has_no_gaps() -> None:
    rows = draw([9.0, 0.0] * 20, [], steps=40)[:9]
    # From the second step on, the line crosses every column from top to bottom.
    assert all(" " not in row[9:] for row in rows)
    assert {len(row) for row in rows} == {48}


@pytest.mark.parametrize("values", [[], [math.nan] * 8, [math.inf, 1.0], [3.0] * 8, [1e30, 1.0], [-2.5, -3.5]])
@pytest.mark.parametrize("width", [1, 20, 80])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_any_losses_can_be_drawn(values: list[float], width: int, ascii_only: bool) -> None:
    rows = draw(values, values, steps=8, width=width, ascii_only=ascii_only)
    assert len(rows) == 11
    assert "".join(rows).isascii() or not ascii_only


def test_control_characters_in_generated_text_are_replaced() -> None:
    assert printable("a\x1b[2J\nb\ufffd\u202e", "ascii") == "a?[2J b??"
    assert printable("naïve", "utf-8") == "naïve"


# ---- the command


def test_version() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"megatrain {__version__}\n"


def test_the_module_prints_help() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "megatrain", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert "demo" in run.stdout
