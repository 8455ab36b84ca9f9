"""Whether RAM holds the next forward and its backward, where the compute device is the CPU and activations are in RAM.

The planner says what a batch takes. A batch that is no larger than one that has been through is not looked at: what
steps take is known by then (hardware/watch.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from megatrain.errors import MegaTrainError
from megatrain.geometry import CHUNK_ELEMENTS
from megatrain.hardware.watch import RamWatch
from megatrain.model.shapes import describe
from megatrain.planner.decision import Decision
from megatrain.planner.memory import Ledger
from megatrain.planner.run import Run
from megatrain.settings import Settings
from megatrain.stream.drain import Drain
from megatrain.stream.fetch import Fetcher

GIB = 1 << 30
IN_A_LAYER = 200
"""Inputs that no layer's graph and backward exceed, as a first guess: only if that does not fit is a model counted."""
LOGIT_BYTES = 16


class Headroom:
    """One engine's; nothing on a GPU."""

    def __init__(
        self,
        model: torch.nn.Module,
        precision: str,
        settings: Settings,
        watch: RamWatch,
        fetcher: Fetcher,
        drain: Drain,
    ) -> None:
        self._model, self._precision, self._settings, self._watch = model, precision, settings, watch
        self._fetcher, self._drain = fetcher, drain
        self._active = drain.device.type == "cpu"
        self._largest = 0
        """Tokens of the largest batch that began with enough."""

    def slots(self) -> int:
        """Bytes of slots that nothing has been written to yet: they are not in memory yet."""
        return (0 if self._drain.counters.fetches else self._fetcher.slot_bytes()) + self._drain.rings.missing()

    def begin(self, inputs: Any) -> None:
        """A forward that is to be differentiated begins: raise `OutOfRam` if RAM does not hold it."""
        if not self._active or not torch.is_grad_enabled():
            return
        extent = _extent(inputs)
        if extent is None or extent[0] * extent[1] <= self._largest:
            return
        nbytes, block = self._of(*extent)
        if nbytes:
            self._watch.require(nbytes + self._to_come(), block, f"a batch of {extent[0]} x {extent[1]} tokens")
        self._largest = extent[0] * extent[1]

    def _to_come(self) -> int:
        """Bytes that the next backward allocates beside activations."""
        return self._drain.missing() + self.slots()

    def of_batch(self, batch: Any) -> int:
        """Bytes that a micro-batch keeps and needs; 0 if there is plenty, or they are not known."""
        extent = _extent(batch) if self._active else None
        return 0 if extent is None else self._of(*extent)[0]

    def _of(self, rows: int, length: int) -> tuple[int, int]:
        """Bytes of a micro-batch in all, and those that one block needs for a while."""
        if self._guess(rows * length) < self._watch.left // 2 - GIB:
            return 0, 0
        try:
            shape = describe(self._model)
        except MegaTrainError:
            return 0, 0
        policy = self._settings.policy
        run = Run(
            micro_batch=rows, length=length, precision=self._precision, compile=self._settings.compile,
            head_chunk=self._settings.head_chunk,
        )  # fmt: skip
        ledger = Ledger(shape, run, gpu=False)
        return ledger.computing(Decision(stored=len(ledger.layers) if policy == "store" else 0))

    def _guess(self, tokens: int) -> int:
        config: Any = getattr(self._model, "config", None)
        text = config.get_text_config() if config is not None else None
        hidden, layers = getattr(text, "hidden_size", 1024), getattr(text, "num_hidden_layers", 32)
        logits = min(tokens * getattr(text, "vocab_size", 1), CHUNK_ELEMENTS[False])
        return int(tokens * hidden * 4 * (IN_A_LAYER + 2 * layers) + logits * LOGIT_BYTES)


def _extent(inputs: Any) -> tuple[int, int] | None:
    """Rows and columns of the ids in a batch; None if there are none."""
    # Collators give a mapping of tokenizers' own, which is one leaf to a tree.
    leaves = pytree.tree_leaves(dict(inputs) if isinstance(inputs, Mapping) else inputs)
    ids = [t for t in leaves if isinstance(t, torch.Tensor) and t.ndim == 2 and not t.is_floating_point()]
    largest = max(ids, key=torch.Tensor.numel, default=None)
    return None if largest is None or not largest.numel() else (largest.shape[0], largest.shape[1])
