"""The lifetime of an engine: attach to a model, hand out its optimizer, save, load, close."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from megatrain import settings as settings_module
from megatrain.compute.block import Block
from megatrain.compute.compiled import Compiled
from megatrain.compute.window import Seats
from megatrain.engine import saving
from megatrain.engine.adopt import Adoption, disable_checkpointing, precision_of, saved_dtypes
from megatrain.engine.headroom import Headroom
from megatrain.engine.lazyhead import LazyHead
from megatrain.engine.placement import Placement, announce_unavailable, place_one_block
from megatrain.engine.planning import follow
from megatrain.engine.relief import Policies, Relief
from megatrain.engine.step import Step
from megatrain.engine.surface import Surface, engine_of
from megatrain.errors import AlreadyAttached, EngineClosed, MegaTrainError, ModelMoved, SettingsError
from megatrain.geometry import MOST_MICRO_BATCHES
from megatrain.hardware import inventory
from megatrain.hardware.machine import THREAD_BYTES
from megatrain.hardware.watch import RamWatch
from megatrain.model import hooks as transformers_hooks
from megatrain.model.blocks import find_blocks
from megatrain.model.skeleton import config_of
from megatrain.optim.optimizer import Optimizer, rule_named
from megatrain.optim.schedule import Updates
from megatrain.settings import Settings
from megatrain.store.export import exported
from megatrain.store.forks import Owner
from megatrain.store.parameter import Deposit, StoreTensor
from megatrain.store.slab import Slab
from megatrain.stream import cuda
from megatrain.stream.activations import Activations
from megatrain.stream.drain import Drain
from megatrain.stream.fetch import Fetcher
from megatrain.stream.lanes import Lanes
from megatrain.stream.timeline import StepTimes, Timeline
from megatrain.stream.transfer import Transfer
from megatrain.telemetry.counters import Counters

Result = TypeVar("Result")
PATIENCE = 3.0
"""Seconds that lanes get to finish when an engine is left because of an error, or the process ends."""


class Engine:
    """Trains a model whose weights stay in host memory; the GPU holds a few layers at a time.

    `model` keeps its interface: call it, call `.backward()` on any loss, read `parameters()`, `state_dict()` and
    `save_pretrained()`. Keyword arguments are the fields of `Settings`, on top of what `megatrain.init` was given.
    """

    def __init__(self, model: torch.nn.Module, **overrides: Any) -> None:
        self.settings: Settings = follow(settings_module.current().override(**overrides))
        inventory.refuse_distributed()
        hooks = transformers_hooks.load()
        self._closed = False
        self.model = model
        self.device = inventory.choose_device(self.settings.device)
        previous = engine_of(model)
        if previous is not None and not previous.closed:
            raise AlreadyAttached(
                f"this {type(model).__name__} already belongs to an engine; use that one, or close it first."
            )
        saved = saved_dtypes(model)
        if previous is not None:
            previous.release()
            # A split master comes back as FP32; the mode of the run stays what it was.
            kept: str = previous.precision
            self.settings = self.settings.override(precision=self.settings.precision or kept)
        found = find_blocks(model, hooks)
        if all(item.loose for item in found):
            self.settings = place_one_block(self.settings, self.device, model)
        announce_unavailable(self.settings)
        self.precision: str = precision_of(model, self.settings.precision)
        self.counters = Counters()
        self._placement = Placement(self.settings, self.device)
        self._memory = memory = self._placement.ram
        self.relief = Relief(self.settings, self.device, model, pinned=lambda: memory.pinned)
        self._lanes = cuda.choose(self.settings.lanes, self.device)
        self._adoption = Adoption(model, self.device, self.precision, self._memory, self._placement.tier, saved)
        try:
            self.relief.hold_to_plan()
            # The flow needs the slabs, and the slabs' parameters deposit into the flow: adopt first, then build it.
            self._adoption.take(found, _weakly(self._deposit), self._run)
            self.slabs = self._adoption.slabs
            # Parameters outside any block lie in slabs that have a name of their own.
            self._placement.check([b.name for b in self.blocks] + [slab.name for slab in self.slabs])
            self._step = self._build(hooks)
            self.relief.take(self.quiesce)
        except BaseException:
            # Refused or interrupted half-way: the user gets the model back whole.
            self._adoption.release()
            self._lanes.close()
            self.relief.let_go()
            raise
        if self.blocks:
            disable_checkpointing(model)
        compiled = Compiled() if self.settings.compile else None
        for found_block in self._adoption.blocks:
            found_block.compiled = compiled if found_block.layer else None
        self._step.expect(self._adoption.blocks)
        self._lazy = self._lazy_head(hooks)
        self._surface = Surface(model, self, hooks, self._begin)
        # Not a method of self: the finalizer must not keep the engine alive.
        weakref.finalize(self, _stop, memory.owner, self._lanes, self._step.seats, self.relief)

    # ---- what users do

    @property
    def blocks(self) -> list[Block]:
        """The blocks that stream, in registration order."""
        return self._adoption.blocks

    @property
    def closed(self) -> bool:
        return self._closed

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
        """AdamW, "lion" or "sgd" over `params` (parameters or groups of the model; None: all that require grad).

        Options that are not given have torch's defaults (Lion: lr 1e-4, betas 0.9 and 0.99, no decay).
        """
        self._step.check()
        self._check_whole()
        if params is None:
            params = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            if not params:
                raise SettingsError("no parameter of the model requires grad, so there is nothing to optimize.")
        params = list(params)
        width = self.settings.moment_width
        listed = [p for item in params for p in (item["params"] if isinstance(item, dict) else [item])]
        owned = {p.slab.index: p.slab for p in listed if isinstance(p, StoreTensor) and self._step.owns(p)}
        self._placement.require_states(owned.values(), rule_named(kind), width, self._headroom.slots())
        options = {"lr": lr, "betas": betas, "eps": eps, "momentum": momentum, "weight_decay": weight_decay}
        lossless = self.settings.optimizer_compression == "lossless"
        return Optimizer(
            params, self._step, kind=kind, width=width, lossless=lossless, max_grad_norm=max_grad_norm, **options
        )

    def window(self, tasks: Sequence[Callable[[], Result]], *, whole: bool = False) -> list[Result]:
        """Run the micro-batches of a step together, each a function that does forward and backward; their results.

        Weights travel once for all of them. The gradients are bit for bit those of one task after the other: random
        numbers are seeded per task, and sums are in order (with several backwards through a block in one task: within
        FP32 rounding). `whole=True` says that these are all micro-batches of the step and that each passes a block
        once, so that a sum may be rounded to the gradient dtype before it travels. If a task fails, its error is raised
        and all gradients of the step are dropped.
        """
        self._memory.owner.require("run a window")
        self.relief.seated(len(tasks))
        return self._step.window(tasks, whole)

    def window_size(self, batch: Any) -> int:
        """How many micro-batches like this one may pass a block together: their inputs to every block must fit."""
        if not self.blocks:
            return 1  # nothing travels per block, so nothing is gained
        if self.settings.window is not None:
            return self.settings.window
        # Collators give a mapping of tokenizers' own, which is one leaf to a tree.
        leaves = pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
        tokens = max((t.numel() for t in leaves if isinstance(t, torch.Tensor)), default=1)
        config = config_of(self.model)
        hidden = getattr(config.get_text_config() if config is not None else None, "hidden_size", 1024)
        boundary = tokens * hidden * (4 if self.precision == "fp32" else 2) * len(self.blocks) * 2
        # Each has a thread, which takes some of the GPU too.
        boundary += THREAD_BYTES if self.device.type == "cuda" else 0
        boundary = max(boundary, self._headroom.of_batch(batch))
        return max(1, min(MOST_MICRO_BATCHES, inventory.free_memory(self.device) // 2 // max(boundary, 1)))

    @property
    def revisits(self) -> bool:
        """Whether a micro-batch of a window gave a block's gradient twice (two forwards, or two backwards)."""
        return self._step.revisits

    @property
    def ram(self) -> RamWatch:
        """What is left of RAM under the limits of this process."""
        return self._placement.watch

    def grad_norm(self) -> float:
        """The global norm of the gradients accumulated so far, before clipping; waits for the backward."""
        return self._step.norm()

    def synchronize(self) -> None:
        """Wait until every copy and update that was submitted is done."""
        self._step.settle()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def quiesce(self) -> None:
        """Wait until every lane has done what it was given: nothing of it uses or asks for memory then."""
        for lane in (self._lanes.h2d, self._lanes.d2h, self._lanes.vram, self._lanes.update):
            lane.submit(lambda: None, label="quiesce").wait()

    def loss_only(self) -> AbstractContextManager[None]:
        """Forwards without gradients inside are for their loss: logits stay uncomputed until somebody looks at them."""
        return nullcontext() if self._lazy is None else self._lazy.wanting(loss_only=True)

    @contextmanager
    def trace(self) -> Iterator[Timeline]:
        """Record what the lanes do inside the block; the timeline is complete when it ends."""
        self.synchronize()
        self._lanes.timeline.start()
        try:
            yield self._lanes.timeline
        finally:
            self.synchronize()
            self._lanes.timeline.stop()

    def host_state_dict(self) -> dict[str, torch.Tensor]:
        """The model's state dict for saving. Parameters are brought to host memory one by one, when they are written,
        in the dtype the model was loaded in: FP32 is joined from both halves of the master."""
        self._check_whole()
        return exported(self.model.state_dict())

    def save(self, directory: str | os.PathLike[str], optimizer: Optimizer | None = None) -> None:
        """Write an HF directory (sharded safetensors, config) and, with an optimizer, its exact state.

        What the directory held before is replaced in one step; files of others in it stay.
        """
        self.ready_to_save()
        saving.save(self.model, self.host_state_dict, directory, optimizer, self.ram.portion)

    def load(self, directory: str | os.PathLike[str], optimizer: Optimizer | None = None) -> None:
        """Read back what `save` wrote; training continues bit for bit. All is checked before anything is changed."""
        self._step.check()
        saving.load(self.model, directory, optimizer)

    def ready_to_save(self) -> None:
        """Wait for the last step to be decided, and raise if weights are between two steps. Make room if RAM is low."""
        self._step.whole()
        if self.ram.low:
            for slab in self.slabs:
                slab.grad.give_back()
            self._memory.trim()

    @property
    def step_times(self) -> StepTimes | None:
        """The newest step whose times are known: seconds each lane was busy, and compute waited for it."""
        self._lanes.timeline.settle(wait=False)
        return self._lanes.timeline.last

    def close(self) -> None:
        """Finish pending updates and stop. Weights stay readable; running the model needs a new engine."""
        if self._closed:
            return
        try:
            if self._memory.owner.here:
                self.synchronize()
        finally:
            self._end()

    def _end(self, patience: float | None = None) -> None:
        self._closed = True
        if self._memory.owner.here:
            self._step.close()
            self._lanes.close(patience=patience)
            self._memory.unpin()
            self.relief.let_go()
        if self._lazy is not None:
            self._lazy.detach()

    def release(self) -> torch.nn.Module:
        """Close, and give the model back as an ordinary one on the CPU."""
        self.close()
        if engine_of(self.model) is self:
            self._adoption.release()
            self._surface.remove()
        return self.model

    def __deepcopy__(self, memo: Any) -> Engine:
        raise MegaTrainError(
            "a model that belongs to an engine cannot be deep-copied: its weights live in the engine's store; "
            "copy it before attaching the engine, or load the copy from a saved directory."
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self._closed:
            # Whatever went wrong must reach the user, also when it left a lane that will never finish.
            self._end(PATIENCE)
            return
        self.close()

    # ---- how it is put together

    def _build(self, hooks: transformers_hooks.Hooks) -> Step:
        policies = self.relief.policies = Policies(self.settings.policy, [block.name for block in self.blocks])
        transfers = [Transfer(self.device, inventory.cores()) for _ in range(2)]
        # Loose parameters are read where they are used: no slot is for them.
        fetched = [slab for slab in self.slabs if any(slab in block.slabs for block in self.blocks)]
        fetcher = Fetcher(fetched, self.settings.slots, self.device, self._lanes, transfers[0], self.counters)
        drain = Drain(self.slabs, self.settings.grad_slots, self.device, self._lanes, transfers[1], self.counters)
        self._headroom = Headroom(self.model, self.precision, self.settings, self.ram, fetcher, drain)
        return Step(
            device=self.device,
            slabs=self.slabs,
            lanes=self._lanes,
            fetcher=fetcher,
            drain=drain,
            updates=Updates(self.slabs, self._placement.kernels(), self._lanes, self.counters),
            recorder=transformers_hooks.CaptureRecorder(hooks),
            for_training=lambda args, kwargs: transformers_hooks.without_cache(hooks, args, kwargs),
            check_open=self._check_open,
            activations=Activations(self.device, self._lanes, transfers[1], transfers[0], self._memory),
            policy=lambda block: policies[block.name],
            watch=self._placement.watch.check,
            stepped=self._stepped,
        )

    def _begin(self, inputs: Any) -> None:
        self._headroom.begin(inputs)
        self._step.begin_pass()

    def _stepped(self, steps: int) -> None:
        self.relief.stepped(steps, self.quiesce)
        self._placement.watch.stepped()

    def _lazy_head(self, hooks: transformers_hooks.Hooks) -> LazyHead | None:
        block = LazyHead.fits(self.model, self.blocks, hooks.causal_loss) if self.settings.head_chunk != 0 else None
        if block is None:
            return None
        lazy = LazyHead(self.model, self._step, block, hooks.causal_loss, self.settings.head_chunk)
        lazy.attach()
        self._step.unparked.add(block.index)
        return lazy

    def _run(self, block: Block, args: Any, kwargs: Any) -> Any:
        if self._lazy is not None and self._lazy.takes(block, args, kwargs):
            self._step.entered()
            return self._lazy.logits(args[0], lambda: self._step.forward(block, args, kwargs))
        return self._step.forward(block, args, kwargs)

    def _deposit(self, slab: Slab, index: int, gradient: torch.Tensor) -> None:
        self._step.deposit(slab, index, gradient)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed(
                "this engine is closed: its model's weights can still be read and saved, but to run or train it attach "
                "a new megatrain.Engine(model)."
            )

    def _check_whole(self) -> None:
        """A parameter that somebody put into the model after it was attached would be saved but never run."""
        for name, parameter in self.model.named_parameters():
            if not isinstance(parameter, StoreTensor):
                raise ModelMoved(
                    f"{name} was replaced after the engine was attached, so the engine does not know it; change the "
                    "model before attaching, or write into the parameter (`parameter.data.copy_`)."
                )


def _stop(owner: Owner, lanes: Lanes, seats: Seats, relief: Relief) -> None:
    # Threads, pinned memory and limits are those of the process that made the engine, not of a forked child.
    if not owner.here:
        return
    seats.close()
    lanes.close(patience=PATIENCE)
    # Of an engine that was closed nothing is left to let go; at the end of the process CUDA may be gone.
    with suppress(RuntimeError):
        relief.let_go()


def _weakly(deposit: Deposit) -> Deposit:
    """Autograd keeps the hooks of parameters out of the garbage collector's sight: they must not hold the engine."""
    reference = weakref.WeakMethod(deposit)

    def call(slab: Slab, index: int, gradient: torch.Tensor) -> None:
        target = reference()
        if target is not None:
            target(slab, index, gradient)

    return call
