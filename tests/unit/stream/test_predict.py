"""Predictions of the next uses: what followed last time, up to the end of the step."""

from itertools import islice

from megatrain.stream.predict import BOUNDARY, Predictor


def after(*uses, count=10):
    predictor = Predictor()
    for use in uses:
        predictor.record(use)
    return [*islice(predictor.upcoming(), count)]


def test_nothing_is_known_at_first():
    assert [*Predictor().upcoming()] == []
    assert after("a", "b") == []


def test_a_repeated_sequence_is_known_to_its_end():
    step = ["a", "b", "c", "c'", "b'", "a'", BOUNDARY]
    assert after(*step, *step, "a") == ["b", "c", "c'", "b'", "a'"]
    assert after(*step, *step, "a", "b", count=2) == ["c", "c'"]


def test_the_first_uses_of_the_next_step_are_known_at_the_boundary():
    step = ["a", "b", "b'", "a'", BOUNDARY]
    assert after(*step, *step)[:2] == ["a", "b"]


def test_predictions_stop_at_a_boundary():
    """Weights beyond the boundary are about to change."""
    step = ["a", "b", BOUNDARY]
    assert after(*step, *step, *step, "a") == ["b"]


def test_two_uses_tell_forward_from_backward():
    """b follows a in the forward and precedes it in the backward."""
    step = ["a", "b", "c", "b", "a", BOUNDARY]
    assert after(*step, *step, "a", "b") == ["c", "b", "a"]
    assert after(*step, *step, "a", "b", "c", "b") == ["a"]


def test_a_change_is_learned_at_once():
    first, second = ["a", "b", "c", BOUNDARY], ["a", "x", "c", BOUNDARY]
    assert after(*first, *first, *second, "a") == ["x", "c"]


def test_predictions_end_in_a_loop():
    assert after(*"ababab", count=5) == ["a", "b"]
    assert after(*"ababab", count=1) == ["a"]
    assert after(*"ababab", count=0) == []


def test_repeated_uses_count_once():
    """Four micro-batches pass every block; the prediction must name the next two blocks, not the same one again."""
    step = [*"aaaabbbbccccdddd", BOUNDARY]
    assert after(*step, *step, *"aa", count=2) == ["b", "c"]


def test_an_assumed_sequence_is_predicted_to_its_end():
    predictor = Predictor()
    predictor.assume([*range(40)])
    predictor.record(BOUNDARY)
    predictor.assume([0, 1])
    assert [*predictor.upcoming()] == [*range(2, 40)]


def test_predictions_end_in_an_assumed_loop():
    predictor = Predictor()
    predictor.assume([1, 2, 3] * 3)
    assert [*predictor.upcoming()] == [1, 2, 3]
