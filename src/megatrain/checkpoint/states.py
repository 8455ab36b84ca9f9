"""The optimizer's exact state, beside the weights of a checkpoint.

    megatrain/optimizer-00001-of-00003.safetensors   "<parameter>/<role>" → tensor; roles: residual and the moments
    megatrain/manifest.json                          files of the whole checkpoint, step counts, parameter groups

Tensors are written from the store's own memory, one shard at a time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatrain import files
from megatrain.checkpoint import manifest
from megatrain.errors import CheckpointError
from megatrain.native import lossless
from megatrain.store.parameter import StoreTensor, restore_states, states_of
from megatrain.telemetry.notices import announce

CODED = ".lossless"
"""Ends the names of tensors that are coded (native/lossless.py); their bytes are a uint8 tensor."""
THREADS = 256
"""At the most: the pool takes no more than this process may use."""
SHARD_BYTES = 4 << 30
"""Tensors are gathered into shards of about this size, which is also the extra RAM a save may take."""


class _Coder:
    """Codes the FP32 tensors of shards without loss, and keeps count."""

    def __init__(self) -> None:
        self._before = self._after = 0
        self._seconds = 0.0

    def encode(self, shard: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        start = time.perf_counter()
        coded = {key: tensor for key, tensor in shard.items() if tensor.dtype != torch.float32}
        for key in sorted(shard.keys() - coded.keys()):
            found = lossless.encode(shard[key].reshape(-1).cpu(), THREADS).clone()
            coded[key + CODED] = found
            self._before += shard[key].nbytes
            self._after += found.nbytes
        self._seconds += time.perf_counter() - start
        return coded

    def report(self) -> str:
        ratio, rate = self._before / max(1, self._after), self._before / 1e9 / max(self._seconds, 1e-9)
        return (
            f"lossless: moments of {self._before / 1e6:.1f} MB are {self._after / 1e6:.1f} MB on disk (ratio "
            f"{ratio:.2f}, coded at {rate:.1f} GB/s)"
        )


class Optimizer(Protocol):
    """What a checkpoint needs of an optimizer (optim/optimizer.py)."""

    kind: str
    width: str
    lossless: bool
    moments: tuple[str, ...]
    param_groups: list[dict[str, Any]]


def save_optimizer(model: torch.nn.Module, optimizer: Optimizer, directory: str | os.PathLike[str]) -> None:
    """Moments, residuals, step counts and groups. `seal` makes the checkpoint complete."""
    folder = Path(directory) / manifest.FOLDER
    files.make_directory(folder)
    files.remove(Path(directory) / manifest.FILE)
    for stale in folder.glob("optimizer-*.safetensors"):
        files.remove(stale)
    names = _names(model)
    parameters = [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]
    for _, parameter in parameters:
        parameter.slab.settle()
    shards = list(_shards(parameters, optimizer.moments))
    coder = _Coder() if optimizer.lossless else None
    for number, shard in enumerate(shards, start=1):
        path = folder / f"optimizer-{number:05d}-of-{len(shards):05d}.safetensors"
        files.before("write", path)
        save_file(shard if coder is None else coder.encode(shard), path, metadata={"format": "pt"})
    if coder is not None:
        announce(coder.report())


def seal(model: torch.nn.Module, optimizer: Optimizer, directory: str | os.PathLike[str]) -> int:
    """Make everything in the directory durable, then write its manifest: from now on it is a complete checkpoint.

    Returns its size in bytes. Older checkpoints may be deleted after this, not before.
    """
    names = _names(model)
    content = {
        "optimizer": optimizer.kind,
        "steps": {names[id(p)]: p.slab.steps[p.segment] for group in optimizer.param_groups for p in group["params"]},
        "groups": [
            {key: value for key, value in group.items() if key != "params"}
            | {"params": [names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ],
    }
    files.sync_tree(directory)
    nbytes = manifest.write(Path(directory), _listed(Path(directory)), content)
    files.sync_names(directory)
    return nbytes


def _listed(directory: Path) -> list[Path]:
    """Files of a checkpoint that its manifest names. Links are not followed when it is read, so they are left out."""
    own = directory / manifest.FOLDER
    found = sorted(path for path in directory.rglob("*") if own not in (path, *path.parents))
    found += sorted(own.glob("optimizer-*.safetensors"))
    return [path for path in found if path.is_file() and not path.is_symlink()]


def load_optimizer(model: torch.nn.Module, optimizer: Optimizer, directory: str | os.PathLike[str]) -> None:
    """The reverse of `save_optimizer`. The caller has verified the checkpoint."""
    saved = check_optimizer(model, optimizer, directory)
    for group, stored in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update({k: tuple(v) if k == "betas" else v for k, v in stored.items() if k != "params"})
    names = _names(model)
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in parameters.items():
        parameter.slab.overwrite()
        parameter.slab.steps[parameter.segment] = saved["steps"][name]
    rounded = 0
    for path in sorted((Path(directory) / manifest.FOLDER).glob("optimizer-*.safetensors")):
        entries: dict[str, dict[str, torch.Tensor]] = {}
        with safe_open(path, framework="pt") as shard:
            for key in shard.keys():  # noqa: SIM118
                name, _, role = key.rpartition("/")
                entries.setdefault(name, {})[role] = shard.get_tensor(key)
                if role.endswith(CODED):
                    coded = entries[name].pop(role)
                    plain = torch.empty(parameters[name].numel())
                    lossless.decode(coded, plain, THREADS)
                    entries[name][role.removesuffix(CODED)] = plain
        # A parameter's roles are always in one shard.
        for name, entry in entries.items():
            if not restore_states(parameters[name], entry):
                rounded += 1
    if rounded:
        announce(f"the moments of {rounded} parameters in {directory} were rounded to {optimizer.width} on loading")


def check_optimizer(model: torch.nn.Module, optimizer: Optimizer, directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest, if it is of this optimizer's parameters and groups."""
    saved = manifest.read(directory)
    kind = saved.get("optimizer", "adamw")
    if kind != optimizer.kind:
        raise CheckpointError(
            f"the optimizer state in {directory} is of {kind}, this optimizer is {optimizer.kind}; continue with the "
            "same kind, or load the weights alone."
        )
    names = _names(model)
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if groups != [group["params"] for group in saved["groups"]]:
        raise CheckpointError(
            f"the optimizer state in {directory} is of other parameters or groups "
            f"({[len(g['params']) for g in saved['groups']]} per group, not {[len(g) for g in groups]})."
        )
    return saved


def _names(model: torch.nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _shards(parameters: list[tuple[str, StoreTensor]], moments: Iterable[str]) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, parameter in parameters:
        tensors = {f"{name}/{role}": tensor for role, tensor in states_of(parameter, moments).items()}
        added = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if shard and size + added > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard |= tensors
        size += added
    if shard:
        yield shard
