"""What a checkpoint says of its run: the kernels that its bits depend on, compared on a resume, and bytes written to
disk, which a resume continues to count."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from megatrain.engine.summary import attention_used, experts_implementation
from megatrain.errors import CheckpointError
from megatrain.telemetry.notices import announce, warn

if TYPE_CHECKING:
    from megatrain.engine.session import Engine


SET_BY_USERS = ("attention_implementation", "experts_implementation", "head_chunk")
"""Of what a checkpoint says of the kernels."""


def facts_of_run(engine: Engine) -> dict[str, Any]:
    """What a checkpoint says of its run."""
    written = engine.drive.settled
    return {"kernels": kernels_of(engine)} | ({"disk_written": written} if written else {})


def kernels_of(engine: Engine) -> dict[str, Any]:
    """What a checkpoint says of the kernels that its run used."""
    plan, attention, head = engine.settings.plan, attention_used(engine), engine._step.head
    gpu = engine.device.type == "cuda"
    versions: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    # It has kernels of attention.
    versions["cudnn"] = torch.backends.cudnn.version() if gpu else None
    for name in ("transformers", "triton"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {
        "compile": bool(engine.settings.compile),
        "batch": None if plan is None else [plan.run.micro_batch, plan.run.length],
        "layers": {name: how for compiled in engine.compiled for name, how in compiled.described.items()},
        "gpu": torch.cuda.get_device_name(engine.device) if gpu else None,
        "attention": attention["sdpa"],
        "attention_implementation": attention["implementation"],
        "experts_implementation": experts_implementation(engine),
        "head_chunk": 0 if head is None else head.tokens,
        "fused_loss": head is not None and head.fused,
        "deterministic": attention["deterministic"],
        **versions,
    }


def check_resume(engine: Engine, manifest: Mapping[str, Any], directory: object) -> None:
    """Refuse a checkpoint whose run had other kernels; if the user has set `compile`, warn. Else continue its count of
    bytes written to disk."""
    _check_kernels(engine, manifest, directory)
    engine.drive.resumed(manifest.get("disk_written", 0))


def _check_kernels(engine: Engine, manifest: Mapping[str, Any], directory: object) -> None:
    now, saved = kernels_of(engine), manifest.get("kernels")
    if saved is None:
        if now["compile"]:
            announce(
                f"{directory} does not say whether its layers were compiled: the last bits may differ from its run"
            )
        return
    eager = not (saved["compile"] or now["compile"])
    plain = eager and saved.get("gpu") is None and now["gpu"] is None
    ignored = {"layers", *(("batch", "triton") if eager else ())}
    # With PyTorch's own kernels on the CPU, what the user has set. An older version has not written all of them.
    names = [name for name in (SET_BY_USERS if plain else now) if name in saved and name not in ignored]
    other = [f"{name} {saved[name]} → {now[name]}" for name in names if saved[name] != now[name]]
    for compiled in engine.compiled:
        compiled.expect(saved["layers"], lambda change: _differ(engine, directory, [change]))
    if other:
        _differ(engine, directory, other, refuse=not plain)


def _differ(engine: Engine, directory: object, other: list[str], refuse: bool = True) -> None:
    what = f"{directory} was written by a run with other kernels ({', '.join(other)}), so the last bits will differ"
    if refuse and not engine.compile_chosen:
        raise CheckpointError(
            f"{what}; resume where that run was, or set compile=True or compile=False to continue all the same."
        )
    warn(what)
