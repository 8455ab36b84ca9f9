"""On the GPU: the probe is quick, and its numbers are plausible."""

import time

import pytest
import torch

import megatrain as mt
from megatrain.hardware.machine import TOUCHED, Machine
from megatrain.hardware.probe import probe

MEASURED = {"h2d": 55.5e9, "d2h": 55.4e9, "duplex": 101e9, "pageable_h2d": 7.6e9, "dram": 134e9, "hbm": 4.3e12}
"""Measured on one H200 machine; other machines only get a plausibility check."""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_probe_is_quick_and_plausible(cache, tmp_path):
    precision, state = torch.backends.cuda.matmul.fp32_precision, torch.cuda.get_rng_state()
    before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    machine = probe(offload_dir=tmp_path)
    seconds = time.perf_counter() - start
    print(f"\nprobed in {seconds:.1f} s\n{machine.to_json()}")
    assert seconds < 20
    assert torch.backends.cuda.matmul.fp32_precision == precision
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.cuda.memory_allocated() - before < 64 << 20
    check(machine)
    start = time.perf_counter()
    assert probe(offload_dir=tmp_path).matmul == machine.matmul
    assert time.perf_counter() - start < 1
    assert machine.disks[0].read > 50e6


def check(machine):
    assert machine.gpu == torch.cuda.get_device_properties(0).name
    assert machine.vram_bytes > 1 << 30
    assert 1e9 < machine.pageable_h2d < 1.1 * machine.h2d
    assert min(machine.h2d, machine.d2h) > 5e9
    assert max(machine.h2d, machine.d2h) < 1.1 * machine.duplex
    assert machine.duplex < 1.1 * (machine.h2d + machine.d2h)
    assert 5e9 < machine.dram < machine.hbm
    assert machine.dram_under_dma < 1.1 * machine.dram
    assert machine.matmul["fp32"] < 1.1 * machine.matmul["tf32"] < 1.2 * machine.matmul["bf16"]
    assert 1e12 < machine.attention < machine.matmul["bf16"] < 5e15
    assert set(machine.gpu_update) == set(machine.update) == set(TOUCHED)
    assert Machine.from_json(machine.to_json()) == machine
    if machine.gpu == "NVIDIA H200":
        for name, seen in MEASURED.items():
            assert seen / 3 < getattr(machine, name) < seen * 3, name
        assert machine.matmul["bf16"] > 400e12


@pytest.mark.slow
def test_measured_update_rates_replace_estimates(cache):
    start = time.perf_counter()
    machine = mt.probe()
    print(f"\nprobed with updates in {time.perf_counter() - start:.1f} s\n{machine.to_json()}")
    for width, touched in TOUCHED.items():
        assert 0.05 * machine.dram < machine.update[width] * touched < 1.5 * machine.dram
        assert 0.05 * machine.hbm < machine.gpu_update[width] * touched < 1.5 * machine.hbm
