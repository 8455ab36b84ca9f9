"""Plans for random machines and models: they fit, they are deterministic, and more memory is never slower."""

import dataclasses
import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.planner.made_up import GB, any_machines, cpu_only, machines, moe, runs, shape_of, shapes, work_of

from megatrain.errors import NotEnoughMemory, SettingsError
from megatrain.geometry import GIB, unused_disk_bytes
from megatrain.hardware.machine import PINNED_PER_BYTE, AvailableMemory, Disk, Machine
from megatrain.model.shapes import SlabShape
from megatrain.planner import plan
from megatrain.planner.api import dense_shape
from megatrain.planner.decision import NAMES, Decision, Decisions
from megatrain.planner.plan import Plan
from megatrain.planner.refusal import Refusal
from megatrain.planner.run import Run
from megatrain.planner.search import GRAD_SLOTS, SLOTS, USABLE_SHARE, Search, window_choices


def solved(*args, **kwargs):
    try:
        return Search(*args, **kwargs).plan()
    except NotEnoughMemory:
        return None


@settings(max_examples=60, deadline=None)
@given(shapes(), any_machines(), runs(), st.sampled_from([None, 6.0, 20.0]), st.sampled_from([None, "/disk"]))
def test_plans_fit_and_are_deterministic(shape, machine, run, cap, disk):
    result = solved(shape, machine, run, max_vram_gb=cap, offload_dir=disk)
    if result is None:
        return
    assert result == Search(shape, machine, run, max_vram_gb=cap, offload_dir=disk).plan()
    assert result.total("vram") <= min(machine.vram_bytes, (cap or 1e9) * 2**30)
    assert hash(Plan.from_json(result.to_json())) == hash(result)
    assert result.total("ram") <= machine.ram_bytes
    assert set(result.resident).isdisjoint({*result.on_disk, *result.weights_on_disk})
    assert {*result.gradients_on_disk} <= {*result.on_disk} - {*result.held_gradients}
    assert not result.gradients_on_disk or len(result.windows) == 1
    assert set(result.weights_on_disk) <= set(result.on_disk), "nothing is frozen"
    assert not result.weights_on_disk or len(result.resident) + len(result.on_disk) == result.blocks
    assert set(result.resident).isdisjoint({*result.held_weights, *result.held_gradients})
    assert sum(result.windows) == run.accumulation
    assert Plan.from_json(result.to_json()) == result
    assert all(value >= 0 for roles in result.memory.values() for value in roles.values())


@settings(max_examples=60, deadline=None)
@given(shapes(), machines(), runs(), st.sampled_from([None, "/disk"]), st.floats(0, 3), st.floats(0, 3))
def test_more_memory_is_never_slower(shape, machine, run, disk, more_vram, more_ram):
    larger = dataclasses.replace(
        machine,
        vram_bytes=int(machine.vram_bytes * (1 + more_vram)),
        ram_bytes=int(machine.ram_bytes * (1 + more_ram)),
    )
    small, large = (solved(shape, m, run, offload_dir=disk) for m in (machine, larger))
    if small is not None:
        assert large is not None
        assert large.step.seconds <= small.step.seconds * (1 + 1e-9)


def test_a_plan_uses_only_available_memory():
    """A GPU of 141 GiB that another process uses too, and a reference model of 10 GiB in this process."""
    shape, machine = shape_of("qwen2.5-7b"), "h200-1.5tb"
    taken = [
        plan(
            shape, machine=machine, max_vram_gb=cap, available=AvailableMemory(vram=vram * GIB, held=held * GIB)
        ).total("vram")
        / GIB
        for cap, vram, held in ((None, 30, 0), (24, 30, 10), (24, 12, 0), (24, 140, 0))
    ]
    for result, most in zip(taken, (30, 14, 12, 24), strict=True):
        assert most - 3 < result <= most


