"""Plans of format 1: windows of one size, nothing held, and some lanes less. They are read as plans of today."""

from __future__ import annotations

from typing import Any

from megatrain.geometry import LANES, PLACED, windows_of
from megatrain.hardware.described import is_count

LANE_NAMES = {"vram update": "vram"}
"""Lanes that had another name."""


def converted(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of a plan of format 1 as they are now. What is not as it should be stays, and is refused as such."""
    run, window, step = data.get("run"), data.get("window"), data.get("step")
    found: dict[str, Any] = {name: [] for name in PLACED if name != "resident"} | data
    accumulation: Any = run.get("accumulation", 1) if isinstance(run, dict) else None
    if window is not None and is_count(window, 1) and is_count(accumulation, 1):
        del found["window"]
        found["windows"] = list(windows_of(window, accumulation))
    if isinstance(step, dict):
        bottleneck = step.get("bottleneck")
        found["step"] = {name: _lanes(value) if name in ("busy", "waited") else value for name, value in step.items()}
        if isinstance(bottleneck, str):
            found["step"]["bottleneck"] = LANE_NAMES.get(bottleneck, bottleneck)
    return found


def _lanes(seconds: Any) -> Any:
    if not isinstance(seconds, dict):
        return seconds
    return dict.fromkeys(LANES, 0.0) | {LANE_NAMES.get(name, name): value for name, value in seconds.items()}
