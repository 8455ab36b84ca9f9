"""The plan as text and JSON, and the largest batch, context and model."""

import copy
import dataclasses
import json
import pickle

import pytest
from tests.unit.planner.made_up import cpu_only, shape_of
from transformers import AutoConfig

from megatrain.errors import NotEnoughMemory, SettingsError
from megatrain.hardware.machine import Machine
from megatrain.planner import plan
from megatrain.planner.api import dense_shape, largest_batch, largest_context, largest_model
from megatrain.planner.plan import Plan
from megatrain.planner.run import Run
from megatrain.planner.search import Search
from megatrain.settings import Settings

H200 = Machine.load("h200-128gb")


def test_the_table_has_every_row():
    result = plan(shape_of("qwen2.5-7b"), machine=H200, batch=4, max_vram_gb=24, optimizer_compression="8bit")
    text = result.table(tokens=5e9)
    for word in ("weights", "residuals", "moments", "gradients", "activations", "workspace", "vram", "ram", "24.0",
                 "bound by", "tokens/s", "days for 5B tokens", "moments of matrices in 8bit"):  # fmt: skip
        assert word in text
    rows = [line for line in text.splitlines() if line.startswith(("GiB", "vram", "ram"))]
    assert len({len(row) for row in rows}) == 1
    assert str(result) == result.table()


def test_the_table_says_where_blocks_are():
    result = plan(
        shape_of("qwen2.5-14b"), machine=H200, batch=2, accumulation=16, compile=True, optimizer_compression="8bit"
    )
    others, states = result.blocks - len(result.resident), len(result.streamed_states)
    assert 0 < states < others == len(result.held_weights) == len(result.held_gradients)
    rows = {name: rest for name, _, rest in (line.partition("  ") for line in result.table().splitlines())}
    assert rows["placement"].startswith(f"{len(result.resident)} of {result.blocks} blocks resident")
    assert rows["weights"].strip() == f"of the other {others}: all held in VRAM"
    assert f"{states} on the GPU with streamed states, the rest on {result.threads} CPU threads" in rows["updates"]
    assert result.placement.endswith(f"{states} with streamed states")
    alone = plan(dense_shape(8, 8), machine=cpu_only()).table()
    assert "all blocks in RAM: there is no GPU" in alone
    assert "VRAM" not in alone


def test_days_for_tokens():
    result = plan(shape_of("qwen2.5-7b"), machine=H200, batch=4)
    assert result.days_for(result.tokens_per_second * 86400) == pytest.approx(1)
    assert result.tflops == pytest.approx(6 * result.matmul_parameters * result.tokens_per_second / 1e12)


def test_a_plan_gives_settings_for_an_engine():
    result = plan(shape_of("qwen2.5-7b"), machine=H200, batch=4, max_vram_gb=40)
    settings = Settings(**result.settings())
    assert settings.resident == result.resident != ()
    assert settings.window == result.window


def test_plans_with_micro_batches_one_by_one():
    """Each gradient is then copied by itself, and a BF16 one needs an FP32 sum as well: 6 bytes instead of 2."""
    options = {"machine": Machine.load("h200-1.5tb"), "accumulation": 8, "max_vram_gb": 20}
    together, in_turn = (plan(shape_of("qwen2.5-7b"), **options, together=value) for value in (True, False))
    assert together.windows == (8,)
    assert in_turn.windows == (1,) * 8
    assert in_turn.step.seconds > together.step.seconds
    # Sums held in VRAM are copied once.
    assert in_turn.held_gradients
    gradients = [result.memory["ram"]["gradients"] for result in (together, in_turn)]
    assert gradients[1] > 2.5 * gradients[0]


def test_a_plan_is_frozen_and_serialises():
    result = plan(shape_of("qwen2.5-7b"), machine=H200, batch=4, max_vram_gb=24)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.windows = (2,)
    assert Plan.from_json(result.to_json()) == result
    for broken in ("", "{}", "[]", result.to_json().replace('"windows"', '"window"')):
        with pytest.raises(SettingsError):
            Plan.from_json(broken)


def test_the_table_says_what_is_on_disk():
    result = plan(dense_shape(32, 90), machine="rtx4090-64gb", offload_dir="/d")
    states, gradients = len(result.on_disk), len(result.gradients_on_disk)
    assert 0 < gradients <= states
    rows = {name: rest.strip() for name, _, rest in (line.partition("  ") for line in result.table().splitlines())}
    assert f"states of {states} blocks, gradients of {gradients} blocks" in rows["disk"]
    assert rows["gradients"].endswith("in RAM or on disk")
    on_disk = result.memory["disk"]["gradients"]
    assert on_disk > 0
    assert f"{on_disk / (1 << 30):.2f}" in rows["disk"] + str(result)
    assert f"{result.written / 1e9:.0f} GB written per step" in rows["disk"]


