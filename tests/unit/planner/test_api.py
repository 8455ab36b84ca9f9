"""`largest_batch`, `largest_context` and `largest_model` take a plan's options and return the largest value
that fits.
"""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.planner.made_up import GB, any_machines, cpu_only, runs, shape_of, shapes
from transformers import AutoConfig

import megatrain as mt
from megatrain.errors import NotEnoughMemory, SettingsError
from megatrain.hardware.machine import Machine
from megatrain.planner import Refusal, Run, largest_batch, largest_context, largest_model, plan
from megatrain.planner.api import SEARCH_LIMIT, dense_shape
from megatrain.planner.search import Search

H200 = "h200-128gb"


@settings(max_examples=20, deadline=None)
@given(shapes(), any_machines(), runs(), st.sampled_from([None, 8.0]), st.sampled_from([None, 16.0]))
def test_answers_fit_and_one_more_does_not(shape, machine, run, max_vram_gb, max_ram_gb):
    limits = {"max_vram_gb": max_vram_gb, "max_ram_gb": max_ram_gb}
    for ask, field, step in ((largest_batch, "micro_batch", 1), (largest_context, "length", 64)):
        try:
            answer = ask(shape, machine, run, **limits)
        except Refusal:
            with pytest.raises(Refusal):
                Search(shape, machine, dataclasses.replace(run, **{field: step}), **limits).plan()
            continue
        assert getattr(answer.plan.run, field) == answer.value
        if answer.value < SEARCH_LIMIT * step:
            with pytest.raises(Refusal):
                Search(shape, machine, dataclasses.replace(run, **{field: answer.value + step}), **limits).plan()


def test_without_a_gpu():
    machine = cpu_only(30 * GB)
    answer = largest_batch(dense_shape(16, 16), machine)
    assert answer.value > 1
    with pytest.raises(NotEnoughMemory):
        plan(dense_shape(16, 16), machine=machine, batch=answer.value + 1)


def test_they_take_the_options_of_a_plan(tmp_path):
    config = AutoConfig.for_model("llama", num_hidden_layers=4, dtype="bfloat16")
    path = tmp_path / "mine.json"
    path.write_text(Machine.load(H200).to_json())
    options = {
        "length": 1024, "accumulation": 2, "optimizer": "lion", "clipping": False, "evaluation": 2048,
        "predictions": False, "max_vram_gb": 20, "max_ram_gb": 90, "optimizer_compression": "8bit",
        "precision": "fp32", "compile": True,
    }  # fmt: skip
    answer = largest_batch(config, machine=H200, **options)
    assert answer == largest_batch(config, machine=path, **options, batch=7)
    assert answer.plan == plan(config, machine=H200, batch=answer.value, **options)
    longest = largest_context(config, machine=H200, **options | {"length": 1, "batch": 3})
    assert longest.plan == plan(config, machine=H200, **options | {"batch": 3, "length": longest.value})
    largest = largest_model(H200, max_ram_gb=40, optimizer_compression="8bit", batch=2)
    assert largest.plan.run == Run(micro_batch=2, optimizer_compression="8bit")
    assert largest == largest_model(Machine.load(H200), Run(micro_batch=2, optimizer_compression="8bit"), max_ram_gb=40)
    # Each model of a family keeps its own precision.
    full = dataclasses.replace(shape_of("qwen2.5-1.5b"), precision="fp32")
    assert largest_model(H200, family=[full]).plan.run.precision == "fp32"


def test_arguments_are_checked():
    shape = dense_shape(8, 8)
    for ask in (largest_batch, largest_context):
        with pytest.raises(SettingsError, match=r"mt\.probe"):
            ask(shape)
        with pytest.raises(SettingsError, match="length, compile cannot be given beside a run"):
            ask(shape, H200, Run(), length=64, compile=True)
        with pytest.raises(SettingsError, match="run must be a Run"):
            ask(shape, H200, 64)
        with pytest.raises(SettingsError, match="max_vram_gb"):
            ask(shape, H200, Run(), max_vram_gb=-1)
    with pytest.raises(SettingsError, match="family has no members"):
        largest_model(H200, family=[])
    for wrong in ("qwen", 5, {}):
        with pytest.raises(SettingsError, match="family must be a list"):
            largest_model(H200, family=wrong)


def test_a_refusal_names_the_smallest_model():
    with pytest.raises(Refusal, match=r"^dense 33\.1M \(1 layers of 128\) \(33\.1M parameters\)"):
        largest_model("gh200", max_vram_gb=2)


def test_they_are_public_and_measure_this_machine(monkeypatch):
    monkeypatch.setattr("megatrain.engine.planning.probe", lambda offload_dir: cpu_only(20 * GB))
    shape = dense_shape(8, 8)
    assert mt.largest_batch(shape, length=512) == largest_batch(shape, cpu_only(20 * GB), Run(length=512))
    assert mt.largest_context(shape, batch=2).value == largest_context(shape, cpu_only(20 * GB), batch=2).value
    assert mt.largest_model(family=[shape]).plan.machine == "cpu"
    assert mt.largest_batch(shape, H200, Run()).plan.machine == H200


def test_an_unknown_option_is_named():
    for ask in (plan, largest_batch):
        with pytest.raises(TypeError, match=r"unknown option bach; a plan takes batch, length, "):
            ask(dense_shape(8, 8), machine="gh200", bach=2)
