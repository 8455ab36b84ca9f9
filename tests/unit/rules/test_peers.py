"""The comparison with transformers' own tests (tests/peers) reports failures and exceptions correctly."""

import importlib.util
import tomllib
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "peers"
_spec = importlib.util.spec_from_file_location("peers_run", FOLDER / "run.py")
run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(run)


def test_a_test_that_only_stock_passes_needs_a_reason():
    lines, right = run.compared({"T::a", "T::b"}, {"T::a"}, {})
    assert not right
    assert lines == ["stock passes 2, megatrain.Trainer 1 of them", "FAILED      T::b"]
    lines, right = run.compared({"T::a", "T::b"}, {"T::a"}, {"T::b": "why"})
    assert right
    assert "exception   T::b: why" in lines


def test_an_exception_that_is_no_longer_needed_is_reported():
    lines, right = run.compared({"T::a"}, {"T::a"}, {"T::a": "why"})
    assert not right
    assert any(line.startswith("NOT NEEDED  T::a") for line in lines)


def test_every_exception_has_a_reason():
    named = tomllib.loads((FOLDER / "exceptions.toml").read_text())
    assert all("::" in name and reason for name, reason in named.items())
