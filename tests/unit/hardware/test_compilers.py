"""`compile="auto"` compiles on a GPU if it can, and says why it does not; True says what to install."""

import pytest
import torch
from tests import small

import megatrain as mt
from megatrain.engine.planning import resolve_compile
from megatrain.errors import SettingsError
from megatrain.hardware import compilers
from megatrain.settings import Settings

HAS_TRITON = torch.utils._triton.has_triton_package()


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")


def test_auto_is_eager_on_the_cpu(announced: pytest.LogCaptureFixture) -> None:
    with mt.Engine(small.llama(), device="cpu") as engine:
        assert engine.settings.compile is False
    assert not [line for line in announced.messages if "eagerly" in line], "eager is what users expect on the CPU"


def test_true_without_a_compiler_says_what_to_install(no_compiler: None) -> None:
    message = r"compile=True cannot compile here: no C\+\+ compiler was found \(searched for c\+\+, g\+\+, clang\+\+\)"
    with pytest.raises(SettingsError, match=message):
        mt.Engine(small.llama(), device="cpu", compile=True)
    with mt.Engine(small.llama(), device="cpu"):
        pass


def test_auto_on_a_gpu_without_triton_or_a_compiler_is_announced_in_one_sentence(
    no_compiler: None, announced: pytest.LogCaptureFixture
) -> None:
    assert resolve_compile(Settings(), torch.device("cuda")) is False
    [line] = [line for line in announced.messages if line.startswith("layers run eagerly, not compiled: ")]
    assert "Triton is not installed; pip install triton" in line or HAS_TRITON


@pytest.mark.parametrize("name", compilers.DISABLED)
def test_a_disabled_torch_compile_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert compilers.missing("cpu") == f"{name} is set in the environment; unset it"
    monkeypatch.setenv(name, "0")
    assert compilers.missing("cpu") is None


@pytest.mark.parametrize("wrong", ["yes", None, 1.5, "True"])
def test_other_values_are_refused(wrong: object) -> None:
    with pytest.raises(SettingsError, match="compile must be 'auto', True or False"):
        mt.init(compile=wrong)


def test_plans_of_machines_with_a_gpu_are_compiled() -> None:
    assert mt.plan(small.llama(), machine="h200-128gb", batch=2, length=8).run.compile
    assert not mt.plan(small.llama(), machine="h200-128gb", batch=2, length=8, compile=False).run.compile
    mt.init(compile=False)
    assert not mt.plan(small.llama(), machine="h200-128gb", batch=2, length=8).run.compile
