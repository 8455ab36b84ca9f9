"""A checkpoint: an HF directory (written by the model itself) and, in `megatrain/`, the optimizer's exact state.

    megatrain/optimizer-00001-of-00003.safetensors   "<parameter>/<role>" → tensor; roles: residual, exp_avg, exp_avg_sq
    megatrain/manifest.json                          written last: sizes and CRC-32 of the shards, step counts, groups

Tensors are written from the store's own memory, one shard at a time. No absolute path is stored.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatrain._version import __version__
from megatrain.errors import CheckpointError
from megatrain.store.parameter import StoreTensor, states_of

FOLDER = "megatrain"
MANIFEST = "manifest.json"
FORMAT = 1
SHARD_BYTES = 4 << 30
"""Tensors are gathered into shards of about this size, which is also the extra RAM a save may take."""


# ---- weights


def save_model(
    model: Any, host_state: Callable[[], dict[str, torch.Tensor]], directory: str | os.PathLike[str]
) -> None:
    """Through `save_pretrained` if the model has it, else as one safetensors file."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(directory)
    else:
        save_file(without_aliases(host_state()), Path(directory) / "model.safetensors", metadata={"format": "pt"})


def without_aliases(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One name per tensor: safetensors does not store tied ones twice."""
    seen: set[tuple[int, torch.Size]] = set()
    kept = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        kept[name] = tensor.contiguous()
    return kept


def load_model(model: torch.nn.Module, directory: str | os.PathLike[str]) -> None:
    """Weights from an HF directory into the store, tensor by tensor where its names are the model's own."""
    named: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())
    files = _weight_files(Path(directory))
    stored = {key for _, keys in files for key in keys}
    wanted: dict[int, str] = {}
    for name, parameter in named.items():
        wanted.setdefault(id(parameter), name)
    covered = {id(named[key]) for key in stored if key in named}
    if not stored <= named.keys() | buffers.keys() or not wanted.keys() <= covered:
        _load_converted(model, named, directory, sorted(name for i, name in wanted.items() if i not in covered))
        return
    for path, keys in files:
        with safe_open(path, framework="pt") as shard:
            for key in keys:
                _put(key, named.get(key), buffers.get(key), shard.get_tensor(key))


def _put(name: str, parameter: Any, buffer: torch.Tensor | None, values: torch.Tensor) -> None:
    target = parameter if parameter is not None else buffer
    assert target is not None
    if target.shape != values.shape:
        raise CheckpointError(
            f"{name} has shape {tuple(values.shape)} in the checkpoint and {tuple(target.shape)} in the model."
        )
    if parameter is not None:
        parameter.slab.put(parameter.segment, values)
    elif buffer is not None:
        with torch.no_grad():
            buffer.copy_(values)


def _load_converted(model: Any, named: dict[str, Any], directory: str | os.PathLike[str], missing: list[str]) -> None:
    """Names on disk differ from the model's (merged experts...): let transformers convert, in a temporary copy."""
    if not hasattr(model, "from_pretrained"):
        raise CheckpointError(
            f"the checkpoint in {directory} lacks {missing[:3] or 'nothing'} or has names the model does not know."
        )
    loaded = type(model).from_pretrained(directory, dtype="auto", config=model.config)
    for name, parameter in loaded.named_parameters():
        _put(name, named[name], None, parameter)
    own = dict(model.named_buffers())
    for name, buffer in loaded.named_buffers():
        if name in own:
            _put(name, None, own[name], buffer)


def _weight_files(directory: Path) -> list[tuple[Path, list[str]]]:
    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory} holds no model*.safetensors; it is not a complete checkpoint.")
    index = directory / "model.safetensors.index.json"
    if index.exists():
        listed = set(json.loads(index.read_text())["weight_map"].values())
        absent = sorted(listed - {path.name for path in files})
        if absent:
            raise CheckpointError(
                f"{directory} lacks the shard {absent[0]} that its index names ({len(absent)} missing)."
            )
        files = [path for path in files if path.name in listed]
    found = []
    for path in files:
        with safe_open(path, framework="pt") as shard:
            found.append((path, list(shard.keys())))
    return found


