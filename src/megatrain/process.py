"""Process-wide settings that MegaTrain changes. They are changed only here, and restored when no longer needed.

| setting | changed while |
|---|---|
| Python's switch interval | an engine is open whose lanes are threads |
| PyTorch's GPU memory fraction and expandable segments | an engine with a cap or a plan is open |
| dynamo's recompile limits and dynamic sources | a compiled block is called |
| AOTAutograd's settings, the key of graphs cached on disk, and what Inductor asks for sizes | a block is compiled |
| that dynamo may put grouped products into graphs | from the first compiled block on; PyTorch cannot undo it |
| the order in which PyTorch tries attention backends | an engine is open on a GPU that hardware/attention.py knows |
| how transformers loads a checkpoint | from `init(offload_dir=...)` until an engine is attached |

A value that the user sets in the meantime is kept.
"""

from __future__ import annotations

import importlib
import math
import operator
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Generic, TypeVar

import torch

Value = TypeVar("Value")
Request = TypeVar("Request")

SWITCH_INTERVAL = 1e-4
"""Seconds. Compute and lanes are threads that hold the interpreter lock for microseconds at a time. With Python's
default of 5 ms, steps of a small model take longer (docs/log.md)."""
EXPANDABLE_SEGMENTS = "expandable_segments:True"


def fork_safe_lock() -> Callable[[], threading.RLock]:
    """A function that returns the lock of this process. A forked child has a new one, which no thread holds."""
    locks = [threading.RLock()]
    os.register_at_fork(after_in_child=lambda: locks.__setitem__(0, threading.RLock()))
    return lambda: locks[0]


_lock = fork_safe_lock()


@dataclass
class ProcessSetting(Generic[Value, Request]):
    """One process-wide setting that several owners may request values for."""

    read: Callable[[], Value]
    write: Callable[[Value], object]
    combine: Callable[[Value, list[Request]], Value]
    """Returns the value to set, given the user's value and all requests."""
    same: Callable[[Value, Value], bool] = operator.eq
    _requests: dict[Hashable, Request] = field(default_factory=dict)
    _set: tuple[Value, Value] | None = None
    """The user's value and the value set instead; None without requests."""

    def users_value(self) -> Value:
        """The value before the first request, or what the user has set since."""
        now = self.read()
        return self._set[0] if self._set is not None and self.same(now, self._set[1]) else now

    def request(self, owner: Hashable, request: Request) -> None:
        with _lock():
            self._requests[owner] = request
            self._apply()

    def release(self, owner: Hashable) -> None:
        with _lock():
            if owner in self._requests:
                del self._requests[owner]
                self._apply()

    def _apply(self) -> None:
        before = self.users_value()
        value = self.combine(before, list(self._requests.values())) if self._requests else before
        self._set = (before, value) if self._requests else None
        self.write(value)


def release(owner: Hashable) -> None:
    """Withdraw all requests of an owner."""
    settings: list[ProcessSetting[Any, Any]] = [switch_interval, *_vram_fractions.values(), _allocator_settings]
    settings.append(sdpa_order)
    for setting in settings:
        setting.release(owner)


# ---- Python

switch_interval: ProcessSetting[float, float] = ProcessSetting(
    sys.getswitchinterval, sys.setswitchinterval, lambda users, requests: min(users, *requests), math.isclose
)


# ---- PyTorch's allocator


@dataclass(frozen=True)
class VramLimit:
    """One engine's limits on PyTorch's allocator, in bytes. None: no limit."""

    cap: int | None = None
    """For the process."""
    planned: int | None = None
    """For this engine."""
    other_bytes: int = 0
    """What the process used for something else when the engine was attached."""


_vram_fractions: dict[torch.device, ProcessSetting[float, VramLimit]] = {}


def vram_fraction(device: torch.device) -> ProcessSetting[float, VramLimit]:
    """The fraction of the GPU's memory that PyTorch's allocator may use.

    A cap limits the process, so the lowest one applies. Plans add up, and limit nothing if one engine has no plan.
    """
    return _vram_fractions.setdefault(
        device,
        ProcessSetting(
            lambda: torch.cuda.get_per_process_memory_fraction(device),
            lambda share: torch.cuda.set_per_process_memory_fraction(share, device),
            partial(_combine_vram_limits, device),
            partial(math.isclose, rel_tol=1e-6),
        ),
    )


