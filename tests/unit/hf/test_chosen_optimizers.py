"""A Trainer uses the requested optimizer or refuses it, and clips gradients when transformers does.

Most runs are plain SGD with a low limit, so a gradient with a wrong scale changes every weight.
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
        ((AdamW, {"weight_decay": 0.5}), {"weight_decay": 0.1}),  # the groups set the decay; lr is torch's default
        ((Adam, {"lr": 3e-3}), {"weight_decay": 0.0}),
        ((Adam, {"lr": 3e-3, "decoupled_weight_decay": True}), {"weight_decay": 0.1}),
        ((SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": False}), {"weight_decay": 0.1}),
        ((AdamW, {"lr": 3e-3}), {"optim": "adafactor", "optim_args": "ignored=yes"}),
    ],
    ids=str,
)
def test_an_optimizer_class_equals_transformers(tmp_path: Path, given: Any, changes: dict[str, Any]) -> None:
    before = dict(given[1])
    runs = [trained(kind, tmp_path, optimizer_cls_and_kwargs=given, max_steps=3, **changes) for kind in KINDS]
    assert_equal_runs(*runs)
    assert given[1] == before


def test_a_weight_decay_without_effect_is_announced(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    trainer_of(mt.Trainer, tmp_path, optimizer_cls_and_kwargs=(AdamW, {"weight_decay": 0.5}), weight_decay=0.1)
    assert any("weight_decay=0.5 has no effect" in line for line in announced.messages)


class Tuned(AdamW):
    """A subclass, whose step could do anything."""


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
def test_unsupported_optimizers_are_refused(tmp_path: Path, given: Any, changes: dict[str, Any], message: str) -> None:
    model = small.llama()
    before = small.snapshot(model)
    with pytest.raises(SettingsError, match=message):
        trainer_of(mt.Trainer, tmp_path, model=model, optimizer_cls_and_kwargs=given, **changes)
    assert small.same(before, small.snapshot(model))


@pytest.mark.parametrize("args", ["momentum=0.9", "momentum = 0.5, dampening=0, nesterov=no", "weight_decay=0.3"])
def test_optim_args_equal_transformers(tmp_path: Path, args: str) -> None:
    changes = {"optim": "sgd", "optim_args": args, "learning_rate": 0.1, "weight_decay": 0.1, "max_steps": 3}
    assert_equal_runs(*[trained(kind, tmp_path, **changes) for kind in KINDS])


def test_a_subclass_that_chooses_the_optimizer_class(tmp_path: Path) -> None:
    def named(args: Any, model: Any = None) -> Any:
        return SGD, {"lr": args.learning_rate, "momentum": 0.9}

    runs = [
        trained(type("Named", (kind,), {"get_optimizer_cls_and_kwargs": staticmethod(named)}), tmp_path, max_steps=3)
        for kind in KINDS
    ]
    assert_equal_runs(*runs)


# ---- optimizers made by a subclass or a callback


def momentum(trainer: Any) -> Any:
    """SGD with a momentum of 0.9, made by the engine if there is one."""
    parameters = trainer.model.parameters()
    if isinstance(trainer, mt.MegaMixin):
        return trainer.engine.optimizer(parameters, kind="sgd", lr=0.5, momentum=0.9)
    return SGD(parameters, lr=0.5, momentum=0.9)


def make_optimizer(self: Any, model: Any = None) -> Any:
    if self.optimizer is None:
        self.optimizer = momentum(self)
    return self.optimizer


def halve_learning_rates(self: Any, model: Any = None) -> Any:
    result = transformers.Trainer.create_optimizer(self)
    for group in result.param_groups:
        group["lr"] /= 2
    return result


@pytest.mark.parametrize("method", [make_optimizer, halve_learning_rates])
@pytest.mark.parametrize("front", [True, False], ids=["in front of MegaMixin", "behind it"])
def test_create_optimizer_of_a_subclass(tmp_path: Path, method: Any, front: bool) -> None:
    """Gradients are clipped as in transformers, which clips for any optimizer."""
    behind = type("Behind", (transformers.Trainer,), {"create_optimizer": method})
    if front and method is halve_learning_rates:

        def method(self: Any) -> Any:
            result = mt.Trainer.create_optimizer(self)
            for group in result.param_groups:
                group["lr"] /= 2
            return result

    ours = (
        type("Front", (mt.Trainer,), {"create_optimizer": method}) if front else type("B", (mt.MegaMixin, behind), {})
    )
    assert_equal_runs(trained(ours, tmp_path, **CLIPPED), trained(behind, tmp_path, **CLIPPED))


class Replaces(TrainerCallback):
    trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.optimizer = momentum(self.trainer)


def test_an_optimizer_set_by_a_callback(tmp_path: Path) -> None:
    runs = []
    for kind in KINDS:
        callback = Replaces()
        callback.trainer = trainer = trainer_of(kind, tmp_path, callbacks=[callback], **CLIPPED)
        trainer.train()
        runs.append(trainer)
    losses = [small.losses(run) for run in runs]
    assert losses[0] == pytest.approx(losses[1], abs=small.LOSSES)
    assert small.drift(*[small.snapshot(run.model) for run in runs]) < small.WEIGHTS


def torch_optimizer(self: Any, model: Any = None) -> Any:
    self.optimizer = AdamW(self.model.parameters())
    return self.optimizer


@pytest.mark.parametrize("front", [True, False], ids=["in front of MegaMixin", "behind it"])
def test_a_torch_optimizer_of_a_subclass_is_refused(tmp_path: Path, front: bool) -> None:
    behind = type("Behind", (transformers.Trainer,), {"create_optimizer": torch_optimizer})
    kind = (
        type("F", (mt.Trainer,), {"create_optimizer": torch_optimizer})
        if front
        else type("B", (mt.MegaMixin, behind), {})
    )
    with pytest.raises(SettingsError, match=r"AdamW cannot update streamed weights; return self.engine.optimizer"):
        trained(kind, tmp_path)


def test_a_trainer_without_an_optimizer_raises(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no optimizer yet; train\(\) or create_optimizer\(\) makes it"):
        trainer_of(mt.Trainer, tmp_path)._own_optimizer()


def test_the_lower_of_two_gradient_limits_applies(tmp_path: Path) -> None:
    """One limit is set in the optimizer, one in TrainingArguments."""
    runs = []
    for optimizer_limit, trainer_limit in ((0.1, 1.0), (1.0, 0.1), (None, 0.1)):
        model = small.llama()
        optimizer = mt.Engine(model, device="cpu").optimizer(kind="sgd", lr=0.5, max_grad_norm=optimizer_limit)
        trainer = trained(mt.Trainer, tmp_path, model=model, optimizers=(optimizer, None), max_grad_norm=trainer_limit)
        runs.append(small.snapshot(trainer.model))
    assert small.drift(runs[0], runs[1]) < small.WEIGHTS
    assert small.same(runs[1], runs[2])


# ---- the order of clipping and of callbacks that read gradients


def edit_gradients(model: Any) -> None:
    """Make gradients much larger than any limit, so that clipping them again would be noticed."""
    for parameter in model.parameters():
        parameter.grad.mul_(3.0).add_(0.01)


def norm_of(model: Any) -> float:
    return float(torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm())


class ReadsGradients(TrainerCallback):
    """Reads the norm of all gradients at one event, and changes them if `edits` is set."""

    def __init__(self, event: str, edits: bool) -> None:
        self.norms: list[float] = []
        self._edits = edits
        setattr(self, event, self._read)

    def _read(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.norms.append(norm_of(model))
        if self._edits:
            edit_gradients(model)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("edits", [True, False])
@pytest.mark.parametrize("event", ["on_pre_optimizer_step", "on_optimizer_step"])
def test_callbacks_read_and_change_clipped_gradients(
    tmp_path: Path, event: str, edits: bool, accumulation: int
) -> None:
    readers = [ReadsGradients(event, edits), ReadsGradients(event, edits)]
    runs = [
        trained(kind, tmp_path, callbacks=[callback], gradient_accumulation_steps=accumulation, **CLIPPED)
        for kind, callback in zip(KINDS, readers, strict=True)
    ]
    assert readers[0].norms == pytest.approx(readers[1].norms, rel=1e-5)
    assert readers[0].norms == pytest.approx([0.1] * 3, rel=1e-4)
    assert_equal_runs(*runs)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1])
def test_a_callback_that_reads_gradients_is_bitwise_neutral(tmp_path: Path, max_grad_norm: float) -> None:
    changes = CLIPPED | {"max_grad_norm": max_grad_norm, "optim": "adamw_torch", "learning_rate": 1e-2}
    plain = trained(mt.Trainer, tmp_path, **changes)
    observed = trained(mt.Trainer, tmp_path, callbacks=[ReadsGradients("on_pre_optimizer_step", False)], **changes)
    assert small.same(small.snapshot(plain.model), small.snapshot(observed.model))


class Registers(TrainerCallback):
    """Registers a pre-hook of one optimizer, or of all optimizers, that changes gradients."""

    def __init__(self, all_optimizers: bool) -> None:
        self._everywhere, self._handle = all_optimizers, None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **given: Any) -> None:
        optimizer_limit = given["optimizer"].optimizer  # inside accelerate's wrapper
        register = register_optimizer_step_pre_hook if self._everywhere else optimizer_limit.register_step_pre_hook
        self._handle = register(lambda *_: edit_gradients(model))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._handle.remove()  # type: ignore[union-attr]


@pytest.mark.parametrize("all_optimizers", [True, False])
def test_gradients_changed_in_a_pre_hook(tmp_path: Path, all_optimizers: bool) -> None:
    assert_equal_runs(*[trained(kind, tmp_path, callbacks=[Registers(all_optimizers)], **CLIPPED) for kind in KINDS])


@pytest.mark.parametrize("optimizer_limit", [True, False], ids=["without super", "with super"])
def test_a_subclass_with_its_own_clipping(tmp_path: Path, optimizer_limit: bool) -> None:
    """Clips by value, instead of clipping by norm or after it."""

    def clipping(base: type) -> type:
        class Clips(base):  # type: ignore[misc]
            def _clip_grad_norm(self, model: Any) -> Any:
                norm = torch.tensor(norm_of(model)) if optimizer_limit else super()._clip_grad_norm(model)
                torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
                return norm

        return Clips

    assert_equal_runs(*[trained(clipping(kind), tmp_path, **CLIPPED) for kind in KINDS])


class Lowers(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        args.max_grad_norm = (0.1, 0.0, 0.5)[state.global_step]


def test_a_limit_that_changes_during_the_run(tmp_path: Path) -> None:
    assert_equal_runs(*[trained(kind, tmp_path, callbacks=[Lowers()], **CLIPPED) for kind in KINDS])


def test_clipping_changes_the_weights_in_these_tests(tmp_path: Path) -> None:
    runs = [trained(mt.Trainer, tmp_path, **(CLIPPED | {"max_grad_norm": norm})) for norm in (0.0, 0.1)]
    assert small.drift(*[small.snapshot(run.model) for run in runs]) > 100 * small.WEIGHTS


class Adds(TrainerCallback):
    """Runs a backward after clipping. Its gradient is added to the clipped one and is not clipped."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model(**small.batch(2, seed=state.global_step)).loss.backward()


class Drops(TrainerCallback):
    """Removes one gradient and replaces another."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.lm_head.weight.grad = None
        model.model.norm.weight.grad = torch.full_like(model.model.norm.weight, 0.5)


@pytest.mark.parametrize("callback", [Adds, Drops])
def test_gradients_added_dropped_or_replaced_after_clipping(tmp_path: Path, callback: type) -> None:
    assert_equal_runs(*[trained(kind, tmp_path, callbacks=[callback()], **CLIPPED) for kind in KINDS])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_scaled_gradients_of_an_engine(precision: str) -> None:
    """Gradients, norm and update are those of multiplied gradients, without rounding before the update."""
    result = []
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
        result.append((seen, norm, small.snapshot(model)))
        engine.close()
    # The factors are powers of two, so nothing is rounded.
    assert small.same(result[0][0], result[1][0])
    assert result[0][1] == result[1][1]
    assert small.same(result[0][2], result[1][2])
