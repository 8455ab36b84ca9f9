"""Timelines do not grow without bound."""

from typing import Any

import torch
from tests.tiny import Stack, engine_of, inputs

from megatrain.stream import cuda
from megatrain.stream.timeline import UNREAD


class FakeEvent:
    def __init__(self, **_: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...
    def elapsed_time(self, other: Any) -> float:
        return 0.0


def test_spans_of_a_stream_lane_are_dropped(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: FakeEvent())
    for name in ("set_device", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    lanes = cuda.CudaLanes(torch.device("cpu"))
    lane, timeline = lanes["h2d"], lanes.timeline
    for _step in range(20):
        for _ in range(100):
            lane.submit(lambda: None, label="x").wait()
        timeline.cut()
    assert len(timeline._closed) <= UNREAD
    timeline.settle(wait=False)
    assert timeline.spans == timeline._closed == timeline._page.spans == timeline._page.pending == []
    assert timeline.last.step == 19
    assert set(timeline.last.busy) == {"h2d"}
    lanes.close()


def test_evaluation_does_not_collect_spans_without_end() -> None:
    model = Stack()
    engine = engine_of(model)
    counts = []
    for _ in range(2):
        with torch.no_grad():
            for seed in range(4000):
                model(inputs(seed))
        counts.append(len(engine._lanes.timeline._page.spans) + len(engine._lanes.timeline._page.waits))
    assert counts[1] < 1 << 16, f"entries after 4000 and 8000 forwards: {counts}"
