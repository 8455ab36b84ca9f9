"""What goes to disk, in which order, and how much RAM that takes: against engines that do the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import small
from tests.tiny import engine_of

import megatrain as mt
from megatrain.engine.placement import staged_bytes
from megatrain.geometry import ALIGN_BYTES, STAGING_SLOTS
from megatrain.hardware.machine import Disk, Machine
from megatrain.model.shapes import describe
from megatrain.optim.rules import AdamW
from megatrain.planner.decision import HELD, RESIDENT, Decision, Decisions
from megatrain.planner.disk import ON_DISK
from megatrain.planner.memory import Ledger
from megatrain.planner.run import Run
from megatrain.planner.search import Search
from megatrain.store.disk import DiskMemory

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


def tied() -> torch.nn.Module:
    return small.llama(num_hidden_layers=LAYERS, tie_word_embeddings=True)


def frozen_in_fp32() -> torch.nn.Module:
    """Frozen weights that were loaded in FP32 keep their low bits."""
    return partly_frozen()


MODELS = [trained, partly_frozen, some_blocks_frozen, experts, tied, frozen_in_fp32]
DECISIONS = [
    Decision(disk_blocks=LAYERS),
    Decision(disk_blocks=LAYERS, disk_gradients=2, held_gradients=1),
    Decision(disk_blocks=LAYERS + 3, disk_gradients=LAYERS + 3, disk_weights=4),
    Decision(disk_blocks=LAYERS + 3, disk_gradients=LAYERS + 3, held_gradients=LAYERS - 2, resident_layers=1),
    Decision(disk_blocks=LAYERS + 3, disk_gradients=LAYERS + 3, held_gradients=2, other_blocks=HELD),
    Decision(disk_frozen=LAYERS + 3, disk_blocks=4, disk_gradients=9),
    Decision(disk_blocks=LAYERS + 3, disk_weights=2),
    Decision(disk_blocks=LAYERS + 3, disk_weights=LAYERS + 3),
    Decision(disk_frozen=4),
    Decision(disk_frozen=LAYERS + 3, disk_blocks=3),
    Decision(disk_frozen=LAYERS + 3, disk_blocks=LAYERS + 3, disk_weights=5, held_weights=LAYERS, other_blocks=HELD),
]


def placed(ledger: Ledger, decision: Decision) -> dict[str, list[str]]:
    return {name: [ledger.shape.blocks[i].name for i in found] for name, found in ledger.placed(decision).items()}


def account(ledger: Ledger, decision: Decision) -> tuple[list[int], list[int]]:
    """Bytes on disk by role, and of RAM for them."""
    on_disk, in_ram = ledger.disk.accounts(Decisions.of([decision]))
    return on_disk[:, 0].tolist(), in_ram[:, 0].tolist()


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
    model = make().to(torch.float32 if make is frozen_in_fp32 else torch.bfloat16)
    ledger = Ledger(describe(model), Run(micro_batch=2, length=small.LENGTH, precision="bf16"))
    account_of = ledger.account(decision)
    (weights, _, _, gradients), (staged_weights, staged_states, staged_gradients, cached) = account(ledger, decision)
    assert cached == 0
    lists = placed(ledger, decision)
    if not lists["on_disk"] and not lists["weights_on_disk"]:
        assert sum(account_of["disk"].values()) == staged_weights == staged_states == staged_gradients == 0
        return
    engine = train(model, precision="bf16", offload_dir=tmp_path, **lists)
    disk = engine._placement.disk
    assert disk is not None
    residuals = dict.fromkeys(account_of, 0)
    for slab in engine.slabs:
        residuals[slab.homes.states.tier] += 0 if slab.residual is None else slab.residual.nbytes
    assert residuals == {tier: roles["residuals"] for tier, roles in account_of.items()}
    on_disk = [slab for slab in engine.slabs if slab.weight_on_disk]
    assert weights == sum(slab.layout.nbytes for slab in on_disk)
    assert abs(engine.drive.per_step - ledger.disk.written(decision)) <= ALIGN_BYTES * len(engine.slabs) * 3
    assert 0 <= sum(account_of["disk"].values()) - disk.allocated_bytes <= 256 * len(engine.slabs)
    assert allocated(engine._step.fetcher._disk._rings) == staged_weights
    parts = [part for slab in engine.slabs for part in slab.grad.parts.values()]
    assert gradients == sum(part.disk_buffer.nbytes for part in parts if part._disk_buffer is not None)
    assert {slab.name for slab in engine.slabs if slab.homes.gradients is not None} == {*lists["gradients_on_disk"]}
    assert allocated(engine._step.updates.gradients.rings) == staged_gradients
    summed = [part for slab in engine.slabs if not slab.grad.on_device for part in slab.grad.parts.values()]
    in_ram = staged_gradients + sum(buffer.nbytes for part in summed for buffer in part.buffers.values())
    exact = decision.other_blocks != HELD and not decision.held_gradients and not any(s.tied for s in ledger.states)
    assert account_of["ram"]["gradients"] == in_ram if exact else account_of["ram"]["gradients"] >= in_ram
    assert allocated(engine._step.updates.disk.rings[True]) == staged_states
    trained = [slab for slab in engine.slabs if slab.trains]
    required = staged_bytes(trained, engine._step.updates, AdamW, engine.settings.moment_width)
    assert required == {"vram": 0, "ram": staged_states + staged_gradients}


@pytest.mark.parametrize("compressed", [False, "8bit"])
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("layers", [0, 1, 2, LAYERS - 1])
def test_planned_slots_for_streamed_states_are_those_of_an_engine(
    make: Callable[[], torch.nn.Module], layers: int, compressed: bool | str
) -> None:
    """One layer needs one slot per ring; more layers than slots share them."""
    model = make().to(torch.bfloat16)
    ledger = Ledger(describe(model), Run(precision="bf16", optimizer_compression=compressed))
    names = [block.name for block in ledger.shape.blocks if block.kind == "layer"]
    lists = {"resident": names[:1], "held_weights": names[1:], "held_gradients": names[1:]}
    lists["streamed_states"] = names[1 : 1 + layers]
    engine = train(model, precision="bf16", optimizer_compression=compressed, **lists)
    decisions = [
        Decision(resident_layers=1, held_weights=LAYERS, held_gradients=LAYERS, gpu_updates=updated)
        for updated in (1, 1 + layers)
    ]
    without, planned = (ledger.account(decision)["vram"]["moments"] for decision in decisions)
    slots = engine._step.updates.states.rings.all
    assert len(slots) == min(STAGING_SLOTS, sum(slab.streams_states and slab.trains for slab in engine.slabs))
    assert planned - without == sum(slot.bytes.numel() for slot in slots)
    trained = [slab for slab in engine.slabs if slab.trains]
    width = engine.settings.moment_width
    assert staged_bytes(trained, engine._step.updates, AdamW, width) == {"vram": planned - without, "ram": 0}


@pytest.mark.parametrize("make", MODELS)
def test_ram_falls_by_what_is_on_disk_less_staging(make: Callable[[], torch.nn.Module]) -> None:
    ledger = Ledger(describe(make()), Run(precision="bf16"))
    roles = ("weights", "residuals", "moments", "gradients")
    for decision in DECISIONS:
        in_ram = replace(decision, **dict.fromkeys(ON_DISK, 0))
        near, far = ledger.account(in_ram), ledger.account(decision)
        on_disk, (weights, _, gradients, _) = account(ledger, decision)
        assert far["disk"] == {**dict.fromkeys(far["disk"], 0), **dict(zip(roles, on_disk, strict=True))}
        for role, nbytes, staged in zip(roles, on_disk, (weights, 0, 0, gradients), strict=True):
            assert near["ram"][role] - far["ram"][role] == nbytes - staged


def freed(ledger: Ledger, chosen: Decisions) -> Any:
    on_disk, in_ram = ledger.disk.accounts(chosen)
    return on_disk.sum(axis=0) - in_ram.sum(axis=0)


def in_order(ledger: Ledger, over: Sequence[int], **placement: int) -> list[Decision]:
    chosen = ledger.disk.freeing(Decisions(**placement, slots=[3] * len(over)), np.array(over))
    return [chosen[index] for index in range(len(over))]


PLACEMENTS: list[dict[str, int]] = [
    {},
    {"resident_layers": 2},
    {"other_blocks": RESIDENT, "resident_layers": 1},
    {"resident_layers": 1, "held_gradients": 3},
    {"other_blocks": HELD, "held_gradients": LAYERS - 1},
]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("windows", [1, 2])
def test_as_much_goes_to_disk_as_ram_requires(
    make: Callable[[], torch.nn.Module], placement: dict[str, int], windows: int
) -> None:
    """Frozen weights first, then states, then gradients as far as that frees RAM, then weights that train."""
    ledger = Ledger(describe(make()), Run(precision="bf16", accumulation=4))
    placement = placement | {"window": 4 // windows}
    count = len(ledger.disk.order(placement.get("other_blocks") == RESIDENT, placement.get("resident_layers", 0)))
    stages = [(step, 0, 0, 0) for step in range(count)] if ledger.disk.has_frozen else []
    full = count if ledger.disk.has_frozen else 0
    stages += [(full, step, 0, 0) for step in range(count)]

    def possible_with(stages: Sequence[tuple[int, ...]]) -> Any:
        return freed(ledger, Decisions(**placement, **dict(zip(ON_DISK, zip(*stages, strict=True), strict=True))))

    gradients = [(full, count, step, 0) for step in range(count + 1)]
    most = int(np.argmax(possible_with(gradients)))
    assert most == 0 if windows > 1 else most > 0 or ledger.disk.has_frozen or placement.get("held_gradients", 0) > 2
    stages += [*gradients[: most + 1], *((full, count, most, step) for step in range(1, count + 1))]
    possible = possible_with(stages)
    wanted = [0, *range(1, int(possible.max()) + 1, max(1, int(possible.max()) // 50)), int(possible.max()), 1 << 50]
    for over, decision in zip(wanted, in_order(ledger, wanted, **placement), strict=True):
        first = int(np.argmax(possible >= over)) if over <= possible.max() else int(np.argmax(possible))
        assert tuple(getattr(decision, name) for name in ON_DISK) == stages[first]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_engine_accepts_a_plan_that_fills_the_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    folders = [tmp_path / str(number) for number in range(count)]
    free = (1 << 30) + 4096
    disks = tuple(Disk(path=str(folder), free_bytes=free, read=3e9, write=2e9, file_system="8:1") for folder in folders)
    machine = replace(Machine.load("h100-512gb"), disks=disks)
    usable = Search(describe(trained()), machine, Run(), offload_dir=folders).capacity["disk"]
    assert usable > 0.7 * free
    memory = DiskMemory(folders, allow_tmpfs=True)
    fields = [*os.statvfs("/")]
    # Bytes per block, and free blocks.
    fields[1], fields[4] = 1, free
    monkeypatch.setattr(os, "fstatvfs", lambda _: os.statvfs_result(fields))
    memory.require(usable)


def test_page_cache_counts_once_anything_is_on_disk() -> None:
    shape = describe(trained())
    direct, cached = (Ledger(shape, Run(), transit=nbytes) for nbytes in (0, 1 << 26))
    for decision in (Decision(), Decision(disk_blocks=2), Decision(disk_blocks=9, disk_gradients=9, disk_weights=9)):
        found = cached.account(decision)["ram"]["workspace"] - direct.account(decision)["ram"]["workspace"]
        assert found == (1 << 26) * (decision.disk_blocks > 0)
    assert freed(cached, Decisions(disk_blocks=[9])) == freed(direct, Decisions(disk_blocks=[9])) - (1 << 26)


def test_resident_blocks_are_never_on_disk() -> None:
    ledger = Ledger(describe(trained()), Run())
    every = {"disk_blocks": 9, "disk_gradients": 9, "disk_weights": 9}
    lists = placed(ledger, Decision(resident_layers=2, other_blocks=RESIDENT, **every))
    assert (
        lists["on_disk"]
        == lists["weights_on_disk"]
        == lists["gradients_on_disk"]
        == [f"model.layers.{i}" for i in range(2, LAYERS)]
    )
