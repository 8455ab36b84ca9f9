"""Optimizer states that stream to the device for their update: which ones, how much memory, and when they do not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tests.tiny import Stack, backward, differences, engine_of, roles

import megatrain as mt
from megatrain.errors import SettingsError
from megatrain.geometry import STAGING_SLOTS
from megatrain.stream.fetch import Lease
from megatrain.stream.lanes import SyncLanes, ThreadLanes

HELD = {"held_weights": ("*",), "held_gradients": ("*",)}
STREAMED = HELD | {"streamed_states": ("*",)}


def jobs_of(engine: mt.Engine) -> list[tuple[str, str, str]]:
    """Lane, job and label of everything submitted from now on."""
    seen: list[tuple[str, str, str]] = []
    real = engine._lanes.submit

    def submit(lane: str, job: str, work: Any, **options: Any) -> Any:
        seen.append((lane, job, options.get("label", "")))
        return real(lane, job, work, **options)

    engine._lanes.submit = submit  # type: ignore[method-assign]
    return seen


def train(engine: mt.Engine, model: Any, steps: int = 3, clip: float | None = 0.5) -> dict[str, Any]:
    optimizer = engine.optimizer(lr=0.1, max_grad_norm=clip)
    for step in range(steps):
        backward(model, 2 * step)
        with optimizer.final_backward():
            backward(model, 2 * step + 1)
        optimizer.step()
        optimizer.zero_grad()
    return roles(engine)


@pytest.mark.parametrize("compression", [False, "8bit", "4bit"])
@pytest.mark.parametrize("clip", [0.5, None])
@pytest.mark.parametrize("precision", ["bf16", "fp32", "bf16-sr"])
def test_streamed_updates_have_the_bits_of_updates_on_the_cpu(
    precision: str, clip: float | None, compression: Any
) -> None:
    found = []
    for settings in ({}, STREAMED):
        model = Stack(4)
        lanes = ThreadLanes(seed=1, max_delay=1e-4)
        with engine_of(
            model, precision=precision, optimizer_compression=compression, lanes=lanes, **settings
        ) as engine:
            found.append(train(engine, model, clip=clip))
    assert differences(*found) == []


def test_only_named_blocks_stream_their_states() -> None:
    model = Stack(5)
    engine = engine_of(model, precision="bf16", **HELD, streamed_states=("layers.[13]",))
    seen = jobs_of(engine)
    train(engine, model, steps=2)
    first = [job for _, job, _ in seen].index("update")
    updates = {label: lane for lane, job, label in seen if job == "update"}
    assert {label for label, lane in updates.items() if lane == "gpu_update"} == {"layers.1", "layers.3"}
    assert set(updates.values()) == {"gpu_update", "update"}
    travelled = Counter((lane, label) for lane, job, label in seen if lane in ("states_in", "states_out"))
    assert travelled == {(f"states_{way}", f"layers.{i}"): n for i in (1, 3) for way, n in (("in", 2), ("out", 4))}
    # Their weights are not fetched again, and their sums stay on the device.
    assert not [job for job in seen[first:] if job[0] in ("refresh", "sums_out") and job[2] in ("layers.1", "layers.3")]


def test_weights_are_written_back_after_all_states() -> None:
    model = Stack(4)
    engine = engine_of(model, precision="bf16", **STREAMED)
    seen = jobs_of(engine)
    train(engine, model, steps=1)
    order = [job for lane, job, _ in seen if lane == "states_out"]
    assert order == sorted(order)
    assert set(order) == {"send states", "send weight"}


def test_slots_for_states_are_few() -> None:
    model = Stack(8)
    engine = engine_of(model, precision="bf16", **STREAMED)
    train(engine, model, steps=2)
    slots = engine.memory_limit.held_state._states.rings.all
    assert len(engine.slabs) > len(slots) == STAGING_SLOTS
    state = max(sum(b.nbytes for b in slab.state_buffers()) for slab in engine.slabs)
    assert all(state <= slot.bytes.numel() <= 2 * state + 4096 for slot in slots)


def test_a_weight_in_use_is_updated_on_the_cpu() -> None:
    """The copy on the device must not change while another thread computes with it."""
    model, expected = Stack(3), Stack(3)
    engine = engine_of(model, precision="bf16", **STREAMED)
    optimizer = engine.optimizer(lr=0.1)
    backward(model, 0)
    fetcher = engine._step.fetcher
    lease = Lease()
    fetcher.acquire(lease, [engine.slabs[1]])
    view, before = lease.views[1], lease.views[1].clone()
    seen = jobs_of(engine)
    optimizer.step()
    assert torch.equal(view, before)
    assert {lane for lane, job, label in seen if job == "update" and label == engine.slabs[1].name} == {"update"}
    fetcher.release(lease)
    other = engine_of(expected, precision="bf16")
    other_optimizer = other.optimizer(lr=0.1)
    backward(expected, 0)
    other_optimizer.step()
    assert differences(roles(engine), roles(other)) == []


@pytest.mark.parametrize("missing", ["held_weights", "held_gradients"])
def test_streamed_states_need_held_weights_and_sums(missing: str) -> None:
    with pytest.raises(SettingsError, match="name it in held_weights and held_gradients too"):
        engine_of(Stack(2), **{name: value for name, value in STREAMED.items() if name != missing})


def test_a_resident_block_has_nothing_to_stream() -> None:
    model = Stack(3)
    engine = engine_of(model, precision="bf16", **STREAMED, resident=("layers.*",))
    seen = jobs_of(engine)
    train(engine, model, steps=1)
    assert not [job for job in seen if job[0] == "states_in" and job[2].startswith("layers")]


class Marking(SyncLanes):
    """Inline lanes on which compute always has unfinished work."""

    class _Mark:
        lane, queue, done = "compute", "compute", False

        def wait(self) -> None: ...

        def order_stream(self) -> None: ...

    def mark(self) -> Any:
        return self._Mark()


def test_the_first_copy_into_a_slot_comes_after_compute() -> None:
    """Compute may still be adding to a gradient in the same bytes."""
    model, lanes = Stack(4), Marking()
    engine = engine_of(model, precision="bf16", lanes=lanes, **STREAMED)
    waits: list[set[str]] = []
    real = lanes["states_in"].submit

    def submit(work: Any, after: Any = (), label: str = "", job: str = "") -> Any:
        waits.append({wait.name for wait in after})
        return real(work, after, label, job)

    lanes["states_in"].submit = submit  # type: ignore[method-assign]
    train(engine, model, steps=1)
    assert all("state slot read" in names for names in waits[:STAGING_SLOTS])


@pytest.mark.parametrize("lanes", ["sync", "threads"])
def test_states_can_grow(lanes: str) -> None:
    """A second optimizer has more moments, while the states of the first are still allocated."""
    found = []
    for settings in ({}, STREAMED):
        model = Stack(4)
        engine = engine_of(model, precision="bf16", lanes=lanes, **settings)
        for kind in ("sgd", "adamw"):
            optimizer = engine.optimizer(kind=kind, lr=0.1)
            for seed in range(2):
                backward(model, seed)
                optimizer.step()
                optimizer.zero_grad()
        found.append(roles(engine))
    assert differences(*found) == []


def test_after_a_failed_step_ram_and_device_weights_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(5)
    engine = engine_of(model, precision="bf16", **STREAMED)
    optimizer = engine.optimizer(lr=0.1)
    backward(model, 0)
    updates = engine._step.updates
    real, calls = updates._submit, iter(range(100))

    def submit(*args: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("no more")
        return real(*args)

    monkeypatch.setattr(updates, "_submit", submit)
    with pytest.raises(RuntimeError, match="no more"):
        optimizer.step()
    # A later step must not apply the gradients of the three updates again.
    assert sum(not slab.grad.present for slab in engine.slabs) == 3
    fetcher = engine._step.fetcher
    for slab in [slab for slab in engine.slabs if slab.index in fetcher._held]:
        slot = fetcher._rings[slab.index].find(slab)
        slab.settle()
        assert slot is None or torch.equal(slot.view(slab), slab.weight)
