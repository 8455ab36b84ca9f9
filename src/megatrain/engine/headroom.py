"""How many micro-batches fit into a window; on the CPU, whether RAM suffices for the next forward and backward.

The planner estimates what a batch needs. Batches no larger than a previous one are not checked: the RAM monitor has
measured such steps (hardware/ram_monitor.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from megatrain.errors import MegaTrainError
from megatrain.geometry import CHUNK_ELEMENTS, GIB, MAX_WINDOW
from megatrain.hardware import inventory
from megatrain.hardware.machine import THREAD_BYTES
from megatrain.hardware.ram_monitor import RamMonitor
from megatrain.model.shapes import describe
from megatrain.model.transformers_api import config_of
from megatrain.planner.decision import Decision
from megatrain.planner.memory import Ledger
from megatrain.planner.run import Run
from megatrain.settings import Settings
from megatrain.stream.drain import Drain
from megatrain.stream.fetch import Fetcher

LAYER_FACTOR = 200
"""Upper bound of a layer's graph and backward, in multiples of its input."""
LOGIT_BYTES = 16


@dataclass(eq=False)
class Headroom:
    """What batches of one engine need."""

    model: torch.nn.Module
    device: torch.device
    precision: str
    settings: Settings
    ram_monitor: RamMonitor
    fetcher: Fetcher
    drain: Drain

    def __post_init__(self) -> None:
        self._on_cpu = self.device.type == "cpu"
        self._largest_tokens = 0
        """Tokens of the largest batch that passed the check."""

    def unwritten_slot_bytes(self) -> int:
        """Bytes of slots that are allocated but never written, so not in physical memory yet."""
        unwritten = 0 if self.drain.link.counters.fetches else self.fetcher.slot_bytes()
        return unwritten + self.drain.unallocated_slot_bytes()

    def check_batch(self, inputs: Any) -> None:
        """On the CPU: raise `OutOfRam` if RAM does not suffice for a forward and backward of this batch."""
        if not self._on_cpu or not torch.is_grad_enabled():
            return
        shape = _batch_shape(inputs)
        if shape is None or shape[0] * shape[1] <= self._largest_tokens:
            return
        nbytes, block = self._estimate(*shape)
        if nbytes:
            nbytes += self._backward_bytes()
            self.ram_monitor.require(nbytes, block, f"a batch of {shape[0]} x {shape[1]} tokens")
        self._largest_tokens = shape[0] * shape[1]

    def _backward_bytes(self) -> int:
        """Bytes that the next backward allocates in addition to activations."""
        return self.drain.unallocated_bytes() + self.unwritten_slot_bytes()

    def window_size(self, batch: Any, blocks: int) -> int | Sequence[int]:
        """How many micro-batches like this one fit into a window, or `Settings.window` if it is set."""
        if not blocks:
            return 1  # nothing is fetched per block, so a window gains nothing
        if self.settings.window is not None:
            return self.settings.window
        tokens = max((tensor.numel() for tensor in tensors_of(batch)), default=1)
        config = config_of(self.model)
        hidden = getattr(config.get_text_config() if config is not None else None, "hidden_size", 1024)
        boundary = tokens * hidden * (4 if self.precision == "fp32" else 2) * blocks * 2
        # The thread of a micro-batch takes GPU memory too.
        boundary += THREAD_BYTES if self.device.type == "cuda" else 0
        boundary = max(boundary, self.batch_bytes(batch))
        return max(1, min(MAX_WINDOW, inventory.free_memory(self.device) // 2 // max(boundary, 1)))

    def batch_bytes(self, batch: Any) -> int:
        """Bytes that a micro-batch needs; 0 on a GPU, if RAM is plentiful or if the size is unknown."""
        shape = _batch_shape(batch) if self._on_cpu else None
        return 0 if shape is None else self._estimate(*shape)[0]

    def _estimate(self, rows: int, length: int) -> tuple[int, int]:
        """Bytes of a micro-batch in total, and of the largest block's temporary data."""
        if self._rough_estimate(rows * length) < self.ram_monitor.left // 2 - GIB:
            return 0, 0
        try:
            shape = describe(self.model)
        except MegaTrainError:
            return 0, 0
        compiled, chunk = bool(self.settings.compile), self.settings.head_chunk
        run = Run(micro_batch=rows, length=length, precision=self.precision, compile=compiled, head_chunk=chunk)
        ledger = Ledger(shape, run, gpu=False)
        return ledger.computing(Decision(stored_graphs=len(ledger.layers) if self.settings.policy == "store" else 0))

    def _rough_estimate(self, tokens: int) -> int:
        config = config_of(self.model)
        text = config.get_text_config() if config is not None else None
        hidden, layers = getattr(text, "hidden_size", 1024), getattr(text, "num_hidden_layers", 32)
        logits = min(tokens * getattr(text, "vocab_size", 1), CHUNK_ELEMENTS[False])
        return int(tokens * hidden * 4 * (LAYER_FACTOR + 2 * layers) + logits * LOGIT_BYTES)


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """All tensors in a batch. A BatchEncoding is converted to a dict first, because pytree treats it as a leaf."""
    leaves = pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _batch_shape(batch: Any) -> tuple[int, int] | None:
    """Rows and columns of the token ids in a batch; None if there are none."""
    ids = [tensor for tensor in tensors_of(batch) if tensor.ndim == 2 and not tensor.is_floating_point()]
    largest = max(ids, key=torch.Tensor.numel, default=None)
    return None if largest is None or not largest.numel() else (largest.shape[0], largest.shape[1])