def _combine_vram_limits(device: torch.device, users_value: float, limits: list[VramLimit]) -> float:
    allowed = [limit.cap for limit in limits if limit.cap is not None]
    plans = [limit.planned for limit in limits if limit.planned is not None]
    if len(plans) == len(limits):
        allowed.append(sum(plans) + min(limit.other_bytes for limit in limits))
    total = torch.cuda.get_device_properties(device).total_memory
    return min([users_value, *[max(0, nbytes) / total for nbytes in allowed]])


def use_expandable_segments(owner: Hashable) -> bool:
    """Enable expandable segments, which reduce fragmentation, unless the user has configured the allocator. Returns
    whether they are enabled."""
    configured = _environment_settings() or _allocator_settings.users_value()
    if configured:
        return EXPANDABLE_SEGMENTS.lower() in configured.lower().replace(" ", "")
    _allocator_settings.request(owner, None)
    return True


def _environment_settings() -> str:
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


_read_allocator_settings: Callable[[], str] | None = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
"""Returns settings made at run time too; missing in some versions of PyTorch."""


def _write_allocator_settings(settings: str) -> None:
    if not settings:
        # An empty string would leave it unchanged.
        torch._C._accelerator_setAllocatorSettings(EXPANDABLE_SEGMENTS.replace("True", "False"))
    if settings or _read_allocator_settings is not None:
        torch._C._accelerator_setAllocatorSettings(settings)


_allocator_settings: ProcessSetting[str, None] = ProcessSetting(
    _read_allocator_settings or _environment_settings, _write_allocator_settings, lambda *_: EXPANDABLE_SEGMENTS
)


# ---- scaled_dot_product_attention

SDPA_BACKENDS = ("math", "flash", "efficient", "cudnn", "overrideable")
"""By PyTorch's number."""
SdpaOrder = tuple[int, ...]
SdpaState = tuple[SdpaOrder, tuple[bool, ...]]
PYTORCH_SDPA_ORDERS: tuple[SdpaOrder, ...] = ((1, 2, 0, 3, 4), (3, 1, 2, 0, 4))
"""The orders that PyTorch sets itself. Any other one is the user's."""
_FLAGS = ("math", "flash", "mem_efficient", "cudnn", "overrideable")
_enabled: list[Callable[[], bool]] = [getattr(torch._C, f"_get_{name}_sdp_enabled") for name in _FLAGS]
_enable: list[Callable[[bool], None]] = [getattr(torch._C, f"_set_sdp_use_{name}") for name in _FLAGS]


def sdpa_state() -> SdpaState:
    """The order in which SDPA tries its backends, and by number whether each is enabled. Neither is per thread."""
    return tuple(torch._C._get_sdp_priority_order()), tuple([enabled() for enabled in _enabled])


def sdpa_key() -> str:
    """The same as a string."""
    return _as_string(sdpa_state())


_as_string = cache(str)  # a string per call would take longer than the state itself


def set_sdpa_state(state: SdpaState) -> None:
    torch._C._set_sdp_priority_order(list(state[0]))
    for enable, enabled in zip(_enable, state[1], strict=True):
        enable(enabled)


def sdpa_order_of(names: Sequence[str]) -> SdpaOrder:
    """These backends first, then the others."""
    return tuple(map(SDPA_BACKENDS.index, [*names, *(name for name in SDPA_BACKENDS if name not in names)]))


def _combine_orders(users_value: SdpaOrder, requests: list[SdpaOrder]) -> SdpaOrder:
    # The first engine's order stays: a run must not change its backend because another one begins.
    return requests[0] if users_value in PYTORCH_SDPA_ORDERS else users_value


sdpa_order: ProcessSetting[SdpaOrder, SdpaOrder] = ProcessSetting(
    lambda: tuple(torch._C._get_sdp_priority_order()),
    lambda order: torch._C._set_sdp_priority_order(list(order)),
    _combine_orders,
)


# ---- transformers

LOADER = "convert_and_load_state_dict_in_model"


