"""Freed device memory is not reused before the stream that used it last; checked without a GPU."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megatrain.store import vram


class Stream:
    """Records the names of the work it is ordered after."""

    def __init__(self) -> None:
        self.ordered_after: set[str] = set()

    def wait_stream(self, other: Any) -> None:
        self.ordered_after |= other.ordered_after


def test_memory_is_reused_only_after_the_stream_that_used_it_last(monkeypatch: pytest.MonkeyPatch) -> None:
    home, compute, evaluation = Stream(), Stream(), Stream()
    current = [compute]
    monkeypatch.setattr(vram, "_persistent_stream", lambda _: home)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[0])
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    real = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, **more: real(*args, **{**more, "device": "cpu"}))
    memory = vram.DeviceMemory(torch.device("cuda", 0))
    buffer = memory.allocate(8, transferred=True)
    compute.ordered_after.add("copy out of the buffer")
    memory.free(buffer)
    assert home.ordered_after == {"copy out of the buffer"}, "the driver gets the memory back after the copy"
    current[0] = evaluation
    memory.allocate(8, transferred=True)
    assert evaluation.ordered_after == {"copy out of the buffer"}
    assert memory.allocated_bytes == 8
