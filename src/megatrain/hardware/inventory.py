"""The machine as this process may use it: devices, RAM and cores under the limits of its container."""

from __future__ import annotations

import gc
import math
import os
from contextlib import suppress

import psutil
import torch

from megatrain import geometry, process
from megatrain.errors import DeviceUnavailable, DistributedUnsupported, NotEnoughMemory, SettingsError
from megatrain.hardware import cgroups
from megatrain.hardware.machine import CUDA_CONTEXT_BYTES, PROCESS_BYTES, AvailableMemory
from megatrain.telemetry.notices import announce, warn

GIB = 1 << 30
LOW = (GIB, 0.2)
"""RAM that is left: bytes, or that share of the limit if it is less. Said once, and freed memory goes back to the
system. A plan leaves as much."""
SHORT = (GIB // 2, 0.1)
"""The same: a Trainer saves a checkpoint and stops at the end of the step."""
CRITICAL = (GIB // 4, 0.05)
"""The same: the next block does not run any more, and nothing is allocated that would leave less."""

COMPILERS = (3 * GIB // 2, 0.1)
"""The same: what the processes take that torch.compile starts, one per core. With 16 cores RAM of others grew by 1.4
GiB (H200, 14B)."""


def choose_device(asked: str | None) -> torch.device:
    """The compute device: what was asked for, or CUDA if there is one, else the CPU, announced."""
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
            f"device={asked!r} was asked for, but only {torch.cuda.device_count()} GPU(s) are visible."
        )
    return torch.device("cuda", index)


def refuse_distributed() -> None:
    """MegaTrain drives one GPU from one process; a launcher's second process would train a copy unseen."""
    world = os.environ.get("WORLD_SIZE", "1")
    if world.isdigit() and int(world) > 1:
        raise DistributedUnsupported(
            f"WORLD_SIZE={world}, but MegaTrain trains on one GPU in one process; start it with plain `python`, "
            "not torchrun or accelerate launch."
        )


def vram_limit(device: torch.device, max_vram_gb: float | None, held: int = 0) -> int | None:
    """What the driver may report for this process at the most (clamped to the hardware, announced); None: no limit."""
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
    """Bytes that activations may still take on the compute device, within the cap that was set."""
    if device.type == "cpu":
        return available_ram()
    free, total = torch.cuda.mem_get_info(device)
    cap = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return max(0, min(free + cached(device), cap - torch.cuda.memory_allocated(device)))


def cached(device: torch.device) -> int:
    """Bytes of the GPU that PyTorch's allocator holds and no tensor does."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def vram_held_beside(device: torch.device, model: torch.nn.Module) -> int:
    """Bytes of the GPU that tensors of this process hold beside a model: another one, another engine's."""
    if device.type == "cpu":
        return 0
    held = torch.cuda.memory_allocated(device) - _bytes_on(device, model)
    if held > 0:
        _let_go_of_what_was_dropped()
        held = torch.cuda.memory_allocated(device) - _bytes_on(device, model)
    return max(0, held)


def available_memory(device: torch.device, model: torch.nn.Module, compiles: bool = False) -> AvailableMemory:
    """What training this model could have now: what is free, what it has itself, and the process's bare needs."""
    _let_go_of_what_was_dropped()
    ram = available_ram() + min(own_ram(), _bytes_on(torch.device("cpu"), model) + PROCESS_BYTES)
    # A plan that took the last byte would be stopped in its first step.
    ram = max(0, ram - level(LOW, cgroups.usable_ram()) - compiles * level(COMPILERS, cgroups.usable_ram()))
    if device.type == "cpu":
        return AvailableMemory(ram=ram)
    free, total = torch.cuda.mem_get_info(device)
    # Of what CUDA takes about half is there already; the rest comes with its libraries, and out of what is free now.
    vram = free + cached(device) + _bytes_on(device, model) + CUDA_CONTEXT_BYTES // 2
    held = vram_held_beside(device, model)
    share = int(process.vram_fraction(device).users_value() * total) + CUDA_CONTEXT_BYTES - held
    return AvailableMemory(vram=max(0, min(total, vram, share)), ram=ram, held=held)


def _let_go_of_what_was_dropped() -> None:
    """A model and its engine refer to each other, as do tries that failed: they are there until Python collects."""
    # The first time ends the lanes of engines that nobody has any more, the second frees what those held.
    gc.collect()
    gc.collect()


def _bytes_on(device: torch.device, model: torch.nn.Module) -> int:
    """Bytes of a model's parameters that lie on the device."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.device == device)


def level(threshold: tuple[int, float], limit: int) -> int:
    """Bytes of `LOW`, `SHORT` or `CRITICAL` under a limit."""
    nbytes, share = threshold
    return min(nbytes, int(share * limit))


def own_ram() -> int:
    """What this process holds and the system cannot take back: RssAnon + RssShmem."""
    found = psutil.Process().memory_info()
    shared = 0
    # Without /proc (not Linux) shared pages are not told apart from files.
    with suppress(OSError), open("/proc/self/status") as status:
        shared = sum(int(line.split()[1]) << 10 for line in status if line.startswith("RssShmem"))
    return int(found.rss - getattr(found, "shared", 0) + shared)


def available_ram() -> int:
    """Bytes that can still be allocated: the host's available memory or the cgroup's headroom, whichever is less."""
    free = int(psutil.virtual_memory().available)
    headroom = cgroups.headroom()
    return free if headroom is None else min(free, headroom)


def require_ram(nbytes: int, what: str, max_ram_gb: float | None = None, held: int = 0) -> None:
    """Refuse, before anything is allocated, what cannot fit in RAM."""
    free, spare = available_ram(), level(CRITICAL, cgroups.usable_ram())
    if nbytes > free - spare:
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


def require_vram(device: torch.device, nbytes: int, what: str) -> None:
    """Refuse, before anything is allocated, what cannot stay in the compute device's memory."""
    free = free_memory(device)
    if nbytes > free:
        raise NotEnoughMemory(
            f"{what} need {nbytes / GIB:.2f} GiB of GPU memory, but only {free / GIB:.2f} GiB are free within the cap "
            f"(short by {(nbytes - free) / GIB:.2f} GiB); name fewer blocks in `resident`, or raise max_vram_gb."
        )


cores = cgroups.usable_cores


def update_threads() -> int:
    """Threads for optimizer updates, of the cores that this process may use."""
    return geometry.update_threads(cores())
