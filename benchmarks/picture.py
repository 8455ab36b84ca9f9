"""Loss curves as an SVG file, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 60, 190, 20, 45
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999",
           "#8c510a", "#542788")  # fmt: skip


def smooth(values: Sequence[float], span: int) -> list[float]:
    """The mean of the last `span` values, from the first full one on."""
    total, means = 0.0, []
    for index, value in enumerate(values):
        total += value - (values[index - span] if index >= span else 0.0)
        if index >= span - 1:
            means.append(total / span)
    return means


def draw(path: Path, curves: Mapping[str, Sequence[float]], first: int, labels: tuple[str, str]) -> None:
    """One line per curve; point k is at step `first + k`. The vertical axis is logarithmic."""
    last = first + max(len(curve) for curve in curves.values()) - 1
    values = [value for curve in curves.values() for value in curve]
    low, high = math.log(min(values)), math.log(max(values))

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / max(1, last - first)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - math.log(value)) / max(1e-9, high - low)

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for number in range(6):
        step = first + (last - first) * number / 5
        parts.append(f'<text x="{x(step):.0f}" y="{HEIGHT - 25}" text-anchor="middle">{step:.0f}</text>')
        value = math.exp(low + (high - low) * number / 5)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#dddddd"/>'
            f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>'
        )
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{labels[0]}</text>')
    parts.append(f'<text x="14" y="{HEIGHT / 2}" transform="rotate(-90 14 {HEIGHT / 2})">{labels[1]}</text>')
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{x(first + k):.1f},{y(value):.1f}" for k, value in enumerate(curve))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        height = TOP + 14 + 18 * number
        parts.append(
            f'<line x1="{WIDTH - RIGHT + 10}" x2="{WIDTH - RIGHT + 34}" y1="{height - 4}" y2="{height - 4}" '
            f'stroke="{colour}" stroke-width="2"/><text x="{WIDTH - RIGHT + 40}" y="{height}">{name}</text>'
        )
    path.write_text("\n".join([*parts, "</svg>", ""]))
