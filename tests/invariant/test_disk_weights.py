"""Weights and gradients on disk give the bits of those in RAM; weights, whether they train or not."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import small
from tests.invariant.test_disk import EVERYTHING, SOME, on_disk, train
from tests.tiny import Stack, differences, engine_of, inputs, roles

import megatrain as mt
from megatrain.engine.adopt import Adoption
from megatrain.errors import DiskFailed, LaneFailed, NotEnoughMemory, SettingsError
from megatrain.geometry import ALIGN_BYTES, round_up
from megatrain.store.parameter import StoreTensor
from megatrain.stream.disk_weights import DiskWeights
from megatrain.stream.lanes import SyncLanes, ThreadLanes


def all_on_disk(folder: Path, patterns: tuple[str, ...] = EVERYTHING) -> dict[str, Any]:
    return {**on_disk(folder), "weights_on_disk": patterns, "gradients_on_disk": patterns}


@pytest.mark.parametrize("clip", [None, 0.5], ids=["early", "clipped"])
@pytest.mark.parametrize(
    ("kind", "precision", "compression"),
    [("adamw", "bf16", False), ("adamw", "fp32", "8bit"), ("lion", "bf16-sr", "4bit")],
)
def test_training_is_bitwise(tmp_path: Path, kind: str, precision: str, compression: Any, clip: float | None) -> None:
    run = partial(train, kind, clip, precision=precision, optimizer_compression=compression)
    expected = run(lanes=SyncLanes())
    assert differences(run(lanes=SyncLanes(), **all_on_disk(tmp_path)), expected) == []
    assert differences(run(lanes=ThreadLanes(seed=1, max_delay=2e-4), **all_on_disk(tmp_path)), expected) == []
    mixed = all_on_disk(tmp_path, SOME) | {"held_weights": ["model.layers.1"], "held_gradients": ["model.layers.[12]"]}
    assert differences(run(lanes=ThreadLanes(seed=2, max_delay=2e-4), **mixed), expected) == []


@pytest.mark.parametrize("policy", ["store", "offload"])
def test_policies_are_bitwise(tmp_path: Path, policy: str) -> None:
    run = partial(train, "adamw", 0.5, precision="bf16")
    expected = run(lanes=SyncLanes())
    found = run(lanes=ThreadLanes(seed=3, max_delay=2e-4), policy=policy, **all_on_disk(tmp_path))
    assert differences(found, expected) == []


def frozen(steps: int = 3, **settings: Any) -> tuple[list[torch.Tensor], mt.Engine]:
    """Only the embedding and the last layer train."""
    model = small.llama(num_hidden_layers=4)
    model.requires_grad_(False)
    for module in (model.model.embed_tokens, model.model.layers[3]):
        module.requires_grad_(True)
    engine = engine_of(model, precision="bf16", **settings)
    optimizer = engine.optimizer(lr=1e-2, max_grad_norm=0.5)
    losses = []
    for step in range(steps):
        loss = model(**small.batch(2, seed=step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    engine.synchronize()
    return [*losses, *(p.detach().clone() for p in model.parameters())], engine


def test_frozen_weights_are_read_and_never_written(tmp_path: Path) -> None:
    expected, engine = frozen(lanes=SyncLanes())
    engine.close()
    folder = {"offload_dir": tmp_path, "allow_tmpfs": True, "weights_on_disk": ["model.layers.[012]", "lm_head"]}
    found, engine = frozen(lanes=ThreadLanes(seed=1, max_delay=2e-4), **folder)
    assert differences(found, expected) == []
    disk = engine._placement.disk
    assert disk is not None
    on_disk = [slab for slab in engine.slabs if slab.weight_on_disk]
    assert {slab.name for slab in on_disk} == {"model.layers.0", "model.layers.1", "model.layers.2", "lm_head"}
    residuals = sum(buffer.nbytes for slab in on_disk for buffer in slab.state_buffers())
    assert disk.allocated_bytes == sum(slab.layout.nbytes for slab in on_disk) + residuals
    assert engine.drive.per_step == 0
    loaded = disk.written_bytes
    assert engine.counters.bytes_disk_in > 0
    engine.close()
    _, engine = frozen(steps=6, lanes=SyncLanes(), **folder)
    again = engine._placement.disk
    assert again is not None
    assert again.written_bytes == loaded, "steps write no frozen weight"
    engine.close()


@pytest.mark.parametrize("states", [False, True], ids=["weights", "states too"])
@pytest.mark.parametrize("clip", [None, 0.5], ids=["early", "clipped"])
def test_weights_unfrozen_later_train_bitwise(tmp_path: Path, states: bool, clip: float | None) -> None:
    """Two blocks that were frozen, and one that was frozen in part."""

    def run(**settings: Any) -> tuple[list[Any], mt.Engine]:
        model = small.llama(num_hidden_layers=4)
        model.requires_grad_(False)
        for module in (model.model.embed_tokens, model.model.layers[3], model.model.layers[2].self_attn):
            module.requires_grad_(True)
        engine = engine_of(model, precision="bf16", **settings)
        losses = []
        for trained in (model.model.layers[3], model):
            trained.requires_grad_(True)
            optimizer = engine.optimizer(lr=1e-2, max_grad_norm=clip)
            for step in range(3):
                loss = model(**small.batch(2, seed=step)).loss
                with optimizer.final_backward():
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        return [*losses, list(roles(engine).values())], engine

    expected, engine = run(lanes=SyncLanes())
    engine.close()
    folder: dict[str, Any] = {"offload_dir": tmp_path, "allow_tmpfs": True, "weights_on_disk": ["model.layers.[012]"]}
    if states:
        folder["on_disk"] = EVERYTHING
    found, engine = run(lanes=ThreadLanes(seed=1, max_delay=2e-4), **folder)
    assert differences(found, expected) == []
    stored = [slab for slab in engine.slabs if slab.homes.states.tier == "disk"]
    buffers = [buffer for slab in stored for buffer in slab.state_buffers()]
    buffers += [slab.weight_buffer for slab in stored if slab.weight_on_disk]
    assert engine.drive.per_step == sum(round_up(buffer.nbytes, ALIGN_BYTES) for buffer in buffers)
    assert engine.drive.per_step > 0
    engine.close()


def test_reads_begin_before_there_is_a_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many layers ahead as there are staging buffers, past layers in RAM."""
    used, reads = [""], []
    model = small.llama(num_hidden_layers=8)
    folder = on_disk(tmp_path, ("model.layers.[4567]",)) | {"weights_on_disk": ["model.layers.[4567]"]}
    with engine_of(model, precision="bf16", slots=2, lanes=SyncLanes(), **folder) as engine:
        stage, record = DiskWeights._read, engine._step.ahead.predictor.record

        def read(self: Any, slab: Any, *args: Any) -> None:
            reads.append((used[0], slab.name))
            stage(self, slab, *args)

        def note(use: Any) -> None:
            used[0] = use[1] if isinstance(use, tuple) and use[0] == "forward" else ""
            record(use)

        monkeypatch.setattr(DiskWeights, "_read", read)
        monkeypatch.setattr(engine._step.ahead.predictor, "record", note)
        optimizer = engine.optimizer(lr=1e-2)
        for _ in range(4):
            reads.clear()
            optimizer.step()
            optimizer.zero_grad()
            model(**small.batch()).loss.backward()
        names = {block.index: block.name for block in engine.blocks}
    found = [(names.get(at, "step"), name) for at, name in reads]
    assert found[:4] == [
        ("step", "model.layers.4"), ("step", "model.layers.5"), ("step", "model.layers.6"),
        ("model.layers.3", "model.layers.7"),
    ]  # fmt: skip


