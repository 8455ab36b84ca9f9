"""Limits on GPU memory end with their engine and never exceed the user's own. The driver is simulated."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from tests.tiny import Stack, engine_of

from megatrain import process
from megatrain.errors import NotEnoughMemory
from megatrain.geometry import GIB
from megatrain.hardware import cgroups, inventory
from megatrain.hardware.machine import CUDA_CONTEXT_BYTES, PROCESS_BYTES, AvailableMemory
from megatrain.process import VramLimit

GPU = torch.device("cuda", 0)
TOTAL = 80 * GIB


@pytest.fixture
def share(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The fraction of GPU memory that PyTorch's allocator may use."""
    held = [1.0]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=TOTAL))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: held[0])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda value, _: held.__setitem__(0, value))
    monkeypatch.setattr(process, "_vram_fractions", {})
    return held


def allowed(share: list[float]) -> float:
    return share[0] * TOTAL


def cap(nbytes: int | None, owner: str = "engine") -> None:
    process.vram_fraction(GPU).request(owner, VramLimit(cap=nbytes))


def end(owner: str = "engine") -> None:
    process.release(owner)


def test_a_cap_can_change_and_ends_with_its_engine(share: list[float]) -> None:
    cap(12 * GIB)
    assert allowed(share) == pytest.approx(12 * GIB)
    cap(40 * GIB)
    assert allowed(share) == pytest.approx(40 * GIB)
    cap(None)
    assert share[0] == 1.0
    cap(12 * GIB)
    end()
    assert share[0] == 1.0


def test_the_users_own_cap_stays(share: list[float]) -> None:
    share[0] = 0.5
    cap(60 * GIB)
    assert share[0] == 0.5
    cap(12 * GIB)
    assert allowed(share) == pytest.approx(12 * GIB)
    end()
    assert share[0] == 0.5


def test_a_cap_that_the_user_sets_later_stays(share: list[float]) -> None:
    cap(40 * GIB)
    share[0] = 0.25
    cap(None)
    assert share[0] == 0.25
    cap(12 * GIB)
    share[0] = 0.2
    end()
    assert share[0] == 0.2


def test_the_lowest_cap_of_open_engines_applies(share: list[float]) -> None:
    cap(20 * GIB, "a")
    cap(30 * GIB, "b")
    assert allowed(share) == pytest.approx(20 * GIB)
    end("a")
    assert allowed(share) == pytest.approx(30 * GIB)
    cap(None, "c")
    assert allowed(share) == pytest.approx(30 * GIB)
    end("b")
    assert share[0] == 1.0
    end("c")
    end("c")
    assert share[0] == 1.0


def test_plans_add_up_and_do_not_limit_engines_without_one(share: list[float]) -> None:
    process.vram_fraction(GPU).request("a", VramLimit(planned=20 * GIB, other_bytes=2 * GIB))
    assert allowed(share) == pytest.approx(22 * GIB)
    # The second engine's other bytes include what the first holds by now.
    process.vram_fraction(GPU).request("b", VramLimit(planned=10 * GIB, other_bytes=17 * GIB))
    assert allowed(share) == pytest.approx(32 * GIB)
    cap(None, "c")
    assert share[0] == 1.0
    cap(25 * GIB, "c")
    assert allowed(share) == pytest.approx(25 * GIB)
    end("c")
    end("b")
    assert allowed(share) == pytest.approx(22 * GIB)


def test_vram_limit(share: list[float], announced: pytest.LogCaptureFixture) -> None:
    assert inventory.vram_limit(GPU, None) is None
    assert inventory.vram_limit(GPU, 24) == 24 * GIB
    assert inventory.vram_limit(GPU, 200) == TOTAL
    assert any("clamped" in line for line in announced.messages)
    with pytest.raises(NotEnoughMemory, match="leaves nothing beside"):
        inventory.vram_limit(GPU, 0.5)


def test_what_does_not_fit_is_refused_in_words_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotEnoughMemory, match=r"need 1073741824\.00 GiB of device memory, .* in `resident`\.$"):
        inventory.require_vram(torch.device("cpu"), 1 << 60, "weights")
    monkeypatch.setattr(inventory, "free_memory", lambda _: GIB)
    with pytest.raises(NotEnoughMemory, match=r"need 2\.00 GiB of VRAM, .* or raise max_vram_gb\.$"):
        inventory.require_vram(GPU, 2 * GIB, "weights")


def test_memory_held_by_the_rest_of_the_process_is_not_available(
    share: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (30 * GIB, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 49 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 45 * GIB)
    model = torch.nn.Linear(2, 2)
    found = inventory.available_memory(GPU, model)
    assert (found.vram, found.held) == (30 * GIB + 4 * GIB + CUDA_CONTEXT_BYTES // 2, 45 * GIB)
    share[0] = 0.75
    assert inventory.available_memory(GPU, model).vram == 60 * GIB + CUDA_CONTEXT_BYTES - 45 * GIB
    # A cap of an engine does not limit the next engine; the user's own cap does.
    cap(12 * GIB)
    assert inventory.available_memory(GPU, model).vram == 60 * GIB + CUDA_CONTEXT_BYTES - 45 * GIB
    share[0] = 0.25
    assert inventory.available_memory(GPU, model).vram == 0


def test_a_cap_below_what_the_process_holds_is_refused(share: list[float]) -> None:
    assert inventory.vram_limit(GPU, 24, held=20 * GIB) == 24 * GIB
    with pytest.raises(NotEnoughMemory, match=r"the 23\.50 GiB that this process holds .* at least 26"):
        inventory.vram_limit(GPU, 24, held=47 * GIB // 2)


@pytest.mark.parametrize(
    ("configured", "grows"),
    [("expandable_segments:True", True), ("max_split_size_mb:64, expandable_segments: true", True),
     ("garbage_collection_threshold:0.8", False), ("expandable_segments:False", False)],
)  # fmt: skip
def test_expandable_segments_follow_the_users_configuration(
    configured: str, grows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", configured)
    assert process.use_expandable_segments("engine") == grows


def test_available_ram_is_free_ram_plus_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "available_ram", lambda: 10 * GIB)
    monkeypatch.setattr(inventory, "own_ram", lambda: 50 * GIB)
    model = torch.nn.Linear(1 << 10, 1 << 10, bias=False)
    cpu = torch.device("cpu")
    # A plan leaves free what the RAM monitor requires.
    low = inventory.level(inventory.LOW, cgroups.usable_ram())
    assert inventory.available_memory(cpu, model) == AvailableMemory(ram=10 * GIB + PROCESS_BYTES + (4 << 20) - low)
    monkeypatch.setattr(inventory, "own_ram", lambda: 1 << 20)
    assert inventory.available_memory(cpu, model).ram == 10 * GIB + (1 << 20) - low
    # Compiler processes will need RAM later.
    compilers = inventory.level(inventory.COMPILERS, cgroups.usable_ram())
    assert inventory.available_memory(cpu, model, compiles=True).ram == 10 * GIB + (1 << 20) - low - compilers


def test_dropped_engines_are_collected_before_memory_is_counted() -> None:
    model = Stack()
    gc.collect()
    gc.disable()
    try:
        slab = weakref.ref(engine_of(Stack()).slabs[0])
        assert slab() is not None, "kept alive by a reference cycle"
        inventory.available_memory(torch.device("cpu"), model)
    finally:
        gc.enable()
    assert slab() is None