# ---- optimizer


def save_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: str | os.PathLike[str]) -> None:
    """Moments, residuals, step counts and groups; the manifest last, so that what has one is complete."""
    folder = Path(directory) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    for stale in folder.glob("optimizer-*.safetensors"):
        stale.unlink()
    names = _names(model)
    parameters = [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]
    for _, parameter in parameters:
        parameter.slab.settle()
    shards = list(_shards(parameters))
    files = {}
    for number, shard in enumerate(shards, start=1):
        path = folder / f"optimizer-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        files[path.name] = {"bytes": path.stat().st_size, "crc32": _checksum(path)}
    manifest = {
        "format": FORMAT,
        "megatrain": __version__,
        "files": files,
        "steps": {name: parameter.slab.steps[parameter.segment] for name, parameter in parameters},
        "groups": [
            {key: value for key, value in group.items() if key != "params"}
            | {"params": [names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ],
    }
    _write_durably(folder / MANIFEST, json.dumps(manifest, indent=1))


def load_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: str | os.PathLike[str]) -> None:
    """The reverse of `save_optimizer`. Everything is checked before the first byte of state is changed."""
    folder = Path(directory) / FOLDER
    manifest = read_manifest(directory)
    names = _names(model)
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if groups != [group["params"] for group in manifest["groups"]]:
        raise CheckpointError(
            f"the optimizer state in {folder} is of other parameters or groups "
            f"({[len(g['params']) for g in manifest['groups']]} per group, not {[len(g) for g in groups]})."
        )
    for name, entry in manifest["files"].items():
        if _checksum(folder / name) != entry["crc32"]:
            raise CheckpointError(f"{folder / name} is damaged: its CRC-32 is not the one in the manifest.")
    for group, saved in zip(optimizer.param_groups, manifest["groups"], strict=True):
        group.update({k: tuple(v) if k == "betas" else v for k, v in saved.items() if k != "params"})
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in parameters.items():
        parameter.slab.overwrite()
        parameter.slab.steps[parameter.segment] = manifest["steps"][name]
    for file in manifest["files"]:
        with safe_open(folder / file, framework="pt") as shard:
            for key in shard.keys():  # noqa: SIM118
                name, _, role = key.rpartition("/")
                states_of(parameters[name])[role].copy_(shard.get_tensor(key))


def read_manifest(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a complete checkpoint; sizes of its files are checked."""
    folder = Path(directory) / FOLDER
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} has no {FOLDER}/{MANIFEST}: the checkpoint was not written to its end."
        ) from None
    except ValueError:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: it is not valid JSON.") from None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} has format {manifest.get('format')}, this MegaTrain ({__version__}) reads format {FORMAT}."
        )
    for name, entry in manifest["files"].items():
        path = folder / name
        size = path.stat().st_size if path.exists() else -1
        if size != entry["bytes"]:
            state = "missing" if size < 0 else f"{size} bytes long"
            raise CheckpointError(
                f"{path} is {state}, the manifest says {entry['bytes']} bytes: the checkpoint is damaged."
            )
    return manifest


def is_complete(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory was written to its end."""
    try:
        read_manifest(directory)
        _weight_files(Path(directory))
    except (CheckpointError, OSError):
        return False
    return True


def _names(model: torch.nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _shards(parameters: list[tuple[str, StoreTensor]]) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, parameter in parameters:
        tensors = {f"{name}/{role}": tensor for role, tensor in states_of(parameter).items()}
        added = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if shard and size + added > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard |= tensors
        size += added
    if shard:
        yield shard


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(16 << 20):
            value = zlib.crc32(piece, value)
    return value


def _write_durably(path: Path, text: str) -> None:
    """Under a temporary name, flushed to disk, then renamed: the file is there whole or not at all."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
