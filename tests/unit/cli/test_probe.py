"""`megatrain probe` prints a narrow table, or the JSON that `megatrain plan --machine FILE` reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import megatrain as mt
from megatrain.cli.main import app
from megatrain.cli.probe import COLUMNS, aligned
from megatrain.engine import planning
from megatrain.hardware.machine import Disk

GPU = mt.Machine.load("h200-128gb")
BARE = replace(
    GPU, gpu=None, vram_bytes=0, h2d=0.0, d2h=0.0, duplex=0.0, pageable_h2d=0.0, dram_under_dma=0.0, hbm=0.0,
    launches=0.0, gpu_update={}, matmul={"bf16": 4e10, "fp32": 2e10},
)  # fmt: skip


@pytest.fixture
def probe_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replaces the measurement, which takes 15 seconds. tests/unit/hardware/test_probe.py tests it."""
    calls: list[dict[str, Any]] = []

    def probe(**options: Any) -> mt.Machine:
        calls.append(options)
        if options["device"] == "cpu":
            return BARE
        disk = Disk(path="/a/directory", free_bytes=1 << 40, read=3e9, write=2e9)
        return replace(GPU, disks=(disk,))

    monkeypatch.setattr(planning, "probe", probe)
    return calls


def test_table(probe_calls: list[dict[str, Any]]) -> None:
    result = CliRunner().invoke(app, ["probe", "--offload-dir", "/a/directory", "--refresh"])
    assert result.exit_code == 0, result.output
    assert probe_calls == [{"device": None, "offload_dir": ["/a/directory"], "refresh": True}]
    for words in ("H200", "to the GPU", "TFLOP/s", "/a/directory: 1024.0 GiB free, read 3.00 GB/s, write 2.00 GB/s"):
        assert words in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= COLUMNS


def test_without_a_gpu(probe_calls: list[dict[str, Any]]) -> None:
    result = CliRunner().invoke(app, ["probe", "--device", "cpu"])
    assert probe_calls == [{"device": "cpu", "offload_dir": None, "refresh": False}]
    assert "bf16 40, fp32 20 GFLOP/s" in result.stdout
    assert "to the GPU" not in result.stdout


def test_json_is_a_machine(probe_calls: list[dict[str, Any]], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["probe", "--device", "cpu", "--json"])
    (tmp_path / "machine.json").write_text(result.stdout)
    assert mt.Machine.load(tmp_path / "machine.json") == BARE


def test_long_values_are_wrapped_and_paths_are_not() -> None:
    path = "/" + "x" * 100
    first, *others = aligned(iter([("a", "word " * 30), ("label", path), ("empty", "")])).splitlines()
    assert first.startswith("a      word")
    assert all(len(line) <= COLUMNS for line in others if path not in line)
    assert others[-2:] == [f"label  {path}", "empty  -"]
