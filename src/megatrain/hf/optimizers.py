"""The optimizer of a Trainer: which one its arguments select, and when gradients are clipped.

The order is that of transformers: clip, `on_pre_optimizer_step`, the optimizer's pre-hooks, update. Changes after
clipping are not clipped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as torch_hooks
from transformers.trainer_optimizer import _parse_optim_args

from megatrain.engine.session import Engine
from megatrain.errors import SettingsError
from megatrain.hf.recovery import grad_norm_with_retry
from megatrain.hf.subclass import Subclass
from megatrain.optim.optimizer import GROUP_KEYS, UNSUPPORTED_OPTIONS, Optimizer, rule_named
from megatrain.optim.schedule import clip_factor
from megatrain.telemetry.notices import announce

if TYPE_CHECKING:
    from transformers import Trainer as Part  # what the parts of `MegaMixin` are put in front of
else:
    Part = object

NAMES = {
    "adamw_torch": ("adamw", None), "adamw_torch_fused": ("adamw", None),
    "adamw_bnb_8bit": ("adamw", "8bit"), "adamw_8bit": ("adamw", "8bit"),
    "lion_32bit": ("lion", None), "lion_8bit": ("lion", "8bit"), "sgd": ("sgd", None),
}  # fmt: skip
"""`TrainingArguments.optim` → kind, and how moments are stored (None: as `megatrain.init` says)."""
CLASSES = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adamw", torch.optim.SGD: "sgd"}
READ = {"sgd": ("momentum", "dampening", "weight_decay", "nesterov")}
"""Kind → names that transformers reads from `optim_args`. Other kinds are configured in TrainingArguments."""
SAME_RESULT = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options of torch's optimizers that do not change what they compute."""


@dataclass(frozen=True)
class Choice:
    """A selected optimizer and its options."""

    kind: str
    moment_width: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    groups: Iterable[Any] | None = None
    """Parameter groups, if they were given."""


