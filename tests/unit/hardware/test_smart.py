"""The health log of NVMe drives: its layout, the rating that follows, and the drives below a file system."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatrain.hardware import smart
from megatrain.hardware.smart import Wear


def log_page(percent: int, units: int) -> bytes:
    """As the NVMe specification lays it out: warning, temperature, spare, threshold, percentage used, 26 reserved
    bytes, then 16 bytes each for units read and units written."""
    head = bytes([0]) + (310).to_bytes(2, "little") + bytes([100, 10, percent]) + bytes(26)
    return (head + (7).to_bytes(16, "little") + units.to_bytes(16, "little")).ljust(512, b"\xff")


def test_the_log_is_parsed() -> None:
    wear = smart.parse(log_page(12, 250_000_000))
    assert wear == Wear(written=128_000_000_000_000, percent_used=12)
    assert wear.rating == pytest.approx(128e12 / 0.12)


@pytest.mark.parametrize(("percent", "known"), [(0, False), (4, False), (5, True), (100, True), (180, True)])
def test_a_rating_needs_some_wear(percent: int, known: bool) -> None:
    assert (smart.parse(log_page(percent, 1000)).rating is not None) == known


def test_the_command_has_the_size_that_its_number_names() -> None:
    assert smart.ADMIN_COMMAND >> 16 & 0x3FFF == smart.COMMAND.size == 72


def block(root: Path, name: str, parent: Path | None = None) -> Path:
    made = (parent or root) / name
    made.mkdir(parents=True)
    return made


def test_partitions_and_slaves_lead_to_drives(tmp_path: Path) -> None:
    first, second = block(tmp_path, "nvme0n1"), block(tmp_path, "nvme1n1")
    part = block(tmp_path, "nvme0n1p2", first)
    (part / "partition").write_text("2")
    raid = block(tmp_path, "md0")
    mapped = block(tmp_path, "dm-0")
    for owner, below in ((raid, [part, second]), (mapped, [raid])):
        (owner / "slaves").mkdir()
        for each in below:
            (owner / "slaves" / each.name).symlink_to(each)
    (first / "slaves").mkdir()
    assert [*smart._drives(first)] == [*smart._drives(part)] == ["nvme0n1"]
    assert sorted(smart._drives(mapped)) == ["nvme0n1", "nvme1n1"]


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    not_a_drive = tmp_path / "nvme0n1"
    not_a_drive.write_bytes(bytes(512))
    assert smart._read(not_a_drive) is None
    assert smart._read(tmp_path / "nvme7n1") is None
    assert smart._read(Path("/dev/null")) is None
    assert smart.wear_of(os.makedev(0, 99)) is None


def test_all_drives_must_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smart, "_drives", lambda block: ["nvme0n1", "sda"])
    monkeypatch.setattr(smart, "_read", lambda path: Wear(10, 50) if "nvme" in path.name else None)
    assert smart.wear_of(1) is None
    monkeypatch.setattr(smart, "_drives", lambda block: ["nvme0n1"])
    assert smart.wear_of(1) == [Wear(10, 50)]
