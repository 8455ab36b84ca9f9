"""What an engine says when it is attached: the model, its precision, its optimizer, and where its state lies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from megatrain.geometry import GIB
from megatrain.hardware import attention, inventory
from megatrain.model import fields
from megatrain.model.dtypes import Dtypes, natural_precision
from megatrain.model.transformers_api import config_of
from megatrain.optim.rules import RULES
from megatrain.planner.plan import format_parameters
from megatrain.telemetry.notices import announce, warn

if TYPE_CHECKING:
    from megatrain.engine.session import Engine

COMPUTES = {
    "fp32": "computes in fp32",
    "bf16": "computes in bf16, exact FP32 master",
    "bf16-sr": "computes in bf16, no FP32 master, rounded stochastically",
}


def announce_plan(engine: Engine, blocks: int) -> None:
    """Say what was planned, before anything is allocated, and where the engine differs from it."""
    plan = engine.settings.plan
    if plan is None:
        return
    announce(f"{_laid_out(engine, plan.run.kind, blocks)}\n\nThe plan:\n{plan.table()}")
    for name, actual, planned in (
        ("precision", engine.precision, plan.run.precision),
        ("moments in", engine.settings.moment_width, plan.run.moment_width),
        ("compile", engine.settings.compile, plan.run.compile),
    ):
        if actual != planned:
            warn(f"the plan is for {name} {planned}, this engine has {actual}: memory and time will differ from it")


def announce_attached(engine: Engine, kind: str) -> None:
    """The same for an engine without a plan: bytes per tier with an optimizer of this kind."""
    if engine.settings.plan is not None:
        return
    settings, trained = engine.settings, [slab for slab in engine.slabs if slab.trains]
    moments, width = RULES[kind].moments, settings.moment_width
    copies = sum(slab.layout.nbytes for slab in engine.slabs if slab.homes.holds_weight)
    memory = inventory.memory_name(engine.device)

    def by_tier(sizes: Iterable[tuple[str, int]]) -> str:
        tiers = {"ram": 0, "vram": 0, "disk": 0}
        for tier, nbytes in sizes:
            tiers[tier] += nbytes
        names = {"ram": "RAM", "vram": memory, "disk": "disk"}
        return ", ".join(f"{names[tier]} {_size(nbytes)}" for tier, nbytes in tiers.items() if nbytes) or "none"

    rows = {
        "weights": by_tier((slab.homes.weight.tier, slab.layout.nbytes) for slab in engine.slabs)
        + (f", copies in {memory} {_size(copies)}" if copies else ""),
        "gradients": by_tier((slab.homes.complete_gradients.tier, slab.owned.nbytes) for slab in trained),
        "states": by_tier((slab.homes.states.tier, slab.state_bytes(moments, width)) for slab in trained),
    }
    if engine.blocks:
        policies = Counter(engine.memory_limit.policies[block.name] for block in engine.blocks)
        rows["policy"] = ", ".join(f"{count} {policy}" for policy, count in policies.items())
        rows["window"] = f"{settings.window} micro-batches" if settings.window else "as many micro-batches as fit"
    announce(_laid_out(engine, kind, len(engine.blocks), rows))


def counted(model: torch.nn.Module) -> dict[str, int]:
    """The number of a model's parameters, and of those that are trained."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return {"parameters": sum(n for n, _ in sizes), "trainable": sum(n for n, trained in sizes if trained)}


def attention_shape(engine: Engine) -> attention.AttentionShape:
    """What the model calls SDPA with, as far as its config and the plan tell."""
    text, plan = _text_config(engine), engine.settings.plan
    return attention.AttentionShape(
        head_dim=None if text is None else fields.head_dim(text),
        length=None if plan is None else plan.run.length,
        masked=plan is not None and plan.run.padded,
        dtype=torch.float32 if engine.precision == "fp32" else torch.bfloat16,
    )


def attention_used(engine: Engine) -> dict[str, str | bool | None]:
    """The model's attention implementation, and the backends of SDPA in the order in which PyTorch tries them."""
    named, deterministic = getattr(_text_config(engine), "_attn_implementation", None), attention.is_deterministic()
    with attention.requested_backend(engine.device, attention_shape(engine)):
        backends = attention.sdpa_backend(engine.device, deterministic)
    return {"implementation": named, "sdpa": backends, "deterministic": deterministic}


def experts_implementation(engine: Engine) -> str | None:
    """The model's implementation of routed experts; None: it has none."""
    text = _text_config(engine)
    total, _ = fields.experts(text, [*engine.model.named_parameters()])
    return str(getattr(text, "_experts_implementation", None) or "eager") if total else None


def experts_used(engine: Engine) -> str | None:
    """How products of routed experts are computed; None: the model has none."""
    how, gpu = experts_implementation(engine), engine.device.type == "cuda"
    if how is None:
        return None
    total, chosen = fields.experts(_text_config(engine), [*engine.model.named_parameters()])
    if how == "eager":
        how = "a loop over experts (eager)"
    elif how == "grouped_mm" and gpu and torch.cuda.get_device_capability(engine.device) < (8, 0):
        how = "a loop over experts (grouped_mm needs compute capability 8.0)"
    return f"{chosen} of {total} per token, {how}"


def _text_config(engine: Engine) -> Any:
    config = config_of(engine.model)
    return None if config is None else config.get_text_config()


def _attention_line(engine: Engine) -> str:
    used = attention_used(engine)
    if used["implementation"] not in (None, "sdpa"):
        return str(used["implementation"])
    return f"SDPA ({used['sdpa']})" + (", deterministic" if used["deterministic"] else "")


def saved_precision(model: torch.nn.Module, precision: str, saved: Mapping[str, torch.dtype]) -> str:
    """What trained weights are saved in. `saved`: by name, what an earlier engine of the model saved."""
    if precision != "bf16":
        return "fp32" if precision == "fp32" else "bf16"
    sizes: Counter[torch.dtype] = Counter()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            sizes[saved.get(name, parameter.dtype)] += parameter.numel()
    return natural_precision(sizes.most_common(1)[0][0] if sizes else Dtypes(model).loaded)


def _laid_out(engine: Engine, kind: str, blocks: int, more: Mapping[str, str] | None = None) -> str:
    size = counted(engine.model)
    total, trained = size["parameters"], size["trainable"]
    share = "all" if trained == total else format_parameters(trained) if trained else "none"
    gpu = f" ({torch.cuda.get_device_name(engine.device)})" if engine.device.type == "cuda" else ""
    rows = {
        "parameters": f"{format_parameters(total)}, {share} trained",
        "blocks": (f"{blocks}" + (", compiled" if engine.settings.compile else "")) if blocks else "1, the whole model",
        "precision": f"{COMPUTES[engine.precision]}, saved in {engine.saved_precision}",
        "optimizer": f"{RULES[kind].__name__}, moments in {engine.settings.moment_width}",
        **({"attention": _attention_line(engine)} if gpu else {}),
        **({"experts": experts} if (experts := experts_used(engine)) else {}),
    } | dict(more or {})
    title = f"{type(engine.model).__name__} on {engine.device}{gpu}"
    return "\n".join([title, *[f"  {name:<12}{text}" for name, text in rows.items()]])


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB / 10 else f"{nbytes / 2**20:.2f} MiB"
