"""Devices, memory and cores of this machine, under the limits of the container and the settings."""

from __future__ import annotations

import gc
import math
import os
from contextlib import suppress

import psutil
import torch

from megatrain import geometry, process
from megatrain.errors import DeviceUnavailable, DistributedUnsupported, NotEnoughMemory, SettingsError
from megatrain.geometry import GIB
from megatrain.hardware import cgroups
from megatrain.hardware.machine import CUDA_CONTEXT_BYTES, PROCESS_BYTES, AvailableMemory
from megatrain.lazy import ram_bytes
from megatrain.telemetry.notices import announce, warn

LOW = (GIB, 0.2)
"""Free RAM, in bytes or as a share of the limit, whichever is less. Below it MegaTrain warns once and returns freed
memory to the system. A plan leaves this much free."""
SHORT = (GIB // 2, 0.1)
"""Below it a Trainer saves a checkpoint and stops at the end of the step."""
CRITICAL = (GIB // 4, 0.05)
"""Below it no block runs, and allocations that would leave less are refused."""

COMPILERS = (3 * GIB // 2, 0.1)
"""RAM of the processes that torch.compile starts, one per core. With 16 cores they took 1.4 GiB (H200, 14B)."""


def choose_device(asked: str | None) -> torch.device:
    """The requested compute device. None: CUDA if there is a GPU, else the CPU, with a notice."""
    if asked is None:
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        announce("no CUDA GPU was found: training on the CPU")
        return torch.device("cpu")
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise SettingsError(f"device must be 'cuda', 'cuda:N', 'cpu' or None, not {asked!r}.") from error
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        built = "this PyTorch was built without CUDA" if torch.version.cuda is None else "no usable GPU is visible"
        raise DeviceUnavailable(
            f"device={asked!r} was asked for, but {built} (torch {torch.__version__}); "
            "use device='cpu' or None, or install a CUDA build of PyTorch."
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise DeviceUnavailable(
            f"device={asked!r} was asked for, but only {torch.cuda.device_count()} GPU(s) are visible; use a lower "
            "index, or check CUDA_VISIBLE_DEVICES."
        )
    return torch.device("cuda", index)


def refuse_distributed() -> None:
    """Raise if a launcher started several processes: each would train its own copy of the model."""
    world = os.environ.get("WORLD_SIZE", "1")
    if world.isdigit() and int(world) > 1:
        raise DistributedUnsupported(
            f"WORLD_SIZE={world}, but MegaTrain trains on one GPU in one process; start it with plain `python`, "
            "not torchrun or accelerate launch."
        )


def vram_limit(device: torch.device, max_vram_gb: float | None, held: int = 0) -> int | None:
    """The most GPU memory that the driver may report for this process, in bytes. None: no limit."""
    if max_vram_gb is None:
        return None
    if device.type != "cuda":
        warn(f"max_vram_gb={max_vram_gb:g} has no effect: there is no GPU in this run")
        return None
    total, allowed = torch.cuda.get_device_properties(device).total_memory, int(max_vram_gb * GIB)
    if allowed <= CUDA_CONTEXT_BYTES:
        raise NotEnoughMemory(
            f"max_vram_gb={max_vram_gb:g} leaves nothing beside the {CUDA_CONTEXT_BYTES / GIB:.2f} GiB that CUDA "
            "itself takes; raise it to at least 2."
        )
    if allowed - CUDA_CONTEXT_BYTES <= held:
        raise NotEnoughMemory(
            f"max_vram_gb={max_vram_gb:g} leaves nothing beside the {held / GIB:.2f} GiB that this process holds on "
            f"the GPU already and the {CUDA_CONTEXT_BYTES / GIB:.2f} that CUDA itself takes; free them, or raise it to "
            f"at least {math.ceil((held + CUDA_CONTEXT_BYTES) / GIB) + 1}."
        )
    if allowed >= total:
        announce(f"max_vram_gb={max_vram_gb:g} is above the GPU's {total / GIB:.1f} GiB: clamped to what it has")
    return min(allowed, total)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the compute device, within the cap."""
    if device.type == "cpu":
        return available_ram()
    free, total = torch.cuda.mem_get_info(device)
    cap = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return max(0, min(free + cached(device), cap - torch.cuda.memory_allocated(device)))


def cached(device: torch.device) -> int:
    """Bytes of GPU memory that PyTorch's allocator has reserved and not allocated."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def vram_held_beside(device: torch.device, model: torch.nn.Module) -> int:
    """Bytes of GPU memory that other tensors of this process hold: another model, another engine."""
    if device.type == "cpu":
        return 0
    held = torch.cuda.memory_allocated(device) - _bytes_on(device, model)
    if held > 0:
        _collect_dropped_engines()
        held = torch.cuda.memory_allocated(device) - _bytes_on(device, model)
    return max(0, held)


def available_memory(device: torch.device, model: torch.nn.Module, compiles: bool = False) -> AvailableMemory:
    """What training this model can use now: what is free, what the model itself holds, and what the process needs."""
    _collect_dropped_engines()
    ram = available_ram() + min(own_ram(), _bytes_on(torch.device("cpu"), model) + PROCESS_BYTES)
    # A plan that took the last byte would be stopped in its first step by `RamMonitor`.
    ram = max(0, ram - level(LOW, cgroups.usable_ram()) - compiles * level(COMPILERS, cgroups.usable_ram()))
    if device.type == "cpu":
        return AvailableMemory(ram=ram)
    free, total = torch.cuda.mem_get_info(device)
    # About half of CUDA's own memory is taken already; its libraries take the rest out of what is free now.
    vram = free + cached(device) + _bytes_on(device, model) + CUDA_CONTEXT_BYTES // 2
    held = vram_held_beside(device, model)
    share = int(process.vram_fraction(device).users_value() * total) + CUDA_CONTEXT_BYTES - held
    return AvailableMemory(vram=max(0, min(total, vram, share)), ram=ram, held=held)


def _collect_dropped_engines() -> None:
    """Free models and engines that nothing refers to: they are in reference cycles."""
    # The first collection ends the lanes of such engines, the second frees what the lanes held.
    gc.collect()
    gc.collect()


def _bytes_on(device: torch.device, model: torch.nn.Module) -> int:
    """Bytes of a model's parameters on the device."""
    if device.type == "cpu":
        return sum(map(ram_bytes, model.parameters()))
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.device == device)


def level(threshold: tuple[int, float], limit: int) -> int:
    """Bytes of a threshold such as `LOW` under a limit."""
    nbytes, share = threshold
    return min(nbytes, int(share * limit))


def own_ram() -> int:
    """RAM of this process that the system cannot reclaim: RssAnon + RssShmem."""
    memory = psutil.Process().memory_info()
    shared = 0
    # Without /proc, shared pages cannot be told from mapped files.
    with suppress(OSError), open("/proc/self/status") as status:
        shared = sum(int(line.split()[1]) << 10 for line in status if line.startswith("RssShmem"))
    return int(memory.rss - getattr(memory, "shared", 0) + shared)


def available_ram() -> int:
    """Bytes that can still be allocated: the host's available memory, or less under a cgroup limit."""
    free = int(psutil.virtual_memory().available)
    headroom = cgroups.headroom()
    return free if headroom is None else min(free, headroom)


def require_ram(nbytes: int, what: str, max_ram_gb: float | None = None, held: int = 0, transit: int = 0) -> None:
    """Raise `NotEnoughMemory` if an allocation cannot fit in RAM. `transit`: what transfers to and from disk take
    beside it, which counts toward the limits of the machine and the container, and not toward `max_ram_gb`."""
    free, most_spare = max(0, available_ram() - transit), CRITICAL[0]
    # The limit is read only if it matters: this runs at every allocation.
    if nbytes > free - most_spare and nbytes > free - (spare := level(CRITICAL, cgroups.usable_ram())):
        raise NotEnoughMemory(
            f"{what} needs {nbytes / GIB:.2f} GiB of RAM, but only {free / GIB:.2f} GiB are available, of which "
            f"{spare / GIB:.2f} must stay free (short by {(nbytes + spare - free) / GIB:.2f} GiB); use a smaller "
            "model, or a machine with more memory."
        )
    if max_ram_gb is not None and held + nbytes > max_ram_gb * GIB:
        raise NotEnoughMemory(
            f"{what} would bring MegaTrain's state to {(held + nbytes) / GIB:.2f} GiB of RAM, over "
            f"max_ram_gb={max_ram_gb:g}; raise max_ram_gb to at least {(held + nbytes) / GIB:.2f}."
        )


def memory_name(device: torch.device) -> str:
    """What messages call the memory of the compute device. On the CPU it is part of RAM."""
    return "VRAM" if device.type == "cuda" else "device memory"


def require_vram(device: torch.device, nbytes: int, what: str) -> None:
    """Raise `NotEnoughMemory` if an allocation cannot fit on the compute device."""
    free = free_memory(device)
    if nbytes > free:
        raise NotEnoughMemory(
            f"{what} need {nbytes / GIB:.2f} GiB of {memory_name(device)}, but only {free / GIB:.2f} GiB are free "
            f"(short by {(nbytes - free) / GIB:.2f} GiB); name fewer blocks in `resident`"
            + (", or raise max_vram_gb." if device.type == "cuda" else ".")
        )


cores = cgroups.usable_cores


def update_threads() -> int:
    """Number of threads for optimizer updates."""
    return geometry.update_threads(cores())
