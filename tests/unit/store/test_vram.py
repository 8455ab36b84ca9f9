"""Memory that compute has given back and still uses, seen without a GPU: who comes after whom."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megatrain.store import vram


class Stream:
    """Remembers what it is behind: pieces of work, by name."""

    def __init__(self) -> None:
        self.behind: set[str] = set()

    def wait_stream(self, other: Any) -> None:
        self.behind |= other.behind


def test_nobody_gets_bytes_before_the_stream_that_used_them_last(monkeypatch: pytest.MonkeyPatch) -> None:
    home, compute, visitor = Stream(), Stream(), Stream()
    current = [compute]
    monkeypatch.setattr(vram, "_persistent_stream", lambda _: home)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[0])
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    real = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, **more: real(*args, **{**more, "device": "cpu"}))
    memory = vram.DeviceMemory(torch.device("cuda", 0))
    buffer = memory.allocate(8, transferred=True)
    compute.behind.add("copy out of the buffer")
    memory.free(buffer)
    assert home.behind == {"copy out of the buffer"}, "the driver gets it back after that"
    current[0] = visitor
    memory.allocate(8, transferred=True)
    assert visitor.behind == {"copy out of the buffer"}
    assert memory.allocated_bytes == 8