def test_a_plan_is_deeply_frozen():
    result = plan(dense_shape(8, 8), machine=H200, max_vram_gb=8)
    for mapping in (result.policy, result.memory, result.memory["vram"], result.capacity, result.step.busy):
        with pytest.raises(TypeError, match="frozen"):
            mapping[next(iter(mapping))] = 0
    copies = [copy.copy(result), copy.deepcopy(result), pickle.loads(pickle.dumps(result)), dataclasses.replace(result)]
    assert {result, Plan.from_json(result.to_json()), *copies} == {result}
    assert {result, dataclasses.replace(result, slots=result.slots + 1)} != {result}
    assert json.loads(json.dumps(dataclasses.asdict(result)))["memory"] == result.memory
    settings = result.settings()
    settings["policy"]["*"] = "store"
    assert result.policy["*"] != "store"


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("windows", [0], "windows"), ("windows", "2", "windows"), ("windows", [2], "windows"),
        ("windows", [], "windows"), ("held_weights", ["a", "a"], "held_weights"),
        ("held_gradients", 5, "held_gradients"),
        ("weights_on_disk", "a", "weights_on_disk"), ("gradients_on_disk", [1], "gradients_on_disk"),
        ("written", -1, "written"), ("written", None, "written"),
        ("slots", 1.5, "slots"), ("threads", -1, "threads"),
        ("model", 5, "model"), ("parameters", 10**400, "parameters"), ("resident", 5, "resident"),
        ("resident", [1], "resident"), ("resident", ["a", "a"], "resident"), ("notes", "text", "notes"),
        ("policy", [], "policy"), ("policy", {"*": "nothing"}, "policy"), ("policy", {}, "policy"),
        ("memory", {}, "memory"), ("memory", {"vram": 1, "ram": 2, "disk": 3}, "memory"),
        ("capacity", None, "capacity"), ("capacity", {"vram": 1, "ram": 2, "disk": -3}, "capacity"),
        ("step", 7, "step"), ("run", [], "run"),
        ("step.seconds", 0, "step.seconds"), ("step.seconds", float("nan"), "step.seconds"),
        ("step.busy", {}, "step.busy"), ("step.waited", None, "step.waited"),
        ("step.bottleneck", [], "step.bottleneck"),
        ("run.length", 0, "length"), ("run.length", 10**400, "run.length"), ("run.precision", [], "precision"),
        ("run.compile", 1, "compile must"), ("run.attention", 1, "run.attention"), ("run.more", 1, "run has more"),
        ("step.more", 1, "step has more"), ("more", 1, "it has more"),
    ],
)  # fmt: skip
def test_errors_in_a_plan_are_named(field, value, named):
    data = json.loads(plan(dense_shape(8, 8), machine=H200).to_json())
    *outer, last = field.split(".")
    (data[outer[0]] if outer else data)[last] = value
    with pytest.raises(SettingsError, match=f"the plan cannot be read: {named}"):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "null", '{"format": 1}', None, 5, b"\xff", "[" * 100_000])
def test_text_that_is_not_a_plan_is_refused(text):
    with pytest.raises(SettingsError, match="plan"):
        Plan.from_json(text)


def test_lossy_settings_are_listed():
    assert plan(dense_shape(8, 8), machine=H200).lossy == ()
    assert plan(dense_shape(8, 8), machine=H200, optimizer_compression="lossless").lossy == ()
    assert "4bit" in plan(dense_shape(8, 8), machine=H200, optimizer_compression=True).lossy[0]
    assert "without an FP32 master" in plan(dense_shape(8, 8), machine=H200, precision="bf16-sr").lossy[0]


def test_slow_fp32_is_noted():
    assert any("TFLOP/s" in note for note in plan(dense_shape(8, 8), machine=H200, precision="fp32").notes)


@pytest.mark.parametrize("cap", [14.0, 30.0])
def test_largest_batch_and_context(cap):
    shape, run = shape_of("qwen2.5-7b"), Run(length=2048)
    answer = largest_batch(shape, H200, run, max_vram_gb=cap)
    assert answer.plan.run.micro_batch == answer.value >= 1
    with pytest.raises(NotEnoughMemory):
        Search(shape, H200, dataclasses.replace(run, micro_batch=answer.value + 1), max_vram_gb=cap).plan()
    longest = largest_context(shape, H200, Run(), max_vram_gb=cap)
    assert longest.plan.run.length == longest.value
    with pytest.raises(NotEnoughMemory):
        Search(shape, H200, Run(length=longest.value + 64), max_vram_gb=cap).plan()


def test_largest_model():
    answer = largest_model(H200, Run())
    assert 8e9 < answer.value < 25e9
    assert answer.plan.parameters == answer.value
    low = largest_model(H200, Run(optimizer_compression="4bit"))
    assert low.value > 1.5 * answer.value
    family = [shape_of(name) for name in ("qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b")]
    assert largest_model(H200, Run(), family).value == shape_of("qwen2.5-7b").parameters
    assert largest_model(Machine.load("rtx4090-64gb"), Run(), family).value == shape_of("qwen2.5-3b").parameters


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bart"])
def test_a_length_beyond_the_models_positions_is_noted(kind):
    config = AutoConfig.for_model(kind)
    longest = config.max_position_embeddings
    assert not any("positions" in note for note in plan(config, machine=H200, length=longest).notes)
    notes = [note for note in plan(config, machine=H200, length=longest + 1).notes if "positions" in note]
    assert len(notes) == 1
    assert f"{longest:,}" in notes[0]
