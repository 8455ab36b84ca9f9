"""`Machine`: the capacities and rates of a machine, measured by `probe` or read from a JSON file.

Reading a description needs no GPU, so a plan can be made for any machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.errors import SettingsError
from megatrain.geometry import WIDTHS
from megatrain.hardware.validation import Frozen, fields_of, is_count, is_rate, read_object, require

KINDS = ("bf16", "tf32", "fp32")
"""Arithmetic of matrix products."""
TOUCHED = {name: 10 + 4 * width.nbytes for name, width in WIDTHS.items()}
"""Width of the optimizer's states → bytes that AdamW reads and writes per parameter (split master, BF16 gradient)."""

CUDA_CONTEXT_BYTES = 960 << 20
"""GPU memory of the CUDA context, modules and libraries, outside PyTorch's allocator: 0.75 to 0.91 GiB on an H200
(benchmarks/results/2026-11-15-h200.md)."""
PINNED_PER_BYTE = 512
"""Bytes of pinned host memory per byte of GPU memory for its page table: 8 bytes per page of 4 KiB. 50 GiB took 0.09
GiB on an H200."""
THREAD_BYTES = 80 << 20
"""GPU memory outside PyTorch's allocator for each further thread that computes, as every micro-batch of a window does:
cuBLAS keeps a handle per thread. 64 MiB were measured with eight threads on an H200, 77 with sixteen on another."""
THREADS = 2
"""Threads that CUDA_CONTEXT_BYTES includes."""
PROCESS_BYTES = 1434 << 20
"""RAM of the interpreter, PyTorch, transformers and the driver: a fifth above the largest of ten runs, 1.16 GiB. 48
other runs, on other machines and with other models, had 0.99 to 1.30 GiB (test_accuracy.py)."""
KERNEL_SHARE = 425
KERNEL_PINNED_SHARE = 1190
"""RAM that is attributed to no process, per 100,000 bytes: page tables and the index of shared pages, for all state;
and for pinned memory the page lists of kernel and driver. Fitted to 20 and 100 GiB of `benchmarks/pinned.py` on an
H200 with 128 GiB; 60 GiB took 0.966 GiB pinned (0.969 predicted) and 0.254 GiB unpinned (0.255)."""

_SHIPPED = Path(__file__).parent / "machines"


def cuda_bytes(pinned: Any, window: Any = 1) -> Any:
    """GPU memory outside PyTorch's allocator, given the pinned host memory and the micro-batches in a window.

    Takes numbers or arrays.
    """
    return CUDA_CONTEXT_BYTES + pinned // PINNED_PER_BYTE + THREAD_BYTES * (window > THREADS) * (window - THREADS)


