"""`megatrain probe`: this machine in numbers, measured once, as a table or as a description that a plan takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import typer

from megatrain.geometry import GIB

if TYPE_CHECKING:
    from megatrain.hardware.machine import Machine

COLUMNS = 80


def probe(
    offload_dir: Annotated[list[str] | None, typer.Option(help="Measure this disk too; may repeat.")] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again what was measured before.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda:N; else the GPU if there is one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what `megatrain plan --machine FILE` reads.")] = False,
) -> None:
    """Measure this machine once, in under 20 seconds; later calls read the cached numbers."""
    from megatrain.engine import planning

    machine = planning.probe(device=device, offload_dir=offload_dir or None, refresh=refresh)
    typer.echo(machine.to_json() if as_json else aligned(_rows(machine)), nl=not as_json)


def aligned(rows: Iterable[tuple[str, str]], indent: str = "") -> str:
    """Labels, then values, wrapped to a narrow terminal. Long words, such as paths, stay whole."""
    pairs = [(indent + label, value) for label, value in rows]
    margin = max(len(label) for label, _ in pairs) + 2
    lines = []
    for label, value in pairs:
        first, *others = wrap(value, COLUMNS - margin, break_long_words=False, break_on_hyphens=False) or ["-"]
        lines += [label.ljust(margin) + first, *[" " * margin + line for line in others]]
    return "\n".join(lines)


def _rows(machine: Machine) -> Iterator[tuple[str, str]]:
    yield "machine", machine.name
    yield "RAM", f"{machine.ram_bytes / GIB:.1f} GiB, {machine.dram / 1e9:.0f} GB/s"
    yield "cores", str(machine.cores)
    yield "GPU", f"{machine.gpu}, {machine.vram_bytes / GIB:.1f} GiB" if machine.gpu else "none"
    if machine.gpu:
        yield "GPU memory", f"{machine.hbm / 1e9:.0f} GB/s"
        yield "to the GPU", f"{machine.h2d / 1e9:.1f} GB/s pinned, {machine.pageable_h2d / 1e9:.1f} GB/s pageable"
        yield "from the GPU", f"{machine.d2h / 1e9:.1f} GB/s pinned"
        yield "both ways", f"{machine.duplex / 1e9:.1f} GB/s; RAM meanwhile {machine.dram_under_dma / 1e9:.0f} GB/s"
        yield "launches", f"{machine.launches / 1e3:.0f} thousand operations/s"
    unit, name = (1e12, "TFLOP/s") if machine.gpu else (1e9, "GFLOP/s")
    yield "matmul", _rates(machine.matmul, unit, name)
    yield "attention", _rates({"bf16": machine.attention}, unit, name)
    yield "update on CPU", _rates(machine.update, 1e9, "billion parameters/s")
    if machine.gpu:
        yield "update on GPU", _rates(machine.gpu_update, 1e9, "billion parameters/s")
    for disk in machine.disks:
        speed = f"read {disk.read / 1e9:.2f} GB/s, write {disk.write / 1e9:.2f} GB/s"
        yield "disk", f"{disk.path}: {disk.free_bytes / GIB:.1f} GiB free, {speed}"
    yield "source", machine.source


def _rates(rates: Mapping[str, float], unit: float, name: str) -> str:
    return f"{', '.join(f'{kind} {rate / unit:.3g}' for kind, rate in rates.items())} {name}"
