"""Which step sizes count as known to fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BatchEncoding

from megatrain.hf.microbatches import MOST, MeasuredSizes


def batch(*shape: int, **others: tuple[int, ...]) -> dict[str, torch.Tensor]:
    named = {"input_ids": shape, **others}
    return {name: torch.empty(*size, device="meta") for name, size in named.items()}


def covers(known: list[Any], sizes: list[Any], windows: tuple[int, int] = (1, 1)) -> bool:
    measured = MeasuredSizes()
    measured.add(known, windows[0])
    return measured.covers(sizes, windows[1])


def test_nothing_is_known_at_first() -> None:
    assert not MeasuredSizes().covers([batch(1, 1)], 1)


@pytest.mark.parametrize("smaller", [batch(2, 8), batch(1, 8), batch(2, 7)])
def test_sizes_that_are_not_larger_in_any_dimension_fit(smaller: Any) -> None:
    assert covers([batch(2, 8)], [smaller])


@pytest.mark.parametrize(
    "other",
    [
        batch(2, 9),
        batch(4, 4),
        batch(1, 16),
        batch(16),
        batch(2, 8, pixel_values=(1,)),
        {"inputs": torch.empty(2, 8, device="meta")},
        {"input_ids": object()},
    ],
)
def test_larger_or_different_sizes_may_not_fit(other: Any) -> None:
    assert not covers([batch(2, 8)], [other])


def test_a_constant_image_does_not_hide_the_text() -> None:
    image = (1, 3, 100, 100)
    assert not covers([batch(1, 10, pixel_values=image)], [batch(1, 11, pixel_values=image)])
    assert covers([batch(1, 10, pixel_values=image)], [batch(1, 9, pixel_values=image)])


def test_sizes_inside_a_batch_encoding_are_measured() -> None:
    def encoded(length: int) -> BatchEncoding:
        return BatchEncoding({"input_ids": torch.zeros(1, length), "nested": [torch.zeros(length)], "text": ["a"]})

    assert covers([encoded(8)], [encoded(7)])
    assert not covers([encoded(8)], [encoded(9)])


def test_more_micro_batches_may_not_fit() -> None:
    assert covers([batch(1, 8)] * 4, [batch(1, 8)] * 3)
    assert not covers([batch(1, 8)] * 4, [batch(1, 8)] * 5)


def test_a_larger_window_may_not_fit() -> None:
    assert covers([batch(1, 8)] * 4, [batch(1, 8)] * 4, windows=(2, 2))
    assert not covers([batch(1, 8)] * 4, [batch(1, 8)] * 4, windows=(2, 4))


def test_the_order_of_micro_batches_does_not_matter() -> None:
    assert covers([batch(1, 4), batch(1, 8)], [batch(1, 7), batch(1, 3)])
    assert not covers([batch(1, 4), batch(1, 8)], [batch(1, 8), batch(1, 8)]), "two long batches exceed one"


def test_redundant_sizes_are_dropped_and_the_number_is_bounded() -> None:
    measured = MeasuredSizes()
    for length in range(1, 50):
        measured.add([batch(1, length)], 1)
    assert len(measured._sizes) == 1
    measured.add([batch(1, 3)], 1)
    assert len(measured._sizes) == 1
    for rows in range(1, 3 * MOST):
        measured.add([batch(rows, 1000 - rows)], 1)
    assert len(measured._sizes) == MOST
    assert measured.covers([batch(3 * MOST - 1, 1001 - 3 * MOST)], 1), "the latest size must be remembered"
