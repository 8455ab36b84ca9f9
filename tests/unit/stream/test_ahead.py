"""What is expected after a use of a block: the slabs of the next uses, a bounded number of them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from megatrain.stream.ahead import LOOK_AHEAD, Ahead


def blocks(count: int) -> Any:
    return [[f"slab{index}"] for index in range(count)]


def names(upcoming: Any, count: int = 3) -> list[str]:
    return [slabs[0] for slabs, _ in upcoming][:count]


def test_blocks_are_expected_in_registration_order_at_first() -> None:
    model = blocks(3)
    ahead = Ahead(model)
    assert names(ahead.after("forward", 0, False), 9) == ["slab1", "slab2", "slab2", "slab1", "slab0"]
    for block in (1, 2):
        ahead.after("forward", block, False)
    for block in (2, 1, 0):
        ahead.after("backward", block, False)
    assert names(ahead.after_step()) == ["slab0", "slab1", "slab2"]


@pytest.mark.parametrize("count", [2, 1000])
def test_a_bounded_number_of_uses_is_looked_at(count: int) -> None:
    model = blocks(count)
    found = [*Ahead(model).after("forward", 0, False)]
    assert len(found) == min(LOOK_AHEAD, 2 * count - 1)


def test_an_evaluation_thread_does_not_disturb_training() -> None:
    model = blocks(4)
    ahead, seen = Ahead(model), list[str]()
    ahead.after("forward", 0, False)

    def evaluate() -> None:
        for index in (0, 2, 3):
            seen[:] = names(ahead.after("inference", index, True))

    thread = threading.Thread(target=evaluate)
    thread.start()
    thread.join()
    assert seen[:1] == ["slab0"]
    assert names(ahead.after("forward", 1, False)) == ["slab2", "slab3", "slab3"]
