"""Refusals name the right tier and shortfall; every suggestion and the named machine fit as they stand."""

import copy
import dataclasses
import pickle
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.planner.made_up import GB, any_machines, cpu_only, runs, shape_of, shapes, work_of

from megatrain.geometry import GIB
from megatrain.hardware.machine import AvailableMemory, Disk, Machine
from megatrain.planner import plan
from megatrain.planner.api import dense_shape
from megatrain.planner.refusal import Refusal


def refusal(shape, options):
    try:
        plan(shape, **options)
    except Refusal as refused:
        return refused


def named_machine(machine, text):
    """The machine that the refusal says is needed."""
    sizes = re.findall(r"([\d.]+) GiB of (v?ram)", text.partition("it needs a machine with ")[2])
    return dataclasses.replace(machine, **{f"{tier}_bytes": int(float(size) * GIB) for size, tier in sizes})


@settings(max_examples=50, deadline=None)
@given(
    shapes(), any_machines(), runs(), st.sampled_from([None, 3.0, 8.0]), st.sampled_from([None, 3.0, 16.0]),
    st.sampled_from(
        [None, None, AvailableMemory(vram=4 * GIB), AvailableMemory(vram=6 * GIB, ram=24 * GIB, held=2 * GIB)]
    ),
    st.sampled_from([None, None, "/disk"]),
)  # fmt: skip
def test_suggestions_make_it_fit(shape, machine, run, max_vram_gb, max_ram_gb, available, disk):
    options = {
        "machine": machine, "batch": run.micro_batch, "length": run.length, "accumulation": run.accumulation,
        "precision": run.precision, "compile": run.compile, "clipping": run.clipping, "evaluation": run.evaluation,
        "predictions": run.predictions, "optimizer_compression": run.optimizer_compression,
        "max_vram_gb": max_vram_gb, "max_ram_gb": max_ram_gb, "available": available, "offload_dir": disk,
    }  # fmt: skip
    refused = refusal(shape, options)
    if refused is None:
        return
    assert refused.tier in (("vram", "ram") if machine.gpu else ("ram",))
    assert refused.shortfall_gb > 0
    assert f"{refused.shortfall_gb:.1f} GiB" in str(refused)
    for suggestion in refused.suggestions:
        plan(shape, **{**options, **suggestion.changes})
        assert suggestion.saves_gb >= refused.shortfall_gb - 1e-6
    uncapped = {"max_vram_gb": None, "max_ram_gb": None}
    if not refused.suggestions:
        least = {
            "batch": 1, "length": min(run.length, 64), "accumulation": 1, "evaluation": min(run.evaluation, 1),
            "precision": "bf16-sr", "optimizer_compression": "4bit", **uncapped,
        }  # fmt: skip
        assert refusal(shape, options | least) is not None
        assert refusal(shape, options | least | {"compile": True}) is not None
        assert "no setting makes it fit" in str(refused) or machine.gpu
        assert "makes it fit" in str(refused) or "to make it fit, set offload_dir" in str(refused)
    if "set offload_dir" in str(refused):
        plan(shape, **options | {"offload_dir": "/d"})
    if "it needs a machine with" in str(refused):
        plan(shape, **(options | uncapped | {"available": None, "machine": named_machine(machine, str(refused))}))


