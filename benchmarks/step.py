"""How long does a streamed step take, in how much memory, and how much of the copying is exposed?

    PYTHONPATH=src python -m benchmarks.step --shape qwen2.5-7b --batch 4 --length 2048 --micro 4

TFLOP/s = 6 x (matmul parameters, head once) x tokens / seconds; attention and recompute are not counted.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

import megatrain as mt
from benchmarks.shapes import SHAPES, matmul_parameters, random_model

GIB = 1 << 30


@dataclass
class Measured:
    shape: str
    tokens: int
    seconds: list[float]
    """Whole steps, after the first."""
    tflops: float
    peak_vram_gib: float
    """Highest allocation of PyTorch in a step."""
    reserved_vram_gib: float
    losses: list[float]
    compute_s: float
    h2d_s: float
    h2d_exposed_s: float
    d2h_s: float
    d2h_exposed_s: float
    update_s: float
    update_exposed_s: float
    fetches_per_step: int
    attach_s: float


def measure(
    shape: str,
    batch: int,
    length: int,
    micro: int,
    steps: int,
    trace: Path | None = None,
    window: bool = True,
    **settings: object,
) -> Measured:
    """Train `steps` steps of `micro` micro-batches of `batch` x `length` random tokens; trace the last one."""
    model = random_model(shape, torch.bfloat16).train()
    parameters = matmul_parameters(model)
    began = time.perf_counter()
    engine = mt.Engine(model, **settings)
    optimizer = engine.optimizer(lr=1e-5, max_grad_norm=1.0)
    attach = time.perf_counter() - began
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, model.config.vocab_size, (batch, length), generator=generator) for _ in range(micro)]
    cuda = engine.device.type == "cuda"

    def micro_batch(ids: torch.Tensor) -> torch.Tensor:
        ids = ids.to(engine.device)
        loss = model(input_ids=ids, labels=ids).loss / micro
        loss.backward()
        return loss.detach()

    def step() -> float:
        tasks = [partial(micro_batch, ids) for ids in tokens]
        losses = engine.window(tasks, whole=True) if window and micro > 1 else [task() for task in tasks]
        optimizer.step()
        optimizer.zero_grad()
        return sum(loss.item() for loss in losses)

    losses = [step()]
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps - 1):
        began = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - began)
    before = engine.counters.fetches
    with engine.trace() as timeline:
        losses.append(step())
    fetches = engine.counters.fetches - before
    if trace is not None:
        timeline.save(trace)
    count = batch * length * micro
    typical = sorted(seconds)[len(seconds) // 2]
    result = Measured(
        shape=shape,
        tokens=count,
        seconds=seconds,
        tflops=6 * parameters * count / typical / 1e12,
        peak_vram_gib=torch.cuda.max_memory_allocated() / GIB if cuda else 0.0,
        reserved_vram_gib=torch.cuda.max_memory_reserved() / GIB if cuda else 0.0,
        losses=losses,
        compute_s=timeline.busy("compute"),
        h2d_s=timeline.busy("h2d"),
        h2d_exposed_s=timeline.exposed("h2d"),
        d2h_s=timeline.busy("d2h"),
        d2h_exposed_s=timeline.exposed("d2h"),
        update_s=timeline.busy("update"),
        update_exposed_s=timeline.exposed("update"),
        fetches_per_step=fetches,
        attach_s=attach,
    )
    engine.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--micro", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--no-window", action="store_true", help="one micro-batch after the other")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--trace", type=Path, help="write the last step's timeline here")
    args = parser.parse_args()
    result = measure(
        args.shape,
        args.batch,
        args.length,
        args.micro,
        args.steps,
        args.trace,
        window=not args.no_window,
        slots=args.slots,
    )
    print(json.dumps(asdict(result), indent=1))


if __name__ == "__main__":
    main()
