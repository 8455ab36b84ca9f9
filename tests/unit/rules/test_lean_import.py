"""`import megatrain` is quick and touches no device. The public names are a fixed list."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import megatrain

PUBLIC = [
    "Answer",
    "Debug",
    "MegaTrainError",
    "Refusal",
    "Run",
    "WindowAborted",
    "Engine",
    "Trainer",
    "MegaMixin",
    "Settings",
    "Machine",
    "Plan",
    "errors",
    "init",
    "largest_batch",
    "largest_context",
    "largest_model",
    "plan",
    "probe",
    "__version__",
]

IMPORT_AND_REPORT = """
import sys
import megatrain
heavy = [name for name in ("transformers", "accelerate", "triton", "datasets") if name in sys.modules]
assert not heavy, f"import megatrain imported {heavy}"
torch = sys.modules.get("torch")
assert torch is None or not torch.cuda.is_initialized(), "import megatrain initialised CUDA"
"""

HELP = """
import contextlib, io, sys
from megatrain.cli.main import app
with contextlib.redirect_stdout(io.StringIO()) as printed:
    app([*sys.argv[1:], "--help"], standalone_mode=False)
assert "Usage" in printed.getvalue()
heavy = [name for name in ("torch", "transformers", "numpy", "psutil", "triton") if name in sys.modules]
assert not heavy, f"--help imported {heavy}"
"""


def test_import_is_lean():
    run_alone(IMPORT_AND_REPORT)


@pytest.mark.parametrize("command", ["", "plan", "probe", "doctor", "demo"])
def test_help_is_lean(command):
    run_alone(HELP, *command.split())


def run_alone(code, *arguments):
    source = str(Path(megatrain.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": source},
    )
    assert done.returncode == 0, done.stderr


def test_public_names_are_the_frozen_list():
    assert sorted(megatrain.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_there(name):
    assert getattr(megatrain, name) is not None
    assert name in dir(megatrain)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        megatrain.no_such_name  # noqa: B018