def test_a_disk_is_suggested_with_the_space_that_it_needs():
    """Whether anything else helps or not."""
    machine, options = Machine.load("rtx4090-64gb"), {"accumulation": 4}
    for shape, alone in ((dense_shape(32, 90), True), (dense_shape(32, 40), False)):
        refused = refusal(shape, options | {"machine": machine})
        assert bool(refused.suggestions) != alone
        assert "no setting makes it fit" not in str(refused)
        (size,) = re.findall(r"set offload_dir to a directory on an NVMe drive with ([\d.]+) GiB free", str(refused))
        disk = Disk(path="/nvme", free_bytes=int(float(size) * GIB), read=3e9, write=2e9)
        fits = dataclasses.replace(machine, disks=(disk,))
        assert plan(shape, machine=fits, offload_dir="/nvme", **options).total("disk") <= disk.free_bytes
        # One that does not suffice is not suggested again.
        full = dataclasses.replace(machine, disks=(dataclasses.replace(disk, free_bytes=disk.free_bytes // 2),))
        refused = refusal(shape, options | {"machine": full, "offload_dir": "/nvme"})
        assert refused.tier == "disk"
        assert "set offload_dir" not in str(refused)


def test_suggestions_fit_without_a_gpu():
    """Without a GPU no layer can be resident, so none may be counted as resident."""
    shape, machine, applied = dense_shape(16, 16), cpu_only(), 0
    for cap in (6, 8, 12, 23):
        refused = refusal(shape, {"machine": machine, "max_ram_gb": cap, "evaluation": 4096})
        assert refused.tier == "ram"
        assert refused.shortfall_gb > 0
        for suggestion in refused.suggestions:
            plan(shape, **{"machine": machine, "max_ram_gb": cap, "evaluation": 4096, **suggestion.changes})
            applied += 1
    assert applied > 4
    refused = refusal(shape, {"machine": cpu_only(5 * GB), "offload_dir": "/d"})
    assert (refused.tier, refused.shortfall_gb > 0) == ("ram", True)


def test_a_smaller_evaluation_is_suggested_without_a_gpu():
    options = {"machine": cpu_only(20 * GB), "evaluation": 65536}
    assert [*refusal(dense_shape(8, 8), options).suggestions[0].changes] == ["evaluation"]


def test_both_caps_are_raised_together():
    options = {"machine": "h200-1.5tb", "max_vram_gb": 1, "max_ram_gb": 1}
    (suggestion,) = refusal(dense_shape(8, 8), options).suggestions
    assert [*suggestion.changes] == ["max_vram_gb", "max_ram_gb"]
    plan(dense_shape(8, 8), **options | suggestion.changes)
    for name in suggestion.changes:
        less = suggestion.changes | {name: suggestion.changes[name] - 0.1}
        assert refusal(dense_shape(8, 8), options | less) is not None


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 256, "length": 16384, "evaluation": 131072},
        {"batch": 16, "length": 8192, "accumulation": 8, "evaluation": 131072},
        {"batch": 4, "length": 32768, "evaluation": 65536, "precision": "fp32"},
    ],
)
def test_suggestions_of_three_settings_change_no_more_than_needed(options):
    options = options | {"machine": "rtx4090-64gb"}
    (suggestion,) = refusal(dense_shape(32, 32), options).suggestions
    assert len(suggestion.changes) >= 3
    plan(dense_shape(32, 32), **options | suggestion.changes)
    for name, value in suggestion.changes.items():
        kept = {**suggestion.changes, name: options.get(name, False)}
        assert refusal(dense_shape(32, 32), options | kept) is not None
        step = {"length": 64, "batch": 1, "accumulation": 1, "evaluation": 1}.get(name)
        if step and value + step <= options[name]:
            assert refusal(dense_shape(32, 32), options | suggestion.changes | {name: value + step}) is not None


def test_pairs_of_settings_change_as_little_as_possible():
    options = {"machine": "rtx4090-64gb", "batch": 64, "length": 32768}
    pairs = [dict(suggestion.changes) for suggestion in refusal(dense_shape(32, 32), options).suggestions]
    assert {"length": 448, "optimizer_compression": "8bit"} in pairs
    assert refusal(dense_shape(32, 32), options | {"length": 512, "optimizer_compression": "8bit"}) is not None


