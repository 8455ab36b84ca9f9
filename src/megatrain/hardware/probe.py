"""`probe`: measures this machine in a few seconds and caches the result in the user's cache directory."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from megatrain import files
from megatrain._version import __version__
from megatrain.errors import NotEnoughMemory, SettingsError
from megatrain.geometry import GIB
from megatrain.hardware import attention, inventory, measure
from megatrain.hardware.cgroups import cpu_quota, memory_limit, usable_cores, usable_ram, words
from megatrain.hardware.machine import KINDS, TOUCHED, Disk, Machine
from megatrain.hardware.validation import folders
from megatrain.telemetry.notices import announce

UpdateRates = Callable[[torch.device], Mapping[str, float]]
"""Measures AdamW on a device: width of the states → parameters per second. Missing widths are estimated."""
Folder = str | os.PathLike[str]
_Cached = tuple[Machine | None, dict[str, Disk]]
"""The machine, and disks by `_key`."""

BUFFER = 512 << 20
"""Size of copy buffers: larger than caches, so that copies use host memory as in training."""
STREAMS_PER_CORE = 128 << 20
"""Size of the tensors for `dram`, per core: several times the cache."""
DISK_FILE = 1 << 30
"""Size of the file for measuring a disk, if there is enough space."""
SECONDS = {
    "h2d": 0.25, "d2h": 0.25, "duplex": 0.3, "pageable_h2d": 0.3, "dram": 0.6, "dram_under_dma": 0.6, "hbm": 0.2,
    "launches": 0.2, "matmul": 0.4, "matmul_burst": 0.05, "attention": 0.4, "disk": 2.0,
}  # fmt: skip
"""Seconds for each measurement. Matrix products on a GPU are measured in a burst: an H200 reached 797 TFLOP/s over
milliseconds and 690 over half a second. Training, with other work in between, matches the former."""
DISKS_SECONDS = 8.0
"""Seconds for reads and writes of all disks together, so that a probe stays below 20 seconds."""


def probe(
    *,
    device: str | None = None,
    offload_dir: Folder | Sequence[Folder] | None = None,
    refresh: bool = False,
    update_rates: UpdateRates | None = None,
) -> Machine:
    """Measure what this process may use of this machine, and how fast it is.

    Earlier measurements are read from the cache unless `refresh`. The speed of a disk is measured only for the
    directories in `offload_dir`. Without `update_rates` the speed of updates is estimated from that of memory.
    """
    start = time.perf_counter()
    chosen = inventory.choose_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    directories = [Path(folder) for folder in folders(offload_dir)]
    for folder in directories:
        if not folder.is_dir():
            raise SettingsError(f"offload_dir {folder} is not a directory; create it first.")
    facts = _facts(chosen)
    file = files.cache_file("probe", facts)
    cached: _Cached = (None, {}) if refresh or file is None else _read_cache(file, facts)
    disks = dict(cached[1])
    unknown = [folder for folder in directories if _key(folder) not in disks]
    if cached[0] is None or unknown:
        announce("measuring this machine, which takes up to 20 s")
    for folder in unknown:
        disks[_key(folder)] = _measure_disk(folder, min(SECONDS["disk"], DISKS_SECONDS / 2 / len(unknown)))
    machine = cached[0] or _measure(chosen)
    if update_rates is not None and _ESTIMATED in machine.source:
        machine = _with_updates(machine, chosen, update_rates)
    if (machine, disks) != cached:
        _write_cache(file, facts, machine, disks)
        _announce(machine, f"measured in {time.perf_counter() - start:.1f} s")
    else:
        _announce(machine, "measured before")
    return replace(
        machine,
        ram_bytes=usable_ram(),
        disks=tuple(
            replace(disks[_key(folder)], free_bytes=shutil.disk_usage(folder).free, file_system=_number(folder))
            for folder in directories
        ),
    )


def _measure(device: torch.device) -> Machine:
    """Measure everything but disks and updates; the latter are estimated."""
    cores = usable_cores()
    with measure.threads(cores):
        nbytes = min(max(512 << 20, cores * STREAMS_PER_CORE), 4 << 30, inventory.available_ram() // 8)
        streams = measure.host_streams(nbytes)
        dram = measure.rate(*streams, SECONDS["dram"])
        rates: dict[str, Any] = {"dram": dram, "update": {width: dram / touched for width, touched in TOUCHED.items()}}
        rates |= _measure_gpu(device, streams, dram) if device.type == "cuda" else _NO_GPU
        del streams
        kinds = KINDS if device.type == "cuda" else ("bf16", "fp32")
        seconds = SECONDS["matmul_burst" if device.type == "cuda" else "matmul"]
        rates["matmul"] = {kind: measure.matmul(device, kind, seconds) for kind in kinds}
        rates["attention"] = measure.attention(device, SECONDS["attention"])
    if device.type == "cuda":
        torch.cuda.empty_cache()
    ram = usable_ram()
    return Machine(
        name=f"{rates['gpu'] or cpu_model()}, {ram / GIB:.0f} GiB",
        source=f"measured {time.strftime('%Y-%m-%d')} by megatrain {__version__}, torch {torch.__version__}; "
        f"updates {_ESTIMATED}",
        ram_bytes=ram,
        cores=cores,
        disks=(),
        **rates,
    )


_ESTIMATED = "estimated from memory bandwidth"
_NO_GPU: dict[str, Any] = {
    **{"gpu": None, "vram_bytes": 0, "gpu_update": {}},
    **dict.fromkeys(("h2d", "d2h", "duplex", "pageable_h2d", "dram_under_dma", "hbm", "launches"), 0.0),
}


def _measure_gpu(device: torch.device, streams: tuple[measure.Work, int], dram: float) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    nbytes = min(BUFFER, inventory.free_memory(device) // 8, inventory.available_ram() // 8)
    launches = measure.launches(device, SECONDS["launches"])
    with torch.cuda.device(device), measure.registered(nbytes) as outgoing, measure.registered(nbytes) as incoming:
        link = measure.Link(device, outgoing, incoming)
        rates = measure.copies(link, SECONDS)
        loaded = measure.dram_under_dma(streams, link, dram, rates["duplex"], SECONDS["dram_under_dma"])
        del link
        hbm = measure.hbm(device, nbytes, SECONDS["hbm"])
    return {
        "gpu": properties.name,
        "vram_bytes": properties.total_memory,
        **rates,
        "dram_under_dma": loaded,
        "gpu_update": {width: hbm / touched for width, touched in TOUCHED.items()},
        "hbm": hbm,
        "launches": _at_its_best(launches, device),
    }


def _at_its_best(launches: float, device: torch.device) -> float:
    """The better of an earlier measurement and a new one: other processes can only slow it down, for a while."""
    return max(launches, measure.launches(device, SECONDS["launches"]))


def _with_updates(machine: Machine, device: torch.device, update_rates: UpdateRates) -> Machine:
    """The machine with update rates as `update_rates` measures them."""
    on_cpu = dict(update_rates(torch.device("cpu")))
    on_gpu = dict(update_rates(device)) if device.type == "cuda" else {}
    source = machine.source.replace(_ESTIMATED, "measured")
    launches = _at_its_best(machine.launches, device) if device.type == "cuda" else machine.launches
    updates, gpu_updates = machine.update | on_cpu, machine.gpu_update | on_gpu
    return replace(machine, update=updates, gpu_update=gpu_updates, launches=launches, source=source)


def _measure_disk(folder: Path, seconds: float) -> Disk:
    """Measure reads and writes for at most `seconds` each."""
    free = shutil.disk_usage(folder).free
    nbytes = min(DISK_FILE, free // 2) // measure.CHUNK * measure.CHUNK
    least = measure.IN_FLIGHT * measure.CHUNK
    if nbytes < least:
        raise NotEnoughMemory(
            f"offload_dir {folder} has {free >> 20} MiB free, and measuring its speed takes {2 * least >> 20} MiB; "
            "free some space or use another directory."
        )
    try:
        read, write, direct = measure.disk(folder, nbytes, seconds)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NotEnoughMemory(
                f"offload_dir {folder} could not hold {nbytes >> 20} MiB ({error.strerror}), though it reported "
                f"{free >> 20} MiB free; free some space, raise the quota, or use another directory."
            ) from error
        raise SettingsError(
            f"offload_dir {folder} cannot be written to or read from ({error.strerror}); use another directory."
        ) from error
    return Disk(path=str(folder), free_bytes=free, read=read, write=write, direct=direct)


def _number(folder: Path) -> str:
    """The number of a directory's file system. It may have another one after a restart."""
    device = folder.stat().st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def _key(folder: Path) -> str:
    """A directory and its drive: another one may be mounted there next time."""
    return f"{folder}@{_drive(Path('/sys/dev/block') / _number(folder)) or _mounted(folder)}"


