"""Holds give way when memory runs out: their memory is there for others then, and the bits stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tiny import Stack, backward, differences, engine_of, gradients, roles

import megatrain as mt
from megatrain.stream import rings
from megatrain.stream.lanes import ThreadLanes

HELD = {"held_weights": ("*",), "held_gradients": ("*",)}
STREAMED_STATES = HELD | {"streamed_states": ("*",)}


def made(depth: int = 6, **settings: Any) -> tuple[Any, mt.Engine, Any]:
    model = Stack(depth)
    engine = engine_of(model, precision="bf16", slots=2, **settings)
    return model, engine, engine.optimizer(lr=0.1, max_grad_norm=0.5)


def ran_out(model: Any, seed: int) -> None:
    """A backward that gets half way."""

    def full(_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    hook = model.layers[2].scale.register_hook(full)
    with pytest.raises(torch.OutOfMemoryError):
        backward(model, seed)
    hook.remove()


@pytest.mark.parametrize("held", [HELD, STREAMED_STATES, dict.fromkeys(HELD, ("layers.[1-3]", "entry"))])
@pytest.mark.parametrize("lanes", ["sync", "threads"])
def test_they_give_way_and_no_bit_changes(held: dict[str, tuple[str, ...]], lanes: str) -> None:
    def run(short: bool, **settings: Any) -> tuple[mt.Engine, list[Any]]:
        chosen: Any = ThreadLanes(seed=3, max_delay=3e-4) if lanes == "threads" else "sync"
        model, engine, optimizer = made(lanes=chosen, **settings)
        seen: list[Any] = []
        for step in range(4):
            backward(model, 3 * step)
            if short and step == 2:
                ran_out(model, 3 * step + 1)
                optimizer.zero_grad()
                assert engine.memory_limit.held_state
                with engine.memory_limit.with_less_memory():
                    backward(model, 3 * step)
                assert not engine.memory_limit.held_state
            backward(model, 3 * step + 1)
            seen.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
        return engine, [*seen, roles(engine)]

    streamed, expected = run(short=False)
    engine, got = run(short=True, **held)
    assert differences(got, expected) == []
    assert engine._placement.vram.allocated_bytes == 0
    assert engine._step.fetcher.slot_bytes() == streamed._step.fetcher.slot_bytes(), "no ring beside those there are"
    sums, slots = engine.memory_limit.held_state._sums_out.rings.all, engine.memory_limit.held_state._states.rings.all
    assert all(buffers.device.bytes.numel() == 0 and buffers.host.buffer is None for buffers in sums)
    assert len(slots) == (2 if held is STREAMED_STATES else 0)
    assert all(slot.bytes.numel() == 0 for slot in slots)
    assert engine._memory.allocated_bytes <= streamed._memory.allocated_bytes


def test_a_step_without_room_for_gradients_to_leave_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine, optimizer = made(3, **HELD)
    expected, its, other = made(3)
    for stack in (model, expected):
        backward(stack, 0)
        backward(stack, 1)
    calls = iter(range(100))
    real = rings.allocate_persistent

    def full(*args: Any) -> torch.Tensor:
        if next(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(*args)

    monkeypatch.setattr(rings, "allocate_persistent", full)
    before = [slab.version for slab in engine.slabs]
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert [slab.version for slab in engine.slabs] == before
    optimizer.step()
    other.step()
    assert differences(roles(engine), roles(its)) == []


def test_a_sum_that_finds_no_memory_leaves_what_had_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine, _ = made(3, held_gradients=("*",))
    backward(model, 0)
    before = gradients(model)

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(engine._placement.vram, "allocate", full)
    with pytest.raises(torch.OutOfMemoryError):
        backward(model, 1)
    assert differences(gradients(model), before) == []


@pytest.mark.parametrize("kind", ["resident", "held_weights"])
def test_blocks_of_which_nothing_travels_are_looked_past(kind: str) -> None:
    model, engine, optimizer = made(6, **{kind: ("entry", "layers.[0-3]")})
    fetcher, last = engine._step.fetcher, engine.blocks[5].slabs[0]
    there: list[bool] = []
    for step in range(3):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    hook = model.layers[0].register_forward_pre_hook(
        lambda *_: there.append(fetcher._rings[last.index].find(last) is not None)
    )
    backward(model, 3)
    hook.remove()
    assert engine.blocks[5].name == "layers.4"
    assert there == [True], "while the first layer is computed"
