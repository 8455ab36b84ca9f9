"""Tests import benchmarks, and then run in the same process as all others."""

import subprocess
import sys
from pathlib import Path

CODE = """
import importlib
from pathlib import Path
import transformers
from megatrain.geometry import LANES, WIDTHS
from megatrain.optim.rules import RULES
from megatrain.store.formats import FORMATS

tables = LANES, WIDTHS, RULES, FORMATS
before = [{**table} for table in tables]
names = [path.stem for path in Path("benchmarks").glob("*.py") if "import triton" not in path.read_text()]
for name in names:
    importlib.import_module(f"benchmarks.{name}")
assert [*tables] == before, tables
print(len(names))
"""


def test_importing_a_benchmark_changes_no_table() -> None:
    root = Path(__file__).parents[3]
    result = subprocess.run([sys.executable, "-c", CODE], cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 10
