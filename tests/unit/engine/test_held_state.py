"""When memory runs out, held state is released: its memory becomes free and the results stay bitwise equal."""

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


def build(depth: int = 6, **settings: Any) -> tuple[Any, mt.Engine, Any]:
    model = Stack(depth)
    engine = engine_of(model, precision="bf16", slots=2, **settings)
    return model, engine, engine.optimizer(lr=0.1, max_grad_norm=0.5)


def run_out_of_memory(model: Any, seed: int) -> None:
    """Run a backward that raises out of memory half way."""

    def raise_oom(_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    hook = model.layers[2].scale.register_hook(raise_oom)
    with pytest.raises(torch.OutOfMemoryError):
        backward(model, seed)
    hook.remove()


@pytest.mark.parametrize("held", [HELD, STREAMED_STATES, dict.fromkeys(HELD, ("layers.[1-3]", "entry"))])
@pytest.mark.parametrize("lanes", ["sync", "threads"])
def test_releasing_held_state_is_bitwise_neutral(held: dict[str, tuple[str, ...]], lanes: str) -> None:
    def run(out_of_memory: bool, **settings: Any) -> tuple[mt.Engine, list[Any]]:
        chosen: Any = ThreadLanes(seed=3, max_delay=3e-4) if lanes == "threads" else "sync"
        model, engine, optimizer = build(lanes=chosen, **settings)
        seen: list[Any] = []
        for step in range(4):
            backward(model, 3 * step)
            if out_of_memory and step == 2:
                run_out_of_memory(model, 3 * step + 1)
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

    streamed, expected = run(out_of_memory=False)
    engine, got = run(out_of_memory=True, **held)
    assert differences(got, expected) == []
    assert engine._placement.vram.allocated_bytes == 0
    assert engine._step.fetcher.slot_bytes() == streamed._step.fetcher.slot_bytes(), (
        "releasing held state must not add a ring"
    )
    sums, slots = engine.memory_limit.held_state._sums_out.rings.all, engine.memory_limit.held_state._states.rings.all
    assert all(buffers.device.bytes.numel() == 0 and buffers.host.buffer is None for buffers in sums)
    assert len(slots) == (2 if held is STREAMED_STATES else 0)
    assert all(slot.bytes.numel() == 0 for slot in slots)
    assert engine._memory.allocated_bytes <= streamed._memory.allocated_bytes


def test_a_step_without_memory_for_its_buffers_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine, optimizer = build(3, **HELD)
    expected, reference, other = build(3)
    for stack in (model, expected):
        backward(stack, 0)
        backward(stack, 1)
    calls = iter(range(100))
    real = rings.allocate_persistent

    def raise_oom(*args: Any) -> torch.Tensor:
        if next(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(*args)

    monkeypatch.setattr(rings, "allocate_persistent", raise_oom)
    before = [slab.version for slab in engine.slabs]
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert [slab.version for slab in engine.slabs] == before
    optimizer.step()
    other.step()
    assert differences(roles(engine), roles(reference)) == []


def test_a_failed_allocation_keeps_earlier_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine, _ = build(3, held_gradients=("*",))
    backward(model, 0)
    before = gradients(model)

    def raise_oom(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(engine._placement.vram, "allocate", raise_oom)
    with pytest.raises(torch.OutOfMemoryError):
        backward(model, 1)
    assert differences(gradients(model), before) == []


@pytest.mark.parametrize("kind", ["resident", "held_weights"])
def test_prefetch_skips_blocks_on_the_device(kind: str) -> None:
    model, engine, optimizer = build(6, **{kind: ("entry", "layers.[0-3]")})
    fetcher, last = engine._step.fetcher, engine.blocks[5].slabs[0]
    prefetched: list[bool] = []
    for step in range(3):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    hook = model.layers[0].register_forward_pre_hook(
        lambda *_: prefetched.append(fetcher._rings[last.index].find(last) is not None)
    )
    backward(model, 3)
    hook.remove()
    assert engine.blocks[5].name == "layers.4"
    assert prefetched == [True], "the last layer must be prefetched while the first is computed"
