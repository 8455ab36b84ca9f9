"""Arrays with one number per decision: prefix sums, a bisection and a memoized lookup."""

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
    """Prefix sums of a number per block, over the layers; the other blocks have one sum."""

    def __init__(self, values: Sequence[float], layers: Sequence[int], others: Sequence[int]) -> None:
        self._before: npt.NDArray[Any] = np.cumsum([0, *(values[i] for i in layers)])
        self._others = sum(values[i] for i in others)

    def before(self, layers: Ints, others: Bools) -> npt.NDArray[Any]:
        """The sum of the first `layers` layers, plus the other blocks where `others`."""
        sums: npt.NDArray[Any] = self._before[layers] + others * self._others
        return sums

    def after(self, layers: Ints, others: Bools | bool) -> npt.NDArray[Any]:
        """The sum of all layers but the first `layers`, plus the other blocks where `others`."""
        sums: npt.NDArray[Any] = self._before[-1] - self._before[layers] + others * self._others
        return sums

    @property
    def total(self) -> float:
        return float(self._before[-1]) + self._others


def most_layers(low: Ints, high: int, fit: Callable[[Ints], Bools]) -> Ints:
    """The largest number of layers below `high` that fits, for each decision, by bisection. `low` layers fit."""
    above = np.full_like(low, high)
    while (above - low > 1).any():
        middle = (low + above) // 2
        enough = fit(middle)
        low, above = np.where(enough, middle, low), np.where(enough, above, middle)
    return low


def look_up(known: Table, function: Callable[..., tuple[Any, ...]], *columns: Any) -> Any:
    """Results × decisions of a function of small integers; `known` keeps what has been computed."""
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
