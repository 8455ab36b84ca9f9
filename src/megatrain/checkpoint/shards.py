"""Checks and reads the files of optimizer state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatrain.errors import CheckpointError
from megatrain.native import lossless
from megatrain.store.formats import FORMATS
from megatrain.store.parameter import StoreTensor

CODED = ".lossless"
"""Suffix of losslessly compressed tensors (native/lossless.py), which are stored as uint8."""
THREADS = 256
"""An upper limit: the thread pool uses no more cores than this process may."""
RESIDUAL = "residual"

Parameters = Mapping[str, StoreTensor]
Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Role → dtype and shape."""


def check(
    paths: Iterable[Path], parameters: Parameters, moments: Collection[str], residuals: Collection[str] | None
) -> None:
    """Raise unless the shards hold every moment of every parameter, once and in its shape, and nothing else.

    `residuals` are the parameters that have one (None: not known).
    """
    where: dict[str, Path] = {}
    found_residuals = set()
    for path in paths:
        with _opened(path) as shard:
            found = _described(shard)
            for name, tensors in found.items():
                if name not in parameters:
                    raise CheckpointError(
                        f"{path} has the state of {name!r}, a parameter that this optimizer does not train; use the "
                        "same model and the same frozen parameters."
                    )
                if name in where:
                    raise CheckpointError(
                        f"{path} and {where[name].name} both have the state of {name}: the checkpoint was changed; use "
                        "another one."
                    )
                where[name] = path
                if RESIDUAL in tensors:
                    found_residuals.add(name)
                _check_tensors(f"the state of {name} in {path}", tensors, parameters[name], moments)
            # What is coded must decode, which is known only afterwards.
            for key in (f"{name}/{role}" for name in found for role in found[name] if role.endswith(CODED)):
                _decoded(path, key, shard.get_tensor(key), parameters)
    if missing := sorted(parameters.keys() - where.keys()):
        raise CheckpointError(
            f"the state of {missing[0]} is in no shard ({len(missing)} parameters are missing); use another checkpoint."
        )
    if residuals is not None and (other := sorted(found_residuals ^ set(residuals))):
        has = "has a" if other[0] in found_residuals else "lacks its"
        raise CheckpointError(
            f"the state of {other[0]} in {where[other[0]]} {has} residual: the shard was changed; use another "
            "checkpoint."
        )


def read(path: Path, parameters: Parameters) -> dict[str, dict[str, torch.Tensor]]:
    """Read a shard that `check` accepted: parameter → role → tensor, decompressed."""
    entries: dict[str, dict[str, torch.Tensor]] = {}
    with _opened(path) as shard:
        for key in shard.keys():  # noqa: SIM118
            name, _, role = key.rpartition("/")
            tensor = shard.get_tensor(key)
            if role.endswith(CODED):
                role, tensor = role.removesuffix(CODED), _decoded(path, key, tensor, parameters)
            entries.setdefault(name, {})[role] = tensor
    return entries


def _described(shard: Any) -> dict[str, Tensors]:
    found: dict[str, Tensors] = {}
    for key in shard.keys():  # noqa: SIM118
        name, _, role = key.rpartition("/")
        view = shard.get_slice(key)
        found.setdefault(name, {})[role] = (view.get_dtype(), tuple(view.get_shape()))
    return found


def _check_tensors(where: str, tensors: Tensors, parameter: StoreTensor, moments: Collection[str]) -> None:
    expected: Tensors = {RESIDUAL: ("I16", tuple(parameter.shape))} if RESIDUAL in tensors else {}
    for moment in moments:
        ways = _ways(parameter, moment)
        kept = next((way for way in ways if way.keys() <= tensors.keys()), None)
        if kept is None:
            raise CheckpointError(f"{where} has no {moment}; use another checkpoint.")
        expected |= kept
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise CheckpointError(f"{where} has {unknown[0]!r}, which this version does not know; use another checkpoint.")
    for role, (dtype, shape) in expected.items():
        found = tensors[role]
        if role.endswith(CODED):
            # The compressed size depends on the values.
            shape = found[1] if len(found[1]) == 1 else (0,)
        if found != (dtype, shape):
            raise CheckpointError(
                f"{where} has {role} as {found[0]} of shape {found[1]}, expected {dtype} of {shape}; use another "
                "checkpoint."
            )


def _ways(parameter: StoreTensor, moment: str) -> list[Tensors]:
    """The formats in which a moment may be stored."""
    shape, numel = tuple(parameter.shape), parameter.numel()
    ways: list[Tensors] = [
        {moment: ("F32", shape)},
        {f"{moment}.bf16": ("BF16", shape)},
        {f"{moment}{CODED}": ("U8", (0,))},
    ]
    for name, (codes, _) in FORMATS.items():
        if not codes.block:
            continue
        blocks = -(-numel // codes.block)
        ways.append(
            {
                f"{moment}.{name}": ("U8", (codes.payload_bytes(blocks * codes.block),)),
                f"{moment}.{name}.scale": ("F32", (blocks,)),
            }
        )
    return ways


def _decoded(path: Path, key: str, coded: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    name = key.rpartition("/")[0]
    plain = torch.empty(parameters[name].numel())
    try:
        lossless.decode(coded, plain, THREADS)
    except CheckpointError as error:
        raise CheckpointError(f"the state of {name} in {path} is damaged: {error}") from error
    return plain


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error
