"""What comes before the first step is timed, part by part."""

import pytest

from megatrain.telemetry.preparation import Preparation


def test_the_longest_parts_are_named_first() -> None:
    preparation = Preparation()
    for part, seconds in (("plan", 1.0), ("adopt_model", 2.5), ("chunk_head", 0.01), ("plan", 3.0)):
        preparation.add(part, seconds)
    assert preparation.described(0.0) == "ready for the first step after 6.5 s: plan 4.0, adopt model 2.5"
    assert preparation.described(1.25).endswith("adopt model 2.5; pinning RAM took 1.2 of them")
    assert Preparation().described(0.0) == "ready for the first step after 0.0 s"


def test_only_what_succeeds_is_timed() -> None:
    preparation = Preparation()
    with pytest.raises(ValueError, match="no"), preparation.timing("plan"):
        raise ValueError("no")
    assert preparation.seconds == {}
    with preparation.timing("plan"):
        pass
    assert preparation.seconds["plan"] > 0
