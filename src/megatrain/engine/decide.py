"""What an engine decides about a model before anything is allocated: `decide`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatrain.engine.adopt import engine_of, precision_of
from megatrain.engine.patterns import check_patterns
from megatrain.engine.planning import resolve_compile
from megatrain.engine.spill import with_states_on_disk
from megatrain.engine.summary import saved_precision
from megatrain.errors import AlreadyAttached
from megatrain.hardware import inventory
from megatrain.hardware.validation import folders
from megatrain.model import transformers_api
from megatrain.model.blocks import BlockSpec, find_blocks
from megatrain.model.dtypes import Dtypes
from megatrain.model.transformers_api import TransformersApi
from megatrain.settings import Settings
from megatrain.store.parameter import StoreTensor
from megatrain.telemetry.notices import announce, warn

DRIVE_SETTINGS = ("drive_tbw", "max_drive_tb")
DRIVE_DEBUG_SETTINGS = ("allow_tmpfs", "disk_coding", "disk_io")
"""Settings, and fields of `Settings.debug`, that say how `offload_dir` is used."""


@dataclass(frozen=True)
class Decided:
    """A model's blocks, and the settings of its engine with every choice made."""

    settings: Settings
    specs: list[BlockSpec]
    transformers_api: TransformersApi
    precision: str
    saved_precision: str
    """What trained weights are saved in."""
    saved_dtypes: dict[str, torch.dtype]
    """Parameter name → the dtype in which an earlier engine saved it."""
    compile_chosen: bool
    """Whether the user said that layers are compiled, or that they are not."""

    @property
    def blocks(self) -> int:
        """Blocks that stream."""
        return sum(not spec.loose for spec in self.specs)


def decide(settings: Settings, device: torch.device, model: torch.nn.Module, kind: str) -> Decided:
    """Decide for an engine whose optimizer will be of this kind. Takes the model from a closed engine."""
    api = transformers_api.load()
    settings, saved_dtypes = _release_closed_engine(settings, model)
    specs = find_blocks(model, api)
    one_block = all(spec.loose for spec in specs)
    if one_block:
        settings = place_one_block(settings, device, model)
    compile_chosen = settings.chosen().get("compile", "auto") != "auto"
    settings = settings.override(compile=not one_block and resolve_compile(settings, device))
    announce_unavailable(settings, device)
    check_patterns(settings, specs)
    precision = precision_of(model, settings.precision)
    settings = with_states_on_disk(settings, device, Dtypes(model, saved_dtypes), model, specs, precision, kind)
    saved = saved_precision(model, precision, saved_dtypes)
    return Decided(settings, specs, api, precision, saved, saved_dtypes, compile_chosen)


def _release_closed_engine(settings: Settings, model: torch.nn.Module) -> tuple[Settings, dict[str, torch.dtype]]:
    """Release the model from a closed engine. Returns the settings with that engine's precision, and the dtypes in
    which it saved its parameters."""
    previous = engine_of(model)
    if previous is not None and not previous.closed:
        raise AlreadyAttached(
            f"this {type(model).__name__} already belongs to an engine; use that one, or close it first."
        )
    named = model.named_parameters(remove_duplicate=False)
    saved = {name: p.slab.saved[p.segment] for name, p in named if isinstance(p, StoreTensor)}
    if previous is not None:
        previous.release()
        # `release` returned all masters as FP32.
        settings = settings.override(precision=settings.precision or previous.precision)
    return settings, saved


def announce_unavailable(settings: Settings, device: torch.device) -> None:
    """Warn about settings that have no effect, and announce those that lose precision."""
    if device.type == "cpu" and "pin" in settings.debug.given:
        warn(f"pin={settings.debug.pin} has no effect on the CPU")
    if not folders(settings.offload_dir):
        unused = {name: getattr(settings, name) for name in DRIVE_SETTINGS if getattr(settings, name) is not None}
        unused |= {name: getattr(settings.debug, name) for name in DRIVE_DEBUG_SETTINGS if name in settings.debug.given}
        for name, value in unused.items():
            warn(f"{name}={value!r} has no effect without offload_dir")
    elif "disk_coding" in settings.debug.given and settings.optimizer_compression != "lossless":
        coding = settings.debug.disk_coding
        warn(f"disk_coding={coding!r} has no effect without optimizer_compression='lossless'")
    if settings.moment_width != "fp32":
        announce(
            f"optimizer_compression={settings.optimizer_compression!r}: moments of matrices are kept in "
            f"{settings.moment_width} and lose precision (docs/precision.md shows what that costs)"
        )


def place_one_block(settings: Settings, device: torch.device, model: torch.nn.Module) -> Settings:
    """Announce that a model has no repeated layers, and keep it on the GPU if its state fits into half the free memory.

    Its weights are read at every use, so each use of a weight in RAM would be a transfer.
    """
    # Weights and, where they train, FP32 gradients and two FP32 moments.
    state = sum(p.numel() * (16 if p.requires_grad else p.element_size()) for p in model.parameters())
    fits = device.type == "cuda" and state <= inventory.free_memory(device) // 2
    stays = fits and "resident" not in settings.given and settings.plan is None
    announce(
        f"{type(model).__name__} has no repeated layers, so it trains as one block: "
        + ("it stays on the GPU" if stays else "its weights are fetched where its forward uses them")
    )
    chosen = settings.chosen()
    for name in ("compile", "policy", "window", "inputs_on_disk"):
        if chosen.get(name) and chosen[name] != "auto":
            warn(f"{name}={chosen[name]!r} has no effect on a model of one block")
    return settings.override(resident=("*",)) if stays else settings
