"""Bars show on a terminal, after a while, and never tear what is printed beside them."""

from __future__ import annotations

import io
import sys
import time

import pytest
from tqdm import tqdm
from transformers.utils import logging

from megatrain.telemetry import progress as module
from megatrain.telemetry.notices import announce
from megatrain.telemetry.progress import hidden, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def opened(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Not a fixture: pytest puts its own stderr back when the test begins."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(module, "REFRESH", 0.01)
    # Hugging Face switches its bars off in some environments.
    monkeypatch.setattr(logging, "_tqdm_active", True)
    return stream


def work(total: int | None, until: str, stream: Terminal) -> None:
    """Goes on until the bar shows something; a bar that never does is a failure, not an endless test."""
    end = time.monotonic() + 20
    with progress(total, "block", "Moving weights") as advance:
        advance(2)
        while until not in stream.getvalue():
            assert time.monotonic() < end, stream.getvalue()
            time.sleep(0.005)


def test_a_bar_says_how_far_it_is_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened(monkeypatch)
    monkeypatch.setattr(module, "AFTER", 0.0)
    work(4, "2/4", terminal)
    assert "Moving weights" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r")
    assert not tqdm._instances


def test_without_a_total_it_says_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened(monkeypatch)
    monkeypatch.setattr(module, "AFTER", 0.0)
    work(None, "Moving weights: 00:00", terminal)


def test_short_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened(monkeypatch)
    with progress(4, "block", "Moving weights") as advance:
        advance()
    assert terminal.getvalue() == ""


def test_an_error_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened(monkeypatch)
    monkeypatch.setattr(module, "AFTER", 0.0)
    with pytest.raises(AssertionError, match="Moving"):
        fail(terminal)
    assert not tqdm._instances


def fail(terminal: Terminal) -> None:
    end = time.monotonic() + 20
    with progress(4, "block", "Moving weights"):
        while "Moving" not in terminal.getvalue() and time.monotonic() < end:
            time.sleep(0.005)
        raise AssertionError(terminal.getvalue())


def test_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    opened(monkeypatch)
    assert module.shown()
    with hidden():
        assert not module.shown()
    with hidden(False):
        assert module.shown()
    monkeypatch.setattr(logging, "_tqdm_active", False)
    assert not module.shown()
    monkeypatch.setattr(logging, "_tqdm_active", True)
    assert module.shown()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not module.shown()


def test_a_line_is_printed_above_an_open_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened(monkeypatch)
    monkeypatch.setattr("logging.root.handlers", [])
    with tqdm(total=4, file=terminal, ncols=40) as bar:
        bar.update(1)
        before = len(terminal.getvalue())
        announce("a decision")
        after = terminal.getvalue()[before:]
    cleared, _, rest = after.partition("[megatrain] a decision\n")
    assert rest, after
    assert set(cleared) <= set("\r ")
    assert "/4" in rest, "the bar is drawn again"
