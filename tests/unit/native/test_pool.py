"""The thread pool of the native update: results do not depend on thread count, calling thread or forks."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from tests.unit.native.test_update import ADAMW, WIDTHS, gradient_of, state_of

from megatrain.native import library
from megatrain.optim.update import Kernel, Operands, native_kernel


@pytest.mark.parametrize(("weight", "width"), [*(("split", width) for width in WIDTHS), ("bf16", "bf16")])
def test_results_do_not_depend_on_the_thread_count(weight, width):
    count = 3_000_001
    alone = state_of(ADAMW, weight, width, count)
    values = gradient_of("bf16", count, 0)
    others = {threads: alone.copy() for threads in (2, 3, 8)}
    for step in (1, 2):
        native_kernel(1)(alone.operands(values, True, step))
        for threads, state in others.items():
            native_kernel(threads)(state.operands(values, True, step))
    for threads, state in others.items():
        assert not state.differs(alone), threads


def workers() -> int:
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("megatrain-") for name in names)


def run_in_child(kernel: Kernel, operands: Operands) -> int:
    """Run the kernel in a forked child. Returns its exit status: the number of its workers, or 99 after an error."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            assert workers() == 0
            kernel(operands)
            code = workers()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_starts_its_own_pool():
    """Also while the parent's pool is running."""
    count = 200_000
    values = gradient_of("bf16", count, 0)
    expected, state, busy = (state_of(ADAMW, "split", "8bit", count) for _ in range(3))
    native_kernel(4)(expected.operands(values, True, 1))
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            native_kernel(4)(busy.operands(values, True, 1))

    state.weight.share_memory_()
    before = state.weight.clone()
    parent = threading.Thread(target=keep_busy)
    parent.start()
    try:
        for _ in range(5):
            state.weight.copy_(before)
            found = run_in_child(native_kernel(4), state.operands(values, True, 1))
            assert found == min(4, usable_cpus()) - 1
            assert torch.equal(state.weight, expected.weight)
    finally:
        stop.set()
        parent.join()


def usable_cpus() -> int:
    allowed = len(os.sched_getaffinity(0))
    return min(allowed, library.cpu_quota() or allowed)


def test_several_threads_can_call_at_once():
    count, rounds = 600_000, 6
    values = [gradient_of("bf16", count, seed) for seed in range(4)]
    states = [state_of(ADAMW, "split", width, count) for width in WIDTHS]
    expected = [state.copy() for state in states]

    def work(index: int) -> None:
        for step in range(1, rounds + 1):
            native_kernel(2 + index)(states[index].operands(values[index], True, step))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, state in enumerate(expected):
        for step in range(1, rounds + 1):
            native_kernel(1)(state.operands(values[index], True, step))
        assert not states[index].differs(state), index
