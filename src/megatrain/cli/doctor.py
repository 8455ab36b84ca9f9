"""`megatrain doctor`: what a bug report needs to know of an installation and its machine. Measures nothing."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from megatrain._version import __version__
from megatrain.cli.probe import aligned
from megatrain.errors import MegaTrainError
from megatrain.geometry import GIB

Rows = Iterator[tuple[str, str]]
OPTIONAL = ("triton", "trl", "peft", "datasets")
ENVIRONMENT = (
    "CC", "CUBLAS_WORKSPACE_CONFIG", "CUDA_HOME", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "CXX", "HF_HOME",
    "HF_HUB_CACHE", "HF_HUB_OFFLINE", "LD_LIBRARY_PATH", "LD_PRELOAD", "LOCAL_RANK", "MEGATRAIN_NATIVE",
    "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONPATH",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "RANK", "TOKENIZERS_PARALLELISM", "TORCHDYNAMO_DISABLE",
    "TORCHINDUCTOR_CACHE_DIR", "TORCH_LOGS", "TRANSFORMERS_OFFLINE", "TRITON_CACHE_DIR", "WORLD_SIZE", "XDG_CACHE_HOME",
)  # fmt: skip
"""The only variables that are shown: none of them holds a secret."""
IN_RAM = ("tmpfs", "ramfs")


def doctor(
    offload_dir: Annotated[list[str] | None, typer.Option(help="Describe this directory too; may repeat.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False,
) -> None:
    """Print versions, devices and limits, to be pasted into a bug report.

    Exits with 1 if training is impossible here, and says what to do.
    """
    problems: list[str] = []
    sections: dict[str, Callable[[], Rows]] = {
        "versions": lambda: _versions(problems),
        "gpu": lambda: _gpu(problems),
        "native": lambda: _native(problems),
        "compile": _compile,
        "host": lambda: _host(problems),
        "disks": lambda: _disks(offload_dir or []),
        "environment": _environment,
    }
    report = {title: dict(_complete(section)) for title, section in sections.items()}
    if as_json:
        typer.echo(json.dumps(report | {"problems": problems}, indent=2))
    else:
        for title, rows in report.items():
            typer.echo(f"{title}\n{aligned(rows.items(), indent='  ')}\n")
        numbered = [(f"{number}.", problem) for number, problem in enumerate(problems, start=1)]
        typer.echo(f"problems\n{aligned(numbered, indent='  ')}" if problems else "no problems found")
    if problems:
        raise typer.Exit(1)


def _complete(section: Callable[[], Rows]) -> Rows:
    """The rows of a section. A report is most needed where things are broken, so no failure ends it."""
    try:
        yield from section()
    except Exception as error:
        yield "not found", _reason(error)


def _try(find: Callable[[], Any]) -> str:
    """What was found, or why it was not."""
    try:
        return str(find())
    except Exception as error:
        return f"not found ({_reason(error)})"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


def _versions(problems: list[str]) -> Rows:
    yield "megatrain", f"{__version__}, {Path(__file__).parents[1]}"
    yield "python", f"{platform.python_version()}, {sys.executable}"
    yield "platform", platform.platform()
    if sys.platform != "linux":
        problems.append(f"MegaTrain runs on Linux only, and this is {sys.platform}; use a Linux machine.")
    for package, needed in _needed().items():
        installed = _version(package)
        yield package, installed or "not installed"
        if installed is None or not needed.contains(installed, prereleases=True):
            state = "is not installed" if installed is None else f"{installed} is installed"
            problems.append(
                f"{package} {state}, and MegaTrain needs {package}{needed}; pip install '{package}{needed}'."
            )
    for package in OPTIONAL:
        yield package, _version(package) or "not installed"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _needed() -> dict[str, Any]:
    """The packages that MegaTrain depends on, and which versions: from its wheel, or from the source tree."""
    from packaging.requirements import Requirement

    project = Path(__file__).parents[3] / "pyproject.toml"
    if project.is_file():
        import tomllib

        lines = tomllib.loads(project.read_text())["project"]["dependencies"]
    else:
        lines = [line for line in metadata.requires("megatrain") or [] if "extra ==" not in line]
    return {requirement.name: requirement.specifier for requirement in map(Requirement, lines)}


def _gpu(problems: list[str]) -> Rows:
    try:
        import torch
    except Exception as error:  # of a broken installation: also an OSError, for a library that is missing
        yield "torch", f"cannot be imported ({_reason(error)})"
        problems.append(f"torch cannot be imported ({_reason(error)}); reinstall it.")
        return

    def driver() -> str:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].removeprefix("NVRM version: ")

    def gpu(index: int) -> str:
        # Properties need no context; asking how much of the memory is free would create one.
        properties = torch.cuda.get_device_properties(index)
        capability = f"compute capability {properties.major}.{properties.minor}"
        return f"{properties.name}, {properties.total_memory / GIB:.1f} GiB, {capability}"

    def attention(index: int) -> str:
        from megatrain.hardware.attention import AttentionShape, Gpu, order_for

        order = order_for(Gpu.of(torch.device("cuda", index)), AttentionShape())
        return f"{', '.join(order)}; deterministic mode leaves out cudnn" if order else "as PyTorch orders its backends"

    def experts(index: int) -> str:
        return "grouped_mm" if torch.cuda.get_device_capability(index) >= (8, 0) else "a loop over experts"

    yield "CUDA of torch", torch.version.cuda or "none: this PyTorch was built without CUDA"
    yield "cuDNN of torch", str(torch.backends.cudnn.version() or "none")
    yield "driver", _try(driver)
    if not torch.cuda.is_available():
        yield "GPU", f"{_try(torch.cuda.init)}: training runs on the CPU"
    for index in range(torch.cuda.device_count()):
        yield f"cuda:{index}", _try(partial(gpu, index))
        yield f"attention on cuda:{index}", _try(partial(attention, index))
        yield f"experts on cuda:{index}", _try(partial(experts, index))


def _native(problems: list[str]) -> Rows:
    from megatrain.native import library

    try:
        yield "path", str(library.find())
        yield "ABI", f"{library.load().mt_abi_version()}, as this version needs"
        *others, used = library.isas()
        yield "instructions", f"{used} in use" + (f"; {', '.join(others)} could be too" if others else "")
    except MegaTrainError as error:
        yield "not usable", str(error)
        problems.append(str(error))


def _compile() -> Rows:
    import torch

    from megatrain.hardware import compilers

    gpu = torch.cuda.is_available()
    why = compilers.missing("cuda" if gpu else "cpu")
    eager = why if gpu else "there is no GPU"
    yield "compile='auto'", f"runs eagerly: {eager}" if eager else "compiles"
    yield "compile=True", f"cannot compile: {why}" if why else "compiles"
    for title, variable, names in (compilers.C, compilers.CXX):
        yield title, compilers.program(variable, names) or f"not found (searched for {', '.join(names)})"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    yield "Python.h", f"{header}" if header.is_file() else f"not found at {header}: Triton needs it to compile"


def _host(problems: list[str]) -> Rows:
    import resource

    import psutil

    from megatrain.hardware import cgroups, inventory
    from megatrain.hardware.probe import cpu_model

    def quota() -> str:
        cores = cgroups.cpu_quota()
        return "unlimited" if cores is None else f"{cores:g} cores"

    def size(nbytes: int | None) -> str:
        if nbytes is None or nbytes == resource.RLIM_INFINITY:
            return "unlimited"
        return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes >> 20} MiB"

    yield "CPU", _try(cpu_model)
    yield "cores", _try(lambda: f"{os.cpu_count()}, {cgroups.affinity()} in the affinity mask")
    yield "cgroup CPU quota", _try(quota)
    yield "RAM", _try(lambda: size(int(psutil.virtual_memory().total)))
    yield "cgroup RAM limit", _try(lambda: size(cgroups.memory_limit()))
    yield "available now", _try(lambda: size(inventory.available_ram()))
    yield "swap", _try(lambda: size(int(psutil.swap_memory().total)))
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield "pinning limit", f"{size(soft)} (RLIMIT_MEMLOCK; at most {size(hard)})"
    try:
        inventory.refuse_distributed()
    except MegaTrainError as error:
        problems.append(str(error))


def _disks(folders: list[str]) -> Rows:
    for folder in folders:
        yield f"offload {folder}", _try(partial(_disk, folder))
    yield "working directory", _try(lambda: _disk(os.getcwd()))
    yield "temporary files", _try(lambda: _disk(os.environ.get("TMPDIR") or "/tmp"))
    from huggingface_hub.constants import HF_HUB_CACHE

    yield "Hugging Face cache", _try(lambda: _disk(HF_HUB_CACHE))


def _disk(folder: str) -> str:
    import psutil

    path = Path(folder).expanduser().resolve()
    parents = (path, *path.parents)
    existing = next(parent for parent in parents if parent.exists())
    types = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    file_system = next((types[str(parent)] for parent in parents if str(parent) in types), "unknown file system")
    file_system += ", which is RAM" if file_system in IN_RAM else ""
    missing = "" if existing == path else " (does not exist yet)"
    return f"{path}{missing}: {file_system}, {shutil.disk_usage(existing).free / GIB:.1f} GiB free"


def _environment() -> Rows:
    present = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    yield from present.items()
    if not present:
        yield "none", "no variable that changes what MegaTrain does is set"
