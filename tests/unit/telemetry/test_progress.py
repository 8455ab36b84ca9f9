"""Progress bars appear on a terminal after a delay and do not garble other output."""

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


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replaces stderr. This is not a fixture because pytest replaces stderr again when the test starts."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(module, "REFRESH", 0.01)
    # Hugging Face switches its bars off in some environments.
    monkeypatch.setattr(logging, "_tqdm_active", True)
    return stream


def work(total: int | None, until: str, stream: Terminal) -> None:
    """Work until the bar shows the text `until`, for at most 300 seconds."""
    end = time.monotonic() + 300
    with progress(total, "block", "Moving weights") as advance:
        advance(2)
        while until not in stream.getvalue():
            assert time.monotonic() < end, stream.getvalue()
            time.sleep(0.005)


def test_a_bar_shows_its_progress_and_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr(module, "AFTER", 0.0)
    work(4, "2/4", terminal)
    assert "Moving weights" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r")
    assert not tqdm._instances


def test_without_a_total_the_bar_shows_the_elapsed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr(module, "AFTER", 0.0)
    work(None, "Moving weights: 00:00", terminal)


def test_short_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with progress(4, "block", "Moving weights") as advance:
        advance()
    assert terminal.getvalue() == ""


def test_an_error_closes_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr(module, "AFTER", 0.0)
    with pytest.raises(AssertionError, match="Moving"):
        fail(terminal)
    assert not tqdm._instances


def fail(terminal: Terminal) -> None:
    end = time.monotonic() + 300
    with progress(4, "block", "Moving weights"):
        while "Moving" not in terminal.getvalue() and time.monotonic() < end:
            time.sleep(0.005)
        raise AssertionError(terminal.getvalue())


def test_bars_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    open_terminal(monkeypatch)
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
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr("logging.root.handlers", [])
    with tqdm(total=4, file=terminal, ncols=40) as bar:
        bar.update(1)
        before = len(terminal.getvalue())
        announce("a decision")
        after = terminal.getvalue()[before:]
    cleared, _, rest = after.partition("[megatrain] a decision\n")
    assert rest, after
    assert set(cleared) <= set("\r ")
    assert "/4" in rest, "the bar must be redrawn"
