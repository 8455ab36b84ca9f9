"""The optimizer: a `torch.optim.Optimizer` whose state lives in the store and whose updates are deferred."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch

from megatrain.aliases import renamed
from megatrain.errors import CheckpointError, NotEnoughMemory, SettingsError
from megatrain.optim.pending import PendingNorm
from megatrain.optim.rules import RULES, Rule
from megatrain.optim.schedule import Outcome, RuleTable
from megatrain.store.parameter import restore_states, states_of
from megatrain.telemetry.notices import announce
from megatrain.telemetry.progress import progress


class Stepper(Protocol):
    """What the optimizer needs from the engine (engine/step.py)."""

    def step(self, rules: RuleTable, max_norm: float | None, owner: object) -> Outcome: ...
    def final_backward(self, rules: RuleTable, owner: object) -> AbstractContextManager[None]: ...
    def raise_errors(self) -> None: ...
    def zero_grad(self) -> None: ...
    def grad_norm(self) -> float: ...
    def scale_gradients(self, factor: float) -> None: ...
    def owns(self, parameter: Any) -> bool: ...


class Optimizer(torch.optim.Optimizer):
    """AdamW, Lion or SGD over the engine's parameters. Schedulers and parameter groups work as with torch's optimizers.

    `step()` only submits updates. They run during the next forward, with the learning rates at the time of the call.
    """

    def __init__(
        self,
        params: Iterable[Any],
        stepper: Stepper,
        *,
        kind: str = "adamw",
        moment_width: str = "fp32",
        lossless: bool = False,
        max_grad_norm: float | None = None,
        **options: Any,
    ) -> None:
        self.kind = kind
        self.rule = rule_named(kind)
        self.moments = tuple(self.rule.moments)
        self.moment_width = moment_width
        """Storage of moments: fp32, bf16, 8bit or 4bit."""
        self.lossless = lossless
        """Whether checkpoints compress FP32 moments losslessly."""
        self.max_grad_norm = max_grad_norm
        chosen = {**self.rule.defaults, **{key: value for key, value in options.items() if value is not None}}
        self._check(chosen, self.rule.defaults.keys())
        self._stepper = stepper
        self._outcome: Outcome | None = None
        self._clip: tuple[float | None, list[Outcome]] | None = None
        """The limit that `clip_next_step` set, and where that step puts its outcome."""
        super().__init__(params, chosen)

    @property
    def width(self) -> str:
        renamed("width of an optimizer", "moment_width")
        return self.moment_width

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        params = param_group["params"]
        param_group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
        for item in param_group["params"]:
            parameter = item[1] if isinstance(item, tuple) else item
            if not self._stepper.owns(parameter):
                raise SettingsError(
                    f"a parameter of shape {tuple(parameter.shape)} does not belong to this engine's model; pass "
                    "parameters taken from the model after the engine was attached."
                )
        self._check({**self.defaults, **param_group}, self.rule.defaults.keys() | GROUP_KEYS)
        super().add_param_group(param_group)
        added = self.param_groups[-1]["params"]
        with progress(len(added), "tensor", "Allocating optimizer states") as advance:
            for parameter in added:
                # Updates of an earlier optimizer use the moments that there are when they run.
                parameter.slab.before_write()
                parameter.slab.allocate_states(self.rule.moments, self.moment_width)
                # A second optimizer on the same model starts with zero moments; master weights stay.
                parameter.slab.steps[parameter.segment] = 0
                restore_states(parameter, {})
                advance()

    def _check(self, options: Mapping[str, Any], known: AbstractSet[str]) -> None:
        if unknown := sorted(set(options) - known):
            raise SettingsError(f"{self.kind} has no {unknown[0]}; its options are {', '.join(self.rule.defaults)}.")
        _rule_of(self.rule, options, "the optimizer")
        _check_norm(self.max_grad_norm)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        max_norm, outcomes = self._clip or (self.max_grad_norm, [])
        self._clip = None
        self._outcome = self._stepper.step(self._rules(), max_norm, self)
        outcomes.append(self._outcome)
        self._stepper.raise_errors()
        return loss

    def clip_next_step(self, max_norm: float | None) -> PendingNorm:
        """Clip in the next `step()`, in place of `max_grad_norm` and without a wait. Until then gradients read as they
        are. Returns the norm before clipping, which that step computes."""
        _check_norm(max_norm)
        outcomes: list[Outcome] = []
        self._clip = max_norm, outcomes

        def read() -> float:
            if not outcomes:
                return self._stepper.grad_norm()
            outcomes[0].ticket.wait()
            return outcomes[0].norm

        return PendingNorm(lambda: bool(outcomes) and outcomes[0].ticket.done, read)

    @contextmanager
    def final_backward(self) -> Iterator[None]:
        """Declare that the backward inside is the last of this step; without clipping, updates then start during it.

        `step()` must follow. It has no effect if that step clips, since updates need the norm first.
        """
        max_norm, _ = self._clip or (self.max_grad_norm, [])
        with self._stepper.final_backward(self._rules(), self) if max_norm is None else nullcontext():
            yield

    def scale_gradients(self, factor: float) -> None:
        """Multiply all current gradients of the model."""
        self._stepper.scale_gradients(factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; they are never filled with zeros."""
        self._clip = None
        self._stepper.zero_grad()

    @property
    def grad_norm(self) -> float:
        """The gradient norm of the last step before clipping; waits for it."""
        return self._finished().norm

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because of a non-finite norm; waits for it."""
        return self._finished().skipped

    def _finished(self) -> Outcome:
        if self._outcome is None:
            raise SettingsError("no step has been taken yet; call step() first.")
        self._outcome.ticket.wait()
        return self._outcome

    def _rules(self) -> RuleTable:
        """Rules by slab and segment, copied, so that later changes of a learning rate do not affect this step.

        Schedulers and users modify the groups, so they are checked every time before anything is updated.
        """
        _check_norm(self.max_grad_norm)
        table: dict[int, dict[int, Rule]] = {}
        for number, group in enumerate(self.param_groups):
            rule = _rule_of(self.rule, group, f"parameter group {number}")
            for parameter in group["params"]:
                table.setdefault(parameter.slab.index, {})[parameter.segment] = rule
        return table

    # ---- state, in torch's form, plus the residual of a split master; low-bit moments as codes

    def state_dict(self) -> dict[str, Any]:
        """Moments, residuals and step counts as views of the store, and the parameter groups. States on disk are copied
        to RAM, or refused if they do not fit."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._require_ram_for_states_on_disk(parameters)
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            | {"params": [numbers[id(parameter)] for parameter in group["params"]]}
            for group in self.param_groups
        ]
        state = {}
        for parameter in parameters:
            # A pending update increments the step count.
            parameter.slab.settle()
            steps = parameter.slab.steps[parameter.segment]
            # Before its first step a parameter has no moments, but its master may have low bits.
            if steps or any(residual.any() for residual in states_of(parameter, ()).values()):
                states = states_of(parameter, self.rule.moments)
                state[numbers[id(parameter)]] = {"step": torch.tensor(float(steps)), **states}
        return {"state": state, "param_groups": groups}

    def moment_bytes(self) -> int:
        """Bytes of moments and step counts of parameters that have taken a step. Nothing is read for them."""
        stepped = [p for group in self.param_groups for p in group["params"] if p.slab.steps[p.segment]]
        states = (states_of(parameter, self.rule.moments, values=False) for parameter in stepped)
        moments = sum(view.nbytes for each in states for role, view in each.items() if role != "residual")
        return moments + len(stepped) * torch.float32.itemsize

    @property
    def has_states_on_disk(self) -> bool:
        return any(p.slab.homes.states.tier == "disk" for group in self.param_groups for p in group["params"])

    def _require_ram_for_states_on_disk(self, parameters: Iterable[Any]) -> None:
        on_disk = [parameter for parameter in parameters if parameter.slab.homes.states.tier == "disk"]
        views = (view for p in on_disk for view in states_of(p, self.rule.moments, values=False).values())
        nbytes = sum(view.nbytes for view in views)
        if nbytes:
            try:
                on_disk[0].slab.homes.transit.require(nbytes)
            except NotEnoughMemory as refused:
                raise NotEnoughMemory(
                    f"state_dict() would copy {nbytes / 1e9:.3g} GB of states from disk to RAM: {refused} Use "
                    "engine.save(), which copies a parameter at a time."
                ) from refused

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy a state dict of this class, or of torch's optimizer of the same kind and groups, into the store."""
        groups = state_dict["param_groups"]
        saved, own = ([len(group["params"]) for group in listed] for listed in (groups, self.param_groups))
        if saved != own:
            raise CheckpointError(
                f"the optimizer state has groups of {saved} parameters, this optimizer of {own}; build the same "
                "groups before loading."
            )
        self.check_groups(groups)
        for number, entry in state_dict["state"].items():
            self._check_entry(number, entry)
        rounded = 0
        for group, saved_group in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved_group.items() if key != "params"})
            for number, parameter in zip(saved_group["params"], group["params"], strict=True):
                entry = state_dict["state"].get(number) or {}
                parameter.slab.before_write()
                parameter.slab.steps[parameter.segment] = int(entry.get("step", 1)) if entry else 0
                states = {k: v for k, v in entry.items() if k != "step" and v is not None}
                rounded += not restore_states(parameter, states)
        if rounded:
            announce(f"the moments of {rounded} parameters were rounded to {self.moment_width} on loading")

    def check_groups(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Raise unless these parameter groups of a saved state can be loaded. Changes nothing."""
        for number, group in enumerate(groups):
            for name, harmless in UNSUPPORTED_OPTIONS.items():
                if group.get(name, harmless) != harmless:
                    raise CheckpointError(
                        f"the optimizer state was written with {name}={group[name]!r}, an option that "
                        f"{self.kind} does not have; use the optimizer that it was saved from."
                    )
            if missing := sorted(set(self.rule.defaults) - set(group)):
                raise CheckpointError(
                    f"the optimizer state has no {missing[0]} in its groups, so {self.kind} did not save it; "
                    "use the optimizer that it was saved from."
                )
            _rule_of(self.rule, group, f"parameter group {number} of the stored state")

    def _check_entry(self, number: Any, entry: Mapping[str, Any]) -> None:
        """Raise for moments of another rule: they would be dropped silently while the step count is kept."""
        roles = {key.split(".")[0] for key, value in entry.items() if value is not None} - {"step", "residual"}
        if unknown := sorted(roles - set(self.rule.moments)):
            raise CheckpointError(
                f"the state of parameter {number} has {unknown[0]}, which {self.kind} does not keep (it keeps "
                f"{', '.join(self.rule.moments)}); use the optimizer that it was saved from."
            )
        if roles and (missing := sorted(set(self.rule.moments) - roles)):
            raise CheckpointError(
                f"the state of parameter {number} has no {missing[0]}, which {self.kind} needs; use the optimizer that "
                "it was saved from."
            )

    def __repr__(self) -> str:
        return f"megatrain.{super().__repr__()}"


def rule_named(kind: str) -> type[Rule]:
    if kind not in RULES:
        raise SettingsError(f"kind must be one of {', '.join(RULES)}, not {kind!r}.")
    return RULES[kind]


GROUP_KEYS = frozenset({"params", "param_names", "initial_lr", "name"})
"""Keys of a parameter group besides the options of its rule."""
UNSUPPORTED_OPTIONS = {"nesterov": False, "dampening": 0, "maximize": False, "amsgrad": False}
"""Options of torch's optimizers that MegaTrain lacks → the value with which they have no effect."""


def _rule_of(rule: type[Rule], group: Mapping[str, Any], where: str) -> Rule:
    """The rule with a group's options; SettingsError if a value is not a number or would destroy weights.

    Each value is read once, since a learning rate on a GPU is copied to the host.
    """
    values: dict[str, Any] = {}
    for name in rule.defaults:
        value, betas = group[name], name == "betas"
        listed = [_float(item) for item in (value if betas and isinstance(value, (tuple, list)) else (value,))]
        floats = [item for item in listed if item is not None]
        wanted = ""
        if betas and len(listed) != 2:
            wanted = "two numbers"
        elif len(floats) < len(listed):
            wanted = "a number"
        elif not all(0.0 <= item < (1.0 if betas else math.inf) for item in floats):
            wanted = "in [0, 1)" if betas else "finite and not negative"
        if wanted:
            raise SettingsError(
                f"{where} has {name}={value!r}, which must be {wanted}; no update used it. Check what sets it "
                "(a scheduler, a callback, a loaded state), then write a valid value into the group."
            )
        values[name] = tuple(floats) if betas else floats[0]
    built = rule.of(values)
    with np.errstate(over="ignore"):
        # Bias correction is largest in the first step.
        scalars = built.scalars(1, 1.0)
    if not all(math.isfinite(scalar) for scalar in scalars):
        raise SettingsError(f"{where} has {values}, which overflow FP32 in the update; use smaller values.")
    return built


def _float(value: Any) -> float | None:
    """None if it is not a real number."""
    if isinstance(value, torch.Tensor):
        number = value.numel() == 1 and not value.is_complex()
    else:
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        return float(value) if number else None
    except OverflowError:
        return math.inf


def _check_norm(max_grad_norm: float | None) -> None:
    if max_grad_norm is not None and (_float(max_grad_norm) is None or not float(max_grad_norm) > 0.0):
        raise SettingsError(f"max_grad_norm must be positive or None, not {max_grad_norm!r}.")
