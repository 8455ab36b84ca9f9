"""The engine: attaches to a model, creates its optimizer, saves, loads and closes."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from megatrain import settings as settings_module
from megatrain.aliases import renamed
from megatrain.compute.block import Block
from megatrain.compute.compiled import Compiled
from megatrain.engine import saving
from megatrain.engine.attach import CLOSE_TIMEOUT, Attachment
from megatrain.engine.decide import decide
from megatrain.engine.drive import DriveLife
from megatrain.engine.kernels import check_resume, facts_of_run
from megatrain.engine.loading import filled
from megatrain.engine.planning import apply_plan
from megatrain.engine.recording import described
from megatrain.engine.summary import announce_plan
from megatrain.errors import MegaTrainError, ModelMoved, SettingsError
from megatrain.hardware import inventory
from megatrain.hardware.ram_monitor import RamMonitor
from megatrain.model.loading import keep_in_files
from megatrain.optim.optimizer import Optimizer, rule_named
from megatrain.settings import Settings
from megatrain.store.export import Survivors, exported
from megatrain.store.parameter import NO_DEEP_COPY, StoreTensor
from megatrain.stream.timeline import StepTimes, Timeline
from megatrain.telemetry.counters import Counters
from megatrain.telemetry.notices import announce, warn
from megatrain.telemetry.preparation import Preparation
from megatrain.telemetry.record import Record

Result = TypeVar("Result")


class Engine:
    """Trains a model whose weights stay in host memory; the GPU holds a few layers at a time.

    `model` keeps its interface: call it, call `.backward()` on any loss, read `parameters()`, `state_dict()` and
    `save_pretrained()`. Keyword arguments are the fields of `Settings` and override those of `megatrain.init`.

    `weights` is a Hugging Face directory, or a safetensors file, for a model on the meta device. Each weight is read
    from its file into the store, so that RAM never holds the model beside the store.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        weights: str | os.PathLike[str] | None = None,
        _kind: str = "adamw",
        **overrides: Any,
    ) -> None:
        self.defaults = settings_module.current()
        self.settings: Settings = apply_plan(self.defaults.override(**overrides))
        inventory.refuse_distributed()
        self.model = model
        self.device = inventory.choose_device(self.settings.device)
        keep_in_files(False)
        # Nothing follows the last step of attaching: a Ctrl-C after it would leave an engine that nobody has.
        if weights is not None:
            with filled(model, weights):
                self._attach(_kind)
        else:
            self._attach(_kind)

    def _attach(self, _kind: str) -> None:
        decided = decide(self.settings, self.device, self.model, _kind)
        self.settings = decided.settings
        self.precision: str = decided.precision
        self.saved_precision = decided.saved_precision
        self.compile_chosen = decided.compile_chosen
        self.expected_kind = _kind
        """The kind of optimizer that a Trainer makes next."""
        self._last_optimizer: Callable[[], Optimizer | None] = lambda: None
        self.counters = Counters()
        self.preparation = Preparation()
        """Seconds of what comes before the first step."""
        self._warned_of_window = False
        announce_plan(self, decided.blocks)
        Attachment(self, decided)

    def _set_parts(self, parts: Attachment) -> None:
        self._attached = parts
        self._placement, self._memory, self._lanes = parts.placement, parts.placement.ram, parts.lanes
        self._adoption, self._step, self._headroom = parts.adoption, parts.step, parts.headroom
        self.memory_limit, self.slabs = parts.memory_limit, parts.adoption.slabs

    # ---- public methods

    @property
    def blocks(self) -> list[Block]:
        """The streamed blocks, in registration order."""
        return self._adoption.blocks

    @property
    def compiled(self) -> list[Compiled]:
        """How the blocks of each structure run, if layers are compiled."""
        found = {block.compiled.name: block.compiled for block in self.blocks if block.compiled is not None}
        return [*found.values()]

    @property
    def closed(self) -> bool:
        return self._attached.closed

    def optimizer(
        self,
        params: Iterable[Any] | None = None,
        *,
        kind: str = "adamw",
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        momentum: float | None = None,
        weight_decay: float | None = None,
        max_grad_norm: float | None = None,
    ) -> Optimizer:
        """Create an optimizer: "adamw", "lion" or "sgd".

        `params` are parameters of the model or parameter groups; None means all that require grad. Other options
        default to those of PyTorch (Lion: lr 1e-4, betas 0.9 and 0.99, no weight decay).
        """
        self._step.raise_errors()
        self._check_parameters_attached()
        if params is None:
            params = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            if not params:
                raise SettingsError(
                    "no parameter of the model requires grad, so there is nothing to optimize; set requires_grad on "
                    "some."
                )
        params = list(params)
        width = self.settings.moment_width
        listed = [p for item in params for p in (item["params"] if isinstance(item, dict) else [item])]
        owned = {p.slab.index: p.slab for p in listed if isinstance(p, StoreTensor) and self._step.owns(p)}
        slots = self._headroom.unwritten_slot_bytes()
        self._placement.require_states([*owned.values()], self._step.updates, rule_named(kind), width, slots)
        plan = self.settings.plan
        if plan is not None and plan.run.kind != kind:
            warn(f"kind={kind!r}, but the plan is for {plan.run.kind!r}: memory and time will differ from the plan")
        options = {"lr": lr, "betas": betas, "eps": eps, "momentum": momentum, "weight_decay": weight_decay}
        lossless = self.settings.optimizer_compression == "lossless"
        first = "create_optimizer" not in self.preparation.seconds
        with self.preparation.timing("create_optimizer"):
            made = Optimizer(
                params, self._step, kind=kind, moment_width=width, lossless=lossless, max_grad_norm=max_grad_norm,
                **options,
            )  # fmt: skip
        if first:
            announce(self.preparation.described(self._memory.pin_seconds))
        self._last_optimizer = weakref.ref(made)
        return made

    def window(
        self, tasks: Sequence[Callable[[], Result]], *, full_step: bool = False, whole: bool | None = None
    ) -> list[Result]:
        """Run micro-batches together and return their results. Each task runs one forward and backward.

        Each block's weights are fetched once for all tasks. The gradients are bitwise those of running the tasks one
        after the other: random numbers are seeded per task, and gradients are added in order. If a task runs several
        backwards through a block, they agree within FP32 rounding.

        Set `full_step=True` if these are all micro-batches of the step and each runs a block once: gradient sums are
        then rounded to the gradient dtype before they are copied. If a task fails, its error is raised and all
        gradients of the step are dropped.
        """
        if whole is not None:
            renamed("Engine.window(whole=...)", "full_step")
            full_step = whole
        self._memory.owner.require("run a window")
        most = self.settings.window
        if (
            most is not None
            and len(tasks) > (most if isinstance(most, int) else max(most))
            and not self._warned_of_window
        ):
            self._warned_of_window = True
            warn(f"window={most!r} has no effect on engine.window(), which runs all {len(tasks)} tasks together")
        self.memory_limit.set_window_size(len(tasks))
        return self._step.window(tasks, full_step)

    def window_size(self, batch: Any) -> int | Sequence[int]:
        """How many micro-batches like this one fit into a window, or `Settings.window` if it is set."""
        return self._headroom.window_size(batch, len(self.blocks))

    @property
    def revisits(self) -> bool:
        """Whether a micro-batch of a window produced a block's gradient twice (two forwards, or two backwards)."""
        return self._step.revisits

    @property
    def ram(self) -> RamMonitor:
        """Monitors the RAM that is left under the limits of this process."""
        return self._placement.ram_monitor

    @property
    def drive(self) -> DriveLife:
        """Counts what the run writes to disk."""
        return self._placement.drive

    def grad_norm(self) -> float:
        """The global norm of the gradients accumulated so far, before clipping. Waits for the backward."""
        return self._step.grad_norm()

    def synchronize(self) -> None:
        """Wait for all submitted copies and updates."""
        self._step.synchronize()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def quiesce(self) -> None:
        """Wait until all lanes are idle, so that none uses or allocates memory."""
        self._lanes.quiesce()

    def loss_only(self) -> AbstractContextManager[None]:
        """Inside, forwards without gradients compute the loss in chunks and return lazy logits."""
        return nullcontext() if self._step.head is None else self._step.head.set_loss_only(True)

    def smoothed_loss(self, logits: Any, labels: torch.Tensor, **options: Any) -> torch.Tensor | None:
        """`Head.smoothed_loss` of the model's head; None if it has none."""
        return None if self._step.head is None else self._step.head.smoothed_loss(logits, labels, **options)

    @contextmanager
    def trace(self) -> Iterator[Timeline]:
        """Record a timeline of all lanes. It is complete when the context ends."""
        self.synchronize()
        self._lanes.timeline.start()
        try:
            yield self._lanes.timeline
        finally:
            self.synchronize()
            self._lanes.timeline.stop()

    def record(self, path: str | os.PathLike[str]) -> Record:
        """Append what the run does to a file of JSON lines, or to `run.jsonl` in a directory (docs/record.md).

        Every `optimizer.step()` becomes a line; `record.log(loss=loss)` adds to it. The record is a context manager,
        and is closed with the engine at the latest.
        """
        return self.open_record(path, step=max((steps for slab in self.slabs for steps in slab.steps), default=0))

    def open_record(self, path: str | os.PathLike[str] | None, step: int, **more: Any) -> Record:
        """The same from a given step on, with `more` in its first line; no path: nothing is written."""
        self._memory.owner.require("record a run")
        start = {} if path is None else described(self, self._last_optimizer())
        return self._step.recording.open(path, start | {"resumed_from_step": step or None} | more, step)

    def forget_forward(self) -> None:
        """Forget a forward that will have no backward, as if it had not run."""
        self._step.forget_forward()
        self.restart_step()

    def restart_step(self) -> None:
        """Leave what was done since the last step out of the next one's times."""
        self._lanes.timeline.restart_step()

    def host_state_dict(self) -> dict[str, torch.Tensor]:
        """The model's state dict for saving, in the dtypes that the model was loaded in.

        Parameters are copied to host memory one by one, when they are written.
        """
        self._check_parameters_attached()
        return exported(self.model.state_dict())

    def survivors(self) -> Survivors:
        """The weights that are left after a drive failed; some may have taken a step that others have not."""
        self.quiesce()
        return Survivors(self._step.updates.disk.unwritten)

    def save(self, directory: str | os.PathLike[str], optimizer: Optimizer | None = None) -> None:
        """Write a Hugging Face model directory and, with an optimizer, its exact state.

        A previous save in the directory is replaced atomically. Unrelated files are kept.
        """
        self.ready_to_save()
        began = time.perf_counter()
        saving.save(self.model, self.host_state_dict, directory, optimizer, self.ram.portion, facts_of_run(self))
        self._step.recording.event("save", path=os.fspath(directory), seconds=time.perf_counter() - began)
        self.restart_step()

    def load(self, directory: str | os.PathLike[str], optimizer: Optimizer | None = None) -> None:
        """Load what `save` wrote; training continues bit for bit. All files are checked before anything is changed."""
        self._step.raise_errors()
        began = time.perf_counter()
        saving.load(self.model, directory, optimizer, lambda content: check_resume(self, content, directory))
        if optimizer is not None:
            steps = max((n for slab in self.slabs for n in slab.steps), default=0)
            self._step.recording.resumed(steps, directory, time.perf_counter() - began)

    def ready_to_save(self) -> None:
        """Wait for the last step, and raise if the weights are inconsistent. Frees unused buffers if RAM is low."""
        self._step.require_consistent_weights()
        if self.ram.low:
            for slab in self.slabs:
                slab.grad.free_unused()
            self._memory.trim()

    @property
    def step_times(self) -> StepTimes | None:
        """Times of the latest completed step: how long each lane was busy, and how long compute waited for it."""
        self._lanes.timeline.settle(wait=False)
        return self._lanes.timeline.last

    def close(self) -> None:
        """Finish pending updates and stop. Weights can still be read and saved; running needs a new engine."""
        try:
            if not self.closed and self._memory.owner.is_current:
                self.synchronize()
                self._step.recording.close()
        finally:
            self._attached.close()

    def release(self) -> torch.nn.Module:
        """Close the engine and return the model as an ordinary one on the CPU."""
        self._adoption.require_ram_for_release()
        self.close()
        self._attached.release()
        return self.model

    def __deepcopy__(self, memo: Any) -> Engine:
        raise MegaTrainError(NO_DEEP_COPY)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if kind is not None and not self.closed:
            self._step.recording.close(error)
            # A lane may hang after an error, which must still reach the user.
            self._attached.close(CLOSE_TIMEOUT)
            return
        self.close()

    def _check_parameters_attached(self) -> None:
        """Raise if a parameter was replaced after attaching: it would be saved but never trained."""
        for name, parameter in self.model.named_parameters():
            if not isinstance(parameter, StoreTensor):
                raise ModelMoved(
                    f"{name} was replaced after the engine was attached, so the engine would not train it; change the "
                    "model before attaching, or write into the parameter (`parameter.data.copy_`)."
                )
