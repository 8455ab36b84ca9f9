"""`megatrain.init`: say once what a run may use."""

from __future__ import annotations

from typing import Any

from megatrain import settings as settings_module
from megatrain.hardware import inventory
from megatrain.hardware.machine import Machine
from megatrain.settings import Settings

UNSET: Any = object()


def init(
    offload_dir: Any = UNSET, max_vram_gb: Any = UNSET, optimizer_compression: Any = UNSET, **more: Any
) -> Settings:
    """Set the defaults of every engine and trainer made from here on; returns them.

    `more` are the other fields of `Settings`. Values are checked here; what the hardware makes of them is announced
    when an engine is attached. A second call replaces the first.
    """
    inventory.refuse_distributed()
    first = {"offload_dir": offload_dir, "max_vram_gb": max_vram_gb, "optimizer_compression": optimizer_compression}
    settings = Settings().override(**{name: value for name, value in first.items() if value is not UNSET}, **more)
    if settings.machine is not None and not isinstance(settings.machine, Machine):
        Machine.load(settings.machine)  # a name that is not there is refused now, not after the model has been loaded
    inventory.choose_device(settings.device)
    settings_module.store(settings)
    return settings
