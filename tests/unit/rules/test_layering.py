"""Imports go down only. The table is the rule; it is checked by reading the source, not by importing it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "src" / "megatrain"

# Each part of megatrain and the parts it may import, from the top down.
MAY_IMPORT: dict[str, set[str]] = {
    "cli": {"hf", "engine", "checkpoint", "optim", "planner", "model", "hardware", "native"},
    "hf": {"engine", "checkpoint", "optim", "planner", "model", "hardware"},
    "engine": {"compute", "optim", "checkpoint", "stream", "store", "planner", "model", "hardware"},
    "compute": {"stream", "store", "native"},
    "optim": {"stream", "store", "native"},
    "checkpoint": {"stream", "store", "native"},
    "stream": {"store", "native"},
    "store": {"native"},
    "native": set(),
    "planner": {"model", "hardware"},
    "model": set(),
    "hardware": set(),
    "files": {"native"},
    "settings": set(),
    "aliases": set(),
    "geometry": set(),
    "generators": set(),
    "host_copies": set(),
    "lazy": set(),
    "process": set(),
    "telemetry": set(),
    "errors": set(),
}

# Parts that every other part may import, and what the lowest parts may import.
EVERYBODY = {
    "aliases", "errors", "files", "generators", "geometry", "host_copies", "lazy", "process", "settings", "telemetry",
}  # fmt: skip
BOTTOM = {
    "aliases": set(),
    "errors": set(),
    "geometry": set(),
    "generators": set(),
    "host_copies": set(),
    "lazy": set(),
    "process": set(),
    "settings": {"aliases", "errors", "geometry"},
    "telemetry": {"errors", "geometry"},
    "native": {"errors", "geometry", "settings", "telemetry"},
    "files": {"errors", "telemetry", "native"},
}

# External modules that only some parts may import.
RESERVED = {
    "transformers": {"model", "hf", "cli"},
    "ctypes": {"native"},
}

# Files directly under megatrain/ that connect the parts: the public names and `python -m megatrain`.
FREE = {"__init__", "__main__", "_version"}


def imported_modules(module: str, is_package: bool, source: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything a module imports, anywhere in the file."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{origin}.{alias.name}"


def violations(module: str, is_package: bool, source: str) -> list[str]:
    part = module.split(".")[1] if "." in module else "__init__"
    if part in FREE:
        return []
    if part not in MAY_IMPORT:
        return [f"{module}: the part '{part}' has no row in MAY_IMPORT"]
    allowed = {part, "_version"} | BOTTOM.get(part, MAY_IMPORT[part] | EVERYBODY)
    found = []
    for line, name in imported_modules(module, is_package, source):
        root, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if root == "megatrain" and target not in allowed:
            found.append(f"{module}:{line}: {part} may not import {name}")
        if root in RESERVED and part not in RESERVED[root]:
            found.append(f"{module}:{line}: only {sorted(RESERVED[root])} may import {root}")
    return found


def test_imports_go_down_only():
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        found += violations(module, is_package, path.read_text())
    assert not found, "\n" + "\n".join(found)


def test_the_table_has_no_cycle():
    remaining = {part: set(below) for part, below in MAY_IMPORT.items()}
    while remaining:
        lowest = {part for part, below in remaining.items() if not below & remaining.keys()}
        assert lowest, f"these parts import each other: {sorted(remaining)}"
        remaining = {part: below for part, below in remaining.items() if part not in lowest}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatrain.store.ram", "from megatrain.stream import lanes"),
        ("megatrain.store.ram", "from megatrain import engine"),
        ("megatrain.store.ram", "from ..engine.step import run"),
        ("megatrain.store.ram", "def late():\n    import megatrain.engine"),
        ("megatrain.store.ram", "import megatrain"),
        ("megatrain.store.ram", "from ctypes import c_void_p"),
        ("megatrain.engine.step", "from transformers.trainer import Trainer"),
        ("megatrain.telemetry.log", "from megatrain.settings import Settings"),
        ("megatrain.native.library", "from megatrain import files"),
        ("megatrain.files", "from megatrain.store import slab"),
        ("megatrain.surprise.part", ""),
    ],
)
def test_the_check_finds_violations(module, source):
    assert violations(module, False, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatrain.store.ram", "from . import layout\nfrom megatrain import errors, native"),
        ("megatrain.engine.step", "from megatrain.compute.block import run\nimport torch"),
        ("megatrain.hf.trainer", "import transformers\nfrom ..telemetry import log"),
    ],
)
def test_the_check_allows(module, source):
    assert violations(module, False, source) == []
