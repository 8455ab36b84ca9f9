"""What goes to disk, in which order, and how much RAM that takes: against engines that do the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import small
from tests.tiny import engine_of

import megatrain as mt
from megatrain.geometry import ALIGN_BYTES
from megatrain.model.shapes import describe
from megatrain.planner.decision import HELD, RESIDENT, Decision, Decisions
from megatrain.planner.memory import Ledger
from megatrain.planner.run import Run

LAYERS = 6


def trained() -> torch.nn.Module:
    return small.llama(num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=128)


def partly_frozen() -> torch.nn.Module:
    """As with adapters: every layer has a small part that trains. Embedding and head are frozen."""
    model = trained().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj.requires_grad_(True)
    return model


def some_blocks_frozen() -> torch.nn.Module:
    model = trained()
    model.model.layers[:3].requires_grad_(False)
    return model


def experts() -> torch.nn.Module:
    """Its embedding and head are in the size class of no layer."""
    return small.mixtral(num_hidden_layers=LAYERS, vocab_size=2048)


MODELS = [trained, partly_frozen, some_blocks_frozen, experts]
DECISIONS = [
    Decision(disk_blocks=LAYERS),
    Decision(disk_blocks=LAYERS + 3, disk_weights=2),
    Decision(disk_blocks=LAYERS + 3, disk_weights=LAYERS + 3),
    Decision(disk_frozen=4),
    Decision(disk_frozen=LAYERS + 3, disk_blocks=3),
    Decision(disk_frozen=LAYERS + 3, disk_blocks=LAYERS + 3, disk_weights=5, held_weights=LAYERS, other_blocks=HELD),
]


def placed(ledger: Ledger, decision: Decision) -> dict[str, list[str]]:
    return {name: [ledger.shape.blocks[i].name for i in found] for name, found in ledger.placed(decision).items()}


def train(model: torch.nn.Module, **settings: Any) -> mt.Engine:
    engine = engine_of(model, allow_tmpfs=True, **settings)
    optimizer = engine.optimizer(lr=1e-3)
    for step in range(2):
        model(**small.batch(2, seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.synchronize()
    return engine


def allocated(rings: Any) -> int:
    return sum(0 if each.buffer is None else each.buffer.nbytes for each in rings.all)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("decision", DECISIONS, ids=range(len(DECISIONS)))
def test_planned_bytes_are_those_of_an_engine(
    tmp_path: Path, make: Callable[[], torch.nn.Module], decision: Decision
) -> None:
    model = make().to(torch.bfloat16)
    ledger = Ledger(describe(model), Run(micro_batch=2, length=small.LENGTH, precision="bf16"))
    account = ledger.account(decision)
    weights, _, _, staged_weights, staged_states = (int(x[0]) for x in ledger.disk.accounts(Decisions.of([decision])))
    lists = placed(ledger, decision)
    if not lists["on_disk"] and not lists["weights_on_disk"]:
        assert sum(account["disk"].values()) == staged_weights == staged_states == 0
        return
    engine = train(model, precision="bf16", offload_dir=tmp_path, **lists)
    disk = engine._placement.disk
    assert disk is not None
    on_disk = [slab for slab in engine.slabs if slab.weight_on_disk]
    assert weights == sum(slab.layout.nbytes for slab in on_disk)
    assert abs(engine.drive.per_step - ledger.disk.written(decision)) <= ALIGN_BYTES * len(engine.slabs) * 3
    assert 0 <= sum(account["disk"].values()) - disk.allocated_bytes <= 256 * len(engine.slabs)
    assert allocated(engine._step.fetcher._disk._rings) == staged_weights
    held = allocated(engine._step.updates.disk.rings)
    assert held <= staged_states <= held + 6 * ALIGN_BYTES * max(1, staged_states // max(held, 1))


@pytest.mark.parametrize("make", MODELS)
def test_ram_falls_by_what_is_on_disk_less_staging(make: Callable[[], torch.nn.Module]) -> None:
    ledger = Ledger(describe(make()), Run(precision="bf16"))
    for decision in DECISIONS:
        near, far = ledger.account(Decision(held_weights=decision.held_weights)), ledger.account(decision)
        found = ledger.disk.accounts(Decisions.of([decision]))
        weights, residuals, moments, staged_weights, _ = (int(each[0]) for each in found)
        assert far["disk"] == {**dict.fromkeys(far["disk"], 0), "weights": weights, "residuals": residuals,
                               "moments": moments}  # fmt: skip
        assert near["ram"]["weights"] - far["ram"]["weights"] == weights - staged_weights
        for role in ("residuals", "moments"):
            assert near["ram"][role] - far["ram"][role] == far["disk"][role]


def freed(ledger: Ledger, chosen: Decisions) -> Any:
    weights, residuals, moments, *staged = ledger.disk.accounts(chosen)
    return weights + residuals + moments - sum(staged)


def in_order(ledger: Ledger, over: Sequence[int], **placement: int) -> list[Decision]:
    chosen = ledger.disk.freeing(Decisions(**placement, slots=[3] * len(over)), np.array(over))
    return [chosen[index] for index in range(len(over))]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("placement", [{}, {"resident_layers": 2}, {"other_blocks": RESIDENT, "resident_layers": 1}])
def test_as_much_goes_to_disk_as_ram_requires(make: Callable[[], torch.nn.Module], placement: dict[str, int]) -> None:
    """Frozen weights first, then states, then weights that train."""
    ledger = Ledger(describe(make()), Run(precision="bf16"))
    count = len(ledger.disk.order(placement.get("other_blocks") == RESIDENT, placement.get("resident_layers", 0)))
    stages = [(step, 0, 0) for step in range(count)] if ledger.disk.has_frozen else []
    full = count if ledger.disk.has_frozen else 0
    stages += [(full, step, 0) for step in range(count)] + [(full, count, step) for step in range(count + 1)]
    columns = dict(zip(("disk_frozen", "disk_blocks", "disk_weights"), zip(*stages, strict=True), strict=True))
    possible = freed(ledger, Decisions(**placement, **columns))
    wanted = [0, *range(1, int(possible.max()) + 1, max(1, int(possible.max()) // 50)), int(possible.max()), 1 << 50]
    for over, decision in zip(wanted, in_order(ledger, wanted, **placement), strict=True):
        first = int(np.argmax(possible >= over)) if over <= possible.max() else int(np.argmax(possible))
        assert (decision.disk_frozen, decision.disk_blocks, decision.disk_weights) == stages[first]


def test_resident_blocks_are_never_on_disk() -> None:
    ledger = Ledger(describe(trained()), Run())
    lists = placed(ledger, Decision(resident_layers=2, other_blocks=RESIDENT, disk_blocks=9, disk_weights=9))
    assert lists["on_disk"] == lists["weights_on_disk"] == [f"model.layers.{i}" for i in range(2, LAYERS)]
