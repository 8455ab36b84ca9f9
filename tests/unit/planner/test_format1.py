"""Plan files of format 1 can be read and followed. Their errors are reported as for current ones."""

import json
from pathlib import Path

import pytest
from tests import small
from tests.tiny import engine_of

import megatrain as mt
from megatrain.errors import SettingsError

WRITTEN = (Path(__file__).parent / "format1.json").read_text()


def test_a_plan_of_format_1_is_read_and_followed():
    plan = mt.Plan.from_json(WRITTEN)
    assert plan.windows == (2, 2, 1)
    assert (plan.held_weights, plan.held_gradients, plan.on_disk) == ((), (), ())
    assert (plan.weights_on_disk, plan.gradients_on_disk) == ((), ())
    assert plan.run == mt.Run(micro_batch=2, length=64, accumulation=5, precision="fp32", optimizer_compression="8bit")
    assert plan.step.busy["gpu_update"] == json.loads(WRITTEN)["step"]["busy"]["vram update"]
    assert (plan.step.busy["refresh"], plan.step.waited["sums_out"], plan.step.bottleneck) == (0.0, 0.0, "compute")
    assert mt.Plan.from_json(plan.to_json()) == plan, "it is written in the current format"
    assert "2 of 7 blocks resident" in plan.table()
    engine = engine_of(small.llama(num_hidden_layers=4), plan=plan, optimizer_compression="8bit")
    assert {slab.name for slab in engine.slabs if slab.homes.states.tier == "vram"} == {"model.layers.0", "lm_head"}
    assert engine.settings.window == 2


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("window", 0, "has window, unknown here"), ("window", None, "has window, unknown here"),
        ("run", [], "has window, unknown here"), ("step", 5, "step must be an object"),
        ("step", {"busy": 5}, "step lacks"), ("resident", "model.layers.0", "resident must be a list"),
    ],
)  # fmt: skip
def test_errors_in_it_are_named(field, value, match):
    data = json.loads(WRITTEN) | {field: value}
    with pytest.raises(SettingsError, match=match):
        mt.Plan.from_json(json.dumps(data))
    del data[field]
    with pytest.raises(SettingsError, match="the plan cannot be read"):
        mt.Plan.from_json(json.dumps(data))
