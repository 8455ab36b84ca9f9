"""An optimizer of torch's that the user made and passed in `optimizers=`: the engine's optimizer takes its place."""

from __future__ import annotations

import torch

from megatrain.engine.session import Engine
from megatrain.errors import SettingsError
from megatrain.hf.optimizers import of_class
from megatrain.optim.optimizer import BOOKKEEPING, Optimizer, rule_named

WHERE = "optimizers"


class Given:
    """What a torch optimizer was made with. Make it before the model gets its engine, which replaces parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
        self._optimizer = optimizer
        for group in optimizer.param_groups:
            own = {name: group[name] for name in optimizer.defaults if name in group}
            self.kind = of_class(type(optimizer), own | {"params": [group]}, 0.0, WHERE).kind
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) not in names:
                raise SettingsError(
                    f"{WHERE}: {type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that is "
                    "not the model's; make it from model.parameters() of the model that the Trainer is given."
                )
        self._names = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]

    def replaced(self, engine: Engine) -> Optimizer:
        """The engine's optimizer with its options, states and hooks. Groups are shared with the one given.

        A scheduler that was made for the one given writes learning rates into its groups.
        """
        given = self._optimizer
        stored = given.state_dict()["state"]
        parameters = dict(engine.model.named_parameters())
        known = BOOKKEEPING | rule_named(self.kind).defaults.keys()
        others = [{key: group.pop(key) for key in group.keys() - known} for group in given.param_groups]
        for group, names in zip(given.param_groups, self._names, strict=True):
            group["params"] = [parameters[name] for name in names]
        own = engine.optimizer(given.param_groups, kind=self.kind)
        own.load_state_dict({"state": stored, "param_groups": own.state_dict()["param_groups"]})
        for group, other in zip(own.param_groups, others, strict=True):
            group.update(other)
        own._optimizer_step_pre_hooks.update(given._optimizer_step_pre_hooks)
        own._optimizer_step_post_hooks.update(given._optimizer_step_post_hooks)
        # Its scheduler looks whether it has stepped, and would warn of a wrong order.
        given._opt_called = True  # type: ignore[attr-defined]
        return own
