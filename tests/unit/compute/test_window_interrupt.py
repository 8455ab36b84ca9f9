"""Ctrl-C inside a window whose lane does not get on."""

import os
import signal
import threading
import time
from typing import Any

import pytest
from tests.tiny import Stack, engine_of, inputs

from megatrain.stream.lanes import ThreadLanes


@pytest.mark.parametrize("window", [False, True])
def test_ctrl_c_gets_through_within_five_seconds(window: bool) -> None:
    lanes = ThreadLanes()
    model = Stack()
    stuck = threading.Event()
    engine = engine_of(model, lanes=lanes)
    plain = lanes.h2d.submit
    calls = []

    def submit(work: Any, after: Any = (), label: str = "") -> Any:
        calls.append(label)

        def slow() -> None:
            if len(calls) > 3:
                stuck.wait(12)
            work()

        return plain(slow, after, label)

    lanes.h2d.submit = submit  # type: ignore[method-assign]
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with engine:
            task = lambda: model(inputs(0)).square().mean().backward()  # noqa: E731
            engine.window([task, task]) if window else [task() for _ in range(3)]
    took = time.monotonic() - begin
    stuck.set()
    assert took < 1.0 + 5.0, f"{took:.1f} s"
