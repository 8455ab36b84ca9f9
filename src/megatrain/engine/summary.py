"""What an engine says when it is attached: where everything is; or, of a plan, what it has otherwise than planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatrain.optim.rules import AdamW
from megatrain.planner.plan import sized
from megatrain.telemetry.notices import announce, warn

if TYPE_CHECKING:
    from megatrain.engine.session import Engine


def announce_attached(engine: Engine) -> None:
    """Print a summary; a plan has been printed already."""
    if engine.settings.plan is None:
        announce(f"no plan; {summary(engine)}")
        return
    run = engine.settings.plan.run
    for name, has, planned in (
        ("precision", engine.precision, run.precision),
        ("moments in", engine.settings.moment_width, run.moment_width),
        ("compile", engine.settings.compile, run.compile),
    ):
        if has != planned:
            warn(f"the plan is for {name} {planned}, this engine has {has}: memory and time will not be as planned")


def summary(engine: Engine) -> str:
    """Bytes per tier as far as they are known before there is an optimizer, and what blocks keep."""
    settings, trained = engine.settings, [slab for slab in engine.slabs if slab.trains]
    width = settings.moment_width
    copies = sum(slab.layout.nbytes for slab in engine.slabs if slab.homes.held)
    rows = {
        "weights": _by_tier((slab.homes.weight.tier, slab.layout.nbytes) for slab in engine.slabs)
        + (f", copies in vram {_size(copies)}" if copies else ""),
        "gradients": _by_tier((slab.homes.sums.tier, slab.layout.nbytes) for slab in trained) + " for one micro-batch",
        "states": _by_tier((slab.homes.states.tier, slab.state_bytes(AdamW.moments, width)) for slab in trained)
        + f" with AdamW and {width} moments",
    }
    parameters = sized(sum(parameter.numel() for parameter in engine.model.parameters()))
    title = f"{type(engine.model).__name__}: {parameters} parameters"
    if engine.blocks:
        policies = Counter(engine.relief.policies[block.name] for block in engine.blocks)
        rows["policy"] = ", ".join(f"{count} {policy}" for policy, count in policies.items())
        rows["window"] = f"{settings.window} micro-batches" if settings.window else "as many micro-batches as fit"
        title += f" in {len(engine.blocks)} blocks" + (", compiled," if settings.compile else "")
    title += f" on {engine.device}, {engine.precision}"
    return "\n".join([title, *[f"{name:<11}{text}" for name, text in rows.items()]])


def _by_tier(sizes: Iterable[tuple[str, int]]) -> str:
    tiers = Counter({"ram": 0, "vram": 0})
    for tier, nbytes in sizes:
        tiers[tier] += nbytes
    return ", ".join(f"{tier} {_size(nbytes)}" for tier, nbytes in tiers.items() if nbytes) or "none"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 / 10 else f"{nbytes / 2**20:.2f} MiB"
