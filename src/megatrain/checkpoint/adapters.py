"""PEFT adapters: reads the adapters of a checkpoint straight into the store.

Such a checkpoint does not have the base model. The file of the adapter "default" is in the directory itself, those of
others in directories of their names. Keys in a file lack the adapter's name; PEFT maps them to the model's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from megatrain.errors import CheckpointError
from megatrain.store.parameter import StoreTensor

FILE = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"


def found_in(directory: Path) -> list[Path]:
    """The adapter files of a directory."""
    places = (directory / FILE, directory / PICKLED, *directory.glob(f"*/{FILE}"), *directory.glob(f"*/{PICKLED}"))
    return [path for path in places if path.is_file()]


def load(model: Any, directory: Path, put: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Load every adapter of the model from its file. Nothing is written unless all of them fit."""
    wrapped = _is_wrapped(model)
    read = {}
    for name in _names(model):
        folder = directory if name == "default" or not wrapped else directory / name
        values, targets = _read(folder, name), _targets(model, name, "" if wrapped else "base_model.model.")
        _check(folder, name, values, targets)
        read[name] = (values, targets)
    for name, (values, targets) in read.items():
        if None in targets.values():
            from peft import set_peft_model_state_dict

            set_peft_model_state_dict(model, values, adapter_name=name)
            continue
        for key, target in targets.items():
            if target is not None:
                put(target, values[key])


def targets(model: Any) -> list[StoreTensor]:
    """The store tensors that saving the adapters writes."""
    every = [t for name in _names(model) for t in _targets(model, name, "").values()]
    return [target for target in every if isinstance(target, StoreTensor)]


def _is_wrapped(model: Any) -> bool:
    return not getattr(model, "_hf_peft_config_loaded", False)


def _names(model: Any) -> list[str]:
    # A transformers model with built-in adapters saves only the active one, in the directory itself.
    return list(model.peft_config) if _is_wrapped(model) else model.active_adapters()


def _targets(model: Any, name: str, prefix: str) -> dict[str, torch.Tensor | None]:
    """Key in the adapter's file → tensor of the model, or None if PEFT computes the value when it saves."""
    from peft import get_peft_model_state_dict

    state = model.state_dict()
    in_model = {id(value) for value in state.values()}
    saved = get_peft_model_state_dict(model, state_dict=state, adapter_name=name)
    return {
        prefix + key: value if isinstance(value, StoreTensor) or id(value) in in_model else None
        for key, value in saved.items()
    }


def _read(folder: Path, name: str) -> dict[str, torch.Tensor]:
    try:
        if (folder / FILE).is_file():
            return load_file(folder / FILE)
        if (folder / PICKLED).is_file():
            return torch.load(folder / PICKLED, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except SafetensorError as cause:
        raise CheckpointError(f"{folder / FILE} is damaged: {cause}; use another checkpoint.") from cause
    raise CheckpointError(
        f"{folder} has no {FILE}, which the model's adapter {name!r} needs; use a checkpoint of this adapter, or "
        "remove it from the model."
    )


def _check(
    folder: Path, name: str, values: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor | None]
) -> None:
    odd = sorted(values.keys() ^ targets.keys())
    if odd:
        which = "the model has and it lacks" if odd[0] in targets else "it has and the model lacks"
        raise CheckpointError(
            f"the adapter {name!r} in {folder} does not match the model's, {which} {odd[0]}; create the adapter with "
            "the configuration that was saved."
        )
    for key, target in targets.items():
        if target is not None and values[key].shape != target.shape:
            raise CheckpointError(
                f"{key} has shape {tuple(values[key].shape)} in {folder}, but {tuple(target.shape)} in the model; "
                "create the "
                "adapter with the configuration that was saved."
            )
