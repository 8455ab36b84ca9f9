"""Predictions of the next uses: what followed in the past, up to the end of the step."""

import random
import sys
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.stream import predict
from megatrain.stream.predict import BOUNDARY, Predictor


def after(*uses, count=10):
    predictor = Predictor()
    for use in uses:
        predictor.record(use)
    return [expected.use for expected in islice(predictor.upcoming(), count)]


def wrong_predictions(uses, predictor=None):
    """Positions of uses that were not predicted as the very next one."""
    predictor, wrong = predictor or Predictor(), []
    for position, use in enumerate(uses):
        expected = next(predictor.upcoming(), None)
        repeated = position and use == uses[position - 1]
        # Predictions end at a boundary, which itself is not predicted.
        if use != BOUNDARY and not repeated and (expected is None or expected.use != use):
            wrong.append(position)
        predictor.record(use)
    return wrong


def step(*blocks, boundary=True):
    path = [*(("forward", b) for b in blocks), *(("backward", b) for b in reversed(blocks))]
    return [*path, BOUNDARY] if boundary else path


def inference(*blocks):
    return [("inference", b) for b in blocks]


# ---- what follows


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


def test_earlier_uses_tell_forward_from_backward():
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


@pytest.mark.parametrize("micro_batches", [1, 4, 50])
def test_repeated_uses_count_once(micro_batches):
    """All micro-batches pass every block; the prediction must name the next two blocks, not the same one again."""
    step = [use for use in "abcd" for _ in range(micro_batches)] + [BOUNDARY]
    assert after(*step, *step, "a", count=2) == ["b", "c"]
    # The number of micro-batches may change.
    assert after(*step, *step, *"aaabb", count=2) == ["c", "d"]


def test_an_assumed_sequence_is_predicted_to_its_end():
    predictor = Predictor()
    predictor.assume([*range(40)])
    predictor.record(BOUNDARY)
    predictor.assume([0, 1])
    assert [expected.use for expected in predictor.upcoming()] == [*range(2, 40)]


def test_predictions_end_in_an_assumed_loop():
    predictor = Predictor()
    predictor.assume([1, 2, 3] * 3)
    assert [expected.use for expected in predictor.upcoming()] == [1, 2, 3]


# ---- paths that change

PERIODS = {
    "evaluation": step(0, 1, 2) * 4 + inference(0, 1, 2) * 2,
    "generation": step(0, 1, 2) * 2 + inference(0, 1, 2) * 9,
    "two depths": step(0, 1, 2, 3, 4) + step(0, 1, 4),
    "a third model every other step": step(0, 1, 2) * 2 + inference(10, 11) + step(0, 1, 2) + inference(12, 13),
    "accumulation": step(0, 1, 2, boundary=False) * 3 + step(0, 1, 2),
    "one evaluation in one hundred steps": step(0, 1) * 100 + inference(0, 1, 5),
}


@pytest.mark.parametrize("name", PERIODS)
def test_a_period_is_known_after_two_of_them(name):
    period = PERIODS[name]
    assert [at for at in wrong_predictions(period * 5) if at >= 2 * len(period)] == []


def test_a_random_path_is_predicted_as_it_usually_goes():
    """A step leaves out each of six layers with a probability of 1/8. The best guess is the next layer, which is wrong
    for the use after each layer that is left out."""
    chance, uses, left_out = random.Random(0), [], 0
    for _ in range(300):
        blocks = [b for b in range(8) if b in (0, 7) or chance.random() > 1 / 8]
        uses += [*blocks, BOUNDARY]
        left_out += sum(after != before + 1 for before, after in pairwise(blocks))
    assert len(wrong_predictions(uses)) <= 1.2 * left_out


def test_nothing_is_predicted_where_predictions_are_wrong():
    """Prefetching at random delays the copy that is needed."""
    chance, predictor, made = random.Random(0), Predictor(), 0
    for _ in range(100):
        for use in chance.sample(range(30), 30):
            predictor.record(use)
            made += next(predictor.upcoming(), None) is not None
    assert made < 100 * 30 / 10


# ---- bounds


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(predict, "HISTORY", 64)
    predictor, chance = Predictor(), random.Random(0)
    for number in range(2000):
        predictor.record((number // 500, chance.randrange(40)))
        history, before, _ = predictor._log
        assert len(history) == len(before) <= 129
        assert len(predictor._pairs) <= 129
        assert len(predictor._uses) <= 129
        assert len([*predictor.upcoming()]) <= 129


def test_a_period_stays_known_while_history_is_dropped(monkeypatch):
    monkeypatch.setattr(predict, "HISTORY", 64)
    period = step(0, 1, 2) * 3 + inference(0, 1, 2)
    assert [at for at in wrong_predictions(period * 40) if at >= 2 * len(period)] == []


def test_a_period_longer_than_the_history_costs_one_wrong_prediction_each(monkeypatch):
    monkeypatch.setattr(predict, "HISTORY", 16)
    period = step(0, 1, 2) * 20 + inference(0, 1, 2)
    # The evaluation and the first step after it are forgotten every time: all their uses, and the two ways in.
    assert len(wrong_predictions(period * 10)) <= 10 * (3 + 6 + 2)


def interrupt(work, line):
    """Raise KeyboardInterrupt when the work comes to its n-th line in the predictor. Returns whether it did."""

    def trace(frame, event, _):
        nonlocal line
        if frame.f_code.co_filename != predict.__file__:
            return None
        line -= 1
        if line == 0:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_a_record_that_is_interrupted_anywhere_leaves_a_working_predictor(monkeypatch):
    """Ctrl-C may come at every line of it; training may go on afterwards."""
    monkeypatch.setattr(predict, "HISTORY", 8)
    period = step(0, 1, 2) + inference(0, 1)
    for line in range(1, 150):
        predictor = Predictor()
        predictor.assume(period * 3)
        assert interrupt(lambda predictor=predictor: predictor.assume(period * 2), line)
        assert [at for at in wrong_predictions(period * 5, predictor) if at >= 3 * len(period)] == []


keys = st.one_of(st.integers(0, 5), st.just(BOUNDARY), st.tuples(st.sampled_from("fb"), st.integers(0, 3)))


@given(st.lists(keys, max_size=120), st.integers(1, 40))
def test_any_sequence_of_uses_gives_bounded_predictions(uses, history):
    """Predictions name uses that occurred, each once, and no boundary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict, "HISTORY", history)
        predictor, seen = Predictor(), set()
        for key in uses:
            predictor.record(key)
            seen.add(key)
            expected = [*predictor.upcoming()]
            names = [use for use, _ in expected]
            assert len({*names}) == len(names)
            assert {*names} <= seen - {BOUNDARY}
            assert all(0.0 < confidence <= 1.0 for _, confidence in expected)
