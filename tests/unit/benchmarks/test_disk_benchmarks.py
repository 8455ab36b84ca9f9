"""Benchmarks of state on disk: rows with a plan, the I/O engine beside training, prefetching, ZeRO-Infinity."""

import json
import os
import signal
import sys
import types
from dataclasses import replace

import pytest
import torch
from benchmarks import accesses, accuracy, disk, peer_steps, replay, resumable, traffic
from benchmarks.peer_rows import ROWS
from benchmarks.row import measure, row_parser
from benchmarks.shapes import random_model

import megatrain as mt
from megatrain.errors import NotEnoughMemory
from megatrain.hardware.machine import Disk
from megatrain.lazy import is_lazy
from megatrain.store import scratch
from megatrain.store.disk import DiskBuffer

ROW = ["--shape", "tiny", "--layers", "16", "--batch", "1", "--length", "16", "--micro", "1", "--steps", "1",
       "--max-vram-gb", "2.68", "--max-ram-gb", "1.48"]  # fmt: skip
"""A row whose states do not fit in the RAM that is left beside the process."""


@pytest.fixture(autouse=True)
def any_file_system(monkeypatch):
    """Tests may run in a directory in RAM."""
    monkeypatch.setattr(scratch, "MEMORY_SYSTEMS", {})
    yield
    mt.init()


def machine(folder, free_bytes=10**11):
    """A GPU machine, for plans. The CPU follows them."""
    return replace(accuracy.ESTIMATED, disks=(Disk(path=str(folder), free_bytes=free_bytes, read=1e9, write=1e9),))


def row(folder, *more):
    return row_parser(None).parse_args([*ROW, "--offload-dir", str(folder), *more])


# ---- rows with a plan


@pytest.mark.parametrize("more", [[], ["--trainer"]], ids=["own loop", "Trainer"])
def test_a_row_on_disk_reports_what_moved_beside_its_plan(tmp_path, more):
    found = measure(row(tmp_path, *more), machine(tmp_path))
    moved = found["disk"]
    assert moved["blocks"] > 0
    # Weights stay in RAM, so a step reads and writes the states once. Slabs are padded to whole pages.
    assert moved["planned_written"] == pytest.approx(moved["planned"])
    assert moved["written"] == pytest.approx(moved["planned_written"], rel=0.01)
    assert moved["read"] == moved["written"]
    assert moved["gb_per_s"] == pytest.approx((moved["read"] + moved["written"]) / found["seconds"][1] / 1e9)
    assert 0 <= moved["stall_share"] <= 1
    assert moved["rating_share_per_day"] > 0
    _, stepped, peak = found["ram_gib"]
    assert stepped <= peak
    assert json.loads(json.dumps(found))["losses"]
    assert accuracy.line(found).count("|") == 8
    assert accuracy.moved_of(found).startswith(f"{moved['planned_written'] / 1e9:.2f}, ")


def test_a_row_does_not_start_where_the_disk_is_too_small(tmp_path):
    with pytest.raises(NotEnoughMemory, match=r"it needs at least .* GiB of disk and may use"):
        measure(row(tmp_path, "--trainer"), machine(tmp_path, free_bytes=1 << 20))


def test_why_a_row_failed_is_reported():
    def ended():
        os.kill(os.getpid(), signal.SIGKILL)

    def refused():
        raise ValueError("too small")

    assert resumable.in_child(lambda: {"row": 1}) == {"row": 1}
    assert resumable.in_child(refused) == {"failed": "ValueError: too small"}
    assert resumable.in_child(ended) == {"failed": "it ended with SIGKILL"}


def test_rows_on_disk_need_a_directory(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["accuracy", "--rows", "disk"])
    with pytest.raises(SystemExit):
        accuracy.main()
    assert "need --offload-dir" in capsys.readouterr().err


@pytest.mark.parametrize("row", accuracy.GROUPS["disk"], ids=lambda row: row[1])
def test_rows_of_the_disk_group_put_state_on_disk_and_take_less_than_ten_minutes(row):
    options = row_parser(None).parse_args([*row, "--offload-dir", "estimated"])
    assert options.trainer
    assert options.compile
    assert 0 < accuracy.expected(options) < 600
    options.offload_dir = None
    # Without the disk the row does not fit on this machine, so no steps are counted.
    assert accuracy.expected(options) < 200


