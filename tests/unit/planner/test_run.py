"""Invalid runs are refused, with the option names that users know."""

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


@pytest.mark.parametrize("value", [1, 0, 8, None, "16bit", "fp32", ["8bit"]])
@pytest.mark.parametrize("kind", [Settings, Run])
def test_optimizer_compression(value, kind):
    with pytest.raises(SettingsError) as raised:
        kind(optimizer_compression=value)
    assert str(raised.value).startswith("optimizer_compression must be False, True,")
    assert str(raised.value).endswith(f"not {value!r}.")


@pytest.mark.parametrize(
    ("value", "width"), [(False, "fp32"), (True, "4bit"), ("bf16", "bf16"), ("8bit", "8bit"), ("lossless", "fp32")]
)
def test_run_and_settings_agree_on_the_width_of_moments(value, width):
    assert Run(optimizer_compression=value).moment_width == Settings(optimizer_compression=value).moment_width == width
    assert Run(optimizer_compression=True) == Run(optimizer_compression="4bit")


def test_the_old_name_still_works_and_warns_where_it_is_used():
    with pytest.warns(FutureWarning, match="width of a Run is now optimizer_compression") as caught:
        run = Run(width="8bit")
    assert caught[0].filename == __file__
    assert run == Run(optimizer_compression="8bit")
    with pytest.warns(FutureWarning, match="width of a Run is now moment_width") as caught:
        assert run.width == "8bit"
    assert caught[0].filename == __file__
    with pytest.warns(FutureWarning), pytest.raises(SettingsError, match="not '2bit'"):
        Run(width="2bit")