def test_the_machine_that_is_named_is_enough():
    # A plan uses only a share of a machine's memory.
    wide = dense_shape(96, 60)  # even with a disk, three of its layers are too much for 64 GB of RAM
    refused = refusal(wide, {"machine": "rtx4090-64gb"})
    assert "of ram" in str(refused)
    machine = named_machine(Machine.load("rtx4090-64gb"), str(refused))
    found = plan(wide, machine=machine)
    assert found.total("ram") > 0.999 * found.capacity["ram"]
    both = {"machine": cpu_only(), "length": 1 << 24}
    assert " and " not in str(refusal(dense_shape(64, 60), both)).partition("a machine with")[2]
    tiny = dataclasses.replace(Machine.load("rtx4090-64gb"), vram_bytes=2 * GB, ram_bytes=4 * GB)
    text = str(refusal(dense_shape(64, 60), {"machine": tiny}))
    assert re.search(r"a machine with [\d.]+ GiB of vram and [\d.]+ GiB of ram\.$", text)
    plan(dense_shape(64, 60), machine=named_machine(tiny, text))


@pytest.mark.parametrize(
    ("limits", "most"),
    [({}, 400_000), ({"max_vram_gb": 3, "max_ram_gb": 3}, 400_000), ({"offload_dir": "/disk"}, 700_000)],
    ids=["no caps", "caps", "disk"],
)
def test_a_refusal_of_a_hundred_layers_is_bounded_work(limits, most):
    options = {"machine": "gh200", "batch": 64, "length": 32768, "accumulation": 192, "evaluation": 131072, **limits}
    refused = []
    work = work_of(lambda: refused.append(refusal(dense_shape(64, 100), options)))
    assert isinstance(refused[0], Refusal)
    assert work["added up"] < most
    assert work["simulated"] == 0
    assert work["calls"] < 1_500


@pytest.mark.parametrize("name", ["batch", "length", "evaluation"])
def test_absurd_numbers_take_no_more_work(name):
    options = {"machine": "h200-1.5tb", name: 10**30}
    refused = []
    work = work_of(lambda: refused.append(refusal(dense_shape(8, 8), options)))
    assert work["calls"] < 1_500
    plan(dense_shape(8, 8), **options | refused[0].suggestions[0].changes)


def test_a_refusal_can_be_sent_to_another_process():
    refused = refusal(dense_shape(64, 64), {"machine": "h100-512gb"})
    refused.add_note("and a note")
    for made in (pickle.loads(pickle.dumps(refused)), copy.copy(refused), copy.deepcopy(refused)):
        assert type(made) is Refusal
        assert (str(made), made.tier, made.shortfall_gb) == (str(refused), refused.tier, refused.shortfall_gb)
        assert made.suggestions == refused.suggestions
        assert made.__notes__ == ["and a note"]


def test_memory_used_by_others_is_named_and_no_useless_cap_is_suggested():
    long = {"machine": "h100-512gb", "length": 65536}
    refused = refusal(shape_of("qwen2.5-7b"), long | {"max_vram_gb": 12, "available": AvailableMemory(vram=6 * GIB)})
    assert "may use 6.0 (6.0 more are used by something else)" in str(refused)
    assert not any("max_vram_gb" in suggestion.changes for suggestion in refused.suggestions)
    # 2 GiB are held by the process already, so the suggested cap is 2 GiB higher.
    raised = [
        next(s.changes["max_vram_gb"] for s in refusal(shape_of("qwen2.5-7b"), long | limits).suggestions)
        for limits in ({"max_vram_gb": 8}, {"max_vram_gb": 8, "available": AvailableMemory(held=2 * GIB)})
    ]
    assert raised[1] == pytest.approx(raised[0] + 2, abs=0.11)


def test_freeing_memory_is_suggested_if_nothing_else_helps():
    full = AvailableMemory(vram=GIB)
    with pytest.raises(Refusal, match=r"while other programs use the machine: .* GiB more of vram must"):
        plan(dense_shape(16, 8), machine="h100-512gb", available=full)
    shape, short = dense_shape(16, 8), AvailableMemory(vram=GIB, ram=2 * GIB)
    text = str(refusal(shape, {"machine": "h100-512gb", "available": short, "max_ram_gb": 1}))
    more = {tier: float(size) for size, tier in re.findall(r"([\d.]+) GiB more of (v?ram)", text)}
    freed = AvailableMemory(vram=short.vram + int(more["vram"] * GIB), ram=short.ram + int(more["ram"] * GIB))
    plan(shape, machine="h100-512gb", available=freed)
