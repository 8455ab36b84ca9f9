"""What a Trainer may do is asked of one object, whatever way it was changed."""

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
}  # fmt: skip


def made(kind: type, directory: Path, **extra: Any) -> Any:
    return kind(model=small.llama(), args=small.arguments(directory), train_dataset=small.rows(), **extra)


def answers(trainer: Any) -> dict[str, Any]:
    """Those that differ from the stock Trainer's."""
    found = {name: getattr(trainer._subclass, name) for name in STOCK}
    return {name: value for name, value in found.items() if value != STOCK[name]}


def through(method: str) -> Any:
    def override(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Called on the object also where transformers has a static method.
        return vars(transformers.Trainer)[method].__get__(self)(*args, **kwargs)

    return override


LOSS = {"own_loss": True, "looks_at_logits": True, "evaluates_logits": True}
SEEN = {
    "compute_loss": {**LOSS, "why_in_turn": "{} overrides compute_loss", "repeatable": False},
    "training_step": {
        "own_step": True, "looks_at_logits": True, "why_in_turn": "{} overrides training_step", "repeatable": False
    },
    "_prepare_inputs": {"why_in_turn": "{} overrides _prepare_inputs", "repeatable": False},
    "prediction_step": {"evaluates_logits": True},
    "_get_grad_norm": {"watches_gradients": True},
    "get_optimizer_cls_and_kwargs": {"chooses_optimizer": True},
}  # fmt: skip


def test_the_stock_trainer_does_nothing_else(tmp_path: Path) -> None:
    mixed = type("Mixed", (mt.MegaMixin, transformers.Trainer), {})
    assert answers(made(mt.Trainer, tmp_path)) == answers(made(mixed, tmp_path)) == {}


@pytest.mark.parametrize("method", SEEN)
def test_a_method_is_seen_wherever_it_was_put(method: str, tmp_path: Path) -> None:
    override = through(method)
    behind = type("Behind", (transformers.Trainer,), {method: override})
    for name, kind in {
        "Front": type("Front", (mt.Trainer,), {method: override}),
        "Behind": type("Mixed", (mt.MegaMixin, behind), {}),
    }.items():
        expected = {key: it.format(name) if isinstance(it, str) else it for key, it in SEEN[method].items()}
        assert answers(made(kind, tmp_path)) == expected
    trainer = made(mt.Trainer, tmp_path)
    setattr(trainer, method, override.__get__(trainer))
    found = answers(trainer)
    assert found.keys() == SEEN[method].keys(), "put on the object, after it was made"


def test_callbacks_and_functions_are_seen_when_they_come(tmp_path: Path) -> None:
    class Watching(transformers.TrainerCallback):
        def on_substep_end(self, *args: Any, **kwargs: Any) -> None: ...

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...

    trainer = made(mt.Trainer, tmp_path)
    trainer.add_callback(Watching())
    assert answers(trainer) == {"why_in_turn": "Watching listens to on_substep_end", "watches_gradients": True}
    trainer.remove_callback(Watching)
    assert answers(trainer) == {}
    given = made(mt.Trainer, tmp_path, compute_loss_func=lambda *_, **__: None)
    assert answers(given) == {**LOSS, "why_in_turn": "compute_loss_func is given", "repeatable": False}


def test_what_a_class_declares_holds_for_itself_and_those_behind_it(tmp_path: Path) -> None:
    declaring = type(
        "Declaring", (mt.Trainer,), {"compute_loss": through("compute_loss"), "micro_batches_are_independent": True}
    )
    trainer = made(declaring, tmp_path)
    assert answers(trainer) == {**LOSS, "declared": True}
    further = type("Further", (declaring,), {"_prepare_inputs": through("_prepare_inputs")})
    assert answers(made(further, tmp_path))["why_in_turn"] == "Further overrides _prepare_inputs"
    refusing = type("Refusing", (mt.Trainer,), {"micro_batches_are_independent": False})
    assert not made(refusing, tmp_path)._subclass.repeatable
