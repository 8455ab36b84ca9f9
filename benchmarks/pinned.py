"""RAM that the kernel and the driver need for pinned memory: the source of the planner's reserve.

    PYTHONPATH=src python -m benchmarks.pinned 20 60 100     # GiB; on a GPU machine

For each size, memory is allocated as by the store, in buffers of 1 GiB: first faulted in without pinning, then pinned.
Each line shows the growth of this process, the drop in available memory, and the difference, which is overhead of the
kernel and the driver (page tables, lists of pages). At the end, a constant and a slope are fitted for each case.
"""

from __future__ import annotations

import os
import sys
import time

import psutil
import torch

from megatrain.hardware import cgroups, inventory
from megatrain.store.ram import HostBuffer, HostMemory

GIB = 1 << 30
KERNEL = ("Slab", "PageTables", "SecPageTables", "VmallocUsed", "Percpu", "KernelStack")
"""Kernel memory in /proc/meminfo."""


def main(sizes: list[int]) -> None:
    torch.zeros(1, device="cuda")
    # The first registration initialises the driver.
    warm = HostMemory(pin=True, threads=inventory.cores())
    warm.free(warm.allocate(64 << 20, transferred=True))
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {inventory.cores()} cores, "
          f"{cgroups.usable_ram() / GIB:.1f} GiB of RAM, limit {_limit()}")  # fmt: skip
    found: dict[str, list[tuple[float, float]]] = {"touched": [], "pinned": []}
    for size in sizes:
        for kind in ("touched", "pinned"):
            found[kind].append((size, measure(size, pin=kind == "pinned")))
    for kind, points in found.items():
        constant, slope = fit(points)
        print(f"{kind}: {constant:+.3f} GiB + {slope * 1024:.2f} MiB for each GiB")


def measure(size: int, pin: bool) -> float:
    """Overhead in GiB while `size` GiB are faulted in (and pinned)."""
    start = _now()
    memory = HostMemory(pin=pin, threads=inventory.cores())
    began = time.perf_counter()
    held: list[HostBuffer] = [memory.allocate(GIB, transferred=pin) for _ in range(size)]
    seconds = time.perf_counter() - began
    now = _now()
    gone = {name: (start[name] - now[name]) / GIB for name in ("available", "MemAvailable", "headroom")}
    own = (now["own"] - start["own"]) / GIB
    kernel = {name: (now[name] - start[name]) / GIB for name in KERNEL if name in now}
    print(f"{size} GiB {'pinned' if pin else 'touched'} ({memory.pinned / GIB:.0f} pinned) in {seconds:.1f} s: "
          f"process {own:+.3f}; gone {', '.join(f'{k} {v:.3f}' for k, v in gone.items())}; "
          f"beside the process {gone['available'] - own:+.3f}; "
          f"kernel {', '.join(f'{k} {v:+.3f}' for k, v in kernel.items())}; "
          f"cgroup kernel {(now['cgroup_kernel'] - start['cgroup_kernel']) / GIB:+.3f}; "
          f"GPU {(start['gpu'] - now['gpu']) / GIB:.3f}", flush=True)  # fmt: skip
    for buffer in held:
        memory.free(buffer)
    held.clear()
    del buffer
    return gone["available"] - own


def fit(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: the value at 0 and the slope."""
    xs, ys = zip(*points, strict=True)
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((a - x) ** 2 for a in xs)
    slope = sum((a - x) * (b - y) for a, b in points) / spread if spread else 0.0
    return y - slope * x, slope


def _now() -> dict[str, int]:
    fields = {}
    with open("/proc/meminfo") as meminfo:
        for line in meminfo:
            name, value = line.split(":")
            fields[name] = int(value.split()[0]) << 10
    return fields | {
        "MemAvailable": int(psutil.virtual_memory().available),
        "available": inventory.available_ram(),
        "headroom": cgroups.headroom() or 0,
        "own": inventory.own_ram(),
        "gpu": torch.cuda.mem_get_info()[0],
        "cgroup_kernel": _cgroup_kernel(),
    }


def _cgroup_kernel() -> int:
    """Kernel memory of this process's cgroup (v2); 0 if it is not reported."""
    for folder in cgroups.folders("memory", cgroups._CGROUPS, cgroups._MEMBERSHIP):
        fields = cgroups.words(folder / "memory.stat")
        stat = dict(zip(fields[::2], fields[1::2], strict=False))
        if "kernel" in stat:
            return int(stat["kernel"])
    return 0


def _limit() -> str:
    limit = cgroups.memory_limit()
    return "none" if limit is None else f"{limit / GIB:.1f} GiB"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main([int(size) for size in sys.argv[1:]] or [20, 60, 100])
