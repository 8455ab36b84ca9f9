"""A batch that does not fit in RAM is refused before its forward. A batch that fits, or that has run before, is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import small
from tests.tiny import engine_of

import megatrain as mt
from megatrain.errors import OutOfRam
from megatrain.hardware import inventory
from megatrain.hardware.inventory import CRITICAL, level


def batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, small.VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def attached(free: list[int]) -> tuple[Any, Any]:
    model = small.llama(max_position_embeddings=256)
    engine = engine_of(model)
    engine.ram._left = lambda: free[0]
    return model, engine


def test_a_batch_that_does_not_fit_is_refused_with_its_size() -> None:
    free = [1 << 40]
    model, engine = attached(free)
    free[0] = level(CRITICAL, engine.ram._limit) + (16 << 20)
    needed, block = engine._headroom._estimate(4, 256)
    assert 0 < block < needed
    free[0] = level(CRITICAL, engine.ram._limit) + needed
    with pytest.raises(OutOfRam, match=r"a batch of 4 x 256 tokens takes about .* stopped before starting it"):
        model(**batch(4, 256))
    # Without gradients, nothing is stored for a backward.
    with torch.no_grad():
        free[0] = 1 << 40
        model(**batch(4, 256))
    model(**batch(1, 8)).loss.backward()


def test_slots_and_gradients_are_counted_until_they_are_allocated() -> None:
    model, engine = attached([1 << 40])
    to_allocate = engine._headroom._backward_bytes()
    assert to_allocate > sum(slab.layout.nbytes for slab in engine.slabs)
    model(**batch(1, 8)).loss.backward()
    assert engine._headroom._backward_bytes() == 0


def test_a_window_fills_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = attached([1 << 20])
    each = engine._headroom.batch_bytes(batch(4, 256))
    monkeypatch.setattr(inventory, "free_memory", lambda device: 6 * each)
    assert engine.window_size(batch(4, 256)) == 3


def test_a_config_that_is_not_from_transformers_is_ignored() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))
    model.config = {"hidden_size": 8}
    with mt.Engine(model, device="cpu"):
        model(torch.zeros(2, 4, dtype=torch.int64)).sum().backward()
    assert model[0].weight.grad is not None
