"""Run transformers' own Trainer tests on its Trainer and on `megatrain.Trainer`, and compare which pass.

    make peer-tests SUITE=<a checkout of transformers, or a folder with its tests/trainer>

Tests that only the stock Trainer passes are listed in exceptions.toml, each with its reason. The command fails if any
other test fails, or if a listed one passes. Further arguments go to pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Set
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
EXCEPTIONS = HERE / "exceptions.toml"
FILES = (
    "test_trainer", "test_trainer_callback", "test_trainer_evaluation", "test_trainer_optimizers", "test_trainer_data",
    "test_trainer_checkpointing", "test_trainer_seq2seq",
)  # fmt: skip


def passed(suite: Path, arguments: list[str], *, ours: bool) -> set[str]:
    """`Class::test` of every test that passes."""
    files = [path for name in FILES if (path := suite / "tests" / "trainer" / f"{name}.py").is_file()]
    if not files:
        raise SystemExit(f"{suite} holds no tests/trainer/test_trainer*.py of transformers.")
    with tempfile.TemporaryDirectory() as work:
        report = Path(work) / "report.xml"
        command = [
            sys.executable, "-m", "pytest", "-q", "--no-header", "--noconftest", "-p", "no:cacheprovider",
            "-c", os.devnull, "--rootdir", str(suite), "--timeout", "120", "--continue-on-collection-errors",
            "--junitxml", str(report), *(["-p", "substitute"] if ours else []), *arguments, *map(str, files),
        ]  # fmt: skip
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for path in paths for p in path.split(os.pathsep)),
            "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        # Tests write into the current directory.
        subprocess.run(command, cwd=work, env=environment, check=False)
        cases = ElementTree.parse(report).iter("testcase")
        return {f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}" for case in cases if not len(case)}


def compared(stock: Set[str], ours: Set[str], exceptions: Mapping[str, str]) -> tuple[list[str], bool]:
    """The lines to print, and whether the result is as expected."""
    missing = stock - ours
    lines = [f"stock passes {len(stock)}, megatrain.Trainer {len(stock & ours)} of them"]
    lines += [f"exception   {name}: {exceptions[name]}" for name in sorted(missing & exceptions.keys())]
    failed = [f"FAILED      {name}" for name in sorted(missing - exceptions.keys())]
    stale = [
        f"NOT NEEDED  {name} passes; take it out of {EXCEPTIONS.name}" for name in sorted(ours & exceptions.keys())
    ]
    return lines + failed + stale, not failed and not stale


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(
            "usage: make peer-tests SUITE=<a checkout of transformers, or a folder with its tests/trainer>"
        )
    suite, arguments = Path(sys.argv[1]).resolve(), sys.argv[2:]
    stock, ours = (passed(suite, arguments, ours=ours) for ours in (False, True))
    lines, right = compared(stock, ours, tomllib.loads(EXCEPTIONS.read_text()))
    print("\n".join(lines))
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
