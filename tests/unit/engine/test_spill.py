"""Without a plan: states go to `offload_dir` if, and only if, RAM does not hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests import small
from tests.tiny import differences, engine_of, roles

import megatrain as mt
from megatrain.errors import NotEnoughMemory

GIB = 1 << 30
SIZES = {"num_hidden_layers": 10, "hidden_size": 128, "intermediate_size": 256}


def train(**settings: Any) -> tuple[mt.Engine, dict[str, Any]]:
    model = small.llama(**SIZES)
    engine = engine_of(model, **settings)
    optimizer = engine.optimizer(lr=1e-2, max_grad_norm=1.0)
    for step in range(2):
        model(**small.batch(2, seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine, roles(engine)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_states_go_to_disk_only_if_ram_is_short(
    tmp_path: Path, precision: str, announced: pytest.LogCaptureFixture
) -> None:
    engine, expected = train(precision=precision)
    held = engine._placement.ram.allocated_bytes / GIB
    limits: dict[str, Any] = {"offload_dir": tmp_path / "new", "allow_tmpfs": True, "precision": precision}
    engine, found = train(max_ram_gb=4 * held, **limits)
    assert not (tmp_path / "new").exists()
    assert engine.settings.on_disk == ()
    assert [line for line in announced.messages if line.startswith("offload_dir is not used")]
    engine, found = train(max_ram_gb=0.85 * held, **limits)
    assert differences(found, expected) == []
    assert len(engine.settings.on_disk) > 0
    assert engine._placement.ram.allocated_bytes <= 0.85 * held * GIB
    assert engine.counters.bytes_disk_out > 0
    assert [line for line in announced.messages if "are kept on disk" in line]


def test_what_fits_nowhere_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(NotEnoughMemory, match=r"over max_ram_gb=0\.001"):
        train(max_ram_gb=0.001, offload_dir=tmp_path, allow_tmpfs=True)


def test_a_choice_of_the_user_is_kept(tmp_path: Path) -> None:
    engine, _ = train(max_ram_gb=50, offload_dir=tmp_path, allow_tmpfs=True, on_disk=["model.layers.3"])
    assert {slab.name for slab in engine.slabs if slab.homes.states.tier == "disk"} == {"model.layers.3"}
    engine, _ = train(offload_dir=tmp_path, on_disk=[])
    assert engine._placement.disk is None
