"""The demo runs, compares and reports; the byte tokenizer gives back what it was given."""

from __future__ import annotations

import json
import math
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
from megatrain.cli.demo import SPECIAL, VOCAB_SIZE, byte_tokenizer, learning_rate, run_demo, verdict
from megatrain.errors import SettingsError

TOKENIZER = byte_tokenizer()


# ---- bytes


@given(st.text() | st.lists(st.sampled_from([*SPECIAL, " ", "\n", "é", "a", "\0"])).map("".join))
def test_any_text_comes_back(text: str) -> None:
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
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))  # must not bring in Llama's own
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
    for words in ("MegaTrain", "plain PyTorch", "difference", "1.0M parameters", "3 slots", "Reloaded"):
        assert words in result.output
    assert (out / "model.safetensors").exists()
    # The output is ordinary: a process that never imports megatrain loads it and generates.
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
    assert verdict(falling, 0.2, "bf16") is not None
    assert "2.0e-03 apart" in str(verdict(falling, 2e-3, "fp32"))
    assert verdict(falling, math.nan, "fp32") is not None
    assert verdict([5.0, 4.0], 0.0, "fp32") is None


def test_learning_rate() -> None:
    rates = [learning_rate(step, 20) for step in range(20)]
    assert max(rates) == 1.0
    assert rates[0] == 0.5
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert 0.1 <= rates[-1] < 0.15


def test_bad_precision_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingsError):
        run_demo(steps=2, device="cpu", precision="fp8", out=None)
    monkeypatch.setattr(sys, "argv", ["megatrain", "demo", "--precision", "fp8"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("megatrain: precision must be one of")
    assert error.count("\n") == 1


# ---- the command


def test_version() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"megatrain {__version__}\n"


def test_module_and_lean_help() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "megatrain", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert "demo" in run.stdout
