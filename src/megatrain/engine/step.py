"""One training step, from the forward pass to the optimizer update.

    forward    1. The model calls a block. Its weights are already in a device slot, because they were prefetched.
               2. The block runs, its slot is released, and the next block's weights are prefetched.
    head       The last block returns lazy logits. The model's loss computes them chunk by chunk, and differentiates
               each chunk immediately (compute/head.py).
    backward   1. Autograd reaches a block's node. The weights are fetched again.
               2. The block is recomputed and differentiated. Its gradients are copied to host memory.
    step       1. The gradient norm is computed, and the updates are submitted to the update lane in forward order.
               2. The first blocks of the next forward are prefetched, each as soon as its own update is done.
               Without clipping, updates start during the last backward of the step (`final_backward`).

Resident and held weights need no fetch, and gradient sums on the device need no copy out. Optimizer states of a block
that has both may be staged on the device for their update (stream/states.py).

Compute runs in the user's thread. Copies and updates run on lanes (stream/lanes.py). Each job declares what it reads
and writes, and waits for earlier users of that memory (store/ticket.py).

Several threads may run the model. One lock guards slots, gradients and counters; it is not held during compute. A
thread that only evaluates has its own predictor. A Ctrl-C inside a critical section is raised at the end of that
section (compute/interrupts.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from megatrain import host_copies
from megatrain.compute import node
from megatrain.compute.block import Block
from megatrain.compute.head import Head
from megatrain.compute.interrupts import DeferInterrupts
from megatrain.compute.node import CallInfo
from megatrain.compute.window import OUTSIDE_WINDOW, WindowThreads, wait_for_turn
from megatrain.engine.calls import CallTracker
from megatrain.engine.drive import DriveLife
from megatrain.engine.memory_limit import MemoryLimit
from megatrain.engine.recording import Recording
from megatrain.errors import UnsupportedCall
from megatrain.hardware.ram_monitor import RamMonitor
from megatrain.model.transformers_api import TransformersApi
from megatrain.optim.schedule import Outcome, RuleTable, Updates
from megatrain.store.gradient import OUTSIDE_BLOCKS, CallId
from megatrain.store.parameter import StoreTensor
from megatrain.store.slab import Slab
from megatrain.stream.accumulate import WindowSums
from megatrain.stream.activations import Activations
from megatrain.stream.ahead import Ahead
from megatrain.stream.drain import Drain
from megatrain.stream.fetch import Fetcher, Lease
from megatrain.stream.lanes import Lanes

Result = TypeVar("Result")


@dataclass(kw_only=True, eq=False)
class Step:
    """Runs blocks on streamed weights, collects their gradients, and releases updates."""

    device: torch.device
    slabs: Sequence[Slab]
    lanes: Lanes
    fetcher: Fetcher
    drain: Drain
    updates: Updates
    activations: Activations
    transformers_api: TransformersApi
    memory_limit: MemoryLimit
    recording: Recording
    ram_monitor: RamMonitor
    drive: DriveLife
    check_open: Callable[[], None]
    head: Head | None = None
    """The block that returns lazy logits, if the model has one."""
    revisits: bool = False
    """Whether a micro-batch of a window ran a block twice, which changes the order of its gradient sum."""

    def __post_init__(self) -> None:
        self.blocks: list[Block] = []
        self.window_threads = WindowThreads(self.device)
        self._lock = self.fetcher.lock
        self._calls = CallTracker(self.window_threads, self._lock)
        self.ahead = Ahead([])
        self._forward_order: dict[int, None] = {}
        self._block_of_slab: dict[int, int] = {}
        """Slab → block, for slabs that only one block uses."""
        self._window_sums: WindowSums | None = None
        for slab in self.slabs:
            # These must not refer to the engine. Parameters refer to them, and the garbage collector cannot see through
            # autograd, so the engine would never be freed.
            slab.grad.merge, slab.grad.refuse_late = self.drain.merge, self.updates.refuse_late

    def set_blocks(self, blocks: list[Block]) -> None:
        """Set the blocks, in the order in which the model registers them."""
        self.blocks, self.ahead = blocks, Ahead([block.slabs for block in blocks])
        users = Counter(slab.index for block in blocks for slab in block.slabs)
        for slab in self.slabs:
            slab.shared = users[slab.index] > 1
        self._block_of_slab = {slab.index: block.index for block in blocks for slab in block.slabs}
        for block in blocks:
            block.allow_nested_calls(blocks)

    # ---- forward and backward

    def forward(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any], *, materialize: bool = False) -> Any:
        """Run a block for the model. The head returns lazy logits unless `materialize` is set."""
        self._enter_model()
        if not materialize and self.head is not None and self.head.can_defer(block, args, kwargs):
            return self.head.logits(args[0], partial(self.forward, block, args, kwargs, materialize=True))
        if torch.is_grad_enabled():
            args, kwargs = self.transformers_api.without_cache(args, kwargs)
        # A recompute does not follow what the host reads, and runs the same compiled code.
        with host_copies.paused():
            return node.run(self, block, args, kwargs, self.transformers_api.active_capture())

    @contextmanager
    def weights(self, block: Block, phase: str) -> Iterator[dict[int, torch.Tensor]]:
        """Yield the block's weights on the device, by slab, and prefetch those of the next blocks.

        `phase` is "forward", "backward" or "inference".
        """
        self.ram_monitor.check()
        # Micro-batches of a window do not wait at the head: the logits of all of them would be in memory at once.
        if phase != "inference" and (self.head is None or block is not self.head.block):
            wait_for_turn(block.index if phase == "forward" else 2 * len(self.blocks) - block.index)
        evaluating = phase == "inference" and self._calls.evaluating()
        with self._lock:
            if phase == "forward":
                self._forward_order.setdefault(block.index)
            ahead = self.ahead.after(phase, block.index, evaluating)
        lease = Lease()
        try:
            try:
                self.fetcher.acquire(lease, block.slabs, ahead, evaluating)
                with self._span(f"{phase} {block.name}"):
                    yield lease.views
            except torch.OutOfMemoryError as error:
                if not self.updates.early_started:
                    error.add_note(
                        f"megatrain: the GPU ran out of memory in the {phase} of {block.name}. No weight was changed: "
                        "after zero_grad() training can go on, with fewer tokens at a time or with policy='offload'."
                    )
                raise
            finally:
                self.fetcher.release(lease)
        finally:
            # In case a Ctrl-C ended the first call.
            self.fetcher.release(lease)

    def expect_gradients(self, block: Block, call_id: CallId) -> None:
        """Fetch the sums of earlier windows that this call's gradients will be added to, if slots are free."""
        if self._window_sums is None or self.window_threads.current() == OUTSIDE_WINDOW:
            return
        with self._lock, DeferInterrupts():
            self.window_threads.check()
            for slab in block.slabs:
                self._window_sums.fetch(slab, call_id)

    def add_gradients(self, slab: Slab, call_id: CallId, gradients: dict[int, torch.Tensor]) -> None:
        """Add gradients of a slab's parameters, given by segment, to the sum of this call of the block."""
        if slab.grad.scale != 1.0:
            slab.grad.writable()  # applies the pending clip factor, which must not scale the new gradient
        with self._lock, DeferInterrupts():
            self.window_threads.check()
            if self._window_sums is not None and self.window_threads.current() == OUTSIDE_WINDOW:
                raise UnsupportedCall(
                    f"a gradient for {slab.name} came from a thread outside the window that is open; let other threads "
                    "call backward() before or after the window."
                )
            self.updates.refuse_late(slab.grad)
            # An embedding with sparse=True has sparse gradients.
            gradients = {index: g if g.layout is torch.strided else g.to_dense() for index, g in gradients.items()}
            (self._window_sums or self.drain).collect(slab, call_id, gradients)

    def backward_done(self, block: Block) -> None:
        """Note that one backward through a block has added all its gradients."""
        with self._lock, DeferInterrupts() if self.updates.early else nullcontext():
            self._calls.backward_done(block)
            if block.index == 0:
                # Here the host is ahead of the device, so reading timers costs nothing.
                self.lanes.timeline.settle(wait=False)
            for slab in block.slabs:
                if self._window_sums is None or not self._window_sums.has_pending(slab):
                    self._gradient_complete(slab)

    def _gradient_complete(self, slab: Slab) -> None:
        """Allow the slab's update to start if no other gradient for it can follow in this step."""
        if not slab.shared and self._calls.all_backwards_done(self._block_of_slab[slab.index]):
            if self.updates.early:
                self.fetcher.wait_for_evaluations()
            self.updates.gradient_complete(slab)

    def add_loose_gradient(self, slab: Slab, index: int, gradient: torch.Tensor) -> None:
        """Add the gradient of a parameter that was used outside any block."""
        node.refuse_create_graph(slab.layout.segments[index].name)
        slab.shared = True
        self.add_gradients(slab, OUTSIDE_BLOCKS, {index: gradient})

    def start_forward(self) -> None:
        """Start counting calls of blocks: a forward of the model, or of a part of it, begins."""
        self._calls.start_forward()

    def forget_forward(self) -> None:
        """Forget a forward before the first step, as if it had not run."""
        with self._lock:
            self._calls, self._forward_order = CallTracker(self.window_threads, self._lock), {}
            self.set_blocks(self.blocks)

    def start_call(self, block: Block) -> CallInfo:
        """Register a call of a block that will be differentiated."""
        return self._calls.start_call(block, self.memory_limit.policies[block.name])

    # ---- window

    def window(self, tasks: Sequence[Callable[[], Result]], full_step: bool) -> list[Result]:
        """Run micro-batches together: each block's weights are fetched once, and its gradients are copied out once."""
        self.raise_errors()
        self._calls.mark_training_thread()
        if self._window_sums is not None:
            raise UnsupportedCall("a window cannot be opened inside a window; pass all micro-batches to one.")
        seeds = torch.randint(0, 2**62, (len(tasks),), device="cpu").tolist()
        if len(tasks) > 1:
            for slab in self.slabs:
                slab.grad.accumulates = True
        self._window_sums = sums = WindowSums(self.drain, full_step, self.window_threads, self._gradient_complete)
        try:
            results = self.window_threads.run(
                [partial(self._run_task, task) for task in tasks], seeds, sums.micro_batch_finished
            )
            with self._lock, DeferInterrupts():
                sums.close()
        except BaseException:
            sums.abandon()
            # Some sums have been copied out and others have not: only dropping all gradients is consistent.
            self.zero_grad()
            raise
        finally:
            self._window_sums = None
            self.revisits = self.revisits or sums.repeated_call
        return results

    def _run_task(self, task: Callable[[], Result]) -> Result:
        self.start_forward()
        return task()

    # ---- step

    def step(self, rules: RuleTable, max_norm: float | None, owner: object) -> Outcome:
        """Submit the updates. In the next forward a block waits for its own update only."""
        self.raise_errors()
        self.drive.require()
        self._calls.mark_training_thread()
        with self._lock:
            self.fetcher.wait_for_evaluations()
            with DeferInterrupts():
                order = self._slabs_in_forward_order()
                self.drive.stepped()
                outcome = self.updates.submit_step(rules, max_norm, order, owner)
                self._forward_order = {}
                self._calls.after_step()
                page = self.lanes.timeline.cut()
                self.fetcher.refresh(order)
                self.fetcher.prefetch(self.ahead.after_step())
        self.memory_limit.after_step(self._calls.steps, self.lanes.quiesce)
        self.ram_monitor.after_step()
        self.recording.stepped(page, rules, outcome)
        return outcome

    @contextmanager
    def final_backward(self, rules: RuleTable, owner: object) -> Iterator[None]:
        """Start each slab's update during the backward inside, as soon as its gradient is complete."""
        self.raise_errors()
        # Only after one step is it known which parameters several calls share; those wait for all their gradients.
        if self._calls.steps > 0:
            with self._lock:
                self.updates.start_early(rules, owner)
        try:
            yield
        except BaseException:
            self.updates.abandon()
            raise

    def owns(self, parameter: Any) -> bool:
        """Whether a parameter is stored in one of this engine's slabs."""
        if not isinstance(parameter, StoreTensor) or parameter.slab.index >= len(self.slabs):
            return False
        return self.slabs[parameter.slab.index] is parameter.slab

    def zero_grad(self) -> None:
        with self._lock, DeferInterrupts():
            self.updates.abandon()
            self._calls.discard_pending()
            for slab in self.slabs:
                slab.grad.clear()
            self.activations.drop_all()
        self.recording.dropped()

    def grad_norm(self) -> float:
        """The global norm of the gradients accumulated so far."""
        self.raise_errors()
        return self.updates.norm()

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients accumulated so far."""
        self.raise_errors()
        self.updates.scale(factor)

    # ---- errors and waiting

    def _enter_model(self) -> None:
        # Errors of lanes belong to the training thread.
        if self._calls.enter_model():
            self.raise_errors()
        else:
            self.check_open()

    def raise_errors(self) -> None:
        """Raise errors that occurred on lanes since the last call."""
        self.check_open()
        self.lanes.check()
        self.updates.check()

    def require_consistent_weights(self) -> None:
        """Raise if some weights belong to a later step than others, or the last gradients were not finite."""
        self.updates.wait_for_outcome()
        self.raise_errors()
        if self.updates.early_started:
            raise UnsupportedCall(
                "a checkpoint cannot be saved between final_backward() and step(): some weights are already "
                "updated; save after step()."
            )

    def synchronize(self) -> None:
        """Wait for all submitted copies and updates."""
        for slab in self.slabs:
            slab.wait_for_all_work()
        self.lanes.check()

    def _slabs_in_forward_order(self) -> list[Slab]:
        """Slabs in the order of the last forward, then those that it did not use."""
        ordered = {slab.index: slab for index in self._forward_order for slab in self.blocks[index].slabs}
        return list((ordered | {slab.index: slab for slab in self.slabs if slab.index not in ordered}).values())

    def _span(self, label: str) -> AbstractContextManager[None]:
        timeline = self.lanes.timeline
        return (timeline.device_span if self.device.type == "cuda" else timeline.host_span)("compute", label)
