"""A Trainer announces once that steps take longer or shorter than planned, if there is a planned time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tests import small

import megatrain as mt
from megatrain.hf import progress
from megatrain.hf.progress import FIRST, LOOKED_AT, Pace, compared


@pytest.mark.parametrize(
    ("seconds", "padded", "expected"),
    [(1.0, False, None), (1.24, False, None), (0.81, False, None), (1.3, False, "something else"),
     (1.3, True, "something else"), (0.7, False, "refresh=True"), (0.7, True, None)],
)  # fmt: skip
def test_the_notice_depends_on_the_ratio(seconds: float, padded: bool, expected: str | None) -> None:
    line = compared(seconds, 1.0, padded)
    assert line is None if expected is None else line is not None and expected in line


@pytest.mark.parametrize(("planned", "lines"), [(2.0, 1), (1.0, 0), (0.5, 1), (None, 0)])
def test_the_notice_is_printed_once(
    tmp_path: Path,
    planned: float | None,
    lines: int,
    announced: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mt.init(machine="h200-128gb")
    clock = [0.0]

    def tick() -> float:
        clock[0] += 1.0  # read when a step starts and when it ends
        return clock[0]

    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=tick))
    if planned is not None:
        monkeypatch.setattr(Pace, "planned", planned)
    trainer = mt.Trainer(
        model=small.llama(),
        args=small.arguments(tmp_path, max_steps=2 * (FIRST + LOOKED_AT), num_train_epochs=9, logging_strategy="no"),
        train_dataset=small.rows(16),
    )
    trainer.train()
    assert trainer.engine.settings.plan is not None
    assert sum("steps take 1.00 s" in line for line in announced.messages) == lines
