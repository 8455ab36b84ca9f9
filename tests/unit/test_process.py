"""Process-wide settings last while an engine needs them, and leave what the user set or compiled alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.tiny import WIDTH, Stack, engine_of

from megatrain import process
from megatrain.compute import compiled, hints, partition
from megatrain.errors import MegaTrainError
from megatrain.process import EXPANDABLE_SEGMENTS, SWITCH_INTERVAL

PYTHONS = 0.005
"""Python's default switch interval."""


@pytest.fixture(autouse=True)
def interval(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts as if no other engine were open."""
    before, shared = sys.getswitchinterval(), process.switch_interval
    monkeypatch.setattr(
        process, "switch_interval", process.ProcessSetting(shared.read, shared.write, shared.combine, shared.same)
    )
    sys.setswitchinterval(PYTHONS)
    yield
    sys.setswitchinterval(before)


def test_the_switch_interval_is_short_while_an_engine_is_open() -> None:
    first, second = engine_of(Stack(), lanes="threads"), engine_of(Stack(), lanes="threads")
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL)
    first.close()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL)
    second.close()
    assert sys.getswitchinterval() == pytest.approx(PYTHONS)
    with engine_of(Stack(), lanes="sync"):
        assert sys.getswitchinterval() == pytest.approx(PYTHONS), "there is no thread to wait for"


def test_a_shorter_interval_of_the_user_stays() -> None:
    sys.setswitchinterval(2e-5)
    with engine_of(Stack(), lanes="threads"):
        assert sys.getswitchinterval() == pytest.approx(2e-5)
    assert sys.getswitchinterval() == pytest.approx(2e-5)


def test_an_interval_that_the_user_sets_meanwhile_stays() -> None:
    with engine_of(Stack(), lanes="threads"):
        sys.setswitchinterval(0.02)
    assert sys.getswitchinterval() == pytest.approx(0.02)


# ---- PyTorch's allocator, which keeps its settings even without a GPU


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    if process._read_allocator_settings is None:
        pytest.skip("this version of PyTorch does not return settings made at run time")
    torch._C._accelerator_setAllocatorSettings("")
    yield process._read_allocator_settings
    torch._C._accelerator_setAllocatorSettings("")


def test_segments_grow_while_an_engine_wants_them_to(allocator: Callable[[], str]) -> None:
    assert process.use_expandable_segments("a")
    assert process.use_expandable_segments("b")
    process.release("a")
    assert allocator() == EXPANDABLE_SEGMENTS
    process.release("b")
    process.release("b")
    assert allocator() == ""


def test_segments_do_not_grow_afterwards(allocator: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator keeps options that a new setting does not mention, so the option has to be disabled explicitly."""
    written: list[str] = []
    plain = torch._C._accelerator_setAllocatorSettings
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda text: (written.append(text), plain(text)))
    process.use_expandable_segments("a")
    process.release("a")
    assert written == [EXPANDABLE_SEGMENTS, "expandable_segments:False", ""]


def test_what_the_user_configured_at_run_time_stays(allocator: Callable[[], str]) -> None:
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:64")
    assert not process.use_expandable_segments("a")
    process.release("a")
    assert allocator() == "max_split_size_mb:64"
    torch._C._accelerator_setAllocatorSettings("")
    assert process.use_expandable_segments("a")
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:64")
    process.release("a")
    assert allocator() == "max_split_size_mb:64"


# ---- dynamo

LIMIT = 3
LENGTHS = range(2, 2 + LIMIT + 2)


