"""The manifest: what a complete checkpoint consists of, with sizes and CRC-32, written last.

A directory without one was not written to its end. Paths are relative to the checkpoint; none is absolute.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatrain._version import __version__
from megatrain.errors import CheckpointError

FOLDER = "megatrain"
FILE = f"{FOLDER}/manifest.json"
FORMAT = 1


def write(directory: Path, files: Iterable[Path], content: dict[str, Any]) -> None:
    """Under a temporary name, flushed to disk, then renamed: it is there whole or not at all."""
    listed = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "crc32": _checksum(path)}
        for path in files
    }
    text = json.dumps({"format": FORMAT, "megatrain": __version__, "files": listed} | content, indent=1)
    target = directory / FILE
    temporary = target.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(target)


def read(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest as it stands; an unreadable one is a CheckpointError."""
    path = Path(directory) / FILE
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no {FILE}: the checkpoint was not written to its end.") from None
    except ValueError:
        raise CheckpointError(f"{path} is damaged: it is not valid JSON.") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise CheckpointError(f"{path} has format {found}, this MegaTrain ({__version__}) reads format {FORMAT}.")
    missing = [key for key in ("files", "steps", "groups") if key not in manifest]
    if missing:
        raise CheckpointError(f"{path} is damaged: it lacks {missing[0]!r}.")
    return manifest


def verify(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file is there, of the right size and unchanged."""
    manifest = read(directory)
    for name, entry in manifest["files"].items():
        path = Path(directory) / name
        size = path.stat().st_size if path.exists() else -1
        if size != entry["bytes"]:
            state = "missing" if size < 0 else f"{size} bytes long"
            raise CheckpointError(f"{path} is {state}, not {entry['bytes']} bytes: the checkpoint is damaged.")
    for name, entry in manifest["files"].items():
        if _checksum(Path(directory) / name) != entry["crc32"]:
            raise CheckpointError(f"{Path(directory) / name} is damaged: its CRC-32 is not the one in the manifest.")
    return manifest


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(16 << 20):
            value = zlib.crc32(piece, value)
    return value