@pytest.mark.parametrize("held", [["lm_head"], ["*"]], ids=["one", "all"])
def test_held_weights_are_read_in_the_order_of_their_use(tmp_path: Path, held: list[str]) -> None:
    """A read waits for its update, so one that is not needed yet would hold up those that are."""
    reads: list[str] = []

    class Recorded(ThreadLanes):
        def submit(self, lane: str, job: str, *args: Any, **options: Any) -> Any:
            if job == "read weight":
                reads.append(options["label"])
            return super().submit(lane, job, *args, **options)

    model = small.llama(num_hidden_layers=6)
    with engine_of(model, precision="bf16", lanes=Recorded(), held_weights=held, **all_on_disk(tmp_path)) as engine:
        optimizer = engine.optimizer(lr=1e-2)
        for step in range(3):
            model(**small.batch(2, seed=step)).loss.backward()
            reads.clear()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(**small.batch(2, seed=9))
        assert reads[:9] == [block.name for block in engine.blocks]
        if held == ["*"]:
            assert len(reads) == 9


def test_parameters_can_be_read_written_and_saved(tmp_path: Path) -> None:
    model = Stack()
    engine = engine_of(model, precision="bf16", **all_on_disk(tmp_path / "scratch"))
    first = next(iter(model.parameters()))
    assert all(slab.weight.is_meta for slab in engine.slabs)
    before = first.detach().clone()
    with torch.no_grad():
        first.mul_(2.0)
        first[0] = 7.0
    expected = before * 2.0
    expected[0] = 7.0
    assert torch.equal(first.detach().clone(), expected)
    engine.save(tmp_path / "saved")
    other = Stack(seed=5)
    loaded = engine_of(other, precision="bf16")
    loaded.load(tmp_path / "saved")
    ours, theirs = model.state_dict(), other.state_dict()
    assert all(torch.equal(ours[name] + 0, theirs[name] + 0) for name in ours)
    loaded.close()
    plain = engine.release()
    assert torch.equal(next(iter(plain.parameters())).detach().bfloat16(), expected.bfloat16())


