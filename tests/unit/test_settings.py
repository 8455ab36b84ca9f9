"""Settings record which values the user set: an explicit default overrides a plan, an unset one does not."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import small
from tests.tiny import Stack, backward, engine_of

import megatrain as mt
from megatrain import settings as settings_module
from megatrain.errors import SettingsError, UnknownSetting
from megatrain.geometry import PATTERN_SETTINGS
from megatrain.settings import DEBUG

MACHINE = "h200-128gb"
CHOICES = {
    "resident": (), "held_weights": (), "held_gradients": (), "policy": "recompute", "window": None, "slots": 3,
    "grad_slots": 2,
}  # fmt: skip
"""Settings that a plan decides, with the defaults of `Settings` and `Debug`."""


def settings_with(name: str) -> dict[str, Any]:
    return {"debug": mt.Debug(**{name: CHOICES[name]})} if name in DEBUG else {name: CHOICES[name]}


def value_of(settings: mt.Settings, name: str) -> Any:
    return getattr(settings.debug if name in DEBUG else settings, name)


def decided() -> mt.Plan:
    """A plan whose decisions all differ from the defaults."""
    found = mt.plan(small.llama(), machine=MACHINE, batch=2, length=8, accumulation=3, compile=False)
    placed: dict[str, Any] = {
        "resident": ("lm_head",),
        "held_weights": ("model.layers.0",),
        "held_gradients": ("model.layers.1",),
    }
    return dataclasses.replace(found, **placed, policy={"*": "store"}, windows=(3,), slots=2, grad_slots=1)


def test_settings_record_what_was_given() -> None:
    settings = mt.Settings(resident=())
    assert settings == mt.Settings(), "all values are equal"
    assert settings.given == {"resident"}
    further = settings.override(window=None, debug=mt.Debug(slots=3))
    for copied in (further, copy.copy(further), copy.deepcopy(further), pickle.loads(pickle.dumps(further))):
        assert copied.given == {"resident", "window", "debug"}
        assert copied.chosen() == {"resident": (), "window": None, "debug": mt.Debug()}
        assert copied.debug.given == {"slots"}
    assert mt.Settings().given == frozenset()


def test_window_takes_one_size_or_several() -> None:
    for sizes in (3, (2, 1), [4, 1]):
        assert mt.Settings(window=sizes).window == sizes
    for wrong in (0, True, "2", (), [2, 0], [2, True], (1.5,), {2: 1}):
        with pytest.raises(SettingsError, match="window must be a number of micro-batches, a list of"):
            mt.Settings(window=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PATTERN_SETTINGS)
def test_patterns_are_strings(name: str) -> None:
    for wrong in (5, None, [5], ["*", None]):
        with pytest.raises(SettingsError, match=f"{name} must be a list of patterns of block names, not (5|None)"):
            mt.Settings(**{name: wrong})


def test_policies_and_head_chunks_of_other_types_are_refused() -> None:
    for policy in (None, 5, [], ["store"], {"*": ["store"]}):
        with pytest.raises(SettingsError, match="policy must be one of recompute, store, offload, not"):
            mt.Settings(policy=policy)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="policy must have patterns of block names as keys, not 1"):
        mt.Settings(policy={1: "store"})  # type: ignore[dict-item]
    for chunk in (True, False, -1, 1.5, "8"):
        with pytest.raises(SettingsError, match="head_chunk must be a number of tokens, 0 or None, not"):
            mt.Settings(head_chunk=chunk)  # type: ignore[arg-type]
    assert mt.Settings(head_chunk=0).head_chunk == 0


def test_init_records_what_was_given() -> None:
    assert mt.init().given == frozenset()
    assert mt.init(None, 80).given == {"offload_dir", "max_vram_gb"}
    assert mt.init(optimizer_compression=False, debug=mt.Debug()).given == {"optimizer_compression", "debug"}
    assert mt.init(max_ram_gb=None).given == {"max_ram_gb"}, "a second call replaces the first"


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("by", ["init", "engine"])
def test_an_explicit_default_overrides_a_plan(name: str, by: str) -> None:
    plan, chosen = decided(), settings_with(name)
    if by == "init":
        mt.init(**chosen)
    settings = engine_of(small.llama(), plan=plan, **(chosen if by == "engine" else {})).settings
    for other, default in CHOICES.items():
        value = value_of(settings, other)
        assert (value == default) is (other == name), f"{other}={value!r}"


def made(directory: Path, **changes: Any) -> mt.Trainer:
    return mt.Trainer(model=small.llama(), args=small.arguments(directory, **changes), train_dataset=small.rows())


@pytest.mark.parametrize("name", CHOICES)
def test_a_trainer_plans_only_where_nothing_was_decided(name: str, tmp_path: Path) -> None:
    mt.init(machine=MACHINE, **settings_with(name))
    trainer = made(tmp_path)
    assert trainer.engine.settings.plan is None
    assert value_of(trainer.engine.settings, name) == CHOICES[name]


def test_an_explicit_default_overrides_a_trainers_plan(tmp_path: Path) -> None:
    mt.init(plan=decided(), resident=())
    settings = made(tmp_path).engine.settings
    assert (settings.resident, settings.window) == ((), 3)


@pytest.mark.parametrize(
    ("chosen", "arguments"),
    [
        ({"optimizer_compression": False}, {"optim": "adamw_8bit"}),
        ({"compile": False}, {"torch_compile": True}),
        ({"precision": "fp32"}, {"bf16": True}),
    ],
    ids=["optimizer_compression", "compile", "precision"],
)
def test_arguments_that_contradict_init_are_refused(
    chosen: dict[str, Any], arguments: dict[str, Any], tmp_path: Path
) -> None:
    mt.init(**chosen)
    ((name, value),) = chosen.items()
    with pytest.raises(SettingsError, match=rf"megatrain\.init asked for {name}={value!r}"):
        made(tmp_path, **arguments)


def test_arguments_decide_what_init_left_open(tmp_path: Path) -> None:
    mt.init(max_ram_gb=None)
    engine = made(tmp_path, optim="adamw_8bit", bf16=True).engine
    assert (engine.settings.optimizer_compression, engine.precision) == ("8bit", "bf16")


# ---- settings without effect are named or refused


def warned(announced: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in announced.records if r.name == "megatrain" and r.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        ({"max_vram_gb": 80}, "max_vram_gb=80 has no effect"),
        ({"pin": True}, "pin=True has no effect"),
        ({"length": 64}, "length=64 has no effect: no plan is made here"),
        ({"machine": MACHINE}, "machine='h200-128gb' has no effect: no plan is made here"),
        ({"plan": "auto"}, "plan='auto' has no effect on an engine without a Trainer"),
    ],
    ids=lambda it: next(iter(it)) if isinstance(it, dict) else None,
)
def test_an_engine_names_what_it_cannot_use(
    chosen: dict[str, Any], named: str, announced: pytest.LogCaptureFixture
) -> None:
    engine_of(small.llama(), **chosen)
    assert [line for line in warned(announced) if named in line]
    announced.clear()
    engine_of(small.llama())
    engine_of(small.llama(), **dict.fromkeys(("offload_dir", "max_vram_gb", "length", "machine", "plan")))
    assert warned(announced) == []


ONE = "model.layers.0"


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        *[
            ({"resident": [ONE], name: ["model.*"]}, f"{name} has no effect on {ONE}: resident names the same")
            for name in ("held_weights", "held_gradients", "on_disk")
        ],
        (
            {"resident": ["*"], "on_disk": [ONE, "lm_head"]},
            f"on_disk has no effect on {ONE} and 1 more: resident names the same",
        ),
        (
            {"held_gradients": [ONE], "on_disk": ["*"], "gradients_on_disk": ["*"]},
            f"gradients_on_disk has no effect on {ONE}: held_gradients names the same",
        ),
        (
            {"policy": {"*": "store", ONE: "offload"}},
            f"policy='{ONE}' has no effect: earlier patterns match its blocks",
        ),
    ],
    ids=str,
)
def test_a_pattern_that_another_overrides_is_named(
    chosen: dict[str, Any], named: str, announced: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    disk = {"offload_dir": tmp_path, "debug": mt.Debug(allow_tmpfs=True)} if "on_disk" in chosen else {}
    engine_of(small.llama(), **chosen, **disk)
    assert warned(announced) == [named]
    announced.clear()
    for name in chosen:
        alone = {} if name == "gradients_on_disk" else {name: chosen[name]}
        engine_of(small.llama(), **alone, **disk)
    assert warned(announced) == ([named] if "policy" in chosen else []), "each has an effect without the other"


def test_a_pattern_for_state_that_its_blocks_lack_is_named(announced: pytest.LogCaptureFixture) -> None:
    tied = small.llama(tie_word_embeddings=True)
    engine_of(tied, resident=["lm_head"])
    assert warned(announced) == ["resident='lm_head' has no effect: lm_head has no weights of its own"]
    announced.clear()
    frozen = small.llama()
    frozen.lm_head.requires_grad_(False)
    engine_of(frozen, held_gradients=["lm_head"], held_weights=["lm_head"])
    assert warned(announced) == ["held_gradients='lm_head' has no effect: lm_head has no trained weights of its own"]


@pytest.mark.parametrize("name", ["resident", "on_disk", "policy"])
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names(name: str) -> None:
    wrong = {"model.layer.1": "store", "*": "recompute"} if name == "policy" else ["model.layer.1"]
    with pytest.raises(SettingsError, match=rf"^{name}='model\.layer\.1' .* nearest names are model\.layers\.1, "):
        engine_of(small.llama(), offload_dir="/nowhere", **{name: wrong})


@pytest.mark.parametrize(
    "chosen",
    [
        {"drive_tbw": 600}, {"max_drive_tb": 2.5}, {"debug": mt.Debug(disk_io="auto")},
        {"debug": mt.Debug(disk_coding="never")}, {"debug": mt.Debug(allow_tmpfs=True)},
    ],
    ids=str,
)  # fmt: skip
def test_settings_of_drives_need_a_directory(
    chosen: dict[str, Any], tmp_path: Path, announced: pytest.LogCaptureFixture
) -> None:
    ((name, value),) = chosen["debug"].chosen().items() if "debug" in chosen else chosen.items()
    engine_of(small.llama(), **chosen)
    assert warned(announced) == [f"{name}={value!r} has no effect without offload_dir"]
    announced.clear()
    mt.init(offload_dir=tmp_path, optimizer_compression="lossless", **chosen)
    engine_of(small.llama())
    assert warned(announced) == []
    if name == "disk_coding":
        engine_of(small.llama(), optimizer_compression=False)
        assert warned(announced) == ["disk_coding='never' has no effect without optimizer_compression='lossless'"]


def test_the_usual_settings_have_an_effect(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    mt.init(offload_dir=tmp_path, optimizer_compression=True)
    made(tmp_path / "out")
    assert warned(announced) == []


def test_a_model_of_one_block_names_what_it_cannot_use(announced: pytest.LogCaptureFixture) -> None:
    engine_of(torch.nn.Linear(4, 4), compile=True, policy="store", window=2)
    for name in ("compile=True", "policy='store'", "window=2"):
        assert [line for line in warned(announced) if line.startswith(f"{name} has no effect")]


def test_settings_against_a_plan_are_named(announced: pytest.LogCaptureFixture) -> None:
    plan = decided()
    engine_of(small.llama(), plan=plan, policy="store", resident=["lm_head"], window=3)
    assert warned(announced) == [], "these settings equal the plan's"
    engine_of(small.llama(), plan=plan, policy="offload", slots=3, length=9, machine="rtx4090-64gb")
    lines = warned(announced)
    assert "policy='offload', slots=3 overrides the plan: memory and time will differ from it" in lines
    assert "length=9, machine='rtx4090-64gb' has no effect: the plan is for something else" in lines
    announced.clear()
    engine_of(small.llama(), plan=plan, length=8, machine=mt.Machine.load(MACHINE))
    assert warned(announced) == [], "the plan was made for these"


def test_a_trainer_uses_what_it_plans_with(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    mt.init(machine=MACHINE, length=100)
    plan = made(tmp_path).engine.settings.plan
    assert plan.run.length == 100
    assert warned(announced) == []
    mt.init(length=100)
    assert made(tmp_path).engine.settings.plan is None
    assert [line for line in warned(announced) if "length=100 has no effect: no plan is made here" in line]


def test_a_trainer_on_an_attached_model_uses_the_engine_that_is_there(
    tmp_path: Path, announced: pytest.LogCaptureFixture
) -> None:
    mt.init(compile=True)
    engine = mt.Engine(small.llama(), device="cpu", compile=False)

    def trainer(**changes: Any) -> mt.Trainer:
        return mt.Trainer(model=engine.model, args=small.arguments(tmp_path, **changes), train_dataset=small.rows())

    assert trainer().engine is engine, "the engine was made under these settings, and its own override them"
    with pytest.raises(SettingsError, match="torch_compile=True, but the model already belongs"):
        trainer(torch_compile=True)
    for chosen in ({"compile": True}, {"precision": "bf16"}, {"optimizer_compression": "8bit"}, {"head_chunk": 7}):
        mt.init(**chosen)
        ((name, value),) = chosen.items()
        with pytest.raises(SettingsError, match=rf"megatrain\.init asked for {name}={value!r} after"):
            trainer()
    mt.init(precision="fp32", device="cpu", compile=False, optimizer_compression=False, window=2)
    announced.clear()
    assert trainer().engine is engine
    assert warned(announced) == ["window=2 of megatrain.init has no effect: the model already belongs to an engine"]


def test_options_of_torch_compile_that_have_no_effect_are_named(
    tmp_path: Path, announced: pytest.LogCaptureFixture
) -> None:
    made(tmp_path, torch_compile=True, torch_compile_backend="eager", torch_compile_mode="max-autotune")
    lines = " ".join(warned(announced))
    assert "torch_compile_backend='eager' has no effect" in lines
    assert "torch_compile_mode='max-autotune' has no effect" in lines
    announced.clear()
    made(tmp_path, torch_compile=True)
    assert warned(announced) == []


def test_planning_uses_the_settings_of_init(announced: pytest.LogCaptureFixture) -> None:
    model = small.llama()
    chosen = {"max_vram_gb": 9, "max_ram_gb": 20, "optimizer_compression": "8bit", "precision": "bf16", "compile": True}
    expected = mt.plan(model, machine=MACHINE, length=64, head_chunk=0, **chosen)
    mt.init(machine=MACHINE, length=64, head_chunk=0, **chosen)
    assert mt.plan(model) == expected
    assert mt.plan(model, machine="rtx4090-64gb", length=8, max_vram_gb=None).machine == "rtx4090-64gb"
    assert mt.largest_batch(model).plan.run.length == 64
    assert mt.largest_context(model).value > 64
    assert mt.largest_model(run=mt.Run()).plan.run == mt.Run(), "an explicit run is not changed"
    assert mt.largest_model(run=mt.Run()).plan.capacity["ram"] == expected.capacity["ram"], "the limits still apply"
    assert warned(announced) == []


def test_planning_names_settings_without_effect(announced: pytest.LogCaptureFixture) -> None:
    mt.init(offload_dir="/nowhere", resident=(), policy="store", device="cpu", plan=None)
    mt.plan(small.llama(), machine=MACHINE)
    assert warned(announced) == ["a plan ignores offload_dir='/nowhere', policy='store', resident=() of megatrain.init"]
    mt.init()
    announced.clear()
    assert mt.largest_batch(small.llama(), MACHINE, batch=3) == mt.largest_batch(small.llama(), MACHINE)
    assert warned(announced) == ["batch=3 has no effect: it is what this call searches for"]
    with pytest.raises(UnknownSetting, match="unknown option policy; a plan takes batch, length"):
        mt.plan(small.llama(), machine=MACHINE, policy="store")


def test_a_head_chunk_and_a_window_without_effect_are_named(announced: pytest.LogCaptureFixture) -> None:
    engine = engine_of(Stack(), head_chunk=64, window=2)
    assert warned(announced) == ["head_chunk=64 has no effect: logits of Stack are computed whole"]
    announced.clear()

    def task() -> None:
        backward(engine.model, 0)

    engine.window([task, task])
    assert warned(announced) == []
    for _ in range(2):
        engine.window([task, task, task])
    assert warned(announced) == ["window=2 has no effect on engine.window(), which runs all 3 tasks together"]


# ---- debug settings


def test_debug_is_checked_and_completed_by_overrides() -> None:
    for wrong in ({"slots": 0}, {"slots": 2.5}, {"grad_slots": True}, {"lanes": "fast"}, {"kernels": "fast"}):
        ((name, value),) = wrong.items()
        with pytest.raises(SettingsError, match=rf"^{name} must be .*{value!r}"):
            mt.Debug(**wrong)
    for wrong in ({"slots": 2}, None, "threads"):
        with pytest.raises(SettingsError, match=r"debug must be a megatrain\.Debug"):
            mt.init(debug=wrong)
    mt.init(debug=mt.Debug(lanes="sync", slots=1))
    debug = engine_of(small.llama(), debug=mt.Debug(slots=2)).settings.debug
    assert (debug.lanes, debug.slots, debug.given) == ("sync", 2, {"lanes", "slots"})
    assert repr(debug) == "Debug(lanes='sync', slots=2)"


@pytest.mark.parametrize("name", DEBUG)
def test_old_names_still_work_and_warn_where_they_are_used(name: str) -> None:
    value = {"slots": 1, "grad_slots": 1, "lanes": "sync", "kernels": "reference", "pin": False, "allow_tmpfs": True,
             "disk_coding": "never", "disk_io": "threads"}[name]  # fmt: skip
    for make in (
        lambda **old: mt.Settings(**old),
        lambda **old: mt.Settings().override(**old),
        lambda **old: mt.init(**old),
        lambda **old: mt.Engine(small.llama(), device="cpu", **old).settings,
    ):
        with pytest.warns(FutureWarning, match=rf"{name}=\.\.\. is now debug=megatrain\.Debug\({name}=") as caught:
            settings = make(**{name: value})
        assert [warning.filename for warning in caught] == [__file__], "one warning, at the caller's line"
        assert getattr(settings.debug, name) == value
        assert settings.debug.given == {name}
        settings_module.store(mt.Settings())
    with pytest.warns(FutureWarning, match=rf"settings\.{name} is now settings\.debug\.{name}"):
        assert getattr(settings, name) == value
    with pytest.raises(AttributeError, match="slotz"):
        settings.slotz  # noqa: B018


def test_old_and_new_names_together() -> None:
    with pytest.warns(FutureWarning):
        settings = mt.init(slots=2, grad_slots=1, debug=mt.Debug(lanes="sync"))
    assert settings.debug.chosen() == {"slots": 2, "grad_slots": 1, "lanes": "sync"}
    with pytest.warns(FutureWarning), pytest.raises(SettingsError, match="slots must be"):
        mt.Engine(small.llama(), device="cpu", slots=0)
