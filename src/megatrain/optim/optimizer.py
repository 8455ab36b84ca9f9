"""The optimizer users hold: a `torch.optim.Optimizer` whose state lives in the store and whose updates are deferred."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from megatrain.errors import CheckpointError, SettingsError
from megatrain.optim.adamw import Hyper
from megatrain.optim.schedule import Outcome
from megatrain.store.parameter import StoreTensor, states_of

HyperTable = Mapping[int, Mapping[int, Hyper]]


class Stepper(Protocol):
    """What the optimizer needs from the engine (engine/step.py)."""

    def step(self, hypers: HyperTable, max_norm: float | None) -> Outcome: ...

    def zero_grad(self) -> None: ...

    def owns(self, parameter: Any) -> bool: ...


class Optimizer(torch.optim.Optimizer):
    """AdamW over the engine's parameters. Schedulers and parameter groups work as with `torch.optim.AdamW`.

    `step()` returns at once: updates run under the next forward, with the learning rates of the moment of the call.
    """

    def __init__(
        self,
        params: Iterable[Any],
        stepper: Stepper,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_grad_norm: float | None = None,
    ) -> None:
        _check(lr, betas, eps, weight_decay, max_grad_norm)
        self.max_grad_norm = max_grad_norm
        self._stepper = stepper
        self._outcome: Outcome | None = None
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        given = param_group["params"]
        param_group["params"] = [given] if isinstance(given, torch.Tensor) else list(given)
        for item in param_group["params"]:
            parameter = item[1] if isinstance(item, tuple) else item
            if not self._stepper.owns(parameter):
                raise SettingsError(
                    f"a parameter of shape {tuple(parameter.shape)} does not belong to this engine's model; pass "
                    "parameters taken from the model after the engine was attached."
                )
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            parameter.slab.allocate_states()
            self._start_afresh(parameter)

    @staticmethod
    def _start_afresh(parameter: StoreTensor) -> None:
        """A second optimizer on the same model starts without the first one's moments; masters stay."""
        parameter.slab.overwrite()
        parameter.slab.steps[parameter.segment] = 0
        for role, view in states_of(parameter).items():
            if role != "residual":
                view.zero_()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._outcome = self._stepper.step(self._hypers(), self.max_grad_norm)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients. They are always dropped, never filled with zeros."""
        self._stepper.zero_grad()

    @property
    def grad_norm(self) -> float:
        """The gradient norm of the last step, before clipping; waits for it."""
        return self._finished().norm

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because its norm was not finite; waits for it."""
        return self._finished().skipped

    def _finished(self) -> Outcome:
        if self._outcome is None:
            raise SettingsError("no step has been taken yet.")
        self._outcome.ticket.wait()
        return self._outcome

    def _hypers(self) -> HyperTable:
        """Hyperparameters by slab and segment, copied: a learning rate changed after `step()` must not leak in."""
        table: dict[int, dict[int, Hyper]] = {}
        for group in self.param_groups:
            beta1, beta2 = (float(beta) for beta in group["betas"])
            hyper = Hyper(float(group["lr"]), beta1, beta2, float(group["eps"]), float(group["weight_decay"]))
            for parameter in group["params"]:
                table.setdefault(parameter.slab.index, {})[parameter.segment] = hyper
        return table

    # ---- state, in the form that torch.optim.AdamW uses, plus the residual of a split master

    def state_dict(self) -> dict[str, Any]:
        """Moments, residuals and step counts as views of the store (not copies), and the parameter groups."""
        numbers = self._numbers()
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            | {"params": [numbers[id(parameter)] for parameter in group["params"]]}
            for group in self.param_groups
        ]
        state = {}
        for parameter in self._parameters():
            # A pending update also counts the step.
            parameter.slab.settle()
            steps = parameter.slab.steps[parameter.segment]
            if steps:
                state[numbers[id(parameter)]] = {"step": torch.tensor(float(steps))} | states_of(parameter)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy a state dict of this class, or of `torch.optim.AdamW` over the same groups, into the store."""
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise CheckpointError(
                f"the optimizer state has groups of {[len(g['params']) for g in groups]} parameters, this optimizer "
                f"of {[len(g['params']) for g in self.param_groups]}; build the same groups before loading."
            )
        for mine, theirs in zip(self.param_groups, groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})
            for number, parameter in zip(theirs["params"], mine["params"], strict=True):
                entry = state_dict["state"].get(number)
                parameter.slab.overwrite()
                parameter.slab.steps[parameter.segment] = int(entry["step"]) if entry else 0
                for role, view in states_of(parameter).items():
                    if entry is not None and role in entry:
                        view.copy_(entry[role])
                    elif role != "residual":
                        view.zero_()

    def _parameters(self) -> Iterable[Any]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def _numbers(self) -> dict[int, int]:
        return {id(parameter): number for number, parameter in enumerate(self._parameters())}

    def __repr__(self) -> str:
        return f"megatrain.{super().__repr__()}"


def _check(lr: float, betas: tuple[float, float], eps: float, weight_decay: float, max_grad_norm: float | None) -> None:
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not float(value) >= 0.0:
            raise SettingsError(f"{name} must not be negative, and is {value!r}.")
    if not all(0.0 <= float(beta) < 1.0 for beta in betas):
        raise SettingsError(f"betas must lie in [0, 1), and are {betas!r}.")
    if max_grad_norm is not None and not float(max_grad_norm) > 0.0:
        raise SettingsError(f"max_grad_norm must be positive or None, and is {max_grad_norm!r}.")
