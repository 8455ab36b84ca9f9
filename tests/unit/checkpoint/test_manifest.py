"""Damage to a manifest is detected and named, and no file outside its directory is read."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatrain import files
from megatrain.checkpoint import manifest
from megatrain.errors import CheckpointError

CONTENT: dict[str, Any] = {"optimizer": "adamw", "steps": {"w": 3}, "groups": [{"lr": 0.01, "params": ["w"]}]}


def write_checkpoint(directory: Path, **content: Any) -> Path:
    """A checkpoint of two small files."""
    (directory / "megatrain").mkdir(parents=True)
    (directory / "weights").write_bytes(b"weights")
    (directory / "megatrain" / "states").write_bytes(b"states")
    manifest.write(directory, [directory / "weights", directory / "megatrain" / "states"], CONTENT | content)
    return directory / manifest.FILE


def rewrite_manifest(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite a manifest with a correct checksum."""
    content = json.loads(path.read_text())
    del content["sha256"]
    change(content)
    text = json.dumps(content, indent=1).removesuffix("\n}")
    path.write_text(f'{text},\n "sha256": "{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n')


def rewrite_as_format_1(path: Path, change: Callable[[dict[str, Any]], Any] = lambda content: None) -> None:
    """Rewrite a manifest in format 1."""
    content = json.loads(path.read_text())
    for key in ("sha256", "sequence"):
        content.pop(key, None)
    content["format"] = 1
    change(content)
    path.write_text(json.dumps(content, indent=1))


def test_a_manifest_round_trips(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "one")
    result = manifest.verify(tmp_path / "one")
    assert {key: result[key] for key in CONTENT} == CONTENT
    assert result["files"]["megatrain/states"] == {"bytes": 6, "crc32": zlib.crc32(b"states")}
    assert json.loads(path.read_text()) == result, "a manifest must be plain JSON"


def bit_flips(content: bytes) -> Iterator[bytes]:
    for position in range(len(content) * 8):
        changed = bytearray(content)
        changed[position // 8] ^= 1 << position % 8
        yield bytes(changed)


def refusal(path: Path, content: bytes) -> str | None:
    try:
        manifest.parse(path, content)
    except CheckpointError as error:
        return str(error)
    return None


def test_every_flipped_bit_is_detected(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "one")
    messages = [refusal(path, content) for content in bit_flips(path.read_bytes())]
    assert all(message is not None and str(path) in message for message in messages)
    assert refusal(path, path.read_bytes()) is None


def test_every_truncation_is_detected(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "one")
    content = path.read_bytes()
    messages = [refusal(path, content[:size]) for size in range(len(content))]
    assert all(message is not None and str(path) in message for message in messages)


def test_flipped_bits_of_format_1_raise_checkpoint_errors_only(tmp_path: Path) -> None:
    """Format 1 has no checksum, so many flips pass. The others raise an error that names the file."""
    path = write_checkpoint(tmp_path / "one")
    rewrite_as_format_1(path)
    manifest.verify(tmp_path / "one")
    messages = [refusal(path, content) for content in bit_flips(path.read_bytes())]
    assert {message is None for message in messages} == {True, False}
    assert all(message is None or str(path) in message for message in messages)


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no files": lambda m: m.pop("files"),
    "no steps": lambda m: m.pop("steps"),
    "no groups": lambda m: m.pop("groups"),
    "files a list": lambda m: m.update(files=[]),
    "an entry a number": lambda m: m["files"].update(weights=1),
    "no bytes": lambda m: m["files"]["weights"].pop("bytes"),
    "bytes a text": lambda m: m["files"]["weights"].update(bytes="7"),
    "bytes true": lambda m: m["files"]["weights"].update(bytes=True),
    "bytes negative": lambda m: m["files"]["weights"].update(bytes=-1),
    "bytes huge": lambda m: m["files"]["weights"].update(bytes=1 << 70),
    "bytes infinite": lambda m: m["files"]["weights"].update(bytes=float("inf")),
    "no crc32": lambda m: m["files"]["weights"].pop("crc32"),
    "steps a list": lambda m: m.update(steps=[3]),
    "a step a float": lambda m: m["steps"].update(w=3.0),
    "a step huge": lambda m: m["steps"].update(w=1 << 64),
    "groups a mapping": lambda m: m.update(groups={}),
    "a group a number": lambda m: m.update(groups=[1]),
    "no params": lambda m: m["groups"][0].pop("params"),
    "params a text": lambda m: m["groups"][0].update(params="w"),
    "params numbers": lambda m: m["groups"][0].update(params=[1]),
    "optimizer a number": lambda m: m.update(optimizer=1),
    "format true": lambda m: m.update(format=True),
    "format of the future": lambda m: m.update(format=3),
    "a name absolute": lambda m: m["files"].update({"/etc/hostname": {"bytes": 1, "crc32": 0}}),
    "a name above": lambda m: m["files"].update({"../outside": {"bytes": 1, "crc32": 0}}),
    "a name empty": lambda m: m["files"].update({"": {"bytes": 1, "crc32": 0}}),
    "a name with a zero": lambda m: m["files"].update({"a\0b": {"bytes": 1, "crc32": 0}}),
    "a name too long": lambda m: m["files"].update({"a" * 300: {"bytes": 1, "crc32": 0}}),
    "a name not Unicode": lambda m: m["files"].update({"\ud800": {"bytes": 1, "crc32": 0}}),
    "a device": lambda m: m["files"].update({"/dev/zero": {"bytes": 0, "crc32": 0}}),
    "a pipe": lambda m: m["files"].update(pipe={"bytes": 0, "crc32": 0}),
    "a directory": lambda m: m["files"].update(megatrain={"bytes": 4096, "crc32": 0}),
    "a link": lambda m: m["files"].update(link={"bytes": 7, "crc32": zlib.crc32(b"weights")}),
    "below a link": lambda m: m["files"].update({"folder/outside": {"bytes": 1, "crc32": 0}}),
    "a link to a device": lambda m: m["files"].update(zero={"bytes": 0, "crc32": 0}),
}


