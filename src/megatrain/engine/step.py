"""The whole flow of a training step, on one page.

    forward    the model calls a block → its weights are in a slot (fetched ahead) → it runs → the slot is released
    head       returns logits that are not computed yet → the model's loss takes them chunk by chunk, and each chunk is
               differentiated at once (compute/head.py)
    backward   autograd reaches the block's node → its weights are fetched again → it is recomputed and
               differentiated → its gradients are drained to host memory
    step       the norm is taken, updates are released in forward order on the update lane → at once, the first
               blocks of the next forward are fetched, each as soon as its own update is done (without clipping, and
               in a backward that is known to be the last, updates start there)

What stays on the device skips the copies: weights that are resident or held, and sums that are added to in call_id.
Where both are there, states may come to the device for their update and go back to RAM (stream/states.py).

Compute is the user's thread. Everything else runs on lanes (stream/lanes.py). A job says what it reads and writes, and
waits for whoever uses that memory (store/ticket.py).

Other threads may run the model meanwhile. One lock guards slots, gradients and counts, never compute. A thread that
only evaluates is a visitor, which keeps its own record of what comes next. A Ctrl-C in a section that changes several
of these is raised at its end (compute/interrupts.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

import torch

from megatrain.compute import node
from megatrain.compute.block import Block
from megatrain.compute.head import Head
from megatrain.compute.interrupts import DeferInterrupts
from megatrain.compute.node import CallInfo
from megatrain.compute.window import OUTSIDE_WINDOW, WindowThreads, wait_for_turn
from megatrain.engine.calls import CallTracker
from megatrain.engine.memory_limit import MemoryLimit
from megatrain.errors import UnsupportedCall
from megatrain.hardware.ram_monitor import RamMonitor
from megatrain.model.transformers_api import TransformersApi
from megatrain.optim.schedule import Outcome, RuleTable, Updates
from megatrain.store.gradient import OUTSIDE_BLOCKS, CallId
from megatrain.store.parameter import StoreTensor
from megatrain.store.slab import Slab
from megatrain.stream.accumulate import WindowSums
from megatrain.stream.activations import Activations
from megatrain.stream.drain import Drain
from megatrain.stream.fetch import Fetcher
from megatrain.stream.lanes import Lanes
from megatrain.stream.predict import BOUNDARY, Predictor
from megatrain.telemetry.notices import warn

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
    ram_monitor: RamMonitor
    check_open: Callable[[], None]
    head: Head | None = None
    """The block whose logits wait for the loss, if the model has one."""
    revisits: bool = False
    """Whether a micro-batch was seen to pass a block twice: in a window its sums have another order then."""

    def __post_init__(self) -> None:
        self.blocks: list[Block] = []
        self.window_threads = WindowThreads(self.device)
        self._lock = self.fetcher.lock
        self._calls = CallTracker(self.window_threads, self._lock)
        self._predictor = Predictor()
        self._forward_order: dict[int, None] = {}
        self._block_of_slab: dict[int, int] = {}
        """Slab → block, for slabs that only one block uses."""
        self._window_sums: WindowSums | None = None
        for slab in self.slabs:
            # Parameters lead to these, so they must not lead to the engine, which ends with its last user: autograd
            # keeps what parameters refer to out of the garbage collector's sight.
            slab.grad.merge, slab.grad.refuse_late = self.drain.merge, self.updates.refuse_late

    def set_blocks(self, blocks: list[Block]) -> None:
        """The first step has no past to predict from: assume registration order, there and back."""
        self.blocks = blocks
        users = Counter(slab.index for block in blocks for slab in block.slabs)
        for slab in self.slabs:
            slab.shared = users[slab.index] > 1
        self._block_of_slab = {slab.index: block.index for block in blocks for slab in block.slabs}
        self._predictor.assume([("forward", block.index) for block in blocks])
        self._predictor.assume([("backward", block.index) for block in blocks[::-1]])
        self._predictor.record(BOUNDARY)
        for block in blocks:
            block.allow_nested_calls(blocks)

    # ---- forward and backward

    def forward(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any], *, materialize: bool = False) -> Any:
        """The model calls a block. `materialize`: logits that were to wait for the loss are looked at."""
        self._enter_model()
        if not materialize and self.head is not None and self.head.can_defer(block, args, kwargs):
            return self.head.logits(args[0], partial(self.forward, block, args, kwargs, materialize=True))
        if torch.is_grad_enabled():
            args, kwargs = self.transformers_api.without_cache(args, kwargs)
        return node.run(self, block, args, kwargs, self.transformers_api.active_capture())

    @contextmanager
    def weights(self, block: Block, phase: str) -> Iterator[dict[int, torch.Tensor]]:
        """The block's weights on the device, and those of the blocks after it on their way."""
        self.ram_monitor.check()
        # A window does not wait at the head: the logits of its micro-batches must not pile up.
        if phase != "inference" and (self.head is None or block is not self.head.block):
            wait_for_turn(block.index if phase == "forward" else 2 * len(self.blocks) - block.index)
        evaluating = phase == "inference" and self._calls.evaluating()
        with self._lock:
            predictor = self._calls.evaluation_predictor(self.blocks) if evaluating else self._predictor
            predictor.record((phase, block.index))
            if phase == "forward":
                self._forward_order.setdefault(block.index)
            ahead = self._upcoming_slabs(predictor)
        lease = self.fetcher.acquire(block.slabs, ahead, evaluating)
        try:
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

    def add_gradients(self, slab: Slab, call_id: CallId, gradients: dict[int, torch.Tensor]) -> None:
        """Gradients of a slab's parameters, by segment, as a block's backward makes them."""
        if slab.grad.scale != 1.0:
            slab.grad.writable()  # what was clipped before stays clipped, and this one is not
        with self._lock, DeferInterrupts():
            self.window_threads.check()
            if self._window_sums is not None and self.window_threads.current() == OUTSIDE_WINDOW:
                raise UnsupportedCall(
                    f"a gradient for {slab.name} came from a thread outside the window that is open; let other threads "
                    "call backward() before or after the window."
                )
            self.updates.refuse_late(slab.grad)
            # An embedding with sparse=True gives rows; sums and updates are of whole parameters.
            gradients = {index: g if g.layout is torch.strided else g.to_dense() for index, g in gradients.items()}
            (self._window_sums or self.drain).collect(slab, call_id, gradients)

    def backward_done(self, block: Block) -> None:
        """One backward through a block has given all its gradients."""
        with self._lock, DeferInterrupts() if self.updates.early else nullcontext():
            self._calls.backward_done(block)
            if block.index == 0:
                # The host is ahead of the device here; between steps it is not.
                self.lanes.timeline.settle(wait=False)
            for slab in block.slabs:
                if self._window_sums is None or not self._window_sums.has_pending(slab):
                    self._gradient_complete(slab)

    def _gradient_complete(self, slab: Slab) -> None:
        """A gradient is on its way home: the slab's only one, if every forward through its block has come back."""
        if not slab.shared and self._calls.all_backwards_done(self._block_of_slab[slab.index]):
            if self.updates.early:
                self.fetcher.wait_for_evaluations()
            self.updates.gradient_complete(slab)

    def add_loose_gradient(self, slab: Slab, index: int, gradient: torch.Tensor) -> None:
        """The gradient of a parameter that the model or the loss used outside any block."""
        node.refuse_create_graph(slab.layout.segments[index].name)
        slab.shared = True
        self.add_gradients(slab, OUTSIDE_BLOCKS, {index: gradient})

    def start_forward(self) -> None:
        """A forward begins, of the whole model or of a part of it."""
        self._calls.start_forward()

    def start_call(self, block: Block) -> CallInfo:
        """A block is called, to be differentiated later."""
        call_id, calls = self._calls.start_call(block)
        replay_call_ids = partial(self._calls.replay_call_ids, calls)
        return CallInfo(call_id, self.memory_limit.policies[block.name], self._calls.multithreaded, replay_call_ids)

    # ---- window

    def window(self, tasks: Sequence[Callable[[], Result]], full_step: bool) -> list[Result]:
        """Run micro-batches together: each block's weights come once, and its gradients leave once."""
        self.raise_errors()
        self._calls.mark_training_thread()
        if self._window_sums is not None:
            raise UnsupportedCall("a window cannot be opened inside a window; give all micro-batches to one.")
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
            # Some sums have left already, some replaced what was there: only none at all is a clean state.
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
        """Release the updates; block *i* of the next forward waits for update *i* alone."""
        self.raise_errors()
        self._calls.mark_training_thread()
        with self._lock:
            self.fetcher.wait_for_evaluations()
            with DeferInterrupts():
                order = self._slabs_in_forward_order()
                outcome = self._release_updates(rules, max_norm, order, owner)
                self._forward_order = {}
                self._calls.after_step()
                self.lanes.timeline.cut()
                self._predictor.record(BOUNDARY)
                self.fetcher.refresh(order)
                self.fetcher.prefetch(self._upcoming_slabs(self._predictor), keep=())
        self.memory_limit.after_step(self._calls.steps, self.lanes.quiesce)
        self.ram_monitor.after_step()
        return outcome

    def _release_updates(
        self, rules: RuleTable, max_norm: float | None, order: Sequence[Slab], owner: object
    ) -> Outcome:
        before = {slab.index: slab.version for slab in self.slabs}
        try:
            return self.updates.submit_step(rules, max_norm, order, owner)
        except BaseException:
            moved = [slab for slab in self.slabs if slab.version != before[slab.index]]
            for slab in moved:
                # Used up: a later step must not apply it again.
                slab.grad.clear()
            if moved:
                warn(
                    f"a step failed after the updates of {len(moved)} of {len(self.slabs)} parts of the model had been "
                    "submitted: those move, the others do not; resume from the last checkpoint"
                )
            raise

    @contextmanager
    def final_backward(self, rules: RuleTable, owner: object) -> Iterator[None]:
        """Without clipping, updates start in the backward inside: each slab's as soon as its gradient is complete."""
        self.raise_errors()
        # The first step shows which parameters are used in several places; those must wait for all of them.
        if self._calls.steps > 0:
            with self._lock:
                self.updates.start_early(rules, owner)
        try:
            yield
        except BaseException:
            self.updates.abandon()
            raise

    def owns(self, parameter: Any) -> bool:
        """Whether a parameter lies in one of this engine's slabs."""
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

    def grad_norm(self) -> float:
        """The global gradient norm of what has been accumulated so far."""
        self.raise_errors()
        return self.updates.norm()

    def scale_gradients(self, factor: float) -> None:
        """Multiply what has been accumulated so far."""
        self.raise_errors()
        self.updates.scale(factor)

    # ---- around it

    def _enter_model(self) -> None:
        """The model is called. What lanes found out is told to the thread that trains."""
        if self._calls.enter_model():
            self.raise_errors()
        else:
            self.check_open()

    def raise_errors(self) -> None:
        """Raise what lanes found out since the last call."""
        self.check_open()
        self.lanes.check()
        self.updates.check()

    def require_consistent_weights(self) -> None:
        """Raise if weights are partly those of the next step, or of one that turned out not to be finite."""
        self.updates.wait_for_outcome()
        self.raise_errors()
        if self.updates.early_started:
            raise UnsupportedCall(
                "a checkpoint cannot be saved between final_backward() and step(): some weights are already those of "
                "the next step; save after step()."
            )

    def synchronize(self) -> None:
        """Wait until all submitted work on the store is done."""
        for slab in self.slabs:
            slab.wait_for_all_work()
        self.lanes.check()

    def _upcoming_slabs(self, predictor: Predictor) -> list[Slab]:
        """Slabs of the uses that are expected next, nearest first; those for which nothing travels do not count."""
        uses = (self.blocks[use[1]].slabs for use in predictor.upcoming() if isinstance(use, tuple))
        fetched = (slabs for slabs in uses if any(map(self.fetcher.needs_fetch, slabs)))
        return list(chain.from_iterable(islice(fetched, self.fetcher.depth)))

    def _slabs_in_forward_order(self) -> list[Slab]:
        """Slabs as the last forward used them, then those it did not use."""
        ordered = {slab.index: slab for index in self._forward_order for slab in self.blocks[index].slabs}
        return list((ordered | {slab.index: slab for slab in self.slabs if slab.index not in ordered}).values())

    def _span(self, label: str) -> AbstractContextManager[None]:
        timeline = self.lanes.timeline
        return (timeline.device_span if self.device.type == "cuda" else timeline.host_span)("compute", label)
