"""What this process may use of the host: memory and cores, under cgroup limits (v1 and v2) and the affinity mask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def usable_ram(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Bytes of memory this process may use in all: the host's, or less under a cgroup limit."""
    total = int(psutil.virtual_memory().total)
    limit = memory_limit(root, membership)
    return total if limit is None else min(total, limit)


def usable_cores(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Whole cores this process may use: its affinity mask, or less under a cgroup CPU quota."""
    quota = cpu_quota(root, membership)
    return affinity() if quota is None else max(1, min(affinity(), int(quota)))


def affinity() -> int:
    """Cores that the affinity mask allows."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def memory_limit(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """The tightest memory limit of the cgroups (v1, v2) that this process is in, in bytes."""
    return min((limit for limit, _, _ in _memory_limits(root, membership)), default=None)


def _memory_limits(root: Path, membership: Path) -> Iterator[tuple[int, Path, str]]:
    """Of each cgroup that has a memory limit: the limit, its folder, and the name of the file with its usage."""
    for folder in folders("memory", root, membership):
        for name, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            found = words(folder / name)
            if found and found[0] != "max" and int(found[0]) < 1 << 60:  # v1 writes "none" as almost 2**63
                yield int(found[0]), folder, usage


def cpu_quota(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> float | None:
    """The tightest CPU quota of the cgroups (v1, v2) that this process is in, in cores."""
    quotas = []
    for folder in folders("cpu", root, membership):
        found = words(folder / "cpu.max") or words(folder / "cpu.cfs_quota_us") + words(folder / "cpu.cfs_period_us")
        if len(found) == 2 and found[0] not in ("max", "-1"):
            quotas.append(int(found[0]) / int(found[1]))
    return min(quotas, default=None)


def headroom(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """Bytes that the tightest cgroup still allows: its limit minus what is used and cannot be reclaimed."""
    rooms = []
    for limit, folder, usage in _memory_limits(root, membership):
        if used := words(folder / usage):
            fields = words(folder / "memory.stat")
            stat = dict(zip(fields[::2], fields[1::2], strict=False))
            # Page cache counts as usage but is given back under pressure; of the active list half is counted, since the
            # kernel's own estimate is careful with it too.
            inactive, active = (
                int(stat.get(f"total_{name}", stat.get(name, "0"))) for name in ("inactive_file", "active_file")
            )
            rooms.append(max(0, limit - int(used[0]) + inactive + active // 2))
    return min(rooms, default=None)


def folders(controller: str, root: Path, membership: Path) -> list[Path]:
    """Where limits may be: the group this process is in and every one above it, in each hierarchy."""
    # Inside a container the listed path may be the host's and not exist here; the mount itself is then the group.
    found = [root]
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = [root, root / "unified"]
        elif controller in controllers.split(","):
            mounts = [root / controller, root / controllers]
        else:
            continue
        for mount in mounts:
            group = mount / path.lstrip("/")
            found += [folder for folder in (group, *group.parents) if folder == mount or mount in folder.parents]
    return list(dict.fromkeys(found))


def words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
