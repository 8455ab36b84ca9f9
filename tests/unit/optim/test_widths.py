"""Moments of every width and optimizers of every kind, through the engine: states, checkpoints, memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import small
from tests.tiny import Stack, differences, engine_of, inputs, roles

import megatrain as mt
from megatrain.errors import CheckpointError, SettingsError
from megatrain.stream.lanes import ThreadLanes

WIDTHS: dict[str, Any] = {"fp32": False, "bf16": "bf16", "8bit": "8bit", "4bit": "4bit"}
BYTES = {"fp32": 8.0, "bf16": 4.0, "8bit": 2.03125, "4bit": 1.0625}


def model_of(seed: int = 0) -> Any:
    return small.llama(seed, hidden_size=64, intermediate_size=128)


def train(engine: mt.Engine, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = engine.model(**small.batch(2, seed=step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("width", WIDTHS)
def test_bytes_per_parameter(width: str) -> None:
    engine = engine_of(model_of(), optimizer_compression=WIDTHS[width])
    engine.optimizer(lr=1e-3)
    for slab in engine.slabs:
        matrices = [s for s in slab.layout.segments if len(s.shape) > 1 and s.numel >= 4096]
        others = [s for s in slab.layout.segments if s not in matrices]
        stored = sum(moment.bytes.numel() for moment in slab.moments.values())
        exact = sum(-(-s.numel // 256) * 256 for s in others) * 8
        numel = sum(s.numel for s in matrices)
        assert numel % 256 == 0
        assert stored - exact == pytest.approx(numel * BYTES[width], abs=128 * len(slab.moments))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-sr"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["adamw", "lion", "sgd"])
def test_native_equals_reference_and_resumes_bitwise(tmp_path: Path, kind: str, width: str, precision: str) -> None:
    settings = {"optimizer_compression": WIDTHS[width], "precision": precision}

    def fresh(**more: Any) -> tuple[mt.Engine, Any]:
        engine = engine_of(model_of(), **settings, **more)
        return engine, engine.optimizer(kind=kind, lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)

    engine, optimizer = fresh()
    train(engine, optimizer, range(3))
    engine.save(tmp_path, optimizer)
    losses = train(engine, optimizer, range(3, 5))
    reference = roles(engine)

    slow, other_optimizer = fresh(kernels="reference", lanes=ThreadLanes(seed=1, max_delay=2e-4))
    train(slow, other_optimizer, range(5))
    assert differences(reference, roles(slow)) == []

    resumed, continued = fresh()
    resumed.load(tmp_path, continued)
    assert train(resumed, continued, range(3, 5)) == losses
    assert differences(reference, roles(resumed)) == []


@pytest.mark.parametrize("width", ["bf16", "8bit", "4bit"])
def test_a_state_dict_is_exact(width: str) -> None:
    engine, other = (engine_of(model_of(), optimizer_compression=width) for _ in range(2))
    optimizer, other_optimizer = engine.optimizer(lr=1e-2), other.optimizer(lr=1e-2)
    train(engine, optimizer, range(2))
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for left, right in zip(engine.slabs, other.slabs, strict=True):
        for role in left.moments:
            assert torch.equal(left.moments[role].bytes, right.moments[role].bytes)


def test_a_checkpoint_loads_into_another_width(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    engine = engine_of(model_of(), optimizer_compression="8bit")
    optimizer = engine.optimizer(lr=1e-2)
    train(engine, optimizer, range(3))
    engine.save(tmp_path, optimizer)
    exact = engine_of(model_of())
    engine_optimizer = exact.optimizer(lr=1e-2)
    announced.clear()
    exact.load(tmp_path, engine_optimizer)
    assert not any("rounded" in line for line in announced.messages), "FP32 represents every 8-bit value"
    for mine, theirs in zip(exact.slabs, engine.slabs, strict=True):
        for role, moment in mine.moments.items():
            for index in range(len(mine.layout.segments)):
                assert torch.equal(moment.read(index), theirs.moments[role].read(index))
    coarse = engine_of(model_of(), optimizer_compression="4bit")
    coarse_optimizer = coarse.optimizer(lr=1e-2)
    coarse.load(tmp_path, coarse_optimizer)
    assert any("rounded to 4bit on loading" in line for line in announced.messages)
    train(coarse, coarse_optimizer, range(3, 5))


def test_a_lossless_checkpoint_is_smaller_and_exact(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    engines = [engine_of(model_of(), optimizer_compression=choice) for choice in ("lossless", False)]
    optimizers = [engine.optimizer(lr=1e-2) for engine in engines]
    for engine, optimizer in zip(engines, optimizers, strict=True):
        train(engine, optimizer, range(3))
    assert differences(roles(engines[0]), roles(engines[1])) == [], "compression does not change the state in memory"
    for name, engine, optimizer in zip(("coded", "plain"), engines, optimizers, strict=True):
        engine.save(tmp_path / name, optimizer)
    report = next(line for line in announced.messages if "lossless" in line and "ratio" in line)
    assert "GB/s" in report
    sizes = {
        name: sum(file.stat().st_size for file in (tmp_path / name / "megatrain").glob("*.safetensors"))
        for name in ("coded", "plain")
    }
    assert sizes["coded"] < 0.95 * sizes["plain"]
    # Both kinds of engine read both kinds of checkpoint.
    for choice in ("lossless", False):
        other = engine_of(model_of(seed=1), optimizer_compression=choice)
        other_optimizer = other.optimizer(lr=1e-2)
        other.load(tmp_path / "coded", other_optimizer)
        assert differences(roles(engines[1]), roles(other)) == []


def test_a_checkpoint_of_another_kind_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    engine = engine_of(model_of())
    optimizer = engine.optimizer(lr=1e-2)
    train(engine, optimizer, range(2))
    engine.save(tmp_path, optimizer)
    other = engine_of(model_of(seed=1))
    lion = other.optimizer(kind="lion", lr=1e-3)
    before = roles(other)
    with pytest.raises(CheckpointError, match=r"saved by adamw, but this optimizer is lion"):
        other.load(tmp_path, lion)
    assert differences(before, roles(other)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "adam"}, "kind must be one of adamw, lion, sgd"),
        ({"kind": "sgd", "betas": (0.9, 0.99)}, "sgd has no betas; its options are lr, momentum, weight_decay"),
        ({"kind": "lion", "eps": 1e-8}, "lion has no eps"),
        ({"momentum": 0.9}, "adamw has no momentum"),
        ({"kind": "sgd", "momentum": -1.0}, "momentum=-1.0, which must be finite"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    engine = engine_of(Stack())
    with pytest.raises(SettingsError, match=message):
        engine.optimizer(**options)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_matches_torch(momentum: float) -> None:
    plain = Stack()
    model = copy.deepcopy(plain)
    ours = engine_of(model).optimizer(kind="sgd", lr=0.1, momentum=momentum, weight_decay=0.05)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=momentum, weight_decay=0.05)
    for step in range(5):
        for net, optimizer in ((model, ours), (plain, theirs)):
            optimizer.zero_grad()
            net(inputs(step)).square().mean().backward()
            optimizer.step()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach() + 0, other.detach(), rtol=1e-5, atol=1e-6)


def test_bf16_sr_updates_weights_without_a_master() -> None:
    """Steps of a hundredth of a BF16 ulp: with rounding to nearest, weights would never change."""
    torch.manual_seed(0)
    model = small.llama(hidden_size=64, intermediate_size=128)
    engine = engine_of(model, precision="bf16-sr")
    before = {name: value.float() for name, value in model.state_dict().items()}
    optimizer = engine.optimizer(lr=1e-6, weight_decay=0.0)
    train(engine, optimizer, range(40))
    assert all(slab.residual is None for slab in engine.slabs)
    weight = "model.layers.0.mlp.up_proj.weight"
    moved = (engine.host_state_dict()[weight].float() - before[weight]).abs()
    assert 0.01 < (moved > 0).float().mean() < 0.9
    assert moved.mean() < 40 * 1e-6 * 3, "on average the step has the right size"


def test_trainer_takes_other_optimizers(tmp_path: Path) -> None:
    for optim, kind, width in (
        ("adamw_bnb_8bit", "adamw", "8bit"),
        ("lion_32bit", "lion", "fp32"),
        ("sgd", "sgd", "fp32"),
    ):
        trainer = mt.Trainer(
            model=small.llama(hidden_size=64, intermediate_size=128),
            args=small.arguments(tmp_path / optim, optim=optim, max_steps=2),
            train_dataset=small.rows(),
        )
        trainer.train()
        optimizer = trainer._own_optimizer()
        assert (optimizer.kind, optimizer.moment_width) == (kind, width)


def test_trainer_without_clipping_starts_updates_in_the_backward(tmp_path: Path, monkeypatch: Any) -> None:
    from megatrain.optim.schedule import Updates

    started: list[str] = []
    complete = Updates.gradient_complete

    def seen(updates: Any, slab: Any) -> None:
        before = slab.version
        complete(updates, slab)
        if slab.version != before:
            started.append(slab.name)

    monkeypatch.setattr(Updates, "gradient_complete", seen)
    results = {}
    for accumulation in (1, 2):
        for clip in (0.0, 1e9):
            started.clear()
            trainer = mt.Trainer(
                model=small.llama(),
                args=small.arguments(
                    tmp_path / f"{accumulation}{clip}", max_grad_norm=clip, gradient_accumulation_steps=accumulation
                ),
                train_dataset=small.rows(),
            )
            trainer.train()
            assert bool(started) == (clip == 0.0)
            results[accumulation, clip] = small.snapshot(trainer.model)
        assert small.same(results[accumulation, 0.0], results[accumulation, 1e9])
