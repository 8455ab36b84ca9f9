"""Whether pieces move to and from a drive by threads or by io_uring: by what is faster there.

Both are measured when a drive is opened for the first time, and the rates are kept in the user's cache directory. So is
a network file system, whichever is used, because the warning about it has its rate.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from megatrain import files
from megatrain._version import __version__
from megatrain.errors import DiskFull, SettingsError
from megatrain.native import disk as native
from megatrain.store import forks
from megatrain.store.disk import PIECE_BYTES, THREADS, aligned
from megatrain.store.scratch import ScratchFile, open_scratch
from megatrain.telemetry.notices import announce, warn

MIN_GAIN = 1.1
"""io_uring must be this much faster: rates differ by as much from one measurement to the next."""
PIECES = THREADS // 2
"""Read while as many are written. With the rounds below, a measurement writes 201 MB."""
ROUNDS = ("threads", "uring", "uring", "threads")
SLOW = 0.7e9
"""Bytes per second of a drive that any backend keeps busy; measuring it would take more than half a second."""
NETWORK_SYSTEMS = {
    0x6969: "NFS", 0xFF534D42: "CIFS", 0xFE534D42: "SMB", 0x00C36400: "Ceph", 0x0BD00BD0: "Lustre", 0x01021997: "9P",
    0x65735546: "FUSE", 0x5346414F: "AFS", 0x47504653: "GPFS", 0x19830326: "BeeGFS",
}  # fmt: skip
"""By the magic number of statfs."""


def choose_backend(directories: Sequence[str | os.PathLike[str]], choice: str, allow_tmpfs: bool = False) -> str:
    """One of `native.BACKENDS`. `choice`: one of them, or "auto": threads, unless io_uring is measured to be faster.

    With `allow_tmpfs` nothing is measured. Several drives are taken to be like the first. Warns about directories on
    network file systems.
    """
    for directory in directories:
        _warn_of_network(Path(directory))
    if choice == "threads":
        return choice
    refusal = native.uring_refusal()
    if choice == "uring":
        if refusal is None:
            return choice
        raise SettingsError(
            f"disk_io='uring', but io_uring cannot be used here: {refusal}. The kernel may be older than 5.6, or "
            "kernel.io_uring_disabled, a container's seccomp filter or RLIMIT_MEMLOCK may forbid it; use 'auto' or "
            "'threads'."
        )
    if refusal is not None or allow_tmpfs:
        return "threads"
    try:
        return _faster(Path(directories[0]))
    except (DiskFull, OSError) as error:
        announce(f"disk I/O by threads, because io_uring could not be measured: {error}")
        return "threads"


def _warn_of_network(folder: Path) -> None:
    try:
        files.make_directory(folder)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        # Opening a file there reports it.
        return
    try:
        name = NETWORK_SYSTEMS.get(native.describe(descriptor).magic)
    finally:
        os.close(descriptor)
    if name is None:
        return
    try:
        rate = f"{max(_rates_of(folder)[0].values()) / 1e9:.3g} GB/s, as measured"
    except (DiskFull, OSError) as error:
        rate = f"its rate, which could not be measured ({error})"
    warn(f"{folder} is on a network file system ({name}): state moves to and from it at {rate}; prefer a local drive")


def _faster(folder: Path) -> str:
    rates, known = _rates_of(folder)
    chosen = "uring" if rates.get("uring", 0.0) > MIN_GAIN * rates["threads"] else "threads"
    if not known or chosen != "threads":
        _announce(folder, chosen, rates, "measured before" if known else "measured now")
    return chosen


def _rates_of(folder: Path) -> tuple[dict[str, float], bool]:
    """What `measure` found for this drive, and whether it had been measured before."""
    files.make_directory(folder)
    facts = _facts(folder)
    cache = files.cache_file("disk-io", facts)
    rates = None if cache is None else _read(cache, facts)
    if rates is not None:
        return rates, True
    rates = measure(folder)
    if cache is not None:
        # Without a cache, the next run measures again.
        with suppress(OSError):
            files.make_directory(cache.parent)
            files.write(cache, json.dumps({"facts": facts, "rates": rates}, indent=2))
    return rates, False


def _announce(folder: Path, chosen: str, rates: dict[str, float], when: str) -> None:
    name = "io_uring" if chosen == "uring" else "threads"
    if "uring" not in rates:
        announce(f"disk I/O by threads: {folder} takes {rates['threads'] / 1e9:.2g} GB/s, which they reach")
        return
    announce(
        f"disk I/O by {name}: {rates['uring'] / 1e9:.3g} GB/s by io_uring, {rates['threads'] / 1e9:.3g} GB/s by "
        f"threads in {folder}, {when}"
    )


def measure(folder: Path) -> dict[str, float]:
    """Bytes per second that are read and written at once, for each backend that can be used; only threads on a slow
    drive."""
    file = open_scratch(folder)
    forks.close_in_child(file)
    pools: dict[str, native.Pool] = {}
    try:
        file.require(2 * PIECES * PIECE_BYTES)
        halves = [_pieces(file), _pieces(file)]
        file.reserve()
        held = [aligned(PIECES * PIECE_BYTES) for _ in halves]
        # Drives may compress what is not random.
        held[0].view(torch.int64).random_()
        for backend in _usable():
            pools[backend] = native.Pool(THREADS, backend)
        return _rates(pools, halves, held)
    finally:
        # A piece that is stuck in the kernel needs the file.
        stuck = [pool for pool in pools.values() if not pool.stop()]
        if not stuck:
            file.close()


def _rates(pools: dict[str, native.Pool], halves: list[Any], held: list[torch.Tensor]) -> dict[str, float]:
    # The first write of a block may allocate it.
    first = _seconds(pools["threads"], [(halves[0], held[0], True)])
    if (rate := held[0].nbytes / first) < SLOW:
        return {"threads": rate}
    _seconds(pools["threads"], [(halves[1], held[0], True)])
    best: dict[str, float] = {}
    for backend in (each for each in ROUNDS if each in pools):
        seconds = _seconds(pools[backend], [(halves[0], held[0], True), (halves[1], held[1], False)])
        best[backend] = max(best.get(backend, 0.0), 2 * held[0].nbytes / seconds)
    return best


def _seconds(pool: native.Pool, moves: Sequence[tuple[Any, torch.Tensor, bool]]) -> float:
    begin = time.perf_counter()
    transfers = [
        pool.submit(pieces, 0, len(pieces), memory.data_ptr(), write=write, keep=memory)
        for pieces, memory, write in moves
    ]
    for transfer in transfers:
        transfer.wait()
    return time.perf_counter() - begin


def _usable() -> list[str]:
    return ["threads", "uring"] if native.uring_refusal() is None else ["threads"]


def _pieces(file: ScratchFile) -> Any:
    pieces: Any = (native.Piece * PIECES)()
    for piece in pieces:
        piece.file, piece.length, piece.offset = file.descriptor, PIECE_BYTES, file.place(PIECE_BYTES)
    return pieces


def _facts(folder: Path) -> dict[str, Any]:
    """What the rates depend on. If any of it changes, they are measured again."""
    return {
        "drive": [folder.stat().st_dev, os.statvfs(folder).f_fsid],
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
        "backends": _usable(),
        "megatrain": __version__,
    }


def _read(cache: Path, facts: dict[str, Any]) -> dict[str, float] | None:
    """The cached rates, unless the file is missing or damaged."""
    try:
        data = json.loads(cache.read_text())
        if data["facts"] == facts and data["rates"]["threads"] > 0:
            return {backend: float(rate) for backend, rate in data["rates"].items()}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None