def _modeling() -> Any:
    return importlib.import_module("transformers.modeling_utils")


weights_loader: ProcessSetting[Any, Callable[[Any], Any]] = ProcessSetting(
    lambda: getattr(_modeling(), LOADER),
    lambda function: setattr(_modeling(), LOADER, function),
    lambda users, requests: requests[0](users),
    operator.is_,
)
"""The function that puts the tensors of a checkpoint into a model. A request wraps it."""


# ---- dynamo

DYNAMIC_SOURCES = r"L\['(?!self'|fixed_).*"
"""A pattern for dynamo: sizes and integers of every argument are dynamic, except of modules and of arguments named
`fixed_...` (compute/compiled.py). It applies to what runs after a graph break too."""
LIMITS = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit", "suppress_errors")


def _read_dynamo() -> dict[str, Any]:
    limits = {name: getattr(torch._dynamo.config, name) for name in LIMITS}
    return limits | {"dynamic_sources": torch.compiler.config.dynamic_sources}


def _write_dynamo(values: dict[str, Any]) -> None:
    for name in LIMITS:
        setattr(torch._dynamo.config, name, values[name])
    torch.compiler.config.dynamic_sources = values["dynamic_sources"]


def _for_blocks(users_value: dict[str, Any], graphs: list[int]) -> dict[str, Any]:
    return {
        "recompile_limit": max(users_value["recompile_limit"], *graphs),
        "accumulated_recompile_limit": max(users_value["accumulated_recompile_limit"], *(4 * most for most in graphs)),
        "fail_on_recompile_limit_hit": True,
        "suppress_errors": False,
        "dynamic_sources": ",".join(filter(None, (users_value["dynamic_sources"], DYNAMIC_SOURCES))),
    }


_dynamo_settings: ProcessSetting[dict[str, Any], int] = ProcessSetting(_read_dynamo, _write_dynamo, _for_blocks)
DYNAMO_CONFIG_PER_THREAD = torch.__version__ >= "2.12"
"""Whether dynamo's configuration is per thread; in older versions it is global."""


@contextmanager
def compile_settings(graphs: int) -> Iterator[None]:
    """Inside, a call site may be compiled `graphs` times; one more compilation is an error, not a fall-back to eager.

    The user's own compiled code keeps its settings. Before PyTorch 2.12, other threads are affected too.
    """
    if DYNAMO_CONFIG_PER_THREAD:
        compiler_config: Any = torch.compiler.config
        values = _for_blocks(_read_dynamo(), [graphs])
        sources = values.pop("dynamic_sources")
        with torch._dynamo.config.patch(values), compiler_config.patch(dynamic_sources=sources):
            yield
        return
    owner = object()
    _dynamo_settings.request(owner, graphs)
    try:
        yield
    finally:
        _dynamo_settings.release(owner)


# ---- while a block is compiled


@contextmanager
def partition_settings(values: Mapping[str, Any]) -> Iterator[None]:
    """Inside, AOTAutograd has these settings, and graphs cached on disk are those of the backends of attention."""
    functorch: Any = importlib.import_module("torch._functorch.config")
    compiler: Any = torch.compiler.config
    # Without the tag, a cached graph would be used for any backend of attention.
    tag = f"{compiler.cache_key_tag} {sdpa_key()}"
    with functorch.patch(values), compiler.patch(cache_key_tag=tag):
        yield


@contextmanager
def replaced(functions: Iterable[tuple[Any, str, Callable[[Any], Any]]]) -> Iterator[None]:
    """Inside, functions of PyTorch are replaced: owner, name, and what makes the new one of the old one.

    Threads compile one at a time: dynamo has a lock.
    """
    before = [(owner, name, vars(owner)[name], make) for owner, name, make in functions]
    try:
        for owner, name, function, make in before:
            setattr(owner, name, make(function))
        yield
    finally:
        for owner, name, function, _ in before:
            setattr(owner, name, function)


def allow_grouped_products() -> None:
    """Let dynamo put grouped products into graphs. Some versions do not know them, and would split a layer with experts
    into several graphs. PyTorch cannot undo it; the user's own compiled code has fewer graph breaks by it."""
    torch.compiler.allow_in_graph(torch._grouped_mm)
