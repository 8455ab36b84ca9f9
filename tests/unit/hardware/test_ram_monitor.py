"""RAM is watched while running: said when it is low, and an error before the system kills the process."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import small

import megatrain as mt
from megatrain.errors import OutOfRam
from megatrain.hardware import cgroups, ram_monitor
from megatrain.hardware.ram_monitor import GIB, RamMonitor


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram_monitor, "INTERVAL", 0.0)


def made(left: list[int], limit: int = 100 * GIB, trimmed: list[int] | None = None) -> RamMonitor:
    return RamMonitor(
        held=lambda: 7 * GIB,
        trim=lambda: (trimmed if trimmed is not None else []).append(1),
        left=lambda: left[0],
        limit=limit,
    )


def test_low_is_said_once_until_it_is_high_again(said: pytest.LogCaptureFixture) -> None:
    left, trimmed = [10 * GIB], []
    looking = made(left, trimmed=trimmed)
    looking.check()
    assert not said.messages
    assert not trimmed
    left[0] = GIB * 3 // 4
    looking.check()
    looking.check()
    assert len(said.messages) == 1
    assert "0.75 GiB are left of 100.0 (MegaTrain's state 7.0" in said.messages[0]
    assert len(trimmed) == 2
    left[0] = 10 * GIB
    looking.check()
    left[0] = GIB * 3 // 4
    looking.check()
    assert len(said.messages) == 2


def test_critical_is_an_error_unless_trimming_helps() -> None:
    left = [GIB // 8]
    with pytest.raises(OutOfRam, match=r"0\.12 GiB are left of 100\.0.*Weights and optimizer states are intact"):
        made(left).check()
    looking = RamMonitor(
        held=lambda: 0, trim=lambda: left.__setitem__(0, 50 * GIB), left=lambda: left[0], limit=100 * GIB
    )
    looking.check()


def test_levels_are_shares_of_a_small_limit() -> None:
    left = [int(0.11 * GIB)]
    looking = made(left, limit=GIB)
    looking.check()
    assert looking.short() is None
    left[0] = int(0.09 * GIB)
    looking.check()
    assert "RAM is running out" in (looking.short() or "")
    left[0] = int(0.04 * GIB)
    with pytest.raises(OutOfRam):
        looking.check()


def test_what_a_step_took_for_a_while_is_left_for_the_next() -> None:
    """2 GiB that a step takes and gives back: with 2.2 left the next one would come within 0.25 of a kill."""
    left, own = [10 * GIB], [20 * GIB]
    looking = RamMonitor(held=lambda: 0, trim=lambda: None, left=lambda: left[0], limit=100 * GIB, own=lambda: own[0])
    for inside in (21 * GIB, 22 * GIB, 20 * GIB):
        own[0] = inside
        looking.check()
    looking.after_step()
    left[0] = 9 * GIB // 4
    assert looking.short() is None
    looking.check()
    looking.after_step()
    left[0] = 11 * GIB // 5
    assert "RAM is running out" in (looking.short() or "")
    with pytest.raises(OutOfRam):
        looking.check()
    # Once a step has begun, what is left is what it has.
    looking.check()
    # What was long ago is not expected for ever.
    for _ in range(ram_monitor.REMEMBERED_STEPS):
        looking.after_step()
    assert looking.short() is None


def test_a_batch_that_will_not_fit_is_refused_before_it_begins() -> None:
    left, trimmed = [GIB], []
    looking = made(left, trimmed=trimmed)
    looking.require(GIB // 2, GIB // 8, "a batch")
    assert not trimmed
    with pytest.raises(OutOfRam, match=r"and a batch takes about 0\.80; stopped before starting it"):
        looking.require(int(0.8 * GIB), GIB // 4, "a batch")
    assert trimmed
    # A block may take a quarter of a GiB between two looks.
    left[0] = int(0.51 * GIB)
    looking.check()
    left[0] = int(0.49 * GIB)
    with pytest.raises(OutOfRam):
        looking.check()


def test_a_save_copies_no_more_than_a_part_of_what_is_left() -> None:
    left = [100 * GIB]
    looking = made(left)
    assert looking.portion(4 * GIB) == 4 * GIB
    left[0] = ram_monitor.SAVE_BYTES + 400 * 1000
    assert looking.portion(4 * GIB) == ram_monitor.MIN_SAVE_BUFFER
    left[0] = ram_monitor.SAVE_BYTES + 4 * GIB
    assert looking.portion(4 * GIB) == GIB
    assert looking.portion(1000) == 1000


def test_every_block_looks_when_little_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram_monitor, "INTERVAL", 60.0)
    looks: list[int] = []
    looking = RamMonitor(
        held=lambda: 0, trim=lambda: None, left=lambda: looks.append(1) or GIB * 3 // 2, limit=100 * GIB
    )
    for _ in range(100):
        looking.check()
    assert len(looks) == 100


def test_it_looks_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram_monitor, "INTERVAL", 60.0)
    looks: list[int] = []
    looking = RamMonitor(held=lambda: 0, trim=lambda: None, left=lambda: looks.append(1) or 50 * GIB, limit=100 * GIB)
    for _ in range(100):
        looking.check()
    assert len(looks) == 1


def test_against_a_cgroup_that_fills_up(tmp_path: Path) -> None:
    """The files that the kernel writes, as a container sees them."""
    (tmp_path / "memory.max").write_text(str(4 * GIB))
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {GIB}\n")
    membership = tmp_path / "cgroup"
    membership.write_text("0::/\n")
    looking = RamMonitor(
        held=lambda: 0, trim=lambda: None, limit=4 * GIB,
        left=lambda: cgroups.headroom(tmp_path, membership) or 0,
    )  # fmt: skip
    # Page cache can be reclaimed, so that 4.5 of 4 GiB in use are not too much yet.
    (tmp_path / "memory.current").write_text(str(4 * GIB + GIB // 2))
    looking.check()
    # A limit that is reached because files were read, most of them lately, is no shortage.
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file 1000\nactive_file {2 * GIB}\n")
    (tmp_path / "memory.current").write_text(str(4 * GIB))
    looking.check()
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {GIB}\n")
    (tmp_path / "memory.current").write_text(str(5 * GIB - (8 << 20)))
    with pytest.raises(OutOfRam):
        looking.check()


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
