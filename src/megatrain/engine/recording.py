"""What an engine tells the records of its run: tokens, times, memory, and what the run is made of."""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain import files
from megatrain.engine.summary import attention_used, counted, experts_used
from megatrain.optim.schedule import Outcome, RuleTable
from megatrain.stream.timeline import Timeline
from megatrain.telemetry.record import FILE, Record, ending

if TYPE_CHECKING:
    from megatrain.engine.session import Engine

PACKAGES = ("torch", "transformers", "accelerate", "trl", "peft", "datasets", "safetensors", "triton")


class Recording:
    """The open records of one engine. It does not refer to the engine, which ends with its last user."""

    def __init__(
        self, timeline: Timeline, ram: Callable[[], int], disk: Callable[[], dict[str, float] | None] = lambda: None
    ) -> None:
        self.timeline = timeline
        self._ram, self._disk = ram, disk
        self._records: list[Record] = []
        self._lock = threading.Lock()
        self._tokens: list[Any] = []
        """Of each micro-batch of this step: a number, or a tensor on the GPU."""

    def open(self, path: str | os.PathLike[str] | None, start: Mapping[str, Any], step: int) -> Record:
        """A record in a file, or in the `run.jsonl` of a directory; None: one that only keeps the newest step."""
        file = None if path is None else Path(path)
        if file is not None and file.is_dir():
            file /= FILE
        elif file is not None and not file.parent.is_dir():
            # If this fails, opening the file fails too, and that is reported.
            with suppress(OSError):
                files.make_directory(file.parent)
        record = Record(file, start, step=step, settle=self.timeline.settle)
        self.timeline.restart_step()
        self._records = [*self._open, record]
        self.timeline.listeners[:] = [other.timed for other in self._records]
        return record

    @property
    def _open(self) -> list[Record]:
        return [record for record in self._records if not record.closed]

    def begun(self, inputs: tuple[tuple[Any, ...], Mapping[str, Any]]) -> None:
        """The model is called with these inputs."""
        if not self._open or not torch.is_grad_enabled():
            return
        if (tokens := tokens_of(*inputs)) is not None:
            with self._lock:
                self._tokens.append(tokens)
        for record in self._open:
            record.begun()

    def dropped(self) -> None:
        """The gradients of this step were dropped, so its tokens do not count."""
        with self._lock:
            self._tokens = []

    def stepped(self, page: int, rules: RuleTable, outcome: Outcome) -> None:
        """A step was submitted; `page` is its number in the timeline."""
        if not self._open:
            return
        with self._lock:
            counts, self._tokens = self._tokens, []
        tokens = sum(counts) if counts else None
        device = self.timeline.device
        memory = {"vram": 0 if device is None else torch.cuda.memory_reserved(device), "ram": self._ram()}
        rate = next((rule.lr for of_slab in rules.values() for rule in of_slab.values()), None)  # type: ignore[attr-defined]
        disk = self._disk()
        more = {} if disk is None else {"disk": disk}
        for record in self._open:
            record.stepped(page, outcome, learning_rate=rate, tokens=tokens, memory=memory, **more)
        if device is None:
            # On a GPU the events of this step have not happened yet, and are read while the next one runs.
            self.timeline.settle(wait=False)

    def event(self, name: str, **values: Any) -> None:
        for record in self._open:
            record.write(name, **values)

    def resumed(self, step: int, path: object, seconds: float) -> None:
        for record in self._open:
            record.step = step
            record.write("load", path=path, seconds=seconds, step=step)

    def close(self, error: BaseException | None = None) -> None:
        for record in self._open:
            record.close(**ending(error))
        self._records = []

    def end(self) -> None:
        """The engine was dropped, or the process ends, perhaps because of an error."""
        self.close(getattr(sys, "last_value", None))


def tokens_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Tokens of a batch, without padding: a number, or a tensor if that has to be counted on a GPU; None: no tokens."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    mask = kwargs.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.ndim == 0:
        ids = kwargs.get("inputs_embeds")
        if not isinstance(ids, torch.Tensor) or ids.ndim < 2:
            return None
        ids = ids[..., 0]
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape and not mask.is_floating_point():
        return mask.sum() if mask.is_cuda else int(mask.sum())
    return ids.numel()


def described(engine: Engine, optimizer: Any) -> dict[str, Any]:
    """What the first line of a record says of an engine."""
    settings, model = engine.settings, engine.model
    values = {field.name: getattr(settings, field.name) for field in fields(settings) if field.name != "plan"}
    values["debug"] = asdict(settings.debug)
    values["machine"] = getattr(settings.machine, "name", settings.machine)
    gpu = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else None
    return {
        "versions": _versions(),
        "settings": values,
        "model": {"class": type(model).__name__, "blocks": len(engine.blocks)} | counted(model),
        "device": {"name": str(engine.device), "gpu": gpu},
        "precision": {"compute": engine.precision, "saved": engine.saved_precision},
        "attention": attention_used(engine),
        "compiled": {compiled.name: None for compiled in engine.compiled}
        | {name: how for compiled in engine.compiled for name, how in compiled.described.items()},
        "experts": experts_used(engine),
        "optimizer": None if optimizer is None else _optimizer(optimizer),
        "prepared": {"seconds": dict(engine.preparation.seconds), "pinning": engine._memory.pin_seconds},
        "plan": None if settings.plan is None else json.loads(settings.plan.to_json()),
    }


def _optimizer(optimizer: Any) -> dict[str, Any]:
    groups = [
        {name: group[name] for name in optimizer.rule.defaults}
        | {"parameters": sum(parameter.numel() for parameter in group["params"])}
        for group in optimizer.param_groups
    ]
    described = {"kind": optimizer.kind, "moments": optimizer.moment_width, "max_grad_norm": optimizer.max_grad_norm}
    return described | {"groups": groups}


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