@pytest.mark.parametrize("accumulation", [1, 128])
@pytest.mark.parametrize("name", ["h200-1.5tb", "h100-512gb", "a100-80gb", "gh200"])
def test_planning_a_hundred_layers_is_bounded_work(accumulation, name):
    """`python -m benchmarks.plans --seconds` measures the time of the same plans."""
    shape, run = dense_shape(64, 100), Run(micro_batch=2, accumulation=accumulation)
    limits = {"offload_dir": "/disk"} if name in ("h100-512gb", "a100-80gb") else {}
    work = work_of(lambda: solved(shape, Machine.load(name), run, **limits))
    assert work["added up"] < 1_000_000
    assert work["simulated"] < 1_500
    assert work["calls"] < 1_000


@pytest.mark.parametrize("name", ["h200-128gb", "rtx4090-64gb"])
def test_planning_a_hundred_narrow_layers_is_bounded_work(name):
    """Launches bound their steps, so tens of thousands of decisions are equally fast but for a thousandth."""
    shape, run = dense_shape(2, 100, 32000), Run(micro_batch=8, length=512, accumulation=4)
    found = []
    work = work_of(lambda: found.append(solved(shape, Machine.load(name), run)))
    assert found[0].held_weights == found[0].weights_on_disk == ()
    assert len(found[0].resident) >= 100
    assert work["simulated"] < 10_000
    assert work["calls"] < 1_000


