"""One step of a trace as an SVG picture: a row per lane, seconds to the right.

    PYTHONPATH=src python -m benchmarks.timeline TRACE.json docs/timeline.svg [--title TEXT] [--step N]

TRACE.json is a Chrome trace: what `engine.trace()` saves, what `--trace` of `benchmarks.step` and `benchmarks.accuracy`
writes, or what `megatrain trace` makes of a recorded run (the 3rd, 30th, 300th... step of it can be drawn).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from megatrain.geometry import LANES

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1000, 96, 16, 56, 44
ROW, BAR = 40, 26
MERGE, THIN = 1.0, 3.0
"""Bars of one kind that are closer than `MERGE` pixels are drawn as one if one of them is narrower than `THIN`: a step
has thousands of spans."""
LABEL = 7.0
"""Pixels that a character of a label needs."""
COLOURS = {"forward": "#0072b2", "backward": "#d55e00", "head": "#cc79a7", "h2d": "#56b4e9", "refresh": "#56b4e9",
           "d2h": "#e69f00", "sums_out": "#e69f00", "update": "#009e73", "gpu_update": "#009e73"}  # fmt: skip
OTHER = "#999999"
NOT_DRAWN = ("steps", "saves")
"""Rows of a recorded run that are not lanes."""


@dataclass(frozen=True)
class Bar:
    """Work of one colour on one lane, in seconds since the picture starts."""

    lane: str
    kind: str
    label: str
    start: float
    end: float


def spans_of(trace: dict[str, Any]) -> list[tuple[str, str, float, float]]:
    """Lane, label, start and end in seconds of every complete event of a Chrome trace, by start."""
    names = {
        (event.get("pid"), event.get("tid")): event["args"]["name"]
        for event in trace["traceEvents"]
        if event.get("ph") == "M" and event.get("name") == "thread_name"
    }
    found = [
        (names.get((event.get("pid"), event.get("tid")), event.get("cat", "?")), event["name"], event["ts"] / 1e6,
         (event["ts"] + event["dur"]) / 1e6)
        for event in trace["traceEvents"]
        if event.get("ph") == "X"
    ]  # fmt: skip
    return sorted(found, key=lambda span: span[2])


def kind_of(lane: str, label: str) -> str:
    """What a span is coloured by: on compute the part of the step, elsewhere the lane."""
    if lane != "compute":
        return lane
    return next((word for word in ("head", "backward", "forward") if word in label), lane)


def short(label: str) -> str:
    """What a bar shows of its label: "forward model.layers.12" is 12."""
    return label.rsplit(" ", 1)[-1].rsplit(".", 1)[-1]


def bars(spans: Sequence[tuple[str, str, float, float]], start: float, end: float, scale: float) -> list[Bar]:
    """The spans between two times, cut to them; those of one kind that a reader cannot tell apart become one bar."""
    merged: list[Bar] = []
    last: dict[str, int] = {}
    for lane, label, begin, finish in spans:
        if finish <= start or begin >= end:
            continue
        bar = Bar(lane, kind_of(lane, label), label, max(begin, start) - start, min(finish, end) - start)
        before = merged[last[lane]] if lane in last else None
        if before is not None and before.kind == bar.kind and _one(before, bar, scale):
            label = before.label if before.label == bar.label else bar.kind
            merged[last[lane]] = Bar(lane, bar.kind, label, before.start, max(before.end, bar.end))
            continue
        last[lane] = len(merged)
        merged.append(bar)
    return merged


def _one(before: Bar, bar: Bar, scale: float) -> bool:
    thin = min(before.end - before.start, bar.end - bar.start) * scale < THIN
    return thin and (bar.start - before.end) * scale < MERGE


def tick(seconds: float) -> float:
    """The smallest of 1, 2, 5 × 10^n that gives at most ten marks."""
    step = 10.0**-9
    while True:
        for factor in (1, 2, 5):
            if seconds / (step * factor) <= 10:
                return step * factor
        step *= 10


def bounds(trace: dict[str, Any], step: int) -> tuple[float, float]:
    """When a step of a recorded run began and ended."""
    found = [(start, end) for lane, label, start, end in spans_of(trace) if (lane, label) == ("steps", f"step {step}")]
    if not found:
        raise SystemExit(f"the trace has no step {step}.")
    return found[0]


def draw(trace: dict[str, Any], title: str, start: float | None = None, end: float | None = None) -> str:
    """The picture as SVG text."""
    spans = [span for span in spans_of(trace) if span[0] not in NOT_DRAWN]
    if not spans:
        raise SystemExit("the trace has no spans of lanes.")
    begin = spans[0][2] if start is None else start
    finish = max(span[3] for span in spans) if end is None else end
    if finish <= begin:
        raise SystemExit(f"--end {finish:.3f} must be after --start {begin:.3f}.")
    scale = (WIDTH - LEFT - RIGHT) / (finish - begin)
    drawn = bars(spans, begin, finish, scale)
    if not drawn:
        raise SystemExit(f"no lane was busy between {begin:.3f} and {finish:.3f} s.")
    present = {bar.lane for bar in drawn}
    lanes = [lane for lane in LANES if lane in present] + sorted(present - LANES.keys())
    bottom = TOP + ROW * len(lanes)
    height = bottom + BOTTOM
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12" '
        f'viewBox="0 0 {WIDTH} {height}">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
        *_legend(drawn), *_axis(finish - begin, scale, bottom),
    ]  # fmt: skip
    for number, lane in enumerate(lanes):
        y = TOP + ROW * number
        busy = sum(bar.end - bar.start for bar in drawn if bar.lane == lane)
        parts.append(f'<line x1="0" x2="{WIDTH}" y1="{y}" y2="{y}" stroke="#eeeeee"/>')
        parts.append(f'<text x="8" y="{y + 17}" font-weight="bold">{escape(lane)}</text>')
        parts.append(f'<text x="8" y="{y + 32}" fill="#666666" font-size="11">{busy:.3g} s</text>')
        parts += [_bar(bar, y + (ROW - BAR) / 2, scale) for bar in drawn if bar.lane == lane]
    return "\n".join([*parts, "</svg>", ""])


def _bar(bar: Bar, y: float, scale: float) -> str:
    x, width = LEFT + bar.start * scale, max(0.5, (bar.end - bar.start) * scale)
    colour = COLOURS.get(bar.kind, OTHER)
    tip = f"{bar.label}: {1e3 * (bar.end - bar.start):.3g} ms"
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}"'
    text = f'<rect {place} fill="{colour}" stroke="white" stroke-width="0.5"><title>{escape(tip)}</title></rect>'
    if width > LABEL * len(shown := short(bar.label)) + 4:
        middle = f'x="{x + width / 2:.1f}" y="{y + 17:.1f}" text-anchor="middle" fill="white"'
        text += f"<text {middle}>{escape(shown)}</text>"
    return text


def _legend(drawn: Sequence[Bar]) -> list[str]:
    """What the colours of compute mean; the other rows have their names."""
    parts, x = [], float(LEFT)
    for kind in ("forward", "head", "backward"):
        if any(bar.kind == kind for bar in drawn):
            parts.append(f'<rect x="{x}" y="32" width="12" height="12" fill="{COLOURS[kind]}"/>')
            parts.append(f'<text x="{x + 18}" y="42">{kind}</text>')
            x += 90
    return parts


def _axis(seconds: float, scale: float, bottom: float) -> list[str]:
    step = tick(seconds)
    digits = max(0, len(re.sub(r"^\d*\.?", "", f"{step:.9f}".rstrip("0"))))
    parts = []
    for number in range(int(seconds / step + 1e-9) + 1):
        x = LEFT + number * step * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{number * step:.{digits}f}</text>')
    parts.append(f'<text x="{(WIDTH + LEFT) / 2}" y="{bottom + 36}" text-anchor="middle">seconds</text>')
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--title", default="One step")
    parser.add_argument("--step", type=int, help="of a recorded run: the step to draw")
    parser.add_argument("--start", type=float, help="seconds into the trace; its first span if left out")
    parser.add_argument("--end", type=float, help="the same; its last span if left out")
    args = parser.parse_args()
    trace = json.loads(args.trace.read_text())
    start, end = (args.start, args.end) if args.step is None else bounds(trace, args.step)
    args.picture.write_text(draw(trace, args.title, start, end))


if __name__ == "__main__":
    main()
