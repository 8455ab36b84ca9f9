"""What cannot be run is refused in the names that users know."""

import pytest

from megatrain.errors import SettingsError
from megatrain.planner.run import Run
from megatrain.settings import Settings


@pytest.mark.parametrize("name", ["compile", "clipping", "predictions"])
@pytest.mark.parametrize("value", ["yes", "no", None, 1, 0])
def test_switches_are_true_or_false(name, value):
    with pytest.raises(SettingsError, match=f"^{name} must be True or False, not {value!r}"):
        Run(**{name: value})


@pytest.mark.parametrize(("name", "called"), [("micro_batch", "batch"), ("length", "length")])
@pytest.mark.parametrize("value", [0, True, 1.5, "2"])
def test_counts(name, called, value):
    with pytest.raises(SettingsError, match=f"^{called} must be an integer of at least 1, not {value!r}"):
        Run(**{name: value})


@pytest.mark.parametrize("value", [1, 0, 8, None, "16bit", ["8bit"]])
def test_optimizer_compression(value):
    with pytest.raises(SettingsError) as raised:
        Settings(optimizer_compression=value)
    assert str(raised.value).startswith("optimizer_compression must be False, True,")
    assert str(raised.value).endswith(f"not {value!r}.")