@pytest.mark.parametrize("write", [rewrite_manifest, rewrite_as_format_1], ids=["format 2", "format 1"])
@pytest.mark.parametrize("case", WRONG)
def test_invalid_content_is_named(tmp_path: Path, case: str, write: Any) -> None:
    path = write_checkpoint(tmp_path / "one")
    (tmp_path / "outside").write_bytes(b"x")
    os.mkfifo(tmp_path / "one" / "pipe")
    (tmp_path / "one" / "link").symlink_to("weights")
    (tmp_path / "one" / "zero").symlink_to("/dev/zero")
    (tmp_path / "one" / "folder").symlink_to(tmp_path)
    write(path, lambda content: None)
    manifest.verify(tmp_path / "one")
    write(path, WRONG[case])
    with pytest.raises(CheckpointError, match="one/") as error:
        manifest.verify(tmp_path / "one")
    assert "\n" not in str(error.value)


def test_a_valid_sequence_is_required(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "one")
    for value in (None, -1, 1.5, "1", 1 << 64):
        rewrite_manifest(path, lambda m, value=value: m.update(sequence=value))
        with pytest.raises(CheckpointError, match="'sequence'"):
            manifest.read(tmp_path / "one")


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 10_000, "{", "\ud800".encode("utf-8", "surrogatepass"), b"\xff"])
def test_invalid_json_is_refused(tmp_path: Path, text: str | bytes) -> None:
    path = write_checkpoint(tmp_path / "one")
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: it is not valid JSON"):
        manifest.read(tmp_path / "one")


def test_a_manifest_must_be_a_regular_file(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "one")
    for create in (os.mkfifo, os.mkdir, lambda p: os.symlink("/dev/zero", p)):
        path.unlink() if not path.is_dir() else path.rmdir()
        create(path)
        with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
            manifest.verify(tmp_path / "one")
    path.unlink()
    with path.open("wb") as file:
        file.truncate(manifest.MOST_BYTES + 1)
    with pytest.raises(CheckpointError, match=r"damaged: it has [0-9,]+ bytes"):
        manifest.verify(tmp_path / "one")


def test_sequence_numbers_follow_the_order_of_saves(tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        write_checkpoint(tmp_path / name)
    os.utime(tmp_path / "third", (0, 0))
    result = [manifest.sequence_of(tmp_path / name) for name in ("first", "second", "third")]
    assert result == [1, 2, 3]
    (tmp_path / "third" / manifest.FILE).unlink()
    assert manifest.sequence_of(tmp_path / "third") is None
    rewrite_as_format_1(tmp_path / "second" / manifest.FILE)
    assert manifest.sequence_of(tmp_path / "second") == 0
    assert manifest.next_sequence(tmp_path / "fourth") == 2
    (tmp_path / "link").symlink_to(tmp_path / "first")
    assert manifest.next_sequence(tmp_path / "link") == 2


def test_a_manifest_that_cannot_be_synced_is_removed(tmp_path: Path) -> None:
    def fails(operation: str, path: Path) -> None:
        if operation == "sync" and "manifest" in path.name:
            raise OSError(5, "Input/output error")

    with files.observing(fails), pytest.raises(OSError, match="while syncing"):
        write_checkpoint(tmp_path / "one")
    assert os.listdir(tmp_path / "one" / "megatrain") == ["states"]
