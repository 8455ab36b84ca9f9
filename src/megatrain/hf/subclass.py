"""Finds out how a Trainer differs from transformers' own: by declaration, or from its methods and callbacks.

A window runs all micro-batches of a step in the first call of `training_step`. That is correct only if no method of the
Trainer depends on the order of calls, which is known of transformers' own classes and of the TRL classes in `VERIFIED`.
Another class declares it with `micro_batches_are_independent = True`. All other Trainers run call by call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from transformers import TrainerCallback

from megatrain.hf.smoothing import ChunkedSmoother

DECLARATION = "micro_batches_are_independent"
PER_MICRO_BATCH = (
    "training_step", "_prepare_inputs", "_prepare_input", "compute_loss", "compute_loss_context_manager",
    "autocast_smart_context_manager", "_prepare_context_parallel_inputs",
)  # fmt: skip
"""Methods that run for every micro-batch. If one keeps state, the order of micro-batches matters."""
VERIFIED = frozenset(
    f"trl.trainer.{name.lower()}_trainer.{name}Trainer" for name in ("SFT", "DPO", "KTO", "Reward")
)  # fmt: skip
"""Classes of TRL 1.16 whose overrides only append metrics, in the order of micro-batches, and whose backward passes
each block once per micro-batch."""


class Subclass:
    """Properties of one Trainer. Nothing is cached, because methods and callbacks may be added at any time."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def declared(self) -> bool | None:
        """The declaration of the nearest class that has one."""
        spaces = (space for _, space in self._spaces())
        return next((space[DECLARATION] for space in spaces if space.get(DECLARATION) is not None), None)

    @property
    def why_in_turn(self) -> str | None:
        """Why each micro-batch must run in its own call; None if they may share a window."""
        trainer, declared = self._trainer, self.declared
        if declared is False:
            return f"{DECLARATION} is False"
        # TRL's activation offloading is one context manager that every training step enters.
        verified = frozenset() if getattr(trainer.args, "activation_offloading", False) else VERIFIED
        overridden = self._unknown_override(verified)
        if overridden is not None or declared:
            return overridden
        if trainer.compute_loss_func is not None:
            return "compute_loss_func is given"
        listener = self._listener("on_substep_end")
        return None if listener is None else f"{listener} listens to on_substep_end"

    @property
    def repeatable(self) -> bool:
        """Whether a micro-batch can be retried without side effects in overridden methods."""
        declared = self.declared
        return (
            declared is not False
            and self._unknown_override(frozenset()) is None
            and (bool(declared) or self._trainer.compute_loss_func is None)
        )

    @property
    def own_loss(self) -> bool:
        return not self._stock("compute_loss") or self._trainer.compute_loss_func is not None

    @property
    def own_step(self) -> bool:
        """Whether `training_step` is overridden, and may read gradients or run several backwards."""
        return not self._stock("training_step")

    @property
    def looks_at_logits(self) -> bool:
        """Whether training may need all logits."""
        return self.own_loss or self.own_step

    @property
    def evaluates_logits(self) -> bool:
        """Whether evaluations need all logits: for metrics, or for an overridden step or loss."""
        trainer = self._trainer
        metrics = trainer.compute_metrics is not None and not trainer.args.prediction_loss_only
        return metrics or self.smooths_logits or self.own_loss or not self._stock("prediction_step")

    @property
    def smooths_logits(self) -> bool:
        """Whether label smoothing needs all logits."""
        smoother = self._trainer.label_smoother
        return smoother is not None and not isinstance(smoother, ChunkedSmoother)

    @property
    def watches_gradients(self) -> bool:
        """Whether it may change gradients between backward and update, so that updates must not start early."""
        stock = self._stock("_get_grad_norm") and self._stock("_clip_grad_norm")
        return not stock or self._listener("on_pre_optimizer_step") is not None

    @property
    def reads_gradients_after_step(self) -> bool:
        """Whether it may read gradients between update and `zero_grad`, where transformers has clipped them."""
        return self._listener("on_optimizer_step") is not None

    @property
    def chooses_optimizer(self) -> bool:
        return not self._stock("get_optimizer_cls_and_kwargs")

    def _stock(self, method: str) -> bool:
        """Whether nobody but MegaTrain overrides a method of transformers' Trainer."""
        found = [(name, _package(space[method])) for name, space in self._spaces() if method in space]
        return [it for it in found if it[1] != "megatrain"] == [("transformers.trainer.Trainer", "transformers")]

    def _unknown_override(self, verified: frozenset[str]) -> str | None:
        """An unverified override of a per-micro-batch method, in a class before the one with a declaration."""
        for name, space in self._spaces():
            if space.get(DECLARATION) is not None:
                return None
            known = ("megatrain", "transformers", *(("trl",) if name in verified else ()))
            for method in PER_MICRO_BATCH:
                if method in space and _package(space[method]) not in known:
                    return f"{name.split('.')[-1]} overrides {method}"
        return None

    def _listener(self, event: str) -> str | None:
        """The name of a callback, not one of MegaTrain's, that handles an event."""
        for callback in self._trainer.callback_handler.callbacks:
            method = getattr(callback, event)
            does = getattr(method, "__func__", method) is not vars(TrainerCallback).get(event)
            if does and _package(type(callback)) != "megatrain":
                return type(callback).__name__
        return None

    def _spaces(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Name and attributes of the Trainer object and of its classes, nearest first."""
        yield f"this {type(self._trainer).__name__}", vars(self._trainer)
        for cls in type(self._trainer).__mro__:
            yield f"{cls.__module__}.{cls.__qualname__}", vars(cls)


def _package(thing: Any) -> str:
    """The package that defines a function, even if it was patched into another class; or that of a class."""
    module = thing.__globals__["__name__"] if isinstance(thing, FunctionType) else getattr(thing, "__module__", "")
    return str(module).split(".")[0]
