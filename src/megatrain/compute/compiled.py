"""Compiled blocks: the stateless call through `torch.compile`.

Weights are arguments, so layers that differ only in weights share graphs. All blocks of a structure run compiled, or
all run eagerly: their first call decides, and nothing changes it later. In a recompute, eager code would draw other
dropout masks than the compiled forward.

Sizes map to graphs by a fixed rule. The planned batch has graphs with static sizes. Other batches share graphs with
dynamic sizes, one per class of sizes (compute/hints.py). So results depend neither on the order of lengths nor on
what the process ran before.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch.func import functional_call

from megatrain.compute.binding import call_with
from megatrain.errors import MegaTrainError
from megatrain.generators import Generators
from megatrain.process import compile_settings, sdpa_key
from megatrain.telemetry.notices import announce
from megatrain.telemetry.progress import progress

MAX_GRAPHS = 64
"""Compilations per call site and 32 layers before an error is raised. Dynamo would silently fall back to eager."""
Result = TypeVar("Result")
Shapes = tuple[torch.Size, ...]

TRAINED, FROZEN, EVALUATED = "trained", "frozen", "evaluated"
"""Kinds of calls, which have graphs and a decision of their own: with gradients; without, in a forward with gradients;
in one without."""
IN_WORDS = {TRAINED: "", FROZEN: ", frozen", EVALUATED: ", without gradients"}

_recomputing: ContextVar[bool] = ContextVar("megatrain_recomputing", default=False)
_numbers = itertools.count()


# `state` has every name, tied ones too. With tie_weights=True dynamo would compile each layer separately. The sizes of
# `fixed_...` are static (process.DYNAMIC_SOURCES). Dynamo does not guard on the backends of attention, but on a string
# that is read.
def _call(
    fixed_module: torch.nn.Module, fixed_state: Mapping[str, torch.Tensor], args: Any, kwargs: Any, attention: str
) -> Any:
    if not attention:
        raise AssertionError
    return functional_call(fixed_module, dict(fixed_state), args, kwargs, tie_weights=False)


def _planned_call(
    fixed_module: torch.nn.Module, fixed_state: Mapping[str, torch.Tensor], fixed_args: Any, fixed_kwargs: Any,
    attention: str,
) -> Any:  # fmt: skip
    if not attention:
        raise AssertionError
    return functional_call(fixed_module, dict(fixed_state), fixed_args, fixed_kwargs, tie_weights=False)


class CannotCompile(MegaTrainError):
    """Compiling a block failed; the cause is attached."""


class CompiledCall:
    """The compiled stateless call for one class of sizes."""

    def __init__(self, name: str, sizes: str, planned: bool, recomputes: bool, layers: int = 1) -> None:
        # Imported here: it takes seconds, and engines that do not compile do without it.
        from megatrain.compute.partition import backend

        self._name, self._sizes = name, sizes
        # Layers that compute with their own number have graphs of their own.
        self._most = MAX_GRAPHS * (1 + layers // 32)
        template = _planned_call if planned else _call
        # Functions with the same code share dynamo's cache.
        code = template.__code__.replace(co_name=f"{template.__name__}_{next(_numbers)}")
        function = FunctionType(code, template.__globals__)
        self._compiled: Any = torch.compile(
            function, backend=backend(code, _recomputing.get, recomputes), dynamic=False
        )
        self._called = False

    def __call__(
        self, module: torch.nn.Module, state: Mapping[str, torch.Tensor], args: Any, kwargs: Any, recompute: bool
    ) -> Any:
        graphs, began = graph_count(), time.perf_counter()
        bar = nullcontext() if self._called else progress(None, "", f"Compiling {self._name}")
        try:
            with compile_settings(self._most), bar:
                variables, attention = {_recomputing: recompute}, sdpa_key()
                result = call_with(variables, self._compiled, module, state, args, kwargs, attention)
        except torch._dynamo.exc.FailOnRecompileLimitHit as cause:
            raise MegaTrainError(
                f"{self._name} was compiled {self._most} times for different arguments; pad batches to a few lengths, "
                "or set compile=False."
            ) from cause
        except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as error:
            for inner in _causes(error):
                if isinstance(inner, torch.OutOfMemoryError):
                    raise inner from error
            raise CannotCompile(
                f"{self._name} ran compiled, but could not be compiled for {self._sizes} ({_first_line(error)}), and "
                "eager code would give other results; pad batches to lengths that were compiled, or set compile=False."
            ) from error
        if (parts := graph_count() - graphs) > 0:
            apart = f", in {parts} parts with eager code between them" if parts > 1 and not self._called else ""
            announce(f"compiled {self._name} for {self._sizes} in {time.perf_counter() - began:.1f} s{apart}")
        self._called = True
        return result


@dataclass
class _Decision:
    """Whether calls are compiled."""

    made: bool = False
    reason: str | None = None
    """Why they are not."""


class Compiled:
    """How the blocks of one structure run."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        planned: tuple[int, int] | None,
        recomputes: bool,
        on_decision: Callable[..., object] = lambda **_: None,
        layers: int = 1,
    ) -> None:
        self.name, self._layers = name, layers
        self._device, self._planned, self._recomputes, self._on_decision = device, planned, recomputes, on_decision
        self._decisions = {kind: _Decision() for kind in IN_WORDS}
        self._announced_recording = False
        self._expected: dict[str, str | None] = {}
        self._differ: Callable[[str], None] = lambda _: None
        self._lock = threading.RLock()
        self._calls: dict[Hashable, CompiledCall] = {}

    def run(self, shapes: Shapes, kind: str, call: Callable[[CompiledCall | None], Result]) -> Result:
        """Call with the compiled call for these shapes of the arguments, or with None to run eagerly."""
        decision = self._decisions[kind]
        if not decision.made:
            with self._lock:
                if not decision.made:
                    return self._decide(decision, shapes, kind, call)
        return call(self._compiled_call(shapes, kind) if decision.reason is None else None)

    def _decide(
        self, decision: _Decision, shapes: Shapes, kind: str, call: Callable[[CompiledCall | None], Result]
    ) -> Result:
        before, graphs = Generators.capture(self._device), graph_count()
        try:
            result = call(self._compiled_call(shapes, kind))
            if graph_count() == graphs:
                # Code that is marked not to be compiled: no error, and no graph. A recompute does the same.
                self._eager(decision, "nothing in them can be traced")
            self._made(decision, kind)
            return result
        except CannotCompile as error:
            cause = error.__cause__
            if isinstance(cause, torch._dynamo.exc.BackendCompilerFailed):
                cause = cause.inner_exception
            reason = f"{type(cause).__name__}: {_first_line(cause)}"
        # Parts of the block may have run and drawn random numbers.
        before.restore()
        # If this fails too, the fault is not the compiler's, and nothing is decided.
        result = call(None)
        self._eager(decision, reason)
        self._made(decision, kind)
        return result

    def _eager(self, decision: _Decision, reason: str) -> None:
        announce(f"{self.name} blocks cannot be compiled here and run eagerly ({reason})")
        decision.reason = reason

    def _made(self, decision: _Decision, kind: str) -> None:
        decision.made = True
        self._on_decision(
            layer=self.name + IN_WORDS[FROZEN] * (kind == FROZEN),
            gradients=kind == TRAINED,
            compiled=decision.reason is None,
            reason=decision.reason,
        )
        self._check_expected()

    def announce_recording(self) -> None:
        """Say, once, that a forward which returns outputs of inner modules runs eagerly."""
        if not self._announced_recording:
            self._announced_recording = True
            announce(
                f"{self.name} blocks run eagerly in forwards that return router logits, attentions or hidden states of "
                "layers; leave those out to run compiled"
            )

    @property
    def trained(self) -> bool:
        """Whether it is decided how calls with gradients run."""
        return self._decisions[TRAINED].made

    @property
    def described(self) -> dict[str, str]:
        """How calls in training run, as far as it is decided: name → "compiled" or "eager"."""
        made = {kind: self._decisions[kind] for kind in (TRAINED, FROZEN) if self._decisions[kind].made}
        return {
            self.name + IN_WORDS[kind]: "compiled" if decision.reason is None else "eager"
            for kind, decision in made.items()
        }

    def expect(self, described: Mapping[str, str | None], differ: Callable[[str], None]) -> None:
        """Call `differ` with each change, now or when it is decided, if calls run otherwise than `described`."""
        self._expected, self._differ = dict(described), differ
        self._check_expected()

    def _check_expected(self) -> None:
        for name, how in self.described.items():
            expected = self._expected.pop(name, None)
            if expected not in (None, how):
                self._differ(f"{name} {expected} → {how}")

    def _compiled_call(self, shapes: Shapes, kind: str) -> CompiledCall:
        """The call for these shapes. Equal shapes have the same one, whatever was called before."""
        found = self._calls.get((shapes, kind))
        if found is None:
            with self._lock:
                key, sizes, planned = self._class_of(shapes)
                found = self._calls.get((key, kind))
                if found is None:
                    recomputes = self._recomputes and kind == TRAINED
                    found = CompiledCall(self.name, sizes + IN_WORDS[kind], planned, recomputes, self._layers)
                    self._calls[key, kind] = found
                self._calls[shapes, kind] = found
        return found

    def _class_of(self, shapes: Shapes) -> tuple[Hashable, str, bool]:
        """The key of a class of sizes, its sizes in words, and whether it is the planned batch."""
        from megatrain.compute.hints import size_class

        rows, length = self._planned or (0, 0)
        # A decoder's length may vary while its encoder's does not.
        lengths = {shape[1] for shape in shapes if len(shape) == 3 and shape[0] == rows} - {1}
        # So may the number of packed documents (`cu_seq_lens`), of which each would have a graph of its own.
        counts = {shape[0] for shape in shapes if len(shape) == 1} - {1, rows, length, rows * length}
        whole = any(len(shape) > 2 and shape[:2] == self._planned for shape in shapes)
        if whole and lengths <= {length} and not counts:
            return "planned", f"batches of {rows} × {length}", True
        classes = tuple(
            tuple(size_class(size, rows=dim == 0 and len(shape) > 1) for dim, size in enumerate(shape))
            for shape in shapes
        )
        largest = next((of for of in classes if len(of) > 2), classes[0] if classes else ())
        return classes, f"batches of up to {' × '.join(map(str, largest[:2]))}", False


def graph_count() -> int:
    """Graphs compiled in this process so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def structure_of(module: torch.nn.Module) -> Hashable:
    """A key that is equal for blocks that differ only in weights and position.

    Numbers do not count, since most are a position. Blocks that compute with different ones have graphs of their own.
    """
    return tuple(
        (
            path,
            type(inner),
            tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in inner._parameters.items() if p is not None),
            tuple((k, v) for k, v in vars(inner).items() if isinstance(v, bool | str | None) and k != "training"),
        )
        for path, inner in module.named_modules()
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and the errors that it came of."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
