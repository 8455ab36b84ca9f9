"""The RAM monitor announces low RAM, and raises an error before the system kills the process."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import small

import megatrain as mt
from megatrain.errors import OutOfRam
from megatrain.geometry import GIB
from megatrain.hardware import cgroups, ram_monitor
from megatrain.hardware.ram_monitor import RamMonitor


@pytest.fixture(autouse=True)
def check_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram_monitor, "INTERVAL", 0.0)


def monitor_of(left: list[int], limit: int = 100 * GIB, trimmed: list[int] | None = None) -> RamMonitor:
    return RamMonitor(
        held=lambda: 7 * GIB,
        trim=lambda: (trimmed if trimmed is not None else []).append(1),
        left=lambda: left[0],
        limit=limit,
    )


def test_low_ram_is_announced_once_until_it_recovers(announced: pytest.LogCaptureFixture) -> None:
    left, trimmed = [10 * GIB], []
    monitor = monitor_of(left, trimmed=trimmed)
    monitor.check()
    assert not announced.messages
    assert not trimmed
    left[0] = GIB * 3 // 4
    monitor.check()
    monitor.check()
    assert len(announced.messages) == 1
    assert "0.75 GiB are left of 100.0 (MegaTrain's state 7.0" in announced.messages[0]
    assert len(trimmed) == 2
    left[0] = 10 * GIB
    monitor.check()
    left[0] = GIB * 3 // 4
    monitor.check()
    assert len(announced.messages) == 2


def test_critical_ram_is_an_error_unless_trimming_helps() -> None:
    left = [GIB // 8]
    with pytest.raises(OutOfRam, match=r"0\.12 GiB are left of 100\.0.*Weights and optimizer states are intact"):
        monitor_of(left).check()
    monitor = RamMonitor(
        held=lambda: 0, trim=lambda: left.__setitem__(0, 50 * GIB), left=lambda: left[0], limit=100 * GIB
    )
    monitor.check()


def test_levels_are_fractions_of_a_small_limit() -> None:
    left = [int(0.11 * GIB)]
    monitor = monitor_of(left, limit=GIB)
    monitor.check()
    assert monitor.short() is None
    left[0] = int(0.09 * GIB)
    monitor.check()
    assert "RAM is running out" in (monitor.short() or "")
    left[0] = int(0.04 * GIB)
    with pytest.raises(OutOfRam):
        monitor.check()


def test_the_peak_of_a_step_is_reserved_for_the_next() -> None:
    """A step takes and returns 2 GiB. With 2.2 GiB left, the next would leave less than 0.25 GiB."""
    left, own = [10 * GIB], [20 * GIB]
    monitor = RamMonitor(held=lambda: 0, trim=lambda: None, left=lambda: left[0], limit=100 * GIB, own=lambda: own[0])
    for inside in (21 * GIB, 22 * GIB, 20 * GIB):
        own[0] = inside
        monitor.check()
    monitor.after_step()
    left[0] = 9 * GIB // 4
    assert monitor.short() is None
    monitor.check()
    monitor.after_step()
    left[0] = 11 * GIB // 5
    assert "RAM is running out" in (monitor.short() or "")
    with pytest.raises(OutOfRam):
        monitor.check()
    # Once a step has started, it may use what is left.
    monitor.check()
    # Peaks of old steps are forgotten.
    for _ in range(ram_monitor.REMEMBERED_STEPS):
        monitor.after_step()
    assert monitor.short() is None


def test_a_batch_that_will_not_fit_is_refused_before_it_starts() -> None:
    left, trimmed = [GIB], []
    monitor = monitor_of(left, trimmed=trimmed)
    monitor.require(GIB // 2, GIB // 8, "a batch")
    assert not trimmed
    with pytest.raises(OutOfRam, match=r"and a batch takes about 0\.80; stopped before starting it"):
        monitor.require(int(0.8 * GIB), GIB // 4, "a batch")
    assert trimmed
    # A block may take a quarter of a GiB between two checks.
    left[0] = int(0.51 * GIB)
    monitor.check()
    left[0] = int(0.49 * GIB)
    with pytest.raises(OutOfRam):
        monitor.check()


def test_a_save_buffers_only_a_part_of_the_remaining_ram() -> None:
    left = [100 * GIB]
    monitor = monitor_of(left)
    assert monitor.portion(4 * GIB) == 4 * GIB
    left[0] = ram_monitor.SAVE_BYTES + 400 * 1000
    assert monitor.portion(4 * GIB) == ram_monitor.MIN_SAVE_BUFFER
    left[0] = ram_monitor.SAVE_BYTES + 4 * GIB
    assert monitor.portion(4 * GIB) == GIB
    assert monitor.portion(1000) == 1000


def test_ram_is_read_at_every_block_when_little_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram_monitor, "INTERVAL", 60.0)
    readings: list[int] = []
    monitor = RamMonitor(
        held=lambda: 0, trim=lambda: None, left=lambda: readings.append(1) or GIB * 3 // 2, limit=100 * GIB
    )
    for _ in range(100):
        monitor.check()
    assert len(readings) == 100


def test_ram_is_read_once_per_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram_monitor, "INTERVAL", 60.0)
    readings: list[int] = []
    monitor = RamMonitor(
        held=lambda: 0, trim=lambda: None, left=lambda: readings.append(1) or 50 * GIB, limit=100 * GIB
    )
    for _ in range(100):
        monitor.check()
    assert len(readings) == 1


def test_a_cgroup_that_fills_up(tmp_path: Path) -> None:
    """The files that the kernel writes, as seen in a container."""
    (tmp_path / "memory.max").write_text(str(4 * GIB))
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {GIB}\n")
    membership = tmp_path / "cgroup"
    membership.write_text("0::/\n")
    monitor = RamMonitor(
        held=lambda: 0, trim=lambda: None, limit=4 * GIB,
        left=lambda: cgroups.headroom(tmp_path, membership) or 0,
    )  # fmt: skip
    # Page cache can be reclaimed, so 4.5 GiB in use of a 4 GiB limit are not too much.
    (tmp_path / "memory.current").write_text(str(4 * GIB + GIB // 2))
    monitor.check()
    # A limit reached by recently read files is not a shortage either.
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file 1000\nactive_file {2 * GIB}\n")
    (tmp_path / "memory.current").write_text(str(4 * GIB))
    monitor.check()
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {GIB}\n")
    (tmp_path / "memory.current").write_text(str(5 * GIB - (8 << 20)))
    with pytest.raises(OutOfRam):
        monitor.check()


def test_an_engine_stops_and_can_still_be_saved(tmp_path: Path) -> None:
    model = small.llama()
    engine = mt.Engine(model, device="cpu")
    optimizer = engine.optimizer(lr=1e-2)
    model(**small.batch()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    engine.ram._left = lambda: 0
    with pytest.raises(OutOfRam):
        model(**small.batch())
    engine.save(tmp_path, optimizer)
    assert (tmp_path / "model.safetensors").exists()
    engine.ram._left = lambda: 1 << 40
    model(**small.batch()).loss.backward()
    optimizer.step()
