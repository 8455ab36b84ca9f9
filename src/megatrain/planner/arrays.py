"""One number for each of many decisions: how such arrays are summed up, searched and looked up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Table = dict[tuple[int, ...], tuple[Any, ...]]


class Sums:
    """Numbers of blocks, added up: of the first layers, of those after them, and of all that is not a layer."""

    def __init__(self, values: Sequence[float], layers: Sequence[int], rest: Sequence[int]) -> None:
        self._before: npt.NDArray[Any] = np.cumsum([0, *(values[i] for i in layers)])
        self._rest = sum(values[i] for i in rest)

    def before(self, layers: Ints, rest: Bools) -> npt.NDArray[Any]:
        """Of the first layers, and of the rest or not."""
        found: npt.NDArray[Any] = self._before[layers] + rest * self._rest
        return found

    def after(self, layers: Ints, rest: Bools | bool) -> npt.NDArray[Any]:
        """Of the layers after them."""
        found: npt.NDArray[Any] = self._before[-1] - self._before[layers] + rest * self._rest
        return found

    @property
    def total(self) -> float:
        return float(self._before[-1]) + self._rest


def most_layers(low: Ints, high: int, fit: Callable[[Ints], Bools]) -> Ints:
    """How many layers fit in each choice, of fewer than `high`, where `low` do; found by halving."""
    above = np.full_like(low, high)
    while (above - low > 1).any():
        middle = (low + above) // 2
        enough = fit(middle)
        low, above = np.where(enough, middle, low), np.where(enough, above, middle)
    return low


def look_up(known: Table, function: Callable[..., tuple[Any, ...]], *columns: Any) -> Any:
    """A function of small numbers for many decisions: results × decisions, each computed once."""
    keys = np.zeros(len(columns[0]), np.int64)
    if not len(keys):
        return np.zeros((len(function(*(0 for _ in columns))), 0), np.int64)
    for column in columns:
        keys = keys * 4096 + column
    _, first, where = np.unique(keys, return_index=True, return_inverse=True)
    rows = []
    for index in first:
        key = tuple(int(column[index]) for column in columns)
        if key not in known:
            known[key] = function(*key)
        rows.append(known[key])
    return np.array(rows).T[:, where]