def test_weights_that_are_drawn_when_they_are_read_have_the_same_bits():
    lazy, drawn = (random_model("tiny", torch.bfloat16, seed=3, lazy=lazy) for lazy in (True, False))
    assert all(map(is_lazy, lazy.parameters()))
    engine = mt.Engine(lazy, device="cpu")
    pairs = zip(lazy.named_parameters(), drawn.named_parameters(), strict=True)
    assert all(name == other and torch.equal(a.detach(), b.detach()) for (name, a), (other, b) in pairs)
    engine.close()


# ---- the I/O engine, alone and in training


def tiny(folder, *more):
    return disk.parsed([
        str(folder), "--seconds", "0.01", "--layers", "1", "--hidden", "64", "--vocabulary", "256", "--tokens", "8",
        "--backends", "threads", "--allow-tmpfs", *more,
    ])  # fmt: skip


def test_training_is_compared_with_the_engine_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "EXTENT", 1 << 20)
    found = disk.compared(tiny(tmp_path, "--train"), "threads")
    assert found["steps"] >= 2
    assert found["written per step"] >= found["on disk"] > 0
    assert found["GB/s"] == pytest.approx(
        found["steps"] * (found["read per step"] + found["written per step"]) / found["seconds"] / 1e9
    )
    assert found["share of alone"] == pytest.approx(found["GB/s"] / found["GB/s alone"])
    text = disk.summary([found], True)
    assert f"share {found['share of alone']:.1%}" in text
    assert f"compute waited {found['stalled']:.1%}" in text


@pytest.mark.parametrize(("share", "of_ten"), [(1.0, 10), (0.0, 0), (0.5, 5), (0.3, 3)])
def test_the_engine_alone_reads_what_was_written_and_keeps_the_share_of_reads(tmp_path, monkeypatch, share, of_ten):
    monkeypatch.setattr(disk, "EXTENT", 1 << 20)
    kinds, written, transfer = [], set(), DiskBuffer.transfer

    def noted(self, address, *, write, keep):
        assert write or id(self) in written
        written.add(id(self))
        kinds.append(write)
        return transfer(self, address, write=write, keep=keep)

    monkeypatch.setattr(DiskBuffer, "transfer", noted)
    memory = disk.DiskMemory([tmp_path], allow_tmpfs=True)
    extents = disk.Extents(memory, disk.HostMemory(pin=False, threads=1), 32 << 20)
    assert kinds == [True] * 32
    kinds.clear()
    ticks = iter([*range(31), *[40] * 9])
    monkeypatch.setattr(disk.time, "perf_counter", lambda: next(ticks))
    rate = extents.sustained(share, 30)
    memory.close()
    assert len(kinds) == 29
    assert kinds[:10].count(False) == of_ten
    assert rate == 29 * (1 << 20) / 40


def test_what_an_engine_moves_is_counted_between_two_moments(tmp_path):
    engine = mt.Engine(
        random_model("tiny", torch.bfloat16), device="cpu", offload_dir=tmp_path, on_disk=["*"],
        weights_on_disk=["*"],
    )  # fmt: skip
    optimizer = engine.optimizer(lr=1e-4)

    def step():
        ids = torch.randint(0, 512, (1, 8))
        engine.model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    counted = traffic.Traffic(engine)
    for _ in range(3):
        step()
    moved = counted.end()
    step()
    assert moved.steps == 3
    assert moved.written == 3 * engine.drive.per_step
    assert moved.read > moved.written
    assert moved.read_share == moved.read / (moved.read + moved.written)
    assert set(moved.waited) == {"disk_in", "disk_update", "disk_out", "disk_weights", "disk_inputs"}
    assert sum(moved.waited.values()) <= moved.timed <= moved.seconds
    engine.close()


def test_the_kernel_counts_what_a_process_moves():
    counted = traffic.process_io()
    assert counted is None or min(counted) >= 0
    assert traffic.process_io(2**22 + 1) is None


