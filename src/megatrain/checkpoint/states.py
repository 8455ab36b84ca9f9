"""Saves and loads the optimizer's exact state in a checkpoint.

    megatrain/optimizer-00001-of-00003.safetensors   "<parameter>/<role>" → tensor; roles: residual and the moments
    megatrain/manifest.json                          files of the whole checkpoint, step counts, parameter groups

Tensors are written from the store's memory, one shard at a time.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

from megatrain import files
from megatrain.checkpoint import finite, manifest, shards
from megatrain.errors import CheckpointError, MegaTrainError, SettingsError
from megatrain.files import AnyPath
from megatrain.native import lossless
from megatrain.store.parameter import StoreTensor, restore_states, states_of
from megatrain.telemetry.notices import announce
from megatrain.telemetry.progress import progress

SHARDS = "optimizer-*.safetensors"
SHARD_BYTES = 4 << 30
"""Approximate size of a shard, and the most extra RAM that a save takes."""


class Optimizer(Protocol):
    """What a checkpoint needs of an optimizer (optim/optimizer.py)."""

    kind: str
    moment_width: str
    lossless: bool
    moments: tuple[str, ...]
    param_groups: list[dict[str, Any]]

    def check_groups(self, groups: Iterable[Mapping[str, Any]]) -> None: ...


def save_optimizer(model: torch.nn.Module, optimizer: Optimizer, directory: AnyPath, shard_bytes: int) -> None:
    """Write moments and residuals. `seal` completes the checkpoint."""
    folder = Path(directory) / manifest.FOLDER
    files.make_directory(folder)
    files.remove(Path(directory) / manifest.FILE)
    for stale in folder.glob(SHARDS):
        files.remove(stale)
    parameters = _parameters(model, optimizer)
    for parameter in parameters.values():
        parameter.slab.settle()
    grouped = list(_grouped(parameters, optimizer.moments, shard_bytes))
    gathered = (
        {key: t for name in shard for key, t in _states(name, parameters[name], optimizer.moments).items()}
        for shard in grouped
    )
    with progress(sum(sum(shard.values()) for shard in grouped), "B", "Writing optimizer states") as advance:
        for number, shard in enumerate(_coded(gathered) if optimizer.lossless else gathered, start=1):
            path = folder / f"optimizer-{number:05d}-of-{len(grouped):05d}.safetensors"
            files.before("write", path)
            save_file(shard, path, metadata={"format": "pt"})
            advance(sum(grouped[number - 1].values()))
            # States on disk were copied: free them before the next shard is read.
            del shard


def seal(
    model: torch.nn.Module,
    optimizer: Optimizer | None,
    directory: AnyPath,
    listed: Collection[Path],
    facts: Mapping[str, Any] = MappingProxyType({}),
    place: Path | None = None,
) -> int:
    """Sync a checkpoint and write its manifest, which makes it complete; returns its size in bytes.

    Without an optimizer it holds weights only. The manifest records weights and moments that are not finite, and
    `facts` of the run. `listed` are the checkpoint's files, `place` is its final directory. Older checkpoints may be
    deleted after this, not before.
    """
    if optimizer is None:
        content: dict[str, Any] = {"weights_only": True, "steps": {}, "groups": []}
        named = model.named_parameters()
        marks = finite.nonfinite((n, p) for n, p in named if isinstance(p, StoreTensor) and p.requires_grad)
    else:
        content, marks = _content(model, optimizer)
    if marks:
        content["nonfinite"] = marks
        finite.warn_once(model if optimizer is None else optimizer, marks)
    files.make_directory(Path(directory) / manifest.FOLDER)
    files.sync_tree(directory, listed)
    nbytes = manifest.write(Path(directory), listed, content | dict(facts), place)
    files.sync_names(directory)
    return nbytes


def _content(model: torch.nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], list[str]]:
    """The optimizer's part of the manifest, and names of what is not finite."""
    named, parameters = _named(model, optimizer), _parameters(model, optimizer)
    groups = [
        {key: value for key, value in group.items() if key != "params"} | {"params": [*own]}
        for group, own in zip(optimizer.param_groups, named, strict=True)
    ]
    marks = finite.nonfinite(parameters.items(), optimizer.moments)
    try:
        optimizer.check_groups(groups)
    except MegaTrainError:
        # A scheduler may have set an invalid option since the last step.
        marks.append("the options of parameter groups")
    content = {
        "optimizer": optimizer.kind,
        "steps": {name: p.slab.steps[p.segment] for name, p in parameters.items()},
        "residuals": [name for name, p in parameters.items() if p.slab.residual is not None],
        "groups": groups,
    }
    return content, marks


