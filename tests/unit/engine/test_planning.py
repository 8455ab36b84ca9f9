"""`mt.plan` and engines that follow a plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests import small
from tests.tiny import differences, engine_of, roles

import megatrain as mt
from megatrain.errors import NotEnoughMemory, SettingsError


def planned(**options: Any) -> mt.Plan:
    """For a GPU, but eager, as engines on the CPU run."""
    return mt.plan(small.llama(), machine="h200-128gb", batch=2, length=8, compile=False, **options)


def test_plans_from_a_model_and_its_config_agree() -> None:
    model = small.llama()
    plans = [
        mt.plan(source, machine="rtx4090-64gb", batch=2, length=8, precision="fp32") for source in (model, model.config)
    ]
    assert plans[0].memory == plans[1].memory
    assert "rtx4090-64gb" in plans[0].table()
    assert mt.Plan.from_json(plans[0].to_json()) == plans[0]


def test_an_engine_follows_and_announces_its_plan(announced: pytest.LogCaptureFixture) -> None:
    plan = dataclasses.replace(
        planned(accumulation=6),
        resident=("model.layers.0", "lm_head"),
        held_weights=("model.layers.1",),
        held_gradients=(),
        streamed_states=(),
        policy={"model.layers.1": "store", "*": "recompute"},
        windows=(3, 3),
        slots=2,
    )
    engine = engine_of(small.llama(), plan=plan)
    assert {slab.name for slab in engine.slabs if slab.on_device} == {"model.layers.0", "lm_head"}
    assert engine.settings.debug.slots == 2
    assert engine.settings.held_weights == ("model.layers.1",)
    assert engine.window_size(small.batch(2)) == 3
    assert [engine.memory_limit.policies[b.name] for b in engine.blocks if b.name.startswith("model.layers")] == [
        "recompute", "store", "recompute",
    ]  # fmt: skip
    assert any("blocks resident" in line and "tokens/s" in line for line in announced.messages)


def test_user_settings_override_the_plan() -> None:
    plan = dataclasses.replace(
        planned(accumulation=3),
        resident=("*",),
        held_weights=(),
        held_gradients=(),
        streamed_states=(),
        policy={"*": "store"},
        windows=(3,),
    )
    engine = engine_of(small.llama(), plan=plan, policy="offload", window=1, resident=("lm_head",))
    assert (engine.settings.policy, engine.settings.window, engine.settings.resident) == ("offload", 1, ("lm_head",))


def test_a_plan_does_not_change_bits() -> None:
    def run(**settings: Any) -> Any:
        engine = engine_of(small.llama(), precision="bf16", **settings)
        optimizer = engine.optimizer(lr=1e-2, max_grad_norm=1.0)
        for step in range(2):
            tasks = [
                lambda k=k, step=step: engine.model(**small.batch(2, seed=4 * step + k)).loss.backward()
                for k in range(4)
            ]
            engine.window(tasks, full_step=True)
            optimizer.step()
            optimizer.zero_grad()
        return roles(engine)

    assert differences(run(plan=planned(accumulation=4)), run()) == []


@pytest.mark.parametrize("weights", [(), ("lm_head",), ("model.layers.0", "lm_head")])
def test_an_engine_keeps_state_on_disk_as_planned(tmp_path: Path, weights: tuple[str, ...]) -> None:
    def run(**settings: Any) -> Any:
        model = small.llama()
        engine = engine_of(model, **settings)
        optimizer = engine.optimizer(lr=1e-2)
        for step in range(2):
            model(**small.batch(2, seed=step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return engine, roles(engine)

    placed = {"on_disk": ("model.layers.0", "lm_head"), "weights_on_disk": weights}
    plan = dataclasses.replace(planned(), resident=(), held_weights=("lm_head",), **placed)
    engine, found = run(plan=plan, offload_dir=tmp_path, allow_tmpfs=True)
    assert {slab.name for slab in engine.slabs if slab.weight_on_disk} == {*weights}
    assert {slab.name for slab in engine.slabs if slab.homes.states.tier == "disk"} == {"model.layers.0", "lm_head"}
    assert differences(found, run()[1]) == []


def test_unusable_plans_are_refused() -> None:
    with pytest.raises(SettingsError, match="plan must be a Plan"):
        engine_of(small.llama(), plan={"resident": ()})
    with pytest.raises(SettingsError, match="on_disk name blocks; name a directory"):
        engine_of(small.llama(), plan=dataclasses.replace(planned(), resident=(), on_disk=("model.layers.0",)))


def test_a_refusal_has_the_shortfall_and_suggestions() -> None:
    with pytest.raises(NotEnoughMemory, match=r"GiB") as refusal:
        mt.plan(small.llama(hidden_size=4096, intermediate_size=8192), machine="rtx4090-64gb", max_ram_gb=1.0)
    assert refusal.value.suggestions


def test_an_optimizer_that_differs_from_the_plan_is_announced(announced: pytest.LogCaptureFixture) -> None:
    engine = engine_of(small.llama(), plan=planned())
    engine.optimizer(lr=0.1)
    assert not any("the plan is for" in line for line in announced.messages)
    engine.optimizer(kind="sgd", lr=0.1)
    assert any("kind='sgd', but the plan is for 'adamw'" in line for line in announced.messages)
