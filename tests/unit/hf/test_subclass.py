"""One object describes what a Trainer overrides, however it was changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from tests import small

import megatrain as mt

STOCK = {
    "declared": None, "why_in_turn": None, "repeatable": True, "own_loss": False, "own_step": False,
    "looks_at_logits": False, "evaluates_logits": False, "watches_gradients": False, "chooses_optimizer": False,
    "reads_gradients_after_step": False,
}  # fmt: skip


def new_trainer(kind: type, directory: Path, **extra: Any) -> Any:
    return kind(model=small.llama(), args=small.arguments(directory), train_dataset=small.rows(), **extra)


def differences(trainer: Any) -> dict[str, Any]:
    """The properties that differ from those of transformers' Trainer."""
    properties = {name: getattr(trainer._subclass, name) for name in STOCK}
    return {name: value for name, value in properties.items() if value != STOCK[name]}


def override_of(method: str) -> Any:
    def override(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Bind the method to the object, because it can be a static method in transformers.
        return vars(transformers.Trainer)[method].__get__(self)(*args, **kwargs)

    return override


LOSS = {"own_loss": True, "looks_at_logits": True, "evaluates_logits": True}
DETECTED = {
    "compute_loss": {**LOSS, "why_in_turn": "{} overrides compute_loss", "repeatable": False},
    "training_step": {
        "own_step": True, "looks_at_logits": True, "why_in_turn": "{} overrides training_step", "repeatable": False
    },
    "_prepare_inputs": {"why_in_turn": "{} overrides _prepare_inputs", "repeatable": False},
    "prediction_step": {"evaluates_logits": True},
    "_get_grad_norm": {"watches_gradients": True},
    "_clip_grad_norm": {"watches_gradients": True},
    "get_optimizer_cls_and_kwargs": {"chooses_optimizer": True},
}  # fmt: skip


def test_an_unchanged_trainer_has_no_differences(tmp_path: Path) -> None:
    mixed = type("Mixed", (mt.MegaMixin, transformers.Trainer), {})
    assert differences(new_trainer(mt.Trainer, tmp_path)) == differences(new_trainer(mixed, tmp_path)) == {}


@pytest.mark.parametrize("method", DETECTED)
def test_an_override_is_detected_wherever_it_is_defined(method: str, tmp_path: Path) -> None:
    override = override_of(method)
    behind = type("Behind", (transformers.Trainer,), {method: override})
    for name, kind in {
        "Front": type("Front", (mt.Trainer,), {method: override}),
        "Behind": type("Mixed", (mt.MegaMixin, behind), {}),
    }.items():
        expected = {key: it.format(name) if isinstance(it, str) else it for key, it in DETECTED[method].items()}
        assert differences(new_trainer(kind, tmp_path)) == expected
    trainer = new_trainer(mt.Trainer, tmp_path)
    setattr(trainer, method, override.__get__(trainer))
    properties = differences(trainer)
    assert properties.keys() == DETECTED[method].keys(), "a method set on the object must be detected"


def test_callbacks_and_loss_functions_are_detected(tmp_path: Path) -> None:
    class Watching(transformers.TrainerCallback):
        def on_substep_end(self, *args: Any, **kwargs: Any) -> None: ...

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...

    trainer = new_trainer(mt.Trainer, tmp_path)
    trainer.add_callback(Watching())
    assert differences(trainer) == {"why_in_turn": "Watching listens to on_substep_end", "watches_gradients": True}
    trainer.remove_callback(Watching)
    assert differences(trainer) == {}
    with_loss_function = new_trainer(mt.Trainer, tmp_path, compute_loss_func=lambda *_, **__: None)
    assert differences(with_loss_function) == {**LOSS, "why_in_turn": "compute_loss_func is given", "repeatable": False}


def test_a_declaration_applies_to_its_class_and_base_classes(tmp_path: Path) -> None:
    declaring = type(
        "Declaring", (mt.Trainer,), {"compute_loss": override_of("compute_loss"), "micro_batches_are_independent": True}
    )
    trainer = new_trainer(declaring, tmp_path)
    assert differences(trainer) == {**LOSS, "declared": True}
    further = type("Further", (declaring,), {"_prepare_inputs": override_of("_prepare_inputs")})
    assert differences(new_trainer(further, tmp_path))["why_in_turn"] == "Further overrides _prepare_inputs"
    refusing = type("Refusing", (mt.Trainer,), {"micro_batches_are_independent": False})
    assert not new_trainer(refusing, tmp_path)._subclass.repeatable
