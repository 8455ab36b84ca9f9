"""`benchmarks.timeline` draws a step from its trace."""

import json
from xml.etree import ElementTree

import pytest
from benchmarks import timeline
from tests.tiny import Stack, backward, engine_of

from megatrain.telemetry.trace import document

SVG = "{http://www.w3.org/2000/svg}"
SPANS = [("steps", "step 3", 0.0, 1.0), ("steps", "step 4", 1.0, 3.0), ("compute", "forward model.layers.0", 1.0, 1.5),
         ("compute", "backward model.layers.0", 1.6, 2.9), ("h2d", "model.layers.0", 0.2, 0.4),
         ("update", "<norm>", 2.9, 3.0)]  # fmt: skip


def texts(picture):
    return [element.text for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def bars_of(picture):
    return [e for e in ElementTree.fromstring(picture).iter(f"{SVG}rect") if e.find(f"{SVG}title") is not None]


def test_a_step_of_an_engine(tmp_path):
    model = Stack()
    engine = engine_of(model)
    optimizer = engine.optimizer(lr=1e-3)
    with engine.trace() as recorded:
        backward(model, seed=0)
        optimizer.step()
    recorded.save(tmp_path / "trace.json")
    lanes = {span.lane for span in recorded.spans}
    picture = timeline.draw(json.loads((tmp_path / "trace.json").read_text()), "a < b")
    assert {"compute", "h2d", "update"} <= lanes <= set(texts(picture))
    assert "a < b" in texts(picture)
    assert "seconds" in texts(picture)
    for bar in bars_of(picture):
        assert float(bar.get("x")) >= timeline.LEFT - 0.1
        assert float(bar.get("x")) + float(bar.get("width")) <= timeline.WIDTH
    engine.close()


def test_a_step_of_a_recorded_run():
    trace = {"traceEvents": document(SPANS)}
    start, end = timeline.bounds(trace, 4)
    assert (start, end) == (1.0, 3.0)
    picture = timeline.draw(trace, "step 4", start, end)
    titles = [bar.find(f"{SVG}title").text for bar in bars_of(picture)]
    assert titles == ["forward model.layers.0: 500 ms", "backward model.layers.0: 1.3e+03 ms", "<norm>: 100 ms"]
    assert "h2d" not in texts(picture)  # idle in this step
    with pytest.raises(SystemExit, match="no step 5"):
        timeline.bounds(trace, 5)
    with pytest.raises(SystemExit, match="no spans of lanes"):
        timeline.draw({"traceEvents": document(SPANS[:1])}, "")
    with pytest.raises(SystemExit, match="must be after"):
        timeline.draw(trace, "", 2.0, 1.0)


def test_bars_too_thin_to_distinguish_are_merged():
    spans = [("compute", "forward a", 0.0, 0.001), ("compute", "forward b", 0.001, 0.002),
             ("compute", "backward b", 0.002, 0.003), ("compute", "forward c", 0.5, 1.0)]  # fmt: skip
    assert [(bar.label, bar.start, bar.end) for bar in timeline.bars(spans, 0.0, 1.0, 100)] == [
        ("forward", 0.0, 0.002), ("backward b", 0.002, 0.003), ("forward c", 0.5, 1.0)
    ]  # fmt: skip


@pytest.mark.parametrize(("seconds", "step"), [(1.0, 0.1), (2.67, 0.5), (0.03, 0.005), (13.6, 2.0)])
def test_marks_of_the_axis(seconds, step):
    assert timeline.tick(seconds) == pytest.approx(step)