@pytest.fixture(params=[True, False], ids=["per thread", "per process"])
def dynamo(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Blocks are compiled for every shape, without a C compiler. Returns a function that counts the compiled graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(process, "DYNAMO_CONFIG_PER_THREAD", request.param)
    monkeypatch.setattr(process, "DYNAMIC_SOURCES", "")
    plain = torch.compile
    monkeypatch.setattr(
        compiled.torch, "compile", lambda function, **_: plain(function, backend="eager", dynamic=False)
    )
    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        yield lambda: int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch._dynamo.reset()


def compiled_by_the_user(**options: Any) -> tuple[Callable[[int], Any], list[int]]:
    """A function that is compiled for every length, and the list of lengths it was compiled for."""
    lengths: list[int] = []

    def backend(graph: Any, inputs: list[torch.Tensor]) -> Any:
        lengths.append(inputs[0].numel())
        return graph.forward

    function = torch._dynamo.optimize(backend, dynamic=False, **options)(lambda x: x.sin() + 1)
    return lambda length: function(torch.zeros(length)), lengths


def backwards(model: Any, rows: range) -> None:
    for count in rows:
        model(torch.ones(count, WIDTH)).sum().backward()


def test_functions_compiled_by_users_fall_back_at_their_own_limit(dynamo: Callable[[], int]) -> None:
    model = Stack()
    with engine_of(model, compile=True):
        own, seen = compiled_by_the_user()
        for length in LENGTHS:
            backwards(model, range(length, length + 1))
            assert torch.equal(own(length), torch.ones(length))
        assert seen == list(LENGTHS)[:LIMIT]
        assert dynamo() == len(LENGTHS) + LIMIT, "every shape of the blocks was compiled"


def test_full_graphs_compiled_by_users_raise_at_their_own_limit(dynamo: Callable[[], int]) -> None:
    model = Stack()
    with engine_of(model, compile=True):
        backwards(model, range(1, 2))
        own, _ = compiled_by_the_user(nopython=True)
        for length in range(2, 2 + LIMIT):
            own(length)
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            own(1)


def test_blocks_that_are_compiled_too_often_raise_in_any_thread(
    dynamo: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Falling back to eager silently would draw different dropout masks in the recompute."""
    most = LIMIT + 2
    monkeypatch.setattr(compiled, "MAX_GRAPHS", most)
    model, raised = Stack(), []

    @torch._dynamo.config.patch(recompile_limit=LIMIT)
    def train() -> None:
        backwards(model, range(2, most + 2))
        try:
            backwards(model, range(most + 2, most + 3))
        except MegaTrainError as error:
            raised.append(str(error))

    with engine_of(model, compile=True):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert dynamo() == most
    assert len(raised) == 1
    assert f"compiled {most} times" in raised[0]


@pytest.mark.parametrize("per_thread", [True, False])
def test_calls_that_overlap_leave_no_limits_behind(per_thread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds in both threads, whichever call ends first."""
    if per_thread and not process.DYNAMO_CONFIG_PER_THREAD:
        pytest.skip("dynamo's settings are not per thread in this version of PyTorch")
    monkeypatch.setattr(process, "DYNAMO_CONFIG_PER_THREAD", per_thread)
    if not per_thread:
        # As in versions of PyTorch where dynamo's settings are not per thread.
        everywhere = process._read_dynamo()
        monkeypatch.setattr(process, "_read_dynamo", lambda: dict(everywhere))
        monkeypatch.setattr(
            process,
            "_dynamo_settings",
            process.ProcessSetting(process._read_dynamo, everywhere.update, process._for_blocks),
        )
    entered, ended = threading.Event(), threading.Event()
    before, found = process._read_dynamo(), []

    def other() -> None:
        with process.compile_settings(50):
            entered.set()
            ended.wait(300)
        found.append(process._read_dynamo())

    thread = threading.Thread(target=other)
    with process.compile_settings(40):
        thread.start()
        entered.wait(300)
        assert process._read_dynamo()["recompile_limit"] == (40 if per_thread else 50)
    ended.set()
    thread.join()
    assert found == [before]
    assert process._read_dynamo() == before


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_set_while_a_block_is_compiled_is_put_back(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    seen, plain = [], partition.compile_fx

    def state() -> Any:
        functions = [vars(owner)[name] for owner, name, _ in hints.HINTS]
        settings = {name: getattr(torch._functorch.config, name) for name in partition.PARTITIONER}
        return functions, settings, torch.compiler.config.cache_key_tag

    def compile_fx(*args: Any, **options: Any) -> Any:
        seen.append(state())
        if fails:
            raise RuntimeError("no kernel")
        return plain(*args, **options)

    monkeypatch.setattr(partition, "compile_fx", compile_fx)
    before, model = state(), Stack()
    with engine_of(model, compile=True):
        backwards(model, range(3, 4))
        assert state() == before
    functions, settings, tag = seen[0]
    assert not set(functions) & set(before[0])
    assert settings == partition.PARTITIONER
    assert tag.endswith(process.sdpa_key())


def test_replaced_functions_are_put_back_if_replacing_fails() -> None:
    class Owner:
        first, second = staticmethod(abs), staticmethod(len)

    def fail(_: Any) -> Any:
        raise KeyboardInterrupt

    before = dict(vars(Owner))
    with pytest.raises(KeyboardInterrupt), process.replaced([(Owner, "first", staticmethod), (Owner, "second", fail)]):
        pass
    assert dict(vars(Owner)) == before
