"""A Trainer's step beside its floor: what its parts take when each runs alone.

    PYTHONPATH=src python -m benchmarks.floor 7b-24 7b-8k-24 --resume floor.jsonl --budget 560
    PYTHONPATH=src python -m benchmarks.floor tiny

    floor = backward + max(forward, update, copies in)
    ratio = seconds of a step through mt.Trainer / floor

Rows are those of `benchmarks/peer_rows.py`. Two processes run one after the other, and share the plan that the Trainer
makes for the row and its cap.

The first trains through `mt.Trainer`, compiled on a GPU: the median of the steps after three untimed ones. `UPDATES`
more steps wait for all lanes before and after `optimizer.step()`. What that takes is *update*: the norm, the updates,
what they read and write, and the copies of held weights that follow. *Copies in* are the bytes that the forwards of a
step need on the GPU, over the rate of such copies alone as `mt.probe` measures it. Weights that stream count once per
window; held weights that the CPU updates, and states that stream to the GPU for their update, count once.

The second has all weights and FP32 gradient sums in GPU memory, whatever the cap is, with the plan's windows,
policies and batch, for which its layers are compiled as the Trainer's are. It drops the gradients after each step, so
that nothing is copied or updated. *Backward* has its recompute;
*forward* has the head and the loss, whose gradient is taken at once. Inputs that the plan offloads stay on the GPU.
Where weights and sums do not fit, the row fails.

The floor leaves out copies out, sums that travel between windows, and what a Trainer does between steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import megatrain as mt
from benchmarks.accuracy import expected
from benchmarks.peer_rows import CLIP, ROWS, Row, row_of
from benchmarks.resumable import Result, Task, in_child, parser_of, print_places, results
from benchmarks.row import WARM, measure, probed
from benchmarks.shapes import random_model
from benchmarks.step import Loop
from megatrain.geometry import PLACEMENT_SETTINGS
from megatrain.store.slab import Slab

UPDATES = 3
"""Steps in which updates run alone."""
HEADER = (
    "| row | step, s | floor, s | ratio | backward | forward | update | copies in | GB in | windows |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def trained(row: Row, steps: int, compiled: bool) -> Result:
    """The Trainer's step, its plan, and its update and its copies alone."""
    options = row.options(steps, compiled)
    machine = probed(options)
    updates: list[float] = []
    about: Result = {}

    @contextmanager
    def updated_alone(engine: mt.Engine) -> Iterator[None]:
        step, submit = engine._step, engine._step.step

        def alone(*args: Any) -> Any:
            engine.synchronize()
            began = time.perf_counter()
            outcome = submit(*args)
            engine.synchronize()
            updates.append(time.perf_counter() - began)
            return outcome

        step.step = alone  # type: ignore[method-assign]
        try:
            yield
        finally:
            step.step = submit  # type: ignore[method-assign]
            plan = engine.settings.plan
            nbytes = copied_in(engine.slabs, len(plan.windows))
            copies = nbytes / machine.h2d if machine.h2d else 0.0
            about.update(plan=plan.to_json(), windows=plan.windows, bytes_in=nbytes, copies=copies)

    options.trainer, options.around, options.more = True, updated_alone, UPDATES
    found = measure(options, machine)
    planned, seconds, _ = found["seconds"]
    about |= {name: found[name] for name in ("placement", "vram_gib", "ram_gib", "all_seconds")}
    return about | {
        "planned": planned, "seconds": seconds, "update": statistics.median(updates), "all_updates": updates,
    }  # fmt: skip


def copied_in(slabs: Sequence[Slab], windows: int) -> int:
    """Bytes that the forwards of a step need on the GPU, and that are not there."""
    total = 0
    for slab in slabs:
        if slab.on_device:
            continue
        if not slab.homes.holds_weight:
            total += windows * slab.layout.nbytes
        elif slab.streams_states and slab.trains:
            total += sum(buffer.nbytes for buffer in slab.state_buffers())
        elif slab.trains:
            total += slab.layout.nbytes
    return total


def computed(row: Row, steps: int, plan: mt.Plan) -> Result:
    """Forward and backward of the plan alone, with all weights and sums in GPU memory."""
    model = random_model(row.shape, torch.bfloat16, **row.overrides).train()
    kept = {name: "recompute" if chosen == "offload" else chosen for name, chosen in plan.policy.items()}
    placed = dict.fromkeys(PLACEMENT_SETTINGS, ()) | dict.fromkeys(("held_weights", "held_gradients"), ("*",))
    loop = Loop(
        model, row.batch, row.length, plan.windows, clip=CLIP, updates=False, plan=plan, policy=kept,
        compile=plan.run.compile, **placed,
    )  # fmt: skip
    timed = loop.timed(steps, WARM)
    loop.engine.close()
    forward, backward, _ = zip(*timed, strict=True)
    return {"forward": statistics.median(forward), "backward": statistics.median(backward)}


def floor_of(row: Row, steps: int, compiled: bool | None = None) -> Result:
    """Both parts, each in its own process, and the ratio. Layers are compiled on a GPU, unless said otherwise."""
    compiled = torch.cuda.is_available() if compiled is None else compiled
    found = in_child(lambda: trained(row, steps, compiled))
    if "failed" not in found:
        plan = mt.Plan.from_json(found.pop("plan"))
        found |= in_child(lambda: computed(row, steps, plan))
    if "failed" in found:
        raise RuntimeError(found["failed"])
    return found | compared(found)


def compared(found: Result) -> Result:
    floor = found["backward"] + max(found["forward"], found["update"], found["copies"])
    return {"floor": floor, "ratio": found["seconds"] / floor}


def line(found: Result) -> str:
    """A row of the table."""
    if "failed" in found:
        return f"| {found['row']} | failed: {found['failed']} |"
    parts = (f"{found[name]:.3f}" for name in ("backward", "forward", "update", "copies"))
    return (
        f"| {found['row']} | {found['seconds']:.3f} | {found['floor']:.3f} | {found['ratio']:.3f} | "
        f"{' | '.join(parts)} | {found['bytes_in'] / 1e9:.1f} | {tuple(found['windows'])} |"
    )


def main() -> None:
    args = parser_of(__doc__, ROWS, steps=5).parse_args()
    tasks = []
    for name in args.names:
        row = row_of(name)
        options = row.options(args.steps + UPDATES, compiled=True)
        tasks.append(Task(row.title(), 2 * expected(options), partial(floor_of, row, args.steps)))
    print(HEADER, flush=True)
    found = []
    for result in results(tasks, args):
        print(line(result), flush=True)
        found.append(result)
    print_places(found)


if __name__ == "__main__":
    main()
