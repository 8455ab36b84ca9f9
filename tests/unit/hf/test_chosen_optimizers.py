"""The optimizer that a Trainer is asked for is the one it has, or it is refused; gradients are clipped when stock does.

Most runs are plain SGD with a low limit: a gradient that is scaled otherwise shows in every weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests import small
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import TrainerCallback

import megatrain as mt
from megatrain.errors import SettingsError

CLIPPED = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.1, "weight_decay": 0.0, "max_steps": 3}
KINDS = (mt.Trainer, transformers.Trainer)


def trainer_of(kind: type, directory: Path, **changes: Any) -> Any:
    names = ("callbacks", "optimizer_cls_and_kwargs", "optimizers", "model")
    extra = {name: changes.pop(name) for name in names if name in changes}
    return kind(
        **({"model": small.llama()} | extra), args=small.arguments(directory, **changes), train_dataset=small.rows()
    )


def trained(kind: type, directory: Path, **changes: Any) -> Any:
    trainer = trainer_of(kind, directory, **changes)
    trainer.train()
    return trainer


def assert_equal_runs(ours: Any, stock: Any) -> None:
    mine, theirs = ([e for e in run.state.log_history if "loss" in e] for run in (ours, stock))
    for one, other in zip(mine, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=small.LOSSES)
        assert one["grad_norm"] == pytest.approx(float(other["grad_norm"]), rel=1e-5)
        assert one["learning_rate"] == other["learning_rate"]
    assert small.drift(small.snapshot(ours.model), small.snapshot(stock.model)) < small.WEIGHTS


# ---- classes and their arguments


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ((AdamW, {"lr": 3e-3, "betas": (0.8, 0.9), "eps": 1e-4}), {"weight_decay": 0.1}),
        ((AdamW, {"lr": 3e-3, "foreach": False, "fused": None, "amsgrad": False}), {}),
        ((AdamW, {"weight_decay": 0.5}), {"weight_decay": 0.1}),  # groups say how much; lr has torch's default
        ((Adam, {"lr": 3e-3}), {"weight_decay": 0.0}),
        ((Adam, {"lr": 3e-3, "decoupled_weight_decay": True}), {"weight_decay": 0.1}),
        ((SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": False}), {"weight_decay": 0.1}),
        ((AdamW, {"lr": 3e-3}), {"optim": "adafactor", "optim_args": "ignored=yes"}),
    ],
    ids=str,
)
def test_a_class_equals_stock(tmp_path: Path, given: Any, changes: dict[str, Any]) -> None:
    before = dict(given[1])
    runs = [trained(kind, tmp_path, optimizer_cls_and_kwargs=given, max_steps=3, **changes) for kind in KINDS]
    assert_equal_runs(*runs)
    assert given[1] == before


def test_a_decay_that_groups_override_is_said(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    trainer_of(mt.Trainer, tmp_path, optimizer_cls_and_kwargs=(AdamW, {"weight_decay": 0.5}), weight_decay=0.1)
    assert any("weight_decay=0.5 has no effect" in line for line in said.messages)


class Tuned(AdamW):
    """May do anything in its step."""


@pytest.mark.parametrize(
    ("given", "changes", "message"),
    [
        ((torch.optim.Adagrad, {}), {}, r"optimizer_cls_and_kwargs: Adagrad is not supported"),
        ((Tuned, {}), {}, r"Tuned is not supported"),
        ((transformers.Adafactor, {}), {}, r"Adafactor is not supported"),
        ((AdamW, {"amsgrad": True}), {}, r"AdamW with amsgrad=True is not supported; lr, betas, eps, weight_decay are"),
        ((AdamW, {"maximize": True}), {}, r"maximize=True is not supported"),
        ((SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}), {}, r"SGD with nesterov=True is not supported"),
        ((SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}), {}, r"dampening=0.5 is not supported"),
        ((SGD, {"betas": (0.9, 0.9)}), {}, r"SGD with betas=.* is not supported"),
        ((Adam, {}), {"weight_decay": 0.1}, r"Adam adds weight_decay=0.1 to the gradient, which is not supported"),
        (None, {"optim_args": "eps=1e-3"}, r"optim='adamw_torch.*' takes no eps.*adam_epsilon"),
        (None, {"optim": "lion_32bit", "optim_args": "beta1=0.5"}, r"optim='lion_32bit' takes no beta1"),
        (None, {"optim": "sgd", "optim_args": "momentum=0.9, nesterov=True"}, r"SGD with nesterov=True is not supp"),
        (None, {"optim": "sgd", "optim_args": "lr=0.1"}, r"optim='sgd' takes no lr"),
        (None, {"optim": "sgd", "optim_args": "momentum"}, r"optim_args='momentum' cannot be read"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused(tmp_path: Path, given: Any, changes: dict[str, Any], message: str) -> None:
    model = small.llama()
    before = small.snapshot(model)
    with pytest.raises(SettingsError, match=message):
        trainer_of(mt.Trainer, tmp_path, model=model, optimizer_cls_and_kwargs=given, **changes)
    assert small.same(before, small.snapshot(model))


@pytest.mark.parametrize("args", ["momentum=0.9", "momentum = 0.5, dampening=0, nesterov=no", "weight_decay=0.3"])
def test_optim_args_equal_stock(tmp_path: Path, args: str) -> None:
    changes = {"optim": "sgd", "optim_args": args, "learning_rate": 0.1, "weight_decay": 0.1, "max_steps": 3}
    assert_equal_runs(*[trained(kind, tmp_path, **changes) for kind in KINDS])


def test_a_subclass_that_names_the_class(tmp_path: Path) -> None:
    def named(args: Any, model: Any = None) -> Any:
        return SGD, {"lr": args.learning_rate, "momentum": 0.9}

    runs = [
        trained(type("Named", (kind,), {"get_optimizer_cls_and_kwargs": staticmethod(named)}), tmp_path, max_steps=3)
        for kind in KINDS
    ]
    assert_equal_runs(*runs)


# ---- optimizers that a subclass or a callback makes


def momentum(trainer: Any) -> Any:
    """0.9, from the engine if there is one."""
    parameters = trainer.model.parameters()
    if isinstance(trainer, mt.MegaMixin):
        return trainer.engine.optimizer(parameters, kind="sgd", lr=0.5, momentum=0.9)
    return SGD(parameters, lr=0.5, momentum=0.9)


def makes(self: Any, model: Any = None) -> Any:
    if self.optimizer is None:
        self.optimizer = momentum(self)
    return self.optimizer


def changes_groups(self: Any, model: Any = None) -> Any:
    found = transformers.Trainer.create_optimizer(self)
    for group in found.param_groups:
        group["lr"] /= 2
    return found


@pytest.mark.parametrize("method", [makes, changes_groups])
@pytest.mark.parametrize("front", [True, False], ids=["in front of MegaMixin", "behind it"])
def test_create_optimizer_of_a_subclass(tmp_path: Path, method: Any, front: bool) -> None:
    """Clipped as in a stock Trainer, which clips whatever optimizer there is."""
    behind = type("Behind", (transformers.Trainer,), {"create_optimizer": method})
    if front and method is changes_groups:

        def method(self: Any) -> Any:
            found = mt.Trainer.create_optimizer(self)
            for group in found.param_groups:
                group["lr"] /= 2
            return found

    ours = (
        type("Front", (mt.Trainer,), {"create_optimizer": method}) if front else type("B", (mt.MegaMixin, behind), {})
    )
    assert_equal_runs(trained(ours, tmp_path, **CLIPPED), trained(behind, tmp_path, **CLIPPED))


class Replaces(TrainerCallback):
    trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.optimizer = momentum(self.trainer)


def test_an_optimizer_that_a_callback_puts_in_place(tmp_path: Path) -> None:
    runs = []
    for kind in KINDS:
        callback = Replaces()
        callback.trainer = trainer = trainer_of(kind, tmp_path, callbacks=[callback], **CLIPPED)
        trainer.train()
        runs.append(trainer)
    losses = [small.losses(run) for run in runs]
    assert losses[0] == pytest.approx(losses[1], abs=small.LOSSES)
    assert small.drift(*[small.snapshot(run.model) for run in runs]) < small.WEIGHTS


def foreign(self: Any, model: Any = None) -> Any:
    self.optimizer = AdamW(self.model.parameters())
    return self.optimizer


@pytest.mark.parametrize("front", [True, False], ids=["in front of MegaMixin", "behind it"])
def test_a_torch_optimizer_of_a_subclass_is_refused_in_one_sentence(tmp_path: Path, front: bool) -> None:
    behind = type("Behind", (transformers.Trainer,), {"create_optimizer": foreign})
    kind = type("F", (mt.Trainer,), {"create_optimizer": foreign}) if front else type("B", (mt.MegaMixin, behind), {})
    with pytest.raises(SettingsError, match=r"AdamW cannot update streamed weights; return self.engine.optimizer"):
        trained(kind, tmp_path)


def test_a_trainer_that_has_no_optimizer_yet_says_so(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no optimizer yet; train\(\) or create_optimizer\(\) makes it"):
        trainer_of(mt.Trainer, tmp_path)._own_optimizer()


def test_the_lower_of_two_limits(tmp_path: Path) -> None:
    """One asked of the optimizer, one of TrainingArguments."""
    runs = []
    for own, asked in ((0.1, 1.0), (1.0, 0.1), (None, 0.1)):
        model = small.llama()
        optimizer = mt.Engine(model, device="cpu").optimizer(kind="sgd", lr=0.5, max_grad_norm=own)
        trainer = trained(mt.Trainer, tmp_path, model=model, optimizers=(optimizer, None), max_grad_norm=asked)
        runs.append(small.snapshot(trainer.model))
    assert small.drift(runs[0], runs[1]) < small.WEIGHTS
    assert small.same(runs[1], runs[2])


# ---- the order of clipping and of whoever looks at gradients


def edit(model: Any) -> None:
    """More than any limit: clipped afterwards, it would shrink to nothing."""
    for parameter in model.parameters():
        parameter.grad.mul_(3.0).add_(0.01)


def norm_of(model: Any) -> float:
    return float(torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm())


class Watches(TrainerCallback):
    """At one event, reads the norm of all gradients; changes them if asked to."""

    def __init__(self, event: str, edits: bool) -> None:
        self.norms: list[float] = []
        self._edits = edits
        setattr(self, event, self._watch)

    def _watch(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.norms.append(norm_of(model))
        if self._edits:
            edit(model)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("edits", [True, False])
@pytest.mark.parametrize("event", ["on_pre_optimizer_step", "on_optimizer_step"])
def test_callbacks_see_and_change_clipped_gradients(tmp_path: Path, event: str, edits: bool, accumulation: int) -> None:
    heard = [Watches(event, edits), Watches(event, edits)]
    runs = [
        trained(kind, tmp_path, callbacks=[callback], gradient_accumulation_steps=accumulation, **CLIPPED)
        for kind, callback in zip(KINDS, heard, strict=True)
    ]
    assert heard[0].norms == pytest.approx(heard[1].norms, rel=1e-5)
    assert heard[0].norms == pytest.approx([0.1] * 3, rel=1e-4)
    assert_equal_runs(*runs)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1])
def test_a_callback_that_only_looks_changes_no_bit(tmp_path: Path, max_grad_norm: float) -> None:
    changes = CLIPPED | {"max_grad_norm": max_grad_norm, "optim": "adamw_torch", "learning_rate": 1e-2}
    plain = trained(mt.Trainer, tmp_path, **changes)
    watched = trained(mt.Trainer, tmp_path, callbacks=[Watches("on_pre_optimizer_step", False)], **changes)
    assert small.same(small.snapshot(plain.model), small.snapshot(watched.model))


class Registers(TrainerCallback):
    """A pre-hook of the optimizer, or of all optimizers, that changes gradients."""

    def __init__(self, everywhere: bool) -> None:
        self._everywhere, self._handle = everywhere, None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **given: Any) -> None:
        own = given["optimizer"].optimizer  # under accelerate's wrapper
        register = register_optimizer_step_pre_hook if self._everywhere else own.register_step_pre_hook
        self._handle = register(lambda *_: edit(model))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._handle.remove()  # type: ignore[union-attr]


@pytest.mark.parametrize("everywhere", [True, False])
def test_gradients_changed_in_a_pre_hook(tmp_path: Path, everywhere: bool) -> None:
    assert_equal_runs(*[trained(kind, tmp_path, callbacks=[Registers(everywhere)], **CLIPPED) for kind in KINDS])


@pytest.mark.parametrize("own", [True, False], ids=["without super", "with super"])
def test_a_clipping_of_ones_own(tmp_path: Path, own: bool) -> None:
    """By value, instead of the norm or after it."""

    def clipping(base: type) -> type:
        class Clips(base):  # type: ignore[misc]
            def _clip_grad_norm(self, model: Any) -> Any:
                norm = torch.tensor(norm_of(model)) if own else super()._clip_grad_norm(model)
                torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
                return norm

        return Clips

    assert_equal_runs(*[trained(clipping(kind), tmp_path, **CLIPPED) for kind in KINDS])


class Lowers(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        args.max_grad_norm = (0.1, 0.0, 0.5)[state.global_step]


def test_a_limit_that_changes_during_the_run(tmp_path: Path) -> None:
    assert_equal_runs(*[trained(kind, tmp_path, callbacks=[Lowers()], **CLIPPED) for kind in KINDS])


def test_clipping_makes_a_difference_here(tmp_path: Path) -> None:
    runs = [trained(mt.Trainer, tmp_path, **(CLIPPED | {"max_grad_norm": norm})) for norm in (0.0, 0.1)]
    assert small.drift(*[small.snapshot(run.model) for run in runs]) > 100 * small.WEIGHTS


class Adds(TrainerCallback):
    """Another backward after clipping: its gradient is added to what was clipped, and not clipped."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model(**small.batch(2, seed=state.global_step)).loss.backward()


