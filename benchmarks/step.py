"""Time and memory of a streamed step, and how much of the copying is exposed.

    PYTHONPATH=src python -m benchmarks.step --shape qwen2.5-7b --batch 4 --length 2048 --micro 4

TFLOP/s = 6 x (matmul parameters, head once) x tokens / seconds; attention and recompute are not counted.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

# Keeps reserved memory close to allocated memory; read when CUDA is first used.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from transformers import PreTrainedModel

import megatrain as mt
from benchmarks.shapes import SHAPES, matmul_parameters, random_model

GIB = 1 << 30
Moment = float | torch.cuda.Event


@dataclass
class Measured:
    shape: str
    tokens: int
    seconds: list[float]
    """Steps after the first."""
    tflops: float
    peak_vram_gib: float
    """Peak allocation of PyTorch in a step."""
    reserved_vram_gib: float
    losses: list[float]
    compute_s: float
    h2d_s: float
    h2d_exposed_s: float
    d2h_s: float
    d2h_exposed_s: float
    update_s: float
    update_exposed_s: float
    vram_update_s: float
    """Seconds of norms, merges and updates on the GPU."""
    waited: dict[str, float]
    """Seconds that compute waited for each lane, in the last untraced step."""
    naive_update_wait_s: float
    """Seconds to wait for all updates of a step if nothing overlaps with them, measured in one extra step."""
    driver_vram_gib: float
    """GPU memory in use according to the driver, at the end."""
    ram_gib: float
    """RssAnon + RssShmem at the end."""
    fetches_per_step: int
    attach_s: float
    layer_tflops: float
    """Upper limit: one resident layer alone, forward, then forward + backward, as with policy `recompute`."""


def measure(
    shape: str,
    batch: int,
    length: int,
    micro: int,
    steps: int,
    trace: Path | None = None,
    window: bool = True,
    clip: float | None = 1.0,
    **settings: object,
) -> Measured:
    """Train `steps` steps of `micro` micro-batches of `batch` x `length` random tokens; trace the last one."""
    model = random_model(shape, torch.bfloat16).train()
    parameters = matmul_parameters(model)
    began = time.perf_counter()
    windows = (micro,) if window else (1,) * micro
    loop = Loop(model, batch, length, windows, clip=clip, **settings)
    engine, attach, cuda = loop.engine, time.perf_counter() - began, torch.cuda.is_available()

    def step() -> float:
        return sum(loss.item() for loss in loop.step())

    losses = [step()]
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps - 1):
        began = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - began)
    timeline = engine._lanes.timeline
    if cuda:
        torch.cuda.synchronize()
    timeline.settle(wait=True)
    waited = timeline.last.waited if timeline.last else {}
    losses.append(step())
    began = time.perf_counter()
    engine.synchronize()
    naive = time.perf_counter() - began
    before = engine.counters.fetches
    with engine.trace() as timeline:
        # Two steps: the updates of the first overlap with the forward of the second.
        losses += [step(), step()]
    fetches = (engine.counters.fetches - before) // 2
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
        vram_update_s=timeline.busy("gpu_update"),
        waited=waited,
        naive_update_wait_s=naive,
        driver_vram_gib=driver_vram() if cuda else 0.0,
        ram_gib=resident_ram(),
        fetches_per_step=fetches,
        attach_s=attach,
        layer_tflops=layer_ceiling(model, batch, length, bool(settings.get("compile"))) if cuda else 0.0,
    )
    engine.close()
    return result


class Loop:
    """Steps of an engine on random tokens. The windows of a step have these sizes, whatever a plan says."""

    def __init__(
        self,
        model: PreTrainedModel,
        batch: int,
        length: int,
        windows: Sequence[int],
        clip: float | None = 1.0,
        updates: bool = True,
        **settings: object,
    ) -> None:
        """Without `updates` a step is forward and backward alone, and its gradients are dropped."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.model, self.windows, self.micro = model, windows, sum(windows)
        self.engine = mt.Engine(model, **settings)
        self.optimizer = self.engine.optimizer(lr=1e-5, max_grad_norm=clip) if updates else None
        generator = torch.Generator().manual_seed(1)
        self._tokens = [
            torch.randint(0, model.config.vocab_size, (batch, length), generator=generator).to(self.engine.device)
            for _ in range(self.micro)
        ]
        # As a Trainer counts them. Layers get the number too, so it is part of their graph.
        self._items = torch.tensor(self.micro * batch * (length - 1), device=self.engine.device)
        self._forwards_done: list[Moment] = []

    def step(self) -> list[torch.Tensor]:
        """The losses of the micro-batches; nothing is waited for."""
        losses: list[torch.Tensor] = []
        for size in self.windows:
            losses += self._window(len(losses), size)
        self._end_step()
        return losses

    def timed(self, steps: int, warm: int) -> list[tuple[float, float, float]]:
        """Seconds of each step after the warm-up: of its forwards with their losses, of its backwards, of all of it."""
        marks: list[list[Moment]] = []
        for _ in range(warm + steps):
            marks.append([])
            done = 0
            for size in self.windows:
                marks[-1].append(now())
                self._window(done, size)
                done += size
                # All forwards of a window come before the backward of its last micro-batch.
                marks[-1].append(self._forwards_done[-1])
            marks[-1].append(now())
            self._end_step()
        marks.append([now()])
        found = []
        for step, following in list(pairwise(marks))[warm:]:
            parts = seconds_between(step)
            whole = seconds_between([step[0], following[0]])
            found.append((sum(parts[::2]), sum(parts[1::2]), whole[0]))
        return found

    def _window(self, begin: int, size: int) -> list[torch.Tensor]:
        tasks = [partial(self._micro_batch, ids) for ids in self._tokens[begin : begin + size]]
        last = self.optimizer is not None and begin + size == self.micro
        with self.optimizer.final_backward() if last else nullcontext():  # type: ignore[union-attr]
            return [tasks[0]()] if size == 1 else self.engine.window(tasks, full_step=size == self.micro)

    def _micro_batch(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.model(input_ids=ids, labels=ids, num_items_in_batch=self._items).loss
        self._forwards_done.append(now())
        loss.backward()
        return loss.detach()

    def _end_step(self) -> None:
        if self.optimizer is None:
            self.engine._step.zero_grad()
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._forwards_done.clear()


def now() -> Moment:
    """When the GPU has done what was submitted to the current stream, without waiting for it. No GPU: the time."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(moments: Sequence[Moment]) -> list[float]:
    """Seconds from each moment to the next."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(moments)]
    return [after - before for before, after in pairwise(moments)]


def driver_vram() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def vram_outside() -> float:
    """GiB that the driver reports beyond what PyTorch's allocator has reserved. Nothing else may run on the GPU."""
    return driver_vram() - torch.cuda.memory_reserved() / GIB


def resident_ram(process: int | str = "self") -> float:
    """RssAnon + RssShmem of a process, in GiB."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) / (1 << 20)


def layer_ceiling(model: PreTrainedModel, batch: int, length: int, compiled: bool) -> float:
    """TFLOP/s of the model's first layer, recomputed, with its weights on the GPU."""
    torch.cuda.empty_cache()
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    with torch.device("cuda"):
        small = type(model)._from_config(config, dtype=torch.bfloat16).train()
    layer = small.model.layers[0]
    hidden = torch.randn(batch, length, config.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(length, device="cuda")[None]
    rotary = small.model.rotary_emb(hidden, positions)
    call = torch.compile(layer.forward) if compiled else layer.forward

    def forward() -> torch.Tensor:
        result = call(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        return result[0] if isinstance(result, tuple) else result

    def recomputed() -> None:
        forward()
        output = forward()
        torch.autograd.grad(output, [hidden, *layer.parameters()], torch.ones_like(output))

    import triton.testing

    seconds = triton.testing.do_bench(recomputed, warmup=200, rep=600, return_mode="median") / 1e3
    return 6 * sum(p.numel() for p in layer.parameters()) * batch * length / seconds / 1e12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--micro", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--no-window", action="store_true", help="run micro-batches one after another")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--policy", default="recompute")
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--resident", nargs="*", default=[], help="name patterns of resident blocks")
    parser.add_argument("--held-weights", nargs="*", default=[], help="name patterns of blocks with held weights")
    parser.add_argument(
        "--held-gradients", nargs="*", default=[], help="name patterns of blocks with held gradient sums"
    )
    parser.add_argument("--compression", default="false", help="moments: false, bf16, 8bit, 4bit")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--no-clip", action="store_true", help="no clipping: updates start during the backward")
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
        debug=mt.Debug(slots=args.slots),
        compile=args.compile,
        policy=args.policy,
        clip=None if args.no_clip else 1.0,
        resident=tuple(args.resident),
        held_weights=tuple(args.held_weights),
        held_gradients=tuple(args.held_gradients),
        precision=args.precision,
        optimizer_compression=False if args.compression == "false" else args.compression,
    )
    print(json.dumps(asdict(result), indent=1))


if __name__ == "__main__":
    main()
