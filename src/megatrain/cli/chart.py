"""Two curves as a picture of characters, for a terminal, a pipe or a log."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character (U+2800 + bits) by row and column of its 4 × 2 dots."""
MARK, MARK_EVERY = "o", 4
MARGIN = 8  # columns for the numbers of the vertical axis, and the axis


def curves(
    line: Sequence[float],
    marked: Sequence[float],
    *,
    steps: int,
    width: int,
    height: int = 12,
    ascii_only: bool = False,
) -> Text:
    """`line` drawn through, `marked` as an `o` in every fourth column, over `steps` steps; both may still be growing.

    Values that are not finite leave a gap.
    """
    columns = max(2 * MARK_EVERY, width - MARGIN)
    values = [value for value in (*line, *marked) if math.isfinite(value)] or [0.0]
    low, high = math.floor(min(values)), math.ceil(max(values))
    high = max(high, low + 1)

    def row_of(value: float, rows: int) -> int:
        return round((high - value) / (high - low) * (rows - 1))

    cells = [[" "] * columns for _ in range(height)]
    if ascii_only:
        for x, value in _sampled(line, steps, columns):
            cells[row_of(value, height)][x] = "*"
    else:
        _draw_braille(cells, [(x, row_of(value, 4 * height)) for x, value in _sampled(line, steps, 2 * columns)])
    for x, value in _sampled(marked, steps, columns):
        if x % MARK_EVERY == MARK_EVERY // 2:
            cells[row_of(value, height)][x] = MARK

    tick = max(1, math.ceil((high - low) / 6))
    labels = {row_of(value, height): f"{value:g}" for value in range(low, high + 1, tick)}
    axis, corner = ("|", "+") if ascii_only else ("│", "└")
    picture = Text(no_wrap=True, overflow="crop")
    for row, letters in enumerate(cells):
        picture.append(f"{labels.get(row, ''):>{MARGIN - 2}} {axis}")
        drawn = Text("".join(letters), "cyan")
        drawn.highlight_regex(MARK, "yellow")
        picture.append(drawn).append("\n")
    picture.append(" " * (MARGIN - 1) + corner + ("-" if ascii_only else "─") * columns + "\n")
    middle, end = str(steps // 2), f"step {steps}"
    picture.append(" " * MARGIN + f"1{middle:^{columns - 1 - len(end)}}{end}")
    return picture


def _sampled(values: Sequence[float], steps: int, columns: int) -> list[tuple[int, float]]:
    """The mean of the values in each column that has any. With fewer steps than columns, values repeat."""
    points = []
    for x in range(columns):
        first = x * steps // columns
        part = [value for value in values[first : max(first + 1, (x + 1) * steps // columns)] if math.isfinite(value)]
        if part:
            points.append((x, sum(part) / len(part)))
    return points


def _draw_braille(cells: list[list[str]], points: list[tuple[int, int]]) -> None:
    """Set the dots of all points and between neighbours, so that the line has no holes."""
    bits: dict[tuple[int, int], int] = {}
    before = None
    for x, y in points:
        start = y if before is None or before[0] != x - 1 else before[1] + (y > before[1]) - (y < before[1])
        for dot in range(min(start, y), max(start, y) + 1):
            cell = dot // 4, x // 2
            bits[cell] = bits.get(cell, 0) | DOTS[dot % 4][x % 2]
        before = x, y
    for (row, column), mask in bits.items():
        cells[row][column] = chr(0x2800 + mask)
