"""Weights: saved by the model itself as an ordinary HF directory, and read straight into the store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatrain import files
from megatrain.checkpoint import adapters
from megatrain.errors import CheckpointError
from megatrain.files import AnyPath
from megatrain.lazy import Load, contents, lazy_slice
from megatrain.store.parameter import StoreTensor
from megatrain.telemetry.progress import progress

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def save_model(model: Any, host_state: Callable[[], dict[str, torch.Tensor]], directory: AnyPath) -> None:
    """Save with `save_pretrained` if the model has it, else as one safetensors file."""
    path = Path(directory) / WHOLE
    files.before("write", path)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(directory)
    else:
        save_file(without_aliases(host_state()), path, metadata={"format": "pt"})


def without_aliases(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One name per tensor: safetensors refuses tensors that share memory."""
    seen: set[tuple[int, torch.Size]] = set()
    kept = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        kept[name] = tensor.contiguous()
    return kept


def load_model(model: torch.nn.Module, directory: AnyPath) -> None:
    """Load weights into the store, tensor by tensor if the names on disk are the model's. Nothing is written before all
    shapes have been checked.

    A checkpoint of a model with adapters has the adapters alone. If the model's class overrides `load_state_dict`, it
    is called with everything, as in a stock Trainer.
    """
    if getattr(model, "peft_config", None) and adapters.found_in(Path(directory)):
        adapters.load(model, Path(directory), _put)
        return
    if type(model).load_state_dict is not torch.nn.Module.load_state_dict:
        _load_by_model(model, Path(directory))
        return
    own = dict(model.named_buffers()) | dict(model.named_parameters(remove_duplicate=False))
    files = weight_files(Path(directory))
    shapes = {key: shape for _, entries in files for key, shape in entries.items()}
    covered = {id(own[key]) for key in shapes if key in own}
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in covered]
    if missing or not shapes.keys() <= own.keys():
        _load_converted(model, own, directory, missing)
        return
    for key, shape in shapes.items():
        _check_shape(key, own[key], shape)
    with progress(len(shapes), "tensor", "Loading weights") as advance:
        for key, values in _tensors(files):
            _put(own[key], values)
            advance()


def _load_by_model(model: torch.nn.Module, directory: Path) -> None:
    state = dict(_tensors(weight_files(directory)))
    model.load_state_dict(state, strict=False)
    # The method rounded values to the parameter's dtype. If it did nothing else, the master gets the exact values.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        values = state.get(name)
        if values is not None and torch.equal(parameter.detach().cpu(), values.to(parameter.dtype)):
            _put(parameter, values)


def _tensors(files: Iterable[tuple[Path, Iterable[str]]]) -> Iterator[tuple[str, torch.Tensor]]:
    for path, keys in files:
        with safe_open(path, framework="pt") as shard:
            yield from ((key, shard.get_tensor(key)) for key in keys)


def lazy_tensors(path: Path, load: Load) -> dict[str, torch.Tensor]:
    """All tensors of a directory, or of one safetensors file. They stay in their files until they are read."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; name a directory with model*.safetensors, or one such file.")
    found = weight_files(path) if path.is_dir() else [(path, _shapes(path))]
    tensors: dict[str, torch.Tensor] = {}
    for file, names in found:
        with safe_open(file, framework="pt") as shard:
            tensors |= {name: lazy_slice(shard.get_slice(name), load) for name in names}
    return tensors


def weight_files(directory: Path) -> list[tuple[Path, dict[str, tuple[int, ...]]]]:
    """The safetensors files of a directory, with the names and shapes of their tensors."""
    if (directory / WHOLE).is_file():
        # As transformers does: the index, and shards, may be left from an earlier save.
        return [(directory / WHOLE, _shapes(directory / WHOLE))]
    files = sorted(path for path in directory.glob("model*.safetensors") if path.is_file())
    if not files:
        if adapters.found_in(directory):
            raise CheckpointError(
                f"{directory} has the weights of adapters, but the model has no adapter; add it with peft first."
            )
        raise CheckpointError(f"{directory} has no model*.safetensors: it is no complete checkpoint; use another one.")
    if (directory / INDEX).exists():
        listed = _indexed(directory / INDEX)
        absent = sorted(listed - {path.name for path in files})
        if absent:
            raise CheckpointError(
                f"{directory} has no {absent[0]}, which its index names ({len(absent)} shards are missing); use "
                "another one."
            )
        files = [path for path in files if path.name in listed]
    return [(path, _shapes(path)) for path in files]


def _indexed(index: Path) -> set[str]:
    try:
        named = json.loads(index.read_bytes())["weight_map"].values()
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as cause:
        raise CheckpointError(f"{index} is damaged: {cause!r}; use another checkpoint.") from cause
    return {str(name) for name in named}


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, framework="pt") as shard:
            return {key: tuple(shard.get_slice(key).get_shape()) for key in shard.keys()}  # noqa: SIM118
    except SafetensorError as cause:
        raise CheckpointError(f"{path} is damaged: {cause}; use another checkpoint.") from cause


def _load_converted(model: Any, own: dict[str, torch.Tensor], directory: Any, missing: list[str]) -> None:
    """Load through a temporary model if names on disk differ from the model's (merged experts...). Its weights stay in
    the files until they are put into the store, one by one."""
    if not hasattr(model, "from_pretrained"):
        differs = f"has no {missing[0]}" if missing else "has names that the model does not have"
        raise CheckpointError(
            f"{directory} is a checkpoint of another model: it {differs}; use the model it was saved from."
        )
    load = Load()
    tensors = lazy_tensors(Path(directory), load)
    loaded, report = type(model).from_pretrained(
        None, state_dict=tensors, dtype=_widest(tensors.values()), config=model.config, output_loading_info=True
    )
    load.recording = False
    for kind, differs in (("missing_keys", "it has no"), ("unexpected_keys", "the model has no")):
        if report[kind]:
            raise CheckpointError(
                f"{directory} is a checkpoint of another model: {differs} {sorted(report[kind])[0]}; use the model it "
                "was saved "
                "from."
            )
    for name, parameter in loaded.named_parameters():
        _check_shape(name, own.get(name), tuple(parameter.shape))
    for name, parameter in loaded.named_parameters():
        _put(own[name], contents(parameter))
    persistent = loaded.state_dict().keys()
    for name, buffer in loaded.named_buffers():
        if name in own and name in persistent:
            _put(own[name], contents(buffer))


def _widest(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """The dtype that holds all of them exactly. That of the model's config may be narrower than a saved master."""
    floats = {t.dtype for t in tensors if t.is_floating_point() and t.dtype.itemsize > 1}
    return reduce(torch.promote_types, floats, torch.bfloat16)


def _check_shape(name: str, target: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    if target is None or tuple(target.shape) != shape:
        own = "no such tensor" if target is None else f"shape {tuple(target.shape)}"
        raise CheckpointError(
            f"{name} has shape {shape} in the checkpoint, but the model has {own}; use the model it was saved from."
        )


def _put(target: torch.Tensor, values: torch.Tensor) -> None:
    if isinstance(target, StoreTensor):
        target.slab.load(target.segment, values)
    else:
        with torch.no_grad():
            target.copy_(values)
