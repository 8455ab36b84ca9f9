"""The manifest of a checkpoint: its files with their sizes and CRC-32. It is written last.

A directory without a manifest is incomplete. Paths are relative to the checkpoint and stay inside it. The file ends
with the SHA-256 of everything before that line, so any change to it is detected.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from megatrain import files
from megatrain._version import __version__
from megatrain.errors import CheckpointError
from megatrain.files import AnyPath

FOLDER = "megatrain"
FILE = f"{FOLDER}/manifest.json"
FORMAT = 2
UNSUMMED = 1
"""The earlier format, which has neither a checksum of itself nor a sequence number."""
MOST_BYTES = 1 << 30
"""A larger manifest is refused."""
MOST = 1 << 63
Fits = Callable[[Any], bool]
_SUM = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n\Z')


def write(directory: Path, listed: Iterable[Path], content: dict[str, Any], place: Path | None = None) -> int:
    """Write the manifest of synced files; returns their size. `place` is the checkpoint's final directory."""
    entries = {}
    for path in listed:
        name = path.relative_to(directory).as_posix()
        with files.opened_inside(directory, name) as file:
            entries[name] = {"bytes": os.fstat(file.fileno()).st_size, "crc32": _crc32(file)}
    head = {"format": FORMAT, "megatrain": __version__, "sequence": next_sequence(place or directory), "files": entries}
    # A learning rate may be a tensor or a NumPy number.
    text = json.dumps(head | content, indent=1, default=lambda number: number.item()).removesuffix("\n}")
    files.write(directory / FILE, f'{text},\n "sha256": "{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n')
    return sum(entry["bytes"] for entry in entries.values())


def next_sequence(directory: Path) -> int:
    """The next sequence number among the checkpoints in the same directory."""
    beside = Path(os.path.realpath(directory)).parent.iterdir()
    return 1 + max((found for path in beside if (found := sequence_of(path)) is not None), default=0)


def sequence_of(directory: AnyPath) -> int | None:
    """The sequence number of a checkpoint (0: written by an older version); None: it is incomplete or damaged."""
    try:
        found: int = read(directory).get("sequence", 0)
    except (CheckpointError, OSError):
        return None
    return found


def read(directory: AnyPath) -> dict[str, Any]:
    """Read the manifest. Raises CheckpointError if it is missing or damaged."""
    path = Path(directory) / FILE
    try:
        with files.opened_inside(directory, FILE) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MOST_BYTES:
                raise CheckpointError(f"{path} is damaged: it has {size:,} bytes; use another checkpoint.")
            data = file.read()
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} has no {FILE}: the checkpoint is incomplete, as saving was interrupted; use another "
            "checkpoint."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    return parse(path, data)


def parse(path: Path, data: bytes) -> dict[str, Any]:
    """Parse and check a manifest. `path` is what errors name."""
    ending = _SUM.search(data)
    if ending is not None and hashlib.sha256(data[: ending.start()]).hexdigest().encode() != ending[1]:
        raise CheckpointError(
            f"{path} is damaged: its SHA-256 does not match the one at its end; use another checkpoint."
        )
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is damaged: it is not valid JSON; use another checkpoint.") from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found == FORMAT and ending is None:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is missing; use another checkpoint.")
    # True == 1, and 1.0 == 1.
    if type(found) is not int or found not in (FORMAT, UNSUMMED):
        raise CheckpointError(
            f"{path} has format {found}, but MegaTrain {__version__} reads formats up to {FORMAT}; install a newer "
            "MegaTrain."
        )
    _check(path, manifest)
    return manifest  # type: ignore[no-any-return]


def verify(directory: AnyPath, states: bool = True) -> dict[str, Any]:
    """Check every file of a checkpoint (without `states`: those outside `FOLDER`); returns the manifest."""
    manifest = read(directory)
    entries = {name: e for name, e in manifest["files"].items() if states or not name.startswith(f"{FOLDER}/")}
    for whole in (False, True):
        for name, entry in entries.items():
            try:
                _check_file(Path(directory), name, entry, whole)
            except FileNotFoundError:
                raise CheckpointError(
                    f"{Path(directory) / name} is missing ({entry['bytes']:,} bytes): the checkpoint is damaged; use "
                    "another one."
                ) from None
            except OSError as error:
                raise CheckpointError(
                    f"{Path(directory) / FILE} names {name!r}, which cannot be read: {error.strerror}."
                ) from error
    return manifest


def _check_file(directory: Path, name: str, entry: dict[str, int], whole: bool) -> None:
    """Raise unless a file has the size in the manifest and, with `whole`, the checksum."""
    with files.opened_inside(directory, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size != entry["bytes"]:
            raise CheckpointError(
                f"{directory / name} has {size:,} bytes, expected {entry['bytes']:,}: the checkpoint is damaged; use "
                "another one."
            )
        if whole and _crc32(file) != entry["crc32"]:
            raise CheckpointError(
                f"{directory / name} is damaged: its CRC-32 does not match the manifest; use another one."
            )


def _crc32(file: BinaryIO) -> int:
    value = 0
    while piece := file.read(files.PIECE):
        value = zlib.crc32(piece, value)
    return value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(fits: Fits) -> Fits:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _dict_of(fits: Fits) -> Fits:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


def _with(**fits: Fits) -> Fits:
    return lambda value: isinstance(value, dict) and all(fits[key](value.get(key)) for key in fits)


_NEEDED = {
    "files": _dict_of(_with(bytes=_is_count, crc32=_is_count)),
    "steps": _dict_of(_is_count),
    "groups": _list_of(_with(params=_list_of(_is_text))),
}
_OPTIONAL: dict[str, Fits] = {
    "optimizer": _is_text,
    "residuals": _list_of(_is_text),
    "nonfinite": _list_of(_is_text),
    "weights_only": lambda value: isinstance(value, bool),
    "kernels": _with(compile=lambda value: isinstance(value, bool), layers=lambda value: isinstance(value, dict)),
    "disk_written": _is_count,
}


def _check(path: Path, manifest: dict[str, Any]) -> None:
    """Raise unless all keys that are read have values of the right type."""
    wanted = _NEEDED | ({"sequence": _is_count} if manifest["format"] == FORMAT else {})
    for key, fits in (wanted | {key: fits for key, fits in _OPTIONAL.items() if key in manifest}).items():
        if key not in manifest:
            raise CheckpointError(f"{path} is damaged: it has no {key!r}; use another checkpoint.")
        if not fits(manifest[key]):
            raise CheckpointError(f"{path} is damaged: the value of {key!r} is not valid; use another checkpoint.")
