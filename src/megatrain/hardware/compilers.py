"""Whether layers are compiled here: what `torch.compile` needs, and what `Settings.compile` means."""

from __future__ import annotations

import os
import shutil

from megatrain.errors import SettingsError

C = ("C compiler", "CC", ("cc", "gcc", "clang"))
CXX = ("C++ compiler", "CXX", ("c++", "g++", "clang++"))
DISABLED = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")


def compiles(setting: bool | str, device: str) -> bool:
    """Whether layers are compiled on a device of this type ("cuda" or "cpu") with this setting of `compile`."""
    if setting == "auto":
        return device == "cuda" and missing(device) is None
    if setting and (why := missing(device)) is not None:
        raise SettingsError(f"compile=True cannot compile here: {why}; or leave compile out.")
    return bool(setting)


def missing(device: str) -> str | None:
    """What `torch.compile` lacks for this type of device, and how to get it; None: nothing."""
    for name in DISABLED:
        if os.environ.get(name, "0") != "0":
            return f"{name} is set in the environment; unset it"
    if device == "cuda":
        # Imported here: Triton takes a second.
        from torch.utils._triton import has_triton, has_triton_package

        if not has_triton_package():
            return "Triton is not installed; pip install triton"
        if not has_triton():
            return "Triton does not support this GPU; set compile=False"
    title, variable, names = C if device == "cuda" else CXX
    if program(variable, names) is None:
        return f"no {title} was found (searched for {', '.join(names)}); install gcc, or set {variable}"
    return None


def program(variable: str, names: tuple[str, ...]) -> str | None:
    """The path of a compiler: the one that an environment variable names, or the first of these."""
    chosen = os.environ.get(variable)
    return next(filter(None, map(shutil.which, [chosen] if chosen else names)), None)
