"""What `make setup` installs works from any directory, without PYTHONPATH."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

import megatrain


@pytest.fixture
def environment() -> dict[str, str]:
    try:
        importlib.metadata.distribution("megatrain")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("megatrain runs from the source tree here: it is not installed")
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_the_package_is_found_from_anywhere(environment: dict[str, str], tmp_path: Path):
    code = "import megatrain; from megatrain.native import library; library.load(); print(megatrain.__file__)"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()) == Path(megatrain.__file__)


def test_the_command_is_installed(environment: dict[str, str], tmp_path: Path):
    command = Path(sys.executable).parent / "megatrain"
    found = subprocess.run([command, "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "demo" in found.stdout
