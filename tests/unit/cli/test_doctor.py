"""`megatrain doctor` reports on any installation, prints no secrets, and says how to fix problems."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from megatrain._version import __version__
from megatrain.cli import doctor
from megatrain.cli.main import app
from megatrain.native import library

SECTIONS = ["versions", "gpu", "native", "compile", "host", "disks", "environment"]


def report(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    return result.exit_code, json.loads(result.stdout)


def test_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    code, sections = report()
    assert (code, sections["problems"]) == (0, [])
    assert list(sections) == [*SECTIONS, "problems"]
    assert sections["versions"]["megatrain"].startswith(__version__)
    assert {"torch", "transformers", "accelerate", "safetensors", "triton", "trl", "peft", "datasets"} <= set(
        sections["versions"]
    )
    assert sections["native"]["path"] == str(library.find())
    assert sections["native"]["ABI"].startswith(str(library.ABI_VERSION))
    assert sections["native"]["instructions"].startswith(library.isas()[-1])
    assert sections["host"]["RAM"] == f"{psutil.virtual_memory().total / 2**30:.1f} GiB"


def test_through_a_pipe_in_a_narrow_terminal() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-m", "megatrain", "doctor"],
        capture_output=True,
        text=True,
        env=environment | {"COLUMNS": "80", "NO_COLOR": "1", "PYTHONPATH": path, "HF_TOKEN": "hf_secret"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("no problems found\n")
    assert [line for line in done.stdout.splitlines() if line in SECTIONS] == SECTIONS
    assert all(len(line) <= 80 or os.sep in line for line in done.stdout.splitlines())
    assert "\x1b" not in done.stdout
    assert "hf_secret" not in done.stdout


def test_a_missing_library_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.PATH_VARIABLE, "/no/such/library.so")
    library.load.cache_clear()
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "cmake --build build" in result.stdout.rpartition("\nproblems\n")[2]
    assert "/no/such/library.so" in report()[1]["problems"][0]


def test_missing_and_old_packages_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.1.0", "accelerate": None}
    installed_version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda package: versions.get(package, installed_version(package)))
    code, sections = report()
    assert code == 1
    old, missing = sections["problems"]
    assert old.startswith("torch 2.1.0 is installed, and MegaTrain needs torch>=")
    assert missing.startswith("accelerate is not installed")
    assert "pip install 'accelerate>=" in missing


def test_a_launcher_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, sections = report()
    assert (code, sections["environment"]["WORLD_SIZE"]) == (1, "4")
    assert "WORLD_SIZE=4" in sections["problems"][0]


def test_broken_torch_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "megatrain", "doctor", "--json"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 1, done.stderr
    sections = json.loads(done.stdout)
    assert "libcudart.so.13" in sections["problems"][0]
    assert "libcudart.so.13" in sections["native"]["not found"]
    assert sections["host"]  # the other sections are complete


def test_unavailable_items_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(psutil, "virtual_memory", broken)
    monkeypatch.setattr(psutil, "disk_partitions", broken)
    monkeypatch.setattr(doctor, "_compile", broken)
    code, sections = report()
    assert code == 0
    assert "PermissionError" in sections["host"]["RAM"]
    assert "PermissionError" in sections["disks"]["working directory"]
    assert "PermissionError" in sections["compile"]["not found"]
    assert sections["host"]["cores"]


def test_disks(tmp_path: Path) -> None:
    missing = str(tmp_path / "not" / "there")
    _, sections = report("--offload-dir", str(tmp_path), "--offload-dir", missing, "--offload-dir", "/dev/shm")
    assert sections["disks"][f"offload {tmp_path}"].startswith(f"{tmp_path}: ")
    assert "GiB free" in sections["disks"][f"offload {tmp_path}"]
    assert "does not exist yet" in sections["disks"][f"offload {missing}"]
    if any(mount.mountpoint == "/dev/shm" for mount in psutil.disk_partitions(all=True)):
        assert "tmpfs, which is RAM" in sections["disks"]["offload /dev/shm"]
