"""The version is written in one place, src/megatrain/_version.py."""

import re
import tomllib
from pathlib import Path

import megatrain
from megatrain._version import __version__

ROOT = Path(__file__).parents[3]


def test_package_shows_it():
    assert megatrain.__version__ == __version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)


def test_pyproject_reads_it():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in config["project"]
    assert "version" in config["project"]["dynamic"]
    sources = {entry["field"]: entry["input"] for entry in config["tool"]["dynamic-metadata"]}
    assert sources == {"version": "src/megatrain/_version.py"}


def test_nothing_else_writes_it():
    files = [ROOT / "pyproject.toml", ROOT / "CMakeLists.txt"]
    files += [*(ROOT / "csrc").iterdir(), *(ROOT / "src").rglob("*.py")]
    literal = re.compile(rf"""["' ]{re.escape(__version__)}["')\s]""")
    holders = [path.name for path in files if path.is_file() and literal.search(path.read_text())]
    assert holders == ["_version.py"]