# ---- prefetching


def test_ways_to_prefetch_are_compared_in_a_real_run_and_its_trace_is_replayed(tmp_path, capsys):
    debug = mt.Debug(lanes="threads")
    places = {"offload_dir": tmp_path, "on_disk": ["*"], "weights_on_disk": ["*"]}
    accesses.live("tiny", 1, 8, tmp_path / "live.jsonl", debug=debug, **places)
    lines = [text.split() for text in capsys.readouterr().out.splitlines() if "waited for weights" in text]
    assert [words[0] for words in lines] == ["learned", "nothing", "static", "clairvoyant"]
    arrived = {words[0]: int(words[words.index("arrived") + 1]) for words in lines}
    assert arrived["nothing"] < min(arrived[name] for name in ("learned", "static", "clairvoyant"))
    trace = replay.read(tmp_path / "live.jsonl")
    assert len(trace.events) > 3 * trace.period
    result = replay.replay(trace, replay.TIERS[0], replay.guesses(trace)["learned"]())
    assert result.arrived > 0


# ---- peers


class Builder:
    compatible = True

    def is_compatible(self, verbose):
        return self.compatible


class Engine:
    """What `deepspeed.initialize` returns, as far as the benchmark uses it."""

    def __init__(self, model, config):
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters())

    def __call__(self, **inputs):
        return self.model(**inputs)

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def deepspeed(monkeypatch):
    """DeepSpeed without its kernels: `configs` are those that it was given."""
    made, ops, builder = (types.ModuleType(name) for name in ("deepspeed", "ops", "op_builder"))
    made.configs = []

    def initialize(model, model_parameters, config):
        made.configs.append(config)
        engine = Engine(model, config)
        return engine, types.SimpleNamespace(optimizer=engine.optimizer), None

    made.init_distributed, made.initialize, builder.AsyncIOBuilder = lambda dist_backend: None, initialize, Builder
    for name, module in {"deepspeed": made, "deepspeed.ops": ops, "deepspeed.ops.op_builder": builder}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(peer_steps.metadata, "version", lambda name: "0")
    return made


def test_zero_infinity_keeps_the_optimizer_in_files(deepspeed, monkeypatch, tmp_path):
    counts = iter([(1, 2), (5_000_000_001, 7_000_000_002)])
    monkeypatch.setattr(peer_steps, "process_io", lambda: next(counts))
    found = peer_steps.PEERS["zero-infinity"].train(replace(ROWS["tiny"], length=16, offload_dir=str(tmp_path)), 1)
    (config,) = deepspeed.configs
    optimizer = config["zero_optimization"]["offload_optimizer"]
    assert (optimizer["device"], optimizer["nvme_path"]) == ("nvme", str(tmp_path))
    assert config["zero_optimization"]["offload_param"]["device"] == "cpu"
    # The group that is updated, the one that is read and the one that is written: parameter, gradient, two moments.
    assert optimizer["buffer_count"] == 3 * 4
    assert config["aio"]["queue_depth"] > 1
    assert found.disk["written"] == pytest.approx(7 / 5 * found.disk["read"])
    assert found.config["deepspeed"] == config


def test_zero_infinity_says_what_it_lacks(deepspeed, monkeypatch, tmp_path):
    monkeypatch.setattr(Builder, "compatible", False)
    with pytest.raises(RuntimeError, match="libaio"):
        peer_steps.PEERS["zero-infinity"].train(replace(ROWS["tiny"], offload_dir=str(tmp_path)), 1)
    assert deepspeed.configs == []


def test_ours_with_state_on_disk_says_how_fast_it_moved(tmp_path):
    row = replace(
        ROWS["tiny"],
        layers=16,
        micro=1,
        batch=1,
        length=16,
        max_vram_gb=2.68,
        max_ram_gb=1.48,
        offload_dir=str(tmp_path),
    )
    trained = peer_steps.ours(row, 1, machine(tmp_path))
    assert trained.config["blocks_on_disk"] > 0
    assert trained.disk["read"] > 0
    assert trained.disk["written"] > 0
    assert row.title().endswith("max_vram_gb=2.68, max_ram_gb=1.48")