@pytest.mark.parametrize("weights", ["in RAM", "on disk"])
def test_a_release_that_does_not_fit_is_refused(tmp_path: Path, weights: str) -> None:
    """With the bytes of what it would return: FP32 masters, if their low halves are on disk."""
    model, needed = Stack(), []
    engine = engine_of(model, precision="bf16", **(on_disk if weights == "in RAM" else all_on_disk)(tmp_path))
    engine.optimizer(lr=0.1)

    def full(nbytes: int, held: int) -> None:
        needed.append(nbytes)
        raise NotEnoughMemory(f"{nbytes} bytes are not free.")

    engine._memory._guard = full
    with pytest.raises(NotEnoughMemory, match=r"release\(\) would copy .* GB of weights from disk to RAM"):
        engine.release()
    engine._memory._guard = None
    # It is open, and nothing is lost.
    model(inputs(0)).square().mean().backward()
    engine.save(tmp_path / "saved")
    assert needed == [sum(parameter.nbytes for parameter in engine.release().parameters())]


def test_a_release_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack()
    engine = engine_of(model, precision="bf16", **all_on_disk(tmp_path))
    before = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    plain, seen = Adoption._as_plain_parameter, []

    def no_memory(adoption: Adoption, parameter: Any) -> Any:
        seen.append(parameter)
        if len(seen) > 3:
            raise MemoryError
        return plain(adoption, parameter)

    monkeypatch.setattr(Adoption, "_as_plain_parameter", no_memory)
    with pytest.raises(MemoryError):
        engine.release()
    after = dict(model.named_parameters())
    assert sum(isinstance(parameter, StoreTensor) for parameter in after.values()) == len(before) - 3
    assert all(torch.equal(after[name].detach().cpu().to(values.dtype), values) for name, values in before.items())


def test_weights_that_train_need_their_states_on_disk(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"which trains: .* name it in on_disk too"):
        engine_of(Stack(), offload_dir=tmp_path, weights_on_disk=["*"], allow_tmpfs=True)
    with pytest.raises(SettingsError, match="name a directory"):
        engine_of(Stack(), weights_on_disk=["*"])


def test_a_failed_read_stops_training(tmp_path: Path) -> None:
    model = Stack(depth=5)
    engine = engine_of(model, lanes=ThreadLanes(), **all_on_disk(tmp_path))
    optimizer = engine.optimizer(lr=0.1)
    model(inputs(0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    engine.synchronize()
    assert engine._placement.disk is not None
    for file in engine._placement.disk.files:
        os.ftruncate(file.descriptor, 0)
    with pytest.raises((DiskFailed, LaneFailed), match="the file was truncated"):  # noqa: PT012
        for seed in range(1, 4):
            model(inputs(seed)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.synchronize()
    with pytest.raises((DiskFailed, LaneFailed)):
        optimizer.step()
    engine._attached.close(1.0)