def test_planning_leaves_cuda_alone():
    code = (
        "import torch, megatrain.planner as p; from megatrain.planner.api import dense_shape\n"
        "p.plan(dense_shape(16, 8), machine='h100-512gb')\n"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": "src", "PATH": "/usr/bin:/bin"})


def test_weights_of_a_model_that_fits_stay_in_vram():
    result = plan(shape_of("qwen2.5-1.5b"), machine="h200-128gb", batch=4, accumulation=4)
    # The head has no weights of its own.
    assert len(result.resident) + len(result.held_weights) >= result.blocks - 1
    assert result.windows == (1, 1, 1, 1)
    assert result.step.busy["h2d"] == 0


def test_a_disk_takes_what_ram_does_not_hold():
    with pytest.raises(Refusal, match="ram"):
        plan(dense_shape(64, 64), machine="h100-512gb")
    result = plan(dense_shape(64, 64), machine="h100-512gb", offload_dir="/mnt/nvme")
    assert result.on_disk
    assert result.memory["disk"]["moments"] > 0
    assert result.step.bottleneck == "disk_out"
    assert any("assumed" in note for note in result.notes)
    machine = Machine.load("h100-512gb")
    fast = Disk(path="/mnt/nvme", free_bytes=4000 * GB, read=3e10, write=2e10)
    quick = plan(dense_shape(64, 64), machine=dataclasses.replace(machine, disks=(fast,)), offload_dir="/mnt/nvme")
    assert quick.step.seconds < result.step.seconds
    small = dataclasses.replace(fast, free_bytes=10 * GB)
    with pytest.raises(Refusal):
        plan(dense_shape(64, 64), machine=dataclasses.replace(machine, disks=(small,)), offload_dir="/mnt/nvme")


def test_weights_go_to_disk_if_ram_does_not_hold_them_without_states():
    """20B parameters: 37 GiB of weights in 50 GiB of RAM, with staging buffers for everything else."""
    shape, options = dense_shape(32, 90), {"machine": "rtx4090-64gb", "offload_dir": "/mnt/nvme", "accumulation": 4}
    result = plan(shape, **options, max_ram_gb=50)
    assert {f"layers.{index}" for index in range(90)} <= {*result.on_disk, *result.resident}
    assert 0 < len(result.weights_on_disk) < len(result.on_disk)
    assert result.step.busy["disk_weights"] > 0
    assert result.total("disk") == result.written == sum(result.memory["disk"].values())
    assert "weights of" in result.table()
    # The last layers first; with more RAM, fewer of them.
    layers = [name for name in result.weights_on_disk if name.startswith("layers.")]
    assert layers == [f"layers.{index}" for index in range(90 - len(layers), 90)]
    assert 0 < len(plan(shape, **options, max_ram_gb=60).weights_on_disk) < len(layers)
    assert plan(shape, **options).weights_on_disk == ()


def test_gradients_go_to_disk_before_weights():
    """20B parameters in a step of one window."""
    shape = dense_shape(32, 90)
    plans = [
        plan(shape, machine="rtx4090-64gb", offload_dir="/mnt/nvme", accumulation=accumulation, max_ram_gb=cap)
        for accumulation in (1, 4) for cap in (60, 45, 28)
    ]  # fmt: skip
    for result in plans:
        if result.windows != (result.run.accumulation,):
            continue
        assert result.memory["disk"]["gradients"] > 0
        assert result.step.busy["disk_out"] > 0
        assert result.written == result.total("disk")
        layers = [name for name in result.gradients_on_disk if name.startswith("layers.")]
        assert layers == [f"layers.{index}" for index in range(90 - len(layers), 90)], "the last layers first"
    assert any(result.windows == (4,) for result in plans)
    roomy, short, least = plans[:3]
    assert roomy.weights_on_disk == ()
    for result in (short, least):
        assert {f"layers.{index}" for index in range(90)} <= {*result.on_disk, *result.resident}
        assert len(result.weights_on_disk) < len(result.gradients_on_disk)
    assert 0 < len(short.weights_on_disk) < len(least.weights_on_disk) < len(least.on_disk)
    with pytest.raises(Refusal, match="of ram"):  # sums of micro-batches one by one stay in RAM
        plan(shape, machine="rtx4090-64gb", offload_dir="/mnt/nvme", accumulation=4, together=False)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_gradients_go_to_disk_instead_of_states_if_that_is_faster(accumulation, monkeypatch):
    """They are written while the drive is idle. With no choice between them, states go first."""
    options = {"machine": "rtx4090-64gb", "offload_dir": "/mnt/nvme", "batch": 4, "accumulation": accumulation}
    shape = dense_shape(32, 40)
    chosen = plan(shape, **options)
    monkeypatch.setattr(Search, "_with_gradients_instead", lambda self, decision: decision)
    states_first = plan(shape, **options)
    assert chosen.step.seconds < states_first.step.seconds
    assert len(chosen.on_disk) < len(states_first.on_disk)
    assert 0 < len(chosen.gradients_on_disk) <= len(chosen.on_disk)
    assert chosen.windows == states_first.windows == (accumulation,)
    assert chosen.total("ram") <= chosen.capacity["ram"]


def test_what_is_on_disk_needs_no_gpu_memory_for_its_pages():
    """530 GB of weights would, if pinned, leave too little of 24 GB."""
    search = Search(dense_shape(80, 197), Machine.load("rtx4090-64gb"), Run(), offload_dir="/disk")
    assert search.fits()
    found = search.plan()
    assert len(found.weights_on_disk) == found.blocks
    pinned = found.memory["disk"]["weights"] + found.memory["disk"]["gradients"]
    assert found.total("vram") + pinned // PINNED_PER_BYTE > found.capacity["vram"]


def test_page_cache_counts_without_direct_io():
    """As much RAM as the transfers in flight; more is on disk where that makes a difference."""
    shape, machine = dense_shape(64, 64), Machine.load("h100-512gb")
    drive = Disk(path="/mnt/nvme", free_bytes=4000 * GB, read=3e9, write=2e9)
    direct, cached = (
        plan(shape, machine=dataclasses.replace(machine, disks=(each,)), offload_dir="/mnt/nvme")
        for each in (drive, dataclasses.replace(drive, direct=False))
    )
    assert cached.memory["ram"]["workspace"] - direct.memory["ram"]["workspace"] == pytest.approx(8 * 8 << 20, rel=0.05)
    assert [note for note in cached.notes if "without direct I/O, 0.062 GiB of RAM are page cache" in note]
    assert not [note for note in direct.notes if "page cache" in note]
    in_ram = plan(dense_shape(8, 8), machine=machine)
    search = Search(dense_shape(8, 8), dataclasses.replace(machine, disks=(dataclasses.replace(drive, direct=False),)),
                    Run(), offload_dir="/mnt/nvme")  # fmt: skip
    assert search.plan().memory == in_ram.memory, "nothing is on disk"
    assert search.changed(offload_dir=None).ledger.transit == 0
    assert search.changed(offload_dir=["/mnt/nvme", "/other"]).ledger.transit == 2 * 8 * 8 << 20


def test_several_directories_are_as_large_and_fast_as_the_least_of_them_allows():
    """State is striped equally. One file system is no larger or faster for having two directories."""
    drive = Disk(path="/a", free_bytes=100 * GB, read=3e9, write=2e9, file_system="8:1")
    slow = dataclasses.replace(drive, path="/b", free_bytes=30 * GB, read=1e9, file_system="8:2")
    same = dataclasses.replace(drive, path="/c")

    def search(*disks):
        machine = dataclasses.replace(Machine.load("h100-512gb"), disks=disks)
        return Search(dense_shape(8, 8), machine, Run(), offload_dir=[disk.path for disk in disks])

    for disks, free, read in (((drive,), 100, 3e9), ((drive, slow), 60, 2e9), ((drive, same), 100, 3e9)):
        found = search(*disks)
        assert found.capacity["disk"] == free * GB - unused_disk_bytes(len(disks))
        assert found.simulator.costs.disk[0] == read


def test_memory_of_coded_pieces_counts():
    machine = Machine.load("h100-512gb")
    drive = Disk(path="/mnt/nvme", free_bytes=4000 * GB, read=3e9, write=2e9)
    machine = dataclasses.replace(machine, disks=(drive,))
    plain, coded = (
        Search(dense_shape(64, 64), machine, Run(optimizer_compression=each), offload_dir="/mnt/nvme").ledger
        for each in (False, "lossless")
    )
    decision = Decision(disk_blocks=4)
    assert coded.account(decision)["ram"]["workspace"] - plain.account(decision)["ram"]["workspace"] == 8 * 8 << 20
    assert coded.account(Decision()) == plain.account(Decision())


def frozen_but_vectors(shape, blocks):
    """As with adapters: matrices of some blocks do not train, and a small slab does."""
    small = SlabShape(parameters=4096, numel=4096, vectors=0, trains=True, itemsize=None)
    slabs = [
        (dataclasses.replace(block.slabs[0], trains=False), small) if index in blocks else block.slabs
        for index, block in enumerate(shape.blocks)
    ]
    made = [dataclasses.replace(block, slabs=some) for block, some in zip(shape.blocks, slabs, strict=True)]
    return dataclasses.replace(shape, blocks=tuple(made))


def test_frozen_weights_go_to_disk_before_states():
    """70B parameters with adapters. Nothing is written."""
    shape = frozen_but_vectors(dense_shape(64, 80), range(83))
    with pytest.raises(Refusal, match="set offload_dir to a directory on an NVMe drive"):
        plan(shape, machine="rtx4090-64gb")
    result = plan(shape, machine="rtx4090-64gb", offload_dir="/mnt/nvme")
    assert result.on_disk == ()
    assert result.weights_on_disk
    assert result.written == result.step.busy["disk_out"] == result.step.busy["disk_in"] == 0
    assert result.step.bottleneck == "disk_weights"
    assert "nothing written" in result.table()
    # If the last layers train, their states follow when all frozen weights are on disk.
    shape = frozen_but_vectors(dense_shape(64, 80), range(60))
    result = plan(shape, machine="rtx4090-64gb", max_ram_gb=61, offload_dir="/mnt/nvme", optimizer_compression="4bit")
    assert result.on_disk
    assert {block.name for block in shape.blocks[:60]} - {*result.resident} <= {*result.weights_on_disk}


def test_without_a_gpu():
    machine = cpu_only()
    result = plan(dense_shape(8, 8), machine=machine)
    assert result.total("vram") == 0
    assert result.resident == ()
    assert result.total("ram") <= 64 * GB * USABLE_SHARE


def test_one_layer_that_keeps_its_graph_may_take_less():
    """A recompute needs an input and an output in addition to the graph."""
    shape, run = dense_shape(32, 1, 512), Run(micro_batch=4, length=2048)
    machine = Machine.load("h100-512gb")
    ledger = Search(shape, machine, run).ledger
    least = [Decision(stored_graphs=stored, slots=1, grad_slots=1) for stored in (1, 0)]
    kept, again = map(int, ledger.totals(Decisions.of(least))["vram"])
    assert kept < again
    between = dataclasses.replace(machine, vram_bytes=int((kept + again) / 2 / USABLE_SHARE))
    search = Search(shape, between, run)
    assert search.fits()
    assert search.best()[0].stored_graphs == 1


@pytest.mark.parametrize("clipping", [True, False])
def test_no_step_is_faster_than_its_bound(clipping):
    shape, machine = dense_shape(32, 8), Machine.load("rtx4090-64gb")
    for run in (Run(clipping=clipping), Run(clipping=clipping, accumulation=6)):
        search = Search(shape, machine, run, offload_dir="/disk")
        for disk, weights, offload, other_blocks, window in itertools.product(
            range(9), (0, 3, 8), (False, True), range(3), (1, 2)
        ):
            made = Decision(
                disk_blocks=disk,
                disk_weights=min(disk, weights),
                offload_inputs=offload,
                other_blocks=other_blocks,
                window=min(window, run.accumulation),
            )
            (bound,) = search.simulator.bounds(Decisions.of([made]))
            assert bound <= search.simulator.step(made).seconds * (1 + 1e-12)


def test_disks_are_known_by_their_paths(tmp_path):
    machine, link = Machine.load("h100-512gb"), tmp_path / "link"
    (tmp_path / "nvme").mkdir()
    link.symlink_to(tmp_path / "nvme")
    disk = Disk(path=str(tmp_path / "nvme"), free_bytes=4000 * GB, read=3e10, write=2e10)
    known = dataclasses.replace(machine, disks=(disk,))
    for asked in (f"{tmp_path}/nvme/", tmp_path / "x" / ".." / "nvme", link, [tmp_path / "nvme", link]):
        assert Search(dense_shape(8, 8), known, Run(), offload_dir=asked).disks == (disk,)
    assert len(Search(dense_shape(8, 8), known, Run(), offload_dir=[tmp_path, link, "/elsewhere"]).disks) == 3
    for wrong in (5, b"/d", [b"/d"], [7], "a\0b", "", {"/d"}, True):
        with pytest.raises(SettingsError, match="offload_dir must be a directory"):
            plan(dense_shape(8, 8), machine=known, offload_dir=wrong)


def test_experts_stream():
    result = plan(moe(), machine="h200-1.5tb", batch=1, accumulation=8)
    assert result.total("vram") <= result.capacity["vram"]
    assert len(result.resident) < result.blocks


@settings(max_examples=15, deadline=None)
@given(
    st.builds(dense_shape, st.integers(1, 40), st.integers(1, 2), st.sampled_from([512, 32000])),
    any_machines(),
    runs(),
    st.sampled_from([None, "/disk"]),
)
def test_nothing_that_fits_is_faster(shape, machine, run, disk):
    run = dataclasses.replace(run, accumulation=min(run.accumulation, 4))
    search = Search(shape, machine, run, offload_dir=disk if machine.gpu else None)
    result, every = search.best(), decisions(search)
    assert (result is None) == (len(every) == 0) == (not search.fits())
    if result is not None:
        assert result[1].seconds == pytest.approx(search.simulator.seconds(every).min(), rel=1e-9)


def decisions(search):
    """All decisions that fit. Gradients are on disk only if all states are, and weights only if all gradients are that
    free RAM."""
    counts = range(len(search.ledger.layers) + 1)
    layer_counts, other_blocks, both = (counts, range(3), (0, 1)) if search.gpu else ((0,), (0,), (0,))
    disks = range(3 * len(search.shape.blocks) + 1) if search.disks else (0,)
    windows = window_choices(search.run.accumulation)
    each = itertools.product(
        other_blocks,
        layer_counts,
        layer_counts,
        layer_counts,
        layer_counts,
        counts,
        both,
        windows,
        SLOTS,
        GRAD_SLOTS,
        disks,
    )
    rows = [
        (other_blocks, layers, held, sums, gpu_updates, stored, offload, *window, slots, grad_slots, disk)
        for other_blocks, layers, held, sums, gpu_updates, stored, offload, window, slots, grad_slots, disk in each
        if held >= layers <= sums
        and (
            not gpu_updates
            or (gpu_updates > layers and held == sums == counts[-1] and other_blocks and not offload and not disk)
        )
    ]
    made = Decisions(**dict(zip(NAMES, zip(*rows, strict=True), strict=False)))
    streamed = len(counts) - 1 - made.resident_layers + (made.other_blocks < 2) * len(search.ledger.other_blocks)
    most = search.ledger.disk.freeing(made, np.full(len(made), 1 << 50)).disk_gradients
    made, disk = made.replace(disk_blocks=0), made.disk_blocks
    made = made.replace(
        disk_blocks=np.minimum(disk, streamed),
        disk_gradients=np.clip(disk - streamed, 0, most),
        disk_weights=np.maximum(disk - streamed - most, 0),
    ).take(disk <= 2 * streamed + most)
    totals = search.ledger.totals(made)
    return made.take(np.logical_and.reduce([totals[tier] <= room for tier, room in search.capacity.items()]))


def test_window_choices():
    assert window_choices(1) == [(1, 1)]
    assert window_choices(4) == [(4, 4), (2, 2), (1, 1), (2, 1)]
    assert max(window_choices(1000)) == (64, 64)
    assert {window for first, window in window_choices(12) if first == window} == {12, 6, 4, 3, 2, 1}
    assert {first for first, window in window_choices(12) if first > window} == {2, 4, 8}


def test_arguments_are_checked():
    with pytest.raises(SettingsError, match=r"mt\.probe"):
        plan(dense_shape(8, 8))
    with pytest.raises(SettingsError, match="max_vram_gb"):
        plan(dense_shape(8, 8), machine="h200-128gb", max_vram_gb=-1)
    with pytest.raises(SettingsError, match="precision"):
        plan(dense_shape(8, 8), machine="h200-128gb", precision="int3")
    with pytest.raises(SettingsError, match=r"^batch must be"):
        plan(dense_shape(8, 8), machine="h200-128gb", batch=0)
    with pytest.raises(SettingsError, match="optimizer_compression"):
        plan(dense_shape(8, 8), machine="h200-128gb", optimizer_compression="2bit")
    with pytest.raises(SettingsError, match=r"^optimizer must be"):
        plan(dense_shape(8, 8), machine="h200-128gb", optimizer="adam")
    with pytest.raises(SettingsError, match="positive number of GiB"):
        plan(dense_shape(8, 8), machine="h200-128gb", max_ram_gb=float("inf"))
    with pytest.raises(SettingsError, match="predictions must be"):
        plan(dense_shape(8, 8), machine="h200-128gb", predictions="no")
    with pytest.raises(SettingsError, match="a Machine, not int"):
        plan(dense_shape(8, 8), machine=5)


def test_windows_of_one_if_weights_and_sums_stay_in_vram():
    """7B on an H200: graphs are kept, sums are not copied between micro-batches, and the first layers are resident."""
    result = plan(shape_of("qwen2.5-7b"), machine="h200-128gb", batch=4, accumulation=16, compile=True)
    assert result.windows == (1,) * 16
    assert result.policies["store"] == 28
    assert {*result.resident, *result.held_gradients} >= {f"model.layers.{i}" for i in range(28)}
    layers = [name for name in result.resident if "layers" in name]
    assert layers == [f"model.layers.{i}" for i in range(len(layers))]
    assert result.step.busy["d2h"] == 0 < result.step.busy["sums_out"]


def test_a_large_model_fits_with_few_bytes_per_parameter():
    """Sums of a single window are rounded once it has passed a block."""
    small = {"batch": 1, "length": 4096, "accumulation": 8, "compile": True, "optimizer_compression": "4bit"}
    assert plan(shape_of("qwen3-32b"), machine="h200-128gb", **small).windows == (8,)
    assert plan(moe(), machine="h200-1.5tb", batch=1, accumulation=8, compile=True).resident