class Drops(TrainerCallback):
    """One gradient is left out, one replaced."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.lm_head.weight.grad = None
        model.model.norm.weight.grad = torch.full_like(model.model.norm.weight, 0.5)


@pytest.mark.parametrize("callback", [Adds, Drops])
def test_gradients_added_dropped_or_replaced_after_clipping(tmp_path: Path, callback: type) -> None:
    assert_equal_runs(*[trained(kind, tmp_path, callbacks=[callback()], **CLIPPED) for kind in KINDS])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_scaled_gradients_of_an_engine(precision: str) -> None:
    """Read, norm, update: the same as if they had been multiplied, and without rounding before the update."""
    found = []
    for factor in (1.0, 0.25):
        model = small.llama()
        engine = mt.Engine(model, device="cpu", precision=precision)
        optimizer = engine.optimizer(kind="sgd", lr=0.5 / factor)
        model(**small.batch()).loss.backward()
        optimizer.scale_gradients(factor)
        seen = {name: p.grad.clone() / factor for name, p in model.named_parameters()}
        norm = engine.grad_norm() / factor
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(norm * factor, rel=1e-12)
        assert {name: p.grad.clone() / factor for name, p in model.named_parameters()}.keys() == seen.keys()
        optimizer.zero_grad()
        found.append((seen, norm, small.snapshot(model)))
        engine.close()
    # Powers of two, so that nothing rounds.
    assert small.same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert small.same(found[0][2], found[1][2])
