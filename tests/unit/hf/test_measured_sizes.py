"""Which sizes of a step count as known to fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BatchEncoding

from megatrain.hf.microbatches import MOST, MeasuredSizes


def batch(*shape: int, **others: tuple[int, ...]) -> dict[str, torch.Tensor]:
    named = {"input_ids": shape, **others}
    return {name: torch.empty(*size, device="meta") for name, size in named.items()}


def covers(known: list[Any], asked: list[Any], together: tuple[int, int] = (1, 1)) -> bool:
    tried = MeasuredSizes()
    tried.add(known, together[0])
    return tried.covers(asked, together[1])


def test_nothing_is_known_at_first() -> None:
    assert not MeasuredSizes().covers([batch(1, 1)], 1)


@pytest.mark.parametrize("smaller", [batch(2, 8), batch(1, 8), batch(2, 7)])
def test_what_is_no_longer_in_any_dimension_fits(smaller: Any) -> None:
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
def test_what_is_longer_in_some_or_not_the_same_may_not_fit(other: Any) -> None:
    assert not covers([batch(2, 8)], [other])


def test_a_constant_image_does_not_hide_the_text() -> None:
    image = (1, 3, 100, 100)
    assert not covers([batch(1, 10, pixel_values=image)], [batch(1, 11, pixel_values=image)])
    assert covers([batch(1, 10, pixel_values=image)], [batch(1, 9, pixel_values=image)])


def test_the_mapping_of_a_tokenizer_is_looked_into() -> None:
    def encoded(length: int) -> BatchEncoding:
        return BatchEncoding({"input_ids": torch.zeros(1, length), "nested": [torch.zeros(length)], "text": ["a"]})

    assert covers([encoded(8)], [encoded(7)])
    assert not covers([encoded(8)], [encoded(9)])


def test_more_micro_batches_may_not_fit() -> None:
    assert covers([batch(1, 8)] * 4, [batch(1, 8)] * 3)
    assert not covers([batch(1, 8)] * 4, [batch(1, 8)] * 5)


def test_more_of_them_together_may_not_fit() -> None:
    assert covers([batch(1, 8)] * 4, [batch(1, 8)] * 4, together=(2, 2))
    assert not covers([batch(1, 8)] * 4, [batch(1, 8)] * 4, together=(2, 4))


def test_micro_batches_are_compared_by_size_and_not_by_their_order() -> None:
    assert covers([batch(1, 4), batch(1, 8)], [batch(1, 7), batch(1, 3)])
    assert not covers([batch(1, 4), batch(1, 8)], [batch(1, 8), batch(1, 8)]), "one long one is not two"


def test_only_sizes_that_say_something_are_remembered_and_not_too_many() -> None:
    tried = MeasuredSizes()
    for length in range(1, 50):
        tried.add([batch(1, length)], 1)
    assert len(tried._sizes) == 1
    tried.add([batch(1, 3)], 1)
    assert len(tried._sizes) == 1
    for rows in range(1, 3 * MOST):
        tried.add([batch(rows, 1000 - rows)], 1)
    assert len(tried._sizes) == MOST
    assert tried.covers([batch(3 * MOST - 1, 1001 - 3 * MOST)], 1), "the latest is among them"
