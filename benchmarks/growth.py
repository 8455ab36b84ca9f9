"""How the time of a step grows with depth, tokens and length; whether anything but attention outgrows the work.

    PYTHONPATH=src python -m benchmarks.growth depth tokens length --resume growth.jsonl --budget 560
    PYTHONPATH=src python -m benchmarks.growth tiny

depth: 14, 28, 56 layers, 16 sequences of 2048. tokens: 4k to 262k, in micro-batches of 2 sequences of 2048. length: one
sequence of 4k to 262k, in 7 layers, because attention to 262k tokens takes long. All points have the same settings, so
that no plan changes between them: all blocks are streamed from RAM and recomputed, a step is one window, and layers are
compiled on a GPU. Seconds are the median of the steps after three untimed ones.

Attention is timed alone, at the point's shape and with the backend of engines:

    attention = layers × micro-batches × (2 × forward + backward)

since a recomputed layer runs its forward twice. The rest of a step should grow at most like its products (6 × matrix
parameters × tokens). From one point of a series to the next,

    exponent = log(rest / rest before) / log(products / products before)

1 is linear; below 1, a part of the step does not grow. Above 1, something besides attention does more than follow the
work. Where attention is most of a step, the rest is the small difference of two measurements.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from functools import partial

import torch

from benchmarks.peer_rows import Row, flops
from benchmarks.resumable import Result, Task, parser_of, print_places, results
from benchmarks.row import WARM
from benchmarks.shapes import config_of, random_model
from benchmarks.step import Loop
from megatrain.hardware import measure
from megatrain.hardware.attention import AttentionShape, requested_backend

DEEP, WIDE = Row(shape="qwen2.5-3b", micro=4, batch=4), Row(shape="qwen2.5-1.5b", micro=1, batch=2)
LONG, TINY = replace(WIDE, batch=1, layers=7), Row(shape="tiny", micro=1, batch=1, length=16)
SERIES = {
    "depth": [replace(DEEP, layers=layers) for layers in (14, 28, 56)],
    "tokens": [replace(WIDE, micro=4**power) for power in range(4)],
    "length": [replace(LONG, length=4096 * 4**power) for power in range(4)],
    "tiny": [replace(TINY, layers=layers) for layers in (1, 2, 4)],
    "tiny-length": [replace(TINY, layers=1, length=16 * 4**power) for power in range(3)],
}
HEADER = (
    "| point | seconds | TFLOP/s | attention alone, s | the rest, s | exponent of the rest | of the step |\n"
    "|---|---|---|---|---|---|---|"
)
STARTING, PER_PARAMETER, RATE = 60.0, 4e-9, 2.5e14
"""Estimates: seconds to start and compile, per parameter to build and place, and FLOP per second of a step."""
SECONDS = 1.0
"""For each measurement of attention."""


def measured(row: Row, steps: int) -> Result:
    """The step, then its attention alone."""
    model = random_model(row.shape, torch.bfloat16, **row.overrides).train()
    compiled = torch.cuda.is_available()
    loop = Loop(model, row.batch, row.length, (row.micro,), plan=None, policy="recompute", compile=compiled)
    seconds = [whole for _, _, whole in loop.timed(steps, WARM)]
    loop.engine.close()
    device = loop.engine.device
    del loop, model
    if compiled:
        torch.cuda.empty_cache()
    forward, backward = attention(row, device)
    layers = config_of(row.shape, **row.overrides).num_hidden_layers
    products, _ = flops(row)
    return {
        "seconds": statistics.median(seconds),
        "attention": layers * row.micro * (2 * forward + backward),
        "products": products,
        "tokens": row.tokens,
        "all_seconds": seconds,
    }


def attention(row: Row, device: torch.device) -> tuple[float, float]:
    """Seconds of a forward and of a backward of one layer's attention, for one micro-batch."""
    config = config_of(row.shape)
    heads, dim = config.num_attention_heads, getattr(config, "head_dim", None)
    dim = dim or config.hidden_size // heads
    q, upstream = (torch.randn(row.batch, heads, row.length, dim, dtype=torch.bfloat16, device=device) for _ in "qu")
    k, v = (torch.randn_like(q[:, : config.num_key_value_heads]) for _ in "kv")
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]

    def forward() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=config.num_key_value_heads != heads
        )

    settle = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    with requested_backend(device, AttentionShape(head_dim=dim, length=row.length)):
        out = forward()
        backward = partial(torch.autograd.grad, out, leaves, upstream, retain_graph=True)
        first, second = (1 / measure.rate(work, 1.0, SECONDS, settle) for work in (forward, backward))
    return first, second


def expected(row: Row, steps: int) -> float:
    """Estimated seconds of a point. A recomputed step does a third more than is counted."""
    step = 4 / 3 * sum(flops(row)) / RATE
    return STARTING + PER_PARAMETER * row.described().parameters + (steps + WARM) * step


def line(found: Result, before: Result | None) -> str:
    """A row of the table; exponents are against the point before it."""
    if "failed" in found:
        return f"| {found['row']} | failed: {found['failed']} |"
    rest = found["seconds"] - found["attention"]
    cells = [f"{found['seconds']:.3g}", f"{found['products'] / found['seconds'] / 1e12:.3g}"]
    cells += [f"{found['attention']:.3g}", f"{rest:.3g}"]
    for of in (lambda point: point["seconds"] - point["attention"], lambda point: point["seconds"]):
        cells.append("" if before is None else f"{exponent(of(before), of(found), before, found):.3f}")
    return f"| {found['row']} | {' | '.join(cells)} |"


def exponent(seconds: float, more: float, before: Result, found: Result) -> float:
    """The power of the products with which seconds grow to more."""
    if min(seconds, more) <= 0:
        return math.nan
    return math.log(more / seconds) / math.log(found["products"] / before["products"])


def main() -> None:
    args = parser_of(__doc__, SERIES, steps=3).parse_args()
    rows = {row.work(): row for name in args.names for row in SERIES[name]}
    tasks = [Task(name, expected(row, args.steps), partial(measured, row, args.steps)) for name, row in rows.items()]
    found = {result["row"]: result for result in results(tasks, args)}
    for name in args.names:
        print(f"\n### {name}\n\n{HEADER}")
        before = None
        for row in SERIES[name]:
            if (result := found.get(row.work())) is not None:
                print(line(result, before), flush=True)
                before = None if "failed" in result else result
    print_places(found.values())


if __name__ == "__main__":
    main()
