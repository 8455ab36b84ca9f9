"""Attaches an engine to a model: `ATTACH_STEPS`, in order. Each step registers its undo before it changes anything.

If a step fails or is interrupted, all changes are undone and the model is as before. `Engine.close` and
`Engine.release` run the same undo lists (engine/undo.py).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from megatrain import process
from megatrain.compute.block import Block
from megatrain.compute.compiled import Compiled
from megatrain.compute.head import Head
from megatrain.compute.interrupts import DeferInterrupts
from megatrain.engine.adopt import Adoption, disable_checkpointing, patch_model
from megatrain.engine.decide import Decided
from megatrain.engine.headroom import Headroom
from megatrain.engine.memory_limit import HeldState, MemoryLimit, Policies
from megatrain.engine.placement import Placement
from megatrain.engine.recording import Recording
from megatrain.engine.step import Step
from megatrain.engine.summary import announce_attached, attention_shape
from megatrain.engine.undo import Undo
from megatrain.errors import DiskFailed, EngineClosed, LaneFailed
from megatrain.geometry import chunk_tokens, fuses_loss
from megatrain.hardware import inventory
from megatrain.hardware.attention import request_backend
from megatrain.model.transformers_api import can_chunk_loss, output_embedding, uses_causal_loss
from megatrain.optim.schedule import Updates
from megatrain.store.forks import Owner
from megatrain.store.slab import Slab
from megatrain.stream import cuda
from megatrain.stream.activations import Activations
from megatrain.stream.disk import DiskStream
from megatrain.stream.disk_gradients import DiskGradients
from megatrain.stream.disk_inputs import DiskInputs
from megatrain.stream.disk_transfer import DiskTransfers
from megatrain.stream.disk_weights import DiskWeights
from megatrain.stream.drain import Drain
from megatrain.stream.fetch import Fetcher
from megatrain.stream.lanes import SyncLanes
from megatrain.stream.states import StateStream
from megatrain.stream.sums_out import SumsOut
from megatrain.stream.transfer import Link
from megatrain.telemetry.notices import warn

if TYPE_CHECKING:
    from megatrain.engine.session import Engine

CLOSE_TIMEOUT = 3.0
"""Seconds to wait for lanes when an engine is closed after an error or at process exit."""


class Attachment:
    """The parts of one engine."""

    def __init__(self, engine: Engine, decided: Decided) -> None:
        self.model, self.device, self.settings = engine.model, engine.device, decided.settings
        self.engine, self.decided, self.transformers_api = engine, decided, decided.transformers_api
        self.closed = False
        self.on_close, self.on_release = Undo(Owner()), Undo()
        self._free_disk: Callable[[], None] = lambda: None
        try:
            for step in ATTACH_STEPS:
                with engine.preparation.timing(step.__name__):
                    step(self)
            self.adoption.commit()
        except BaseException:
            with DeferInterrupts():
                try:
                    self.close(CLOSE_TIMEOUT)
                finally:
                    self.release()
            raise

    def close(self, timeout: float | None = None) -> None:
        """Undo all changes except those to the model."""
        self.closed = True
        self.on_close.timeout = timeout
        self.on_close.run()

    def release(self) -> None:
        """Undo the changes to the model; call `close` first. What is on disk is freed last. If this fails, the model
        still needs it, unless the drive or an update failed."""
        try:
            self.on_release.run()
        except (DiskFailed, LaneFailed):
            self._free_disk()
            raise
        self._free_disk()

    # ---- the steps

    def create_tiers(self) -> None:
        """Create the memory tiers. Nothing is allocated yet."""
        self.placement = Placement(self.settings, self.device)
        self.on_close.add(self.placement.ram.unpin)
        if self.placement.disk is not None:
            # Not by `close`: FP32 masters can still be read, and their low halves may be on disk.
            self._free_disk = self.placement.disk.close

    def limit_gpu_memory(self) -> None:
        """Limit PyTorch's allocator to what `max_vram_gb` or the plan allows."""
        ram = self.placement.ram
        self.memory_limit = MemoryLimit(self.settings, self.device, self.model, pinned=lambda: ram.pinned)
        self.on_close.add(self.memory_limit.release)
        self.memory_limit.apply()

    def start_lanes(self) -> None:
        """Start the lanes and their threads."""
        on_close = self.on_close
        with DeferInterrupts():
            self.lanes = lanes = cuda.choose_lanes(
                self.settings.debug.lanes, self.device, disk=self.placement.disk is not None
            )
            on_close.add(lambda: lanes.close(patience=on_close.timeout))
        on_close.add(lambda: process.release(on_close))
        if not isinstance(self.lanes, SyncLanes):
            process.switch_interval.request(on_close, process.SWITCH_INTERVAL)

    def choose_attention_backend(self) -> None:
        """Set the order in which PyTorch tries the backends of attention, from a table (hardware/attention.py)."""
        request_backend(self.on_close, self.device, attention_shape(self.engine))

    def adopt_model(self) -> None:
        """Move weights into the store and route the blocks' forwards through the step, which is built next."""
        # The garbage collector cannot see hooks of parameters, so a strong reference would keep the engine alive.
        reference = weakref.ref(self)

        def add_loose_gradient(slab: Slab, index: int, gradient: torch.Tensor) -> None:
            if (attachment := reference()) is not None:
                attachment.step.add_loose_gradient(slab, index, gradient)

        decided = self.decided
        self.adoption = Adoption(self.model, self.device, decided.precision, self.placement, decided.saved_dtypes)
        self.adoption.adopt(decided.specs, add_loose_gradient, lambda *call: self.step.forward(*call), self.on_release)
        # Parameters outside any block are in slabs that are named after the module that owns them.
        names = [block.name for block in self.adoption.blocks] + [slab.name for slab in self.adoption.slabs]
        self.placement.check(names, self.adoption.slabs)

    def build_step(self) -> None:
        """Build the training step and the parts that move its data."""
        settings, device, lanes, slabs = self.settings, self.device, self.lanes, self.adoption.slabs
        blocks, counters = self.adoption.blocks, self.engine.counters
        self.memory_limit.policies = Policies(settings.policy, [block.name for block in blocks])
        link = Link(device, lanes, counters, inventory.cores())
        # Loose parameters are read where they are used, so they need no slot.
        fetched = [slab for slab in slabs if any(slab in block.slabs for block in blocks)]
        transfers = DiskTransfers(counters)
        weights = DiskWeights(slabs, self.placement.ram, lanes, transfers)
        fetcher = Fetcher(fetched, settings.debug.slots, link, weights)
        gradients = DiskGradients(slabs, self.placement.ram, lanes, transfers)
        drain = Drain(slabs, settings.debug.grad_slots, link, gradients)
        sums_out = SumsOut(slabs, link)
        states = StateStream(fetched, fetcher, link)
        disk = DiskStream(slabs, self.placement.ram, lanes, transfers)
        inputs = None
        if self.placement.disk is not None:
            inputs = DiskInputs(settings.inputs_on_disk, self.placement.disk, self.placement.ram, lanes, transfers)
        for slab in slabs:
            slab.grad.accumulates = settings.plan is not None and settings.plan.run.accumulation > 1
        ram_monitor = self.placement.ram_monitor
        precision = self.decided.precision
        self.headroom = Headroom(self.model, device, precision, settings, ram_monitor, fetcher, drain)
        self.step = Step(
            device=device,
            slabs=slabs,
            lanes=lanes,
            fetcher=fetcher,
            drain=drain,
            updates=Updates(slabs, self.placement.kernels(), lanes, sums_out, states, disk, gradients, counters),
            activations=Activations(link, self.placement.ram, inputs),
            transformers_api=self.transformers_api,
            memory_limit=self.memory_limit,
            ram_monitor=ram_monitor,
            drive=self.placement.drive,
            recording=Recording(lanes.timeline, lambda: ram_monitor.own, self.placement.drive.since_last),
            check_open=self.check_open,
        )
        self.memory_limit.held_state = HeldState(slabs, fetcher, sums_out, states)
        self.on_close.add(self.step.window_threads.close)
        self.on_close.add(self.step.recording.end)

    def reserve_gpu_memory(self) -> None:
        """Reserve all GPU memory of the plan."""
        self.memory_limit.reserve(self.lanes.quiesce)

    def prepare_blocks(self) -> None:
        """Disable gradient checkpointing, compile layers if requested, and register the blocks."""
        blocks = self.adoption.blocks
        if blocks:
            disable_checkpointing(self.model, self.on_release)
        if self.settings.compile:
            self._share_compiled([block for block in blocks if block.layer])
        self.step.set_blocks(blocks)

    def _share_compiled(self, blocks: list[Block]) -> None:
        """Give blocks of the same structure the same compiled code."""
        plan, policies = self.settings.plan, self.memory_limit.policies
        planned = None if plan is None else (plan.run.micro_batch, plan.run.length)
        decided, names = partial(self.step.recording.event, "compiled"), Counter[str]()
        for structure in {block.structure: None for block in blocks}:
            alike = [block for block in blocks if block.structure == structure]
            recomputes = any(policies[block.name] != "store" for block in alike)
            name = type(alike[0].module).__name__
            names[name] += 1
            name += f" {names[name]}" if names[name] > 1 else ""
            compiled = Compiled(name, self.device, planned, recomputes, decided, len(alike))
            for block in alike:
                block.compiled = compiled

    def chunk_head(self) -> None:
        """Compute the loss in chunks of tokens if the model is a causal LM with transformers' own loss."""
        model, loss, chunk = self.model, self.transformers_api.causal_loss, self.settings.head_chunk
        module: Any = output_embedding(model) if chunk != 0 and can_chunk_loss(model, loss) else None
        block = next((block for block in self.adoption.blocks if block.module is module), None)
        if block is None:
            if chunk:
                warn(f"head_chunk={chunk} has no effect: logits of {type(model).__name__} are computed whole")
            return
        features = module.weight.shape[0]
        fused = fuses_loss(bool(self.settings.compile), self.device.type == "cuda")
        self.step.head = Head(self.step, block, loss, features, chunk or chunk_tokens(features, fused), fused)
        # The innermost module that calls the loss function: adapters wrap it.
        owner = [inner for inner in model.modules() if uses_causal_loss(inner, module, loss)][-1]
        self.on_release.patch(owner, "_loss_function", self.step.head.loss, keep_user_value=True)

    def connect_model(self) -> None:
        """Connect engine and model: the engine's parts, the model's hooks and patched methods."""
        engine = self.engine
        with DeferInterrupts():
            engine._set_parts(self)
            # The list must not refer to the engine: it would keep it alive.
            weakref.finalize(engine, _close_at_exit, self.on_close)
            patch_model(engine, self.transformers_api, self._start_forward, self.on_release)
        announce_attached(engine, engine.expected_kind)

    # ---- callbacks

    def check_open(self) -> None:
        if self.closed:
            raise EngineClosed(
                "this engine is closed: its model's weights can still be read and saved, but to run or train it attach "
                "a new megatrain.Engine(model)."
            )

    def _start_forward(self, inputs: Any) -> None:
        self.headroom.check_batch(inputs)
        self.step.recording.begun(inputs)
        self.step.start_forward()


ATTACH_STEPS: tuple[Callable[[Attachment], None], ...] = (
    Attachment.create_tiers,
    Attachment.limit_gpu_memory,
    Attachment.start_lanes,
    Attachment.choose_attention_backend,
    Attachment.adopt_model,
    Attachment.build_step,
    Attachment.reserve_gpu_memory,
    Attachment.prepare_blocks,
    Attachment.chunk_head,
    Attachment.connect_model,
)


def _close_at_exit(on_close: Undo) -> None:
    """Close an engine that was garbage-collected or is alive at process exit."""
    on_close.timeout = CLOSE_TIMEOUT
    # CUDA may already be shut down.
    with suppress(RuntimeError):
        on_close.run()