class Optimizing(Part):
    """The part of `MegaMixin` that creates and runs the optimizer. The other parts inherit from it."""

    engine: Engine
    optimizer: Any
    label_smoother: Any
    _subclass: Subclass
    _given_kind: str | None = None
    """The kind of a torch optimizer that was passed in `optimizers=`."""
    step_norm: float | torch.Tensor | None = None
    """The gradient norm of this step, once the Trainer has asked for it."""
    _from_arguments: Optimizer | None = None
    """The optimizer that was created from TrainingArguments."""

    @property
    def _optim(self) -> str:
        return str(getattr(self.args.optim, "value", self.args.optim))

    def _choose(self) -> Choice:
        """The optimizer that this Trainer's arguments select. Raises `SettingsError` if it is not supported."""
        if self._given_kind is not None:
            return Choice(self._given_kind)
        if self.optimizer is not None:
            return Choice(self._own_optimizer().kind)
        if self.optimizer_cls_and_kwargs is not None:
            return of_class(self.optimizer_cls_and_kwargs, self.args.weight_decay, "optimizer_cls_and_kwargs")
        if self._subclass.chooses_optimizer:
            found = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            return of_class(found, self.args.weight_decay, "get_optimizer_cls_and_kwargs")
        if self._optim not in NAMES:
            raise SettingsError(f"optim={self._optim!r} is not supported; use one of {', '.join(NAMES)}.")
        kind, width = NAMES[self._optim]
        try:
            given = _parse_optim_args(self.args.optim_args)
        except ValueError as error:
            raise SettingsError(
                f"optim_args={self.args.optim_args!r} cannot be read; write name=value, separated by commas."
            ) from error
        if unread := [name for name in given if name not in READ.get(kind, ())]:
            raise SettingsError(
                f"optim_args: optim={self._optim!r} takes no {unread[0]}; learning_rate, weight_decay, adam_beta1, "
                "adam_beta2 and adam_epsilon are fields of TrainingArguments."
            )
        if kind == "sgd":
            found = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            return replace(of_class(found, self.args.weight_decay, "optim_args"), moment_width=width)
        options = {"lr": self.args.learning_rate, "betas": (self.args.adam_beta1, self.args.adam_beta2)}
        return Choice(kind, width, options | ({"eps": self.args.adam_epsilon} if kind == "adamw" else {}))

    def create_optimizer(self, *args: Any) -> Any:
        self._follow_model()
        factory = functools.partial(functools.partial, self._made, self._choose())
        # Goes through transformers' method, so that overrides behind this class run.
        with changed(self, optimizer_cls_and_kwargs=(factory, {})):
            return super().create_optimizer(*args)

    def _made(self, choice: Choice, model: Any) -> Optimizer:
        groups = choice.groups
        if groups is None:
            decayed = set(self.get_decay_parameter_names(self.model))
            named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
            if not named:
                raise SettingsError(
                    "no parameter of the model requires grad, so there is nothing to train; set requires_grad on some."
                )
            groups = [
                {"params": [p for name, p in named if name in decayed], "weight_decay": self.args.weight_decay},
                {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
            ]
        self._from_arguments = self.engine.optimizer(groups, kind=choice.kind, **choice.options)
        return self._from_arguments

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self._follow_model()
        prepared = super()._prepare_for_training(*args, **kwargs)
        # This also refuses a torch optimizer that a subclass returned from `create_optimizer`.
        own = self._own_optimizer()
        if own is not self._from_arguments and own.max_grad_norm is None and self.args.max_grad_norm:
            announce(f"max_grad_norm={self.args.max_grad_norm:g} of TrainingArguments applies to the given optimizer")
        return prepared

    def _own_optimizer(self) -> Optimizer:
        """The engine's optimizer, without accelerate's wrapper."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        if inner is None:
            raise SettingsError("this Trainer has no optimizer yet; train() or create_optimizer() makes it.")
        if not isinstance(inner, Optimizer):
            raise SettingsError(
                f"{type(inner).__name__} cannot update streamed weights; return self.engine.optimizer(...) from "
                "create_optimizer, pass optimizers=(megatrain.Engine(model).optimizer(...), None), or leave it out."
            )
        return inner

    def _clip_grad_norm(self, model: Any) -> float | torch.Tensor:
        """Clip, and return the norm before. If nobody can see the gradients before the step, both are done in it."""
        if self._step_clips():
            return self._own_optimizer().clip_next_step(self.args.max_grad_norm)
        norm = grad_norm_with_retry(self.engine)
        self._own_optimizer().scale_gradients(clip_factor(norm, self.args.max_grad_norm))
        return norm

    def _get_grad_norm(self, model: Any, grad_norm: float | torch.Tensor | None = None) -> float | torch.Tensor:
        if grad_norm is None:
            deferred = self._step_clips()
            grad_norm = self._own_optimizer().clip_next_step(None) if deferred else grad_norm_with_retry(self.engine)
        self.step_norm = grad_norm
        return grad_norm

    def _step_clips(self) -> bool:
        """Whether the norm can be left to the step, so that the host does not wait for it."""
        own = self._own_optimizer()
        read_later = own._optimizer_step_post_hooks or torch_hooks._global_optimizer_post_hooks
        seen = self._gradients_are_watched() or bool(read_later) or self._subclass.reads_gradients_after_step
        return own.max_grad_norm is None and not seen

    def _gradients_are_watched(self) -> bool:
        """Whether hooks may change gradients between backward and update, so that updates must not start early."""
        own = self._own_optimizer()
        return (
            bool(own._optimizer_step_pre_hooks or torch_hooks._global_optimizer_pre_hooks)
            or type(own) is not Optimizer
            or self._subclass.watches_gradients
        )


def of_class(found: tuple[Any, Mapping[str, Any]], weight_decay: float, where: str) -> Choice:
    """The choice for a torch class and its arguments. Without groups, TrainingArguments set the weight decay."""
    cls, kwargs = found
    if cls not in CLASSES:
        name = getattr(cls, "__qualname__", repr(cls))
        raise SettingsError(f"{where}: {name} is not supported; torch.optim.AdamW, Adam and SGD are.")
    kind = CLASSES[cls]
    known = rule_named(kind).defaults
    options = {name: value for name, value in kwargs.items() if name in known}
    decoupled = cls is not torch.optim.Adam or kwargs.get("decoupled_weight_decay", False)
    for name, value in kwargs.items():
        harmless = name in SAME_RESULT or value == UNSUPPORTED_OPTIONS.get(name, ...)
        if name not in known and not harmless and name not in ("params", "decoupled_weight_decay"):
            raise SettingsError(
                f"{where}: {cls.__name__} with {name}={value!r} is not supported; {', '.join(known)} are."
            )
    groups = None if "params" not in kwargs else list(kwargs["params"])
    decays = [weight_decay]
    if groups is not None:
        decays = [group.get("weight_decay", 0.0) for group in (options, *groups) if isinstance(group, dict)]
    if kind == "adamw" and not decoupled and any(decays):
        raise SettingsError(
            f"{where}: Adam adds weight_decay={max(decays):g} to the gradient, which is not supported; use "
            "torch.optim.AdamW, or weight_decay=0."
        )
    if groups is None and options.get("weight_decay", weight_decay) != weight_decay:
        announce(
            f"{where}: weight_decay={options['weight_decay']:g} has no effect, as in transformers: parameters are "
            f"decayed by the weight_decay={weight_decay:g} of TrainingArguments"
        )
    if cls is torch.optim.Adam:
        options = {"weight_decay": 0.0} | options
    return Choice(kind, None, options, groups)


class Given:
    """A torch optimizer passed in `optimizers=`. Create this before the engine, which replaces parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
        self._optimizer = optimizer
        for group in optimizer.param_groups:
            own = {name: group[name] for name in optimizer.defaults if name in group}
            self.kind = of_class((type(optimizer), own | {"params": [group]}), 0.0, "optimizers").kind
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) not in names:
                raise SettingsError(
                    f"optimizers: {type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that "
                    "is not the model's; make it from model.parameters() of the model that the Trainer is given."
                )
        self._names = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]

    def replaced(self, engine: Engine) -> Optimizer:
        """The engine's optimizer with its options, states and hooks. Groups are shared with the one given.

        A scheduler that was made for the one given writes learning rates into its groups.
        """
        given = self._optimizer
        stored = given.state_dict()["state"]
        parameters = dict(engine.model.named_parameters())
        known = GROUP_KEYS | rule_named(self.kind).defaults.keys()
        others = [{key: group.pop(key) for key in group.keys() - known} for group in given.param_groups]
        for group, names in zip(given.param_groups, self._names, strict=True):
            group["params"] = [parameters[name] for name in names]
        own = engine.optimizer(given.param_groups, kind=self.kind)
        own.load_state_dict({"state": stored, "param_groups": own.state_dict()["param_groups"]})
        for group, other in zip(own.param_groups, others, strict=True):
            group.update(other)
        own._optimizer_step_pre_hooks.update(given._optimizer_step_pre_hooks)
        own._optimizer_step_post_hooks.update(given._optimizer_step_post_hooks)
        # Otherwise its scheduler warns that it was called before the optimizer.
        given._opt_called = True  # type: ignore[attr-defined]
        return own


@contextmanager
def changed(thing: Any, **values: Any) -> Iterator[None]:
    """Change attributes of an object inside the block."""
    before = {name: getattr(thing, name) for name in values}
    try:
        for name, value in values.items():
            setattr(thing, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)