def load_optimizer(model: torch.nn.Module, optimizer: Optimizer, directory: AnyPath) -> None:
    """Load what `save_optimizer` wrote, from a verified checkpoint. If it does not fit, nothing is changed."""
    saved = check_optimizer(model, optimizer, directory)
    for group, stored in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update({k: tuple(v) if k == "betas" else v for k, v in stored.items() if k != "params"})
    parameters = _parameters(model, optimizer)
    for name, parameter in parameters.items():
        parameter.slab.before_write()
        parameter.slab.steps[parameter.segment] = saved["steps"][name]
    rounded = 0
    found = _shard_files(Path(directory), saved)
    with progress(len(found), "shard", "Loading optimizer states") as advance:
        for path in found:
            # A parameter's roles are always in one shard.
            for name, entry in shards.read(path, parameters).items():
                rounded += not restore_states(parameters[name], entry)
            advance()
    if rounded:
        announce(
            f"the moments of {rounded} parameters in {directory} were rounded to {optimizer.moment_width} on loading"
        )


def check_optimizer(model: torch.nn.Module, optimizer: Optimizer, directory: AnyPath) -> dict[str, Any]:
    """Raise unless the checkpoint's groups and tensors fit this optimizer; returns the manifest."""
    saved = manifest.read(directory)
    kind = saved.get("optimizer", "adamw")
    if kind != optimizer.kind:
        raise CheckpointError(
            f"the optimizer state in {directory} was saved by {kind}, but this optimizer is {optimizer.kind}; continue "
            f"with {kind}, or load the weights alone."
        )
    parameters = _parameters(model, optimizer)
    groups = [[*own] for own in _named(model, optimizer)]
    if groups != [group["params"] for group in saved["groups"]] or saved["steps"].keys() != parameters.keys():
        raise CheckpointError(
            f"the optimizer state in {directory} has other parameters or groups "
            f"({[len(g['params']) for g in saved['groups']]} parameters per group, this optimizer "
            f"{[len(g) for g in groups]}); build the same groups before loading, or load the weights alone."
        )
    try:
        optimizer.check_groups(saved["groups"])
    except (SettingsError, CheckpointError) as wrong:
        raise CheckpointError(f"{Path(directory) / manifest.FILE}: {wrong}") from wrong
    shards.check(_shard_files(Path(directory), saved), parameters, optimizer.moments, saved.get("residuals"))
    return saved


def _shard_files(directory: Path, saved: dict[str, Any]) -> list[Path]:
    """The shards that the manifest lists."""
    return sorted(directory / name for name in saved["files"] if Path(name).match(f"{manifest.FOLDER}/{SHARDS}"))


def _named(model: torch.nn.Module, optimizer: Optimizer) -> list[dict[str, StoreTensor]]:
    """The parameters of each group, by their names in the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [{names[id(p)]: p for p in group["params"]} for group in optimizer.param_groups]


def _parameters(model: torch.nn.Module, optimizer: Optimizer) -> dict[str, StoreTensor]:
    return {name: parameter for own in _named(model, optimizer) for name, parameter in own.items()}


def _grouped(
    parameters: dict[str, StoreTensor], moments: Collection[str], shard_bytes: int
) -> Iterator[dict[str, int]]:
    """Names of the parameters of each shard, with the bytes of their states."""
    shard: dict[str, int] = {}
    for name, parameter in parameters.items():
        added = sum(tensor.nbytes for tensor in states_of(parameter, moments, values=False).values())
        if shard and sum(shard.values()) + added > shard_bytes:
            yield shard
            shard = {}
        shard[name] = added
    if shard:
        yield shard


def _states(name: str, parameter: StoreTensor, moments: Collection[str]) -> dict[str, torch.Tensor]:
    return {f"{name}/{role}": tensor for role, tensor in states_of(parameter, moments).items()}


def _coded(gathered: Iterable[dict[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """Shards with losslessly compressed FP32 tensors. A notice at the end has the ratio."""
    before, after, seconds = 0, 0, 0.0
    for shard in gathered:
        start = time.perf_counter()
        coded = {key: tensor for key, tensor in shard.items() if tensor.dtype != torch.float32}
        for key in sorted(shard.keys() - coded.keys()):
            coded[key + shards.CODED] = lossless.encode(shard[key].reshape(-1).cpu(), shards.THREADS).clone()
            before += shard[key].nbytes
            after += coded[key + shards.CODED].nbytes
        seconds += time.perf_counter() - start
        del shard
        yield coded
        del coded
    announce(
        f"lossless: {before / 1e6:.1f} MB of moments compressed to {after / 1e6:.1f} MB on disk (ratio "
        f"{before / max(1, after):.2f}, {before / 1e9 / max(seconds, 1e-9):.1f} GB/s)"
    )
