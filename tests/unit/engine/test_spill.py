"""Without a plan: state goes to `offload_dir` if, and only if, RAM does not hold it, and as little as suffices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests import small
from tests.tiny import differences, engine_of, roles

import megatrain as mt
from megatrain.engine import spill
from megatrain.errors import NotEnoughMemory
from megatrain.geometry import ALIGN_BYTES, GIB
from megatrain.hardware import cgroups, inventory
from megatrain.store import scratch
from megatrain.store.ram import HostMemory

SIZES = {"num_hidden_layers": 10, "hidden_size": 128, "intermediate_size": 256}


def train(model: Any = None, **settings: Any) -> tuple[mt.Engine, dict[str, Any]]:
    model = small.llama(**SIZES) if model is None else model
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


def test_low_bits_of_frozen_weights_count(tmp_path: Path) -> None:
    """Loaded in FP32, they have a residual as large as their BF16 weights."""

    def adapted() -> Any:
        model = small.llama(**SIZES).requires_grad_(False)
        for layer in model.model.layers:
            layer.input_layernorm.requires_grad_(True)
        return model

    engine, expected = train(adapted(), precision="bf16")
    held = engine._placement.ram.allocated_bytes / GIB
    limits: dict[str, Any] = {"offload_dir": tmp_path, "allow_tmpfs": True, "precision": "bf16"}
    engine, found = train(adapted(), max_ram_gb=0.85 * held, **limits)
    assert differences(found, expected) == []
    assert engine.settings.weights_on_disk
    assert engine._placement.ram.allocated_bytes <= 0.85 * held * GIB


@pytest.mark.parametrize("low_bits", ["", "norm", "weight"])
def test_ram_for_frozen_weights_is_required_before_they_move(monkeypatch: pytest.MonkeyPatch, low_bits: str) -> None:
    """One parameter with low bits gives all of its slab a residual."""
    model = small.llama(**SIZES).to(torch.bfloat16).float().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if low_bits and low_bits in name:
            torch.nn.init.normal_(parameter)
    kept: list[int] = []
    require = HostMemory.require

    def record(memory: HostMemory, nbytes: int, of_these: int | None = None) -> None:
        kept.extend([] if of_these is None else [of_these])
        require(memory, nbytes, of_these)

    monkeypatch.setattr(HostMemory, "require", record)
    with engine_of(model, precision="bf16") as engine:
        assert kept[0] == engine._placement.ram.allocated_bytes


def test_what_fits_nowhere_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(NotEnoughMemory, match=r"over max_ram_gb=0\.001"):
        train(max_ram_gb=0.001, offload_dir=tmp_path, allow_tmpfs=True)


def test_a_choice_of_the_user_is_kept(tmp_path: Path) -> None:
    engine, _ = train(max_ram_gb=50, offload_dir=tmp_path, allow_tmpfs=True, on_disk=["model.layers.3"])
    assert {slab.name for slab in engine.slabs if slab.homes.states.tier == "disk"} == {"model.layers.3"}
    engine, _ = train(offload_dir=tmp_path, on_disk=[])
    assert engine._placement.disk is None


def test_resident_blocks_stay(tmp_path: Path) -> None:
    resident = tuple(f"model.layers.{index}" for index in range(7, 10))
    limits: dict[str, Any] = {"offload_dir": tmp_path, "allow_tmpfs": True, "max_ram_gb": 0.85 * in_ram()}
    engine, _ = train(resident=resident, **limits)
    assert engine.settings.on_disk
    assert not {*engine.settings.on_disk} & {*resident}


def frozen(trains: str = "q_proj", dtype: torch.dtype = torch.bfloat16) -> Any:
    """Only some parameters of each layer train."""
    model = small.llama(**SIZES).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains in name)
    return model


def in_ram(**settings: Any) -> float:
    """GiB that an engine without a disk takes."""
    return train(**settings)[0]._placement.ram.allocated_bytes / GIB


@pytest.mark.parametrize(("dtype", "fewest"), [(torch.bfloat16, 4), (torch.float32, 1)])
def test_frozen_weights_go_first(
    tmp_path: Path, announced: pytest.LogCaptureFixture, dtype: torch.dtype, fewest: int
) -> None:
    """They are only read, so no step writes anything. A ring of staging buffers takes what the first three free, but
    those loaded in FP32 free residuals too."""
    _, expected = train(frozen(dtype=dtype), precision="bf16")
    limits: dict[str, Any] = {"offload_dir": tmp_path, "allow_tmpfs": True, "precision": "bf16"}
    held = in_ram(model=frozen(dtype=dtype), precision="bf16")
    share, weights = 2.0, ()
    while not weights:
        share -= 0.05
        engine, found = train(frozen(dtype=dtype), max_ram_gb=share * held, **limits)
        weights = engine.settings.weights_on_disk
    assert differences(found, expected) == []
    assert engine.settings.on_disk == ()
    assert weights == tuple(f"model.layers.{index}" for index in range(10 - len(weights), 10))
    assert fewest <= len(weights) < 10
    assert engine._placement.ram.allocated_bytes <= share * held * GIB
    assert engine.drive.per_step == 0
    assert [line for line in announced.messages if line.startswith("weights of") and "are kept on disk" in line]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_follow_states(tmp_path: Path, precision: str, announced: pytest.LogCaptureFixture) -> None:
    _, expected = train(precision=precision)
    limits: dict[str, Any] = {"offload_dir": tmp_path, "allow_tmpfs": True, "precision": precision}
    held = in_ram(precision=precision)
    share, gradients = 0.85, ()
    while not gradients:
        share -= 0.02
        engine, found = train(max_ram_gb=share * held, **limits)
        gradients = engine.settings.gradients_on_disk
    assert differences(found, expected) == []
    assert engine.settings.weights_on_disk == ()
    assert set(gradients) <= set(engine.settings.on_disk)
    assert {slab.name for slab in engine.slabs if slab.homes.gradients is not None} == {*gradients}
    assert engine._placement.ram.allocated_bytes <= share * held * GIB
    said = [line for line in announced.messages if " and gradients of " in line]
    assert "needs one window" in said[0]


def test_gradients_of_tied_weights_stay_in_ram() -> None:
    layers = [spill._Block(f"{i}", [spill._Slab(True, 4096, 3 * 4096, 0, shared=True)]) for i in range(9)]
    everything = frozenset(block.name for block in layers)
    assert spill._OnDisk(everything, gradients=everything).nbytes(layers) == 0


def test_weights_that_train_go_last(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    _, expected = train(precision="bf16")
    limits: dict[str, Any] = {"offload_dir": tmp_path, "allow_tmpfs": True, "precision": "bf16"}
    held = in_ram(precision="bf16")
    share, weights = 0.85, ()
    while not weights:
        share -= 0.05
        engine, found = train(max_ram_gb=share * held, **limits)
        weights = engine.settings.weights_on_disk
    assert differences(found, expected) == []
    layers = {f"model.layers.{index}" for index in range(SIZES["num_hidden_layers"])}
    assert set(weights) <= set(engine.settings.on_disk) == layers, "embedding and head would free nothing"
    assert engine._placement.ram.allocated_bytes <= share * held * GIB
    assert [line for line in announced.messages if " and gradients of " in line and " and weights of " in line]


def made_up(layers: int, trains: bool = True, ends: int = 40) -> list[spill._Block]:
    """Pages of weights: an embedding, layers of 12, a norm and a head."""

    def block(name: str, pages: int) -> spill._Block:
        nbytes = pages * ALIGN_BYTES
        return spill._Block(name, [spill._Slab(trains, nbytes, *(3 * nbytes * trains, 5 * nbytes * trains))])

    return [
        block("embedding", ends),
        *(block(f"{i}", 12) for i in range(layers)),
        block("norm", 1),
        block("head", ends),
    ]


@pytest.mark.parametrize("trains", [True, False])
def test_the_fewest_bytes_go_to_disk(trains: bool) -> None:
    """A ring of staging buffers takes what its first three slabs free. Head and embedding share a ring of two, so
    moving them frees nothing."""
    blocks = made_up(10, trains)
    per_layer = (5 if trains else 1) * 12 * ALIGN_BYTES
    for over in range(1, 7 * per_layer, per_layer // 3):
        chosen = spill._choose(blocks, over, {})
        count = 3 + -(-over // per_layer)
        assert (chosen.states if trains else chosen.weights) == {f"{i}" for i in range(10 - count, 10)}
        assert chosen.nbytes(blocks) == count * per_layer
        assert chosen.freed(blocks) >= over
    assert spill._choose(blocks, 0, {}) == spill._OnDisk()


def test_sizes_are_combined_if_one_does_not_suffice() -> None:
    blocks = made_up(6) + [
        spill._Block(f"large {i}", [spill._Slab(True, 80 * ALIGN_BYTES, 0, 400 * ALIGN_BYTES)]) for i in range(5)
    ]
    small_ones = 3 * 60 * ALIGN_BYTES
    names = [spill._choose(blocks, over, {}).states for over in (small_ones, small_ones + 1)]
    assert names[0] == {"0", "1", "2", "3", "4", "5"}
    assert names[1] <= {f"large {i}" for i in range(5)} | names[0]
    assert any(name.startswith("large") for name in names[1])
    # What frees most is tried if nothing suffices, so that the refusal has the smallest shortfall.
    most = spill._choose(blocks, 1 << 40, {})
    assert most.freed(blocks) > 0
    assert most.freed(blocks) >= spill._OnDisk(frozenset(block.name for block in blocks)).freed(blocks)


def test_weights_of_the_user_are_kept(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"offload_dir": tmp_path, "allow_tmpfs": True, "precision": "bf16"}
    held = in_ram(model=frozen(), precision="bf16")
    engine, _ = train(frozen(), max_ram_gb=2 * held, weights_on_disk=["model.layers.7"], **limits)
    assert engine.settings.weights_on_disk == ("model.layers.7",)
    assert engine.settings.on_disk == ()


@pytest.mark.parametrize(("direct", "coded"), [(True, False), (False, False), (True, True)])
def test_what_is_in_transit_counts_toward_free_ram_and_not_toward_the_cap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool, coded: bool
) -> None:
    """Without direct I/O, or with coding, 64 MiB are in transit. 48 MiB are free here, and 32 allowed."""
    monkeypatch.setattr(scratch, "_direct", lambda file: file if direct else file.close())
    free = inventory.level(inventory.CRITICAL, cgroups.usable_ram()) + (48 << 20)
    options: dict[str, Any] = {"offload_dir": tmp_path, "allow_tmpfs": True, "on_disk": ["model.layers.*"]}
    if coded:
        options |= {"optimizer_compression": "lossless", "disk_coding": "always"}
    model = small.llama(**SIZES)
    engine = engine_of(model, max_ram_gb=32 / 1024, **options)
    expected = 64 << 20 if coded or not direct else 0
    disk = engine._placement.disk
    assert disk is not None
    if disk.files[0].direct != direct:
        pytest.skip("no direct I/O here")
    assert disk.transit_bytes == expected
    monkeypatch.setattr(inventory, "available_ram", lambda: free)
    if not expected:
        engine.optimizer(lr=1e-2)
        return
    with pytest.raises(NotEnoughMemory, match="are available, of which"):
        engine.optimizer(lr=1e-2)
    monkeypatch.undo()
    engine.optimizer(lr=1e-2)


def test_copies_of_what_goes_to_disk_are_counted_before_weights_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both halves of an FP32 weight are in RAM while they are written."""
    layer = torch.nn.Linear(1024, 4096, bias=False)
    model = torch.nn.Sequential(layer)
    everything: dict[str, Any] = {"on_disk": ["*"], "weights_on_disk": ["*"], "allow_tmpfs": True}
    spare, halves = inventory.level(inventory.CRITICAL, cgroups.usable_ram()), 4 * layer.weight.numel()
    monkeypatch.setattr(inventory, "available_ram", lambda: spare + halves - 1)
    with pytest.raises(NotEnoughMemory, match="are available, of which"):
        engine_of(model, precision="bf16", offload_dir=tmp_path, **everything)
    monkeypatch.setattr(inventory, "available_ram", lambda: spare + halves)
    engine_of(model, precision="bf16", offload_dir=tmp_path, **everything)