def kernel_bytes(held: Any, pinned: Any) -> Any:
    """RAM of the kernel and the driver, given the bytes of state and the pinned ones. Takes numbers or arrays."""
    return (KERNEL_SHARE * (held // 1000) + KERNEL_PINNED_SHARE * (pinned // 1000)) // 100


@dataclass(frozen=True)
class AvailableMemory:
    """What a process can use of a machine now, beside other processes."""

    vram: int | None = None
    """Bytes of GPU memory for one model; None: all."""
    ram: int | None = None
    """Bytes of host memory for it; None: all."""
    held: int = 0
    """Bytes of GPU memory that this process uses for something else. `max_vram_gb` includes them."""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """A directory that can hold state, and its speed."""

    path: str
    """The directory."""
    free_bytes: int
    """Bytes free for this user."""
    read: float
    """Bytes per second of large direct reads."""
    write: float
    """Bytes per second of large direct writes."""
    direct: bool = True
    """Whether transfers bypass the page cache (O_DIRECT)."""
    file_system: str = ""
    """Directories with the same one share its space and speed; empty: it is not shared."""

    def __post_init__(self) -> None:
        _check_types(self)
        require(self.path != "" and "\0" not in self.path, "path", "must be the path of a directory")
        for name in ("read", "write"):
            require(getattr(self, name) > 0, name, "must be above 0")


def striped(disks: Sequence[Disk], field: str) -> float:
    """The free bytes or the rate (`field`) of directories that get equal shares of all data: the file system with the
    least for its share bounds all of them."""
    names = [disk.file_system or str(number) for number, disk in enumerate(disks)]
    shares = Counter(names)
    least = (getattr(disk, field) / shares[name] for name, disk in zip(names, disks, strict=True))
    return len(disks) * min(least, default=0)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What this process may use of a machine, and how fast it is. Without a GPU, its fields are 0 or empty."""

    name: str
    """A name for people."""
    source: str
    """Where the numbers come from."""
    gpu: str | None
    """The GPU as its driver names it. None: no GPU; the CPU computes."""
    vram_bytes: int
    """Bytes of GPU memory."""
    ram_bytes: int
    """Bytes of host memory that this process may use: the host's, capped by the tightest cgroup limit."""
    cores: int
    """Cores that this process may use: its affinity mask, capped by the tightest cgroup CPU quota."""
    disks: tuple[Disk, ...]
    """Directories that were measured."""
    h2d: float
    """Bytes per second from pinned host memory to the GPU."""
    d2h: float
    """Bytes per second from the GPU to pinned host memory."""
    duplex: float
    """Bytes per second of both directions together, with equal amounts in each."""
    pageable_h2d: float
    """Bytes per second from memory that is not pinned to the GPU."""
    dram: float
    """Bytes per second, read plus written, of AdamW-like streams through host memory on all cores."""
    dram_under_dma: float
    """The same while copies run in both directions, not counting the bytes of the copies."""
    matmul: dict[str, float]
    """FLOP per second of large matrix products: "bf16", "tf32" (GPU only), "fp32"."""
    attention: float
    """FLOP per second of BF16 causal attention (SDPA), forward + backward, head dimension 128, length 2048; counted as
    7 × length² × dimension per head and sequence: 2 forward, 5 backward, of the unmasked half."""
    update: dict[str, float]
    """Width of the states → parameters per second of AdamW on the CPU, on all update threads (split master, BF16
    gradient)."""
    gpu_update: dict[str, float]
    """Width of the states → parameters per second of the same update on the GPU."""
    hbm: float
    """Bytes per second, read plus written, of a copy inside GPU memory."""
    launches: float
    """Small operations per second that Python can launch, which limits models with small layers."""

    def __post_init__(self) -> None:
        _check_types(self)
        for name in ("matmul", "update", "gpu_update"):
            object.__setattr__(self, name, Frozen(getattr(self, name)))
        for name in ("ram_bytes", "cores", "dram", "attention"):
            require(getattr(self, name) > 0, name, "must be above 0")
        needed = KINDS if self.gpu else ("bf16", "fp32")
        require(set(self.matmul) == set(needed), "matmul", f"must have exactly {', '.join(needed)}")
        require(set(self.update) == set(TOUCHED), "update", f"must have exactly {', '.join(TOUCHED)}")
        widths = set(TOUCHED) if self.gpu else set()
        require(set(self.gpu_update) == widths, "gpu_update", f"must have exactly {', '.join(TOUCHED)} with a GPU")
        for name in ("vram_bytes", "h2d", "d2h", "duplex", "pageable_h2d", "dram_under_dma", "hbm", "launches"):
            there = getattr(self, name) > 0
            require(there == (self.gpu is not None), name, "must be above 0 with a GPU, and 0 without one")

    def to_json(self) -> str:
        """The description as JSON, for `from_json`."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "the machine description") -> Machine:
        """Read a description. `where` is what errors call it. Unknown and missing fields are errors."""
        data = read_object(text, where)
        try:
            values = fields_of(cls, data, "it")
            disks = values["disks"]
            require(isinstance(disks, list), "disks", "must be a list")
            found = tuple(Disk(**fields_of(Disk, disk, f"disks[{number}]")) for number, disk in enumerate(disks))
            return cls(**{**values, "disks": found})
        except SettingsError as error:
            raise SettingsError(f"{where}: {error}") from error

    @staticmethod
    def load(name_or_path: str | os.PathLike[str]) -> Machine:
        """A shipped description by its name, or one in a JSON file by its path."""
        asked = os.fspath(name_or_path) if isinstance(name_or_path, str | os.PathLike) else None
        if not isinstance(asked, str):
            raise SettingsError(
                f"a machine is a name ({', '.join(Machine.shipped())}), the path of a description or a Machine, not "
                f"{type(name_or_path).__name__}."
            )
        is_name = asked in Machine.shipped()
        path = _SHIPPED / f"{asked}.json" if is_name else Path(os.path.expanduser(asked))
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # a ValueError: not UTF-8, or no path at all
            raise SettingsError(
                f"the machine {asked!r} is neither a JSON file that can be read ({error}) nor one of "
                f"{', '.join(Machine.shipped())}."
            ) from error
        return Machine.from_json(text, str(path))

    @staticmethod
    def shipped() -> list[str]:
        """Names of the descriptions that come with MegaTrain."""
        return sorted(path.stem for path in _SHIPPED.glob("*.json"))


def _check_types(described: Disk | Machine) -> None:
    """Raise unless every field has its annotated type, and numbers are finite and not negative."""
    for field in dataclasses.fields(described):
        value = getattr(described, field.name)
        if field.type == "str":
            require(isinstance(value, str), field.name, "must be a string")
        elif field.type == "str | None":
            require(value is None or (isinstance(value, str) and value != ""), field.name, "must be a string or null")
        elif field.type == "int":
            require(is_count(value), field.name, "must be a non-negative integer")
        elif field.type == "float":
            require(is_rate(value), field.name, "must be a finite, non-negative number")
        elif field.type == "bool":
            require(isinstance(value, bool), field.name, "must be true or false")
        elif field.type == "dict[str, float]":
            good = isinstance(value, dict) and all(is_rate(rate) and rate > 0 for rate in value.values())
            require(good, field.name, "must map names to finite numbers above 0")
        else:
            good = isinstance(value, tuple) and all(isinstance(disk, Disk) for disk in value)
            require(good, field.name, "must be a tuple of Disk")
