"""Facts shared by engine and planner."""

import pytest

from megatrain.geometry import group_by_size, update_threads, window_sizes


def test_rings_are_within_a_factor_of_two():
    sizes = [100, 100, 51, 50, 49, 200, 8, 3]
    assert group_by_size(sizes, lambda size: size) == [[200, 100, 100], [51, 50, 49], [8], [3]]
    named = [("b", 4), ("a", 4), ("c", 3)]
    assert group_by_size(named, lambda item: item[1]) == [named], "equal sizes keep their order"


@pytest.mark.parametrize(
    ("sizes", "micro_batches", "windows"),
    [
        (4, 4, (4,)), (4, 10, (4, 4, 2)), (64, 3, (3,)), (1, 3, (1, 1, 1)), ((4, 1), 7, (4, 1, 1, 1)),
        ((1, 3, 2), 9, (1, 3, 2, 2, 1)), ([2], 5, (2, 2, 1)), ((8, 1), 6, (6,)),
    ],
)  # fmt: skip
def test_windows_of_a_step(sizes, micro_batches, windows):
    assert window_sizes(sizes, micro_batches) == windows
    assert sum(windows) == micro_batches


def test_two_cores_are_left_for_launches():
    assert [update_threads(cores) for cores in (1, 2, 4, 5, 16)] == [1, 2, 4, 3, 14]
