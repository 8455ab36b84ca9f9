"""MegaTrain's own callbacks run beside a Trainer's list, which stays what the user made it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler


class Handler(CallbackHandler):
    """Calls the Trainer's callbacks, then MegaTrain's: those see what the others decided, and have the last word."""

    def __init__(self, handler: CallbackHandler, own: Sequence[TrainerCallback]) -> None:
        self.__dict__.update(vars(handler))
        self._own = own

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control = super().call_event(event, args, state, control, **kwargs)
        for callback in self._own:
            control = getattr(callback, event)(args, state, control, **kwargs) or control
        return control