def _drive(block: Path) -> str:
    """What names a block device on every start: the serial number of its drive, or the identifier of a volume. Empty if
    the system does not say."""
    block = Path(os.path.realpath(block))
    whole = block.parent if (block / "partition").exists() else block
    names = (words(whole / name) for name in ("wwid", "device/wwid", "dm/uuid", "md/uuid", "serial", "device/serial"))
    return " ".join(next(filter(None, names), []))


def _mounted(folder: Path) -> str:
    """The type and source of the file system that is mounted at a directory or above it."""
    mounts = map(str.split, Path("/proc/self/mountinfo").read_text().splitlines())
    found = {mount[4]: " ".join(mount[mount.index("-") + 1 :][:2]) for mount in mounts}
    # Spaces in paths are written as octal numbers.
    places = (str(place).replace(" ", "\\040") for place in (folder, *folder.parents))
    return next((found[place] for place in places if place in found), "")


def cpu_model() -> str:
    """The CPU as the kernel names it."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields.get("model name") or f"{platform.machine()} part {fields.get('CPU part', 'unknown')}"


def _facts(device: torch.device) -> dict[str, Any]:
    """What measurements depend on. If any of it changes, they are repeated."""
    facts: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        # In whole GiB: the kernel's own share differs a little from boot to boot.
        "ram_gib": round(psutil.virtual_memory().total / GIB),
        "memory_limit": memory_limit(),
        "cpu_quota": cpu_quota(),
        "torch": torch.__version__,
        "megatrain": __version__,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        driver = words(Path("/proc/driver/nvidia/version"))
        facts |= {"gpu": properties.name, "uuid": str(properties.uuid), "driver": " ".join(driver)}
        with attention.requested_backend(device, attention.AttentionShape(head_dim=128, length=2048)):
            facts["attention"] = attention.sdpa_backend(device, attention.is_deterministic())
    return facts


def _read_cache(file: Path, facts: dict[str, Any]) -> _Cached:
    """The cached measurements, unless the file is missing, damaged or of another machine."""
    try:
        data = json.loads(file.read_text())
        if data["facts"] == facts:
            disks = {key: Disk(**disk) for key, disk in data["disks"].items()}
            return Machine.from_json(json.dumps(data["machine"])), disks
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None, {}


def _write_cache(file: Path | None, facts: dict[str, Any], machine: Machine, disks: dict[str, Disk]) -> None:
    """Write the measurements. If that fails, the next run measures again."""
    again = "they will be repeated next time"
    if file is None:
        announce(
            f"the measurements are not kept, since there is no home directory: {again}; set XDG_CACHE_HOME to avoid "
            "this"
        )
        return
    try:
        files.make_directory(file.parent)
        measured = {key: asdict(disk) for key, disk in disks.items()}
        record = {"facts": facts, "machine": asdict(machine), "disks": measured}
        files.write(file, json.dumps(record, indent=2))
    except OSError as error:
        announce(f"the measurements could not be kept in {file} ({error.strerror}): {again}")


def _announce(machine: Machine, when: str) -> None:
    parts = [f"{machine.cores} cores", f"RAM {machine.dram / 1e9:.0f} GB/s"]
    if machine.gpu:
        parts.append(f"to the GPU {machine.h2d / 1e9:.0f}, back {machine.d2h / 1e9:.0f} GB/s")
    parts.append(f"BF16 {machine.matmul['bf16'] / 1e12:.3g} TFLOP/s")
    announce(f"{machine.name}: {', '.join(parts)} ({when})")
