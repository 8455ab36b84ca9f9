"""Settings know what was asked for: a default that was set is a choice, one that was not is free."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
from tests import small
from tests.tiny import engine_of

import megatrain as mt
from megatrain.errors import SettingsError

MACHINE = "h200-128gb"
CHOICES = {"resident": (), "policy": "recompute", "window": None, "slots": 3, "grad_slots": 2}
"""What a plan decides, at the defaults of `Settings`."""


def decided() -> mt.Plan:
    """A plan that decides something else than each default."""
    found = mt.plan(small.llama(), machine=MACHINE, batch=2, length=8)
    return dataclasses.replace(found, resident=("*",), policy={"*": "store"}, window=3, slots=2, grad_slots=1)


def test_what_was_given_is_known_and_kept() -> None:
    settings = mt.Settings(slots=3)
    assert settings == mt.Settings(), "equal in every value"
    assert settings.given == {"slots"}
    further = settings.override(window=None)
    for copied in (further, copy.copy(further), copy.deepcopy(further), pickle.loads(pickle.dumps(further))):
        assert copied.given == {"slots", "window"}
        assert copied.chosen() == {"slots": 3, "window": None}
    assert mt.Settings().given == frozenset()


def test_init_knows_what_it_was_given() -> None:
    assert mt.init().given == frozenset()
    assert mt.init(None, 80).given == {"offload_dir", "max_vram_gb"}
    assert mt.init(optimizer_compression=False, slots=3).given == {"optimizer_compression", "slots"}
    assert mt.init(max_ram_gb=None).given == {"max_ram_gb"}, "a second call replaces the first"


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("by", ["init", "engine"])
def test_a_default_that_was_asked_for_stands_against_a_plan(name: str, by: str) -> None:
    plan, asked = decided(), {name: CHOICES[name]}
    if by == "init":
        mt.init(**asked)
    settings = engine_of(small.llama(), plan=plan, **(asked if by == "engine" else {})).settings
    for other, default in CHOICES.items():
        value = getattr(settings, other)
        assert (value == default) is (other == name), f"{other}={value!r}"


def made(directory: Path, **changes: Any) -> mt.Trainer:
    return mt.Trainer(model=small.llama(), args=small.arguments(directory, **changes), train_dataset=small.rows())


@pytest.mark.parametrize("name", CHOICES)
def test_a_trainer_plans_only_where_nothing_was_decided(name: str, tmp_path: Path) -> None:
    mt.init(machine=MACHINE, **{name: CHOICES[name]})
    trainer = made(tmp_path)
    assert trainer.engine.settings.plan is None
    assert getattr(trainer.engine.settings, name) == CHOICES[name]


def test_a_trainer_takes_the_default_that_was_asked_for_over_its_plan(tmp_path: Path) -> None:
    mt.init(plan=decided(), resident=())
    settings = made(tmp_path).engine.settings
    assert (settings.resident, settings.window) == ((), 3)


@pytest.mark.parametrize(
    ("asked", "arguments"),
    [
        ({"optimizer_compression": False}, {"optim": "adamw_8bit"}),
        ({"compile": False}, {"torch_compile": True}),
        ({"precision": "fp32"}, {"bf16": True}),
    ],
    ids=["optimizer_compression", "compile", "precision"],
)
def test_arguments_that_contradict_init_are_refused(
    asked: dict[str, Any], arguments: dict[str, Any], tmp_path: Path
) -> None:
    mt.init(**asked)
    ((name, value),) = asked.items()
    with pytest.raises(SettingsError, match=rf"megatrain\.init asked for {name}={value!r}"):
        made(tmp_path, **arguments)


def test_what_init_did_not_say_is_for_the_arguments_to_say(tmp_path: Path) -> None:
    mt.init(max_ram_gb=None)
    engine = made(tmp_path, optim="adamw_8bit", bf16=True).engine
    assert (engine.settings.optimizer_compression, engine.precision) == ("8bit", "bf16")
