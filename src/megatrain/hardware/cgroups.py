"""Memory and cores that this process may use, under cgroup limits (v1 and v2) and the affinity mask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def usable_ram(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Bytes of memory that this process may use in total: the host's, or less under a cgroup limit."""
    total = int(psutil.virtual_memory().total)
    limit = memory_limit(root, membership)
    return total if limit is None else min(total, limit)


def usable_cores(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Whole cores that this process may use: those of its affinity mask, or fewer under a cgroup CPU quota."""
    quota = cpu_quota(root, membership)
    return affinity() if quota is None else max(1, min(affinity(), int(quota)))


def affinity() -> int:
    """Cores that the affinity mask allows."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def memory_limit(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """The tightest memory limit of the cgroups (v1, v2) that this process is in, in bytes."""
    return min((limit for limit, _, _ in _memory_limits(root, membership)), default=None)


def _memory_limits(root: Path, membership: Path) -> Iterator[tuple[int, Path, str]]:
    """For each cgroup with a memory limit: the limit, its directory, and the name of the file with its usage."""
    for folder in folders("memory", root, membership):
        for name, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit = words(folder / name)
            if limit and limit[0] != "max" and int(limit[0]) < 1 << 60:  # v1 writes "none" as almost 2**63
                yield int(limit[0]), folder, usage


def cpu_quota(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> float | None:
    """The tightest CPU quota of the cgroups (v1, v2) that this process is in, in cores."""
    quotas = []
    for folder in folders("cpu", root, membership):
        quota = words(folder / "cpu.max") or words(folder / "cpu.cfs_quota_us") + words(folder / "cpu.cfs_period_us")
        if len(quota) == 2 and quota[0] not in ("max", "-1"):
            quotas.append(int(quota[0]) / int(quota[1]))
    return min(quotas, default=None)


def headroom(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """Bytes that the tightest cgroup still allows: its limit minus what is used and cannot be reclaimed."""
    rooms = []
    for limit, folder, usage in _memory_limits(root, membership):
        if used := words(folder / usage):
            fields = words(folder / "memory.stat")
            stat = dict(zip(fields[::2], fields[1::2], strict=False))
            # Page cache counts as usage but can be reclaimed. Half of the active list is counted as reclaimable, as in
            # the kernel's own estimate of available memory.
            inactive, active = (
                int(stat.get(f"total_{name}", stat.get(name, "0"))) for name in ("inactive_file", "active_file")
            )
            rooms.append(max(0, limit - int(used[0]) + inactive + active // 2))
    return min(rooms, default=None)


def folders(controller: str, root: Path, membership: Path) -> list[Path]:
    """Directories that may have limits: the group of this process and every parent, in each hierarchy."""
    return _folders(controller, root, _read(membership))


@lru_cache(maxsize=16)
def _folders(controller: str, root: Path, membership: bytes) -> list[Path]:
    """The same, from the content of the membership file. RAM is measured at every allocation, and paths are slow."""
    # Inside a container the path may be that of the host, and not exist. The mount itself is then the group.
    groups = [root]
    for line in os.fsdecode(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = [root, root / "unified"]
        elif controller in controllers.split(","):
            mounts = [root / controller, root / controllers]
        else:
            continue
        for mount in mounts:
            group = mount / path.lstrip("/")
            groups += [folder for folder in (group, *group.parents) if folder == mount or mount in folder.parents]
    return list(dict.fromkeys(groups))


def words(path: Path) -> list[str]:
    return os.fsdecode(_read(path)).split()


def _read(path: Path) -> bytes:
    """The content of a small file of the kernel; nothing if there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 1 << 20)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
