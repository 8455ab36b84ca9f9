"""Records which weights real runs use, in which order and when; and compares ways to prefetch in a real run.

    PYTHONPATH=src python -m benchmarks.accesses OUT
        Short runs of a tiny model on the CPU, one file each in the folder OUT, for benchmarks.replay.
    PYTHONPATH=src python -m benchmarks.accesses --live --shape qwen2.5-7b --batch 4 --length 2048
        One run after the other with the predictor, with no prefetch, with the order of the first steps, and with the
        true order: three periods of three steps and an evaluation. Prints how long compute waited for weights. If OUT
        is named too, the uses of the first run are written to OUT/live.jsonl for benchmarks.replay.
    PYTHONPATH=src python -m benchmarks.accesses --live --shape qwen2.5-1.5b --compression 8bit --offload-dir DIR
        The same with weights and states on disk.

A line of a file is one access: {"seconds", "phase", "block", "slab", "role", "tier", "bytes", "trained"}. A step is
{"seconds", "phase": "step"}; the end of the first period is {"seconds", "phase": "period"}.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import megatrain as mt
from benchmarks.replay import Clairvoyant, Guess, Nothing, Static
from benchmarks.shapes import SHAPES, random_model
from megatrain.stream.predict import BOUNDARY, Predictor
from megatrain.stream.timeline import StepTimes

PERIODS, STEPS = 3, 3
"""Periods of a live run, and steps before the evaluation of each."""
WEIGHT_LANES = ("h2d", "refresh", "disk_weights")


class Recorder(Predictor):
    """A predictor that also keeps what it was told."""

    def __init__(self, engine: mt.Engine) -> None:
        super().__init__()
        self.engine, self.uses, self.period = engine, list[tuple[Hashable, float]](), 0
        engine._step.ahead.predictor = self

    def record(self, key: Hashable) -> None:
        super().record(key)
        self.uses.append((key, time.perf_counter()))

    def end_period(self) -> None:
        self.period = self.period or len(self.uses)

    def write(self, path: Path) -> None:
        begin = self.uses[0][1]
        with path.open("w") as file:
            for index, (use, now) in enumerate(self.uses):
                seconds = {"seconds": round(now - begin, 6)}
                if index and index == self.period:
                    print(json.dumps(seconds | {"phase": "period"}), file=file)
                for line in [{"phase": BOUNDARY}] if use == BOUNDARY else self._accesses(use):
                    print(json.dumps(seconds | line), file=file)

    def _accesses(self, use: Any) -> list[dict[str, Any]]:
        phase, block = use
        return [
            {"phase": phase, "block": block, "slab": slab.index, "role": "weight", "tier": slab.homes.weight.tier,
             "bytes": slab.layout.nbytes, "trained": slab.trains}
            for slab in self.engine.blocks[block].slabs
        ]  # fmt: skip


# ---- short runs on the CPU


def train(engine: mt.Engine, optimizer: Any, batches: Sequence[torch.Tensor]) -> None:
    def micro_batch(ids: torch.Tensor) -> None:
        ids = ids.to(engine.device)
        engine.model(input_ids=ids, labels=ids).loss.backward()

    if len(batches) > 1:
        engine.window([partial(micro_batch, ids) for ids in batches])
    else:
        micro_batch(batches[0])
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def evaluate(engine: mt.Engine, ids: torch.Tensor) -> None:
    ids = ids.to(engine.device)
    engine.model(input_ids=ids, labels=ids)


def random_ids(engine: mt.Engine, batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, engine.model.config.vocab_size, (batch, length))


def with_evaluation(engine: mt.Engine, optimizer: Any, period: int) -> None:
    for _ in range(3):
        train(engine, optimizer, [random_ids(engine, 2, 32)])
    for _ in range(2):
        evaluate(engine, random_ids(engine, 2, 32))


def with_generation(engine: mt.Engine, optimizer: Any, period: int) -> None:
    tokens = 3 + 5 * period % 7
    engine.model.generate(random_ids(engine, 2, 4), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    train(engine, optimizer, [random_ids(engine, 2, 32)])


def with_windows(engine: mt.Engine, optimizer: Any, period: int) -> None:
    train(engine, optimizer, [random_ids(engine, 2, 16) for _ in range(4)])
    train(engine, optimizer, [random_ids(engine, 2, 64)])


RUNS: dict[str, Callable[[mt.Engine, Any, int], None]] = {
    "evaluation": with_evaluation,
    "generation": with_generation,
    "windows": with_windows,
}


def record(folder: Path) -> None:
    for name, run in RUNS.items():
        torch.manual_seed(0)
        engine = mt.Engine(random_model("tiny", torch.float32), device="cpu")
        optimizer, recorder = engine.optimizer(lr=1e-4), Recorder(engine)
        for period in range(8):
            run(engine, optimizer, period)
            recorder.end_period()
        recorder.write(folder / f"{name}.jsonl")
        engine.close()
        print(f"{folder / name}.jsonl: {len(recorder.uses)} uses")


# ---- a real run with each way to prefetch


def live(shape: str, batch: int, length: int, trace: Path | None, **settings: Any) -> None:
    def run(name: str, guess: Callable[[mt.Engine], Guess]) -> Any:
        torch.manual_seed(0)
        engine = mt.Engine(random_model(shape, torch.bfloat16, lazy=True), **settings)
        optimizer = engine.optimizer(lr=1e-5, max_grad_norm=1.0)
        used = engine._step.ahead.predictor = guess(engine)
        ids, waits, began = random_ids(engine, batch, length), list[float](), 0.0

        def add_waits(times: StepTimes, *_: Any) -> None:
            waits.extend(times.waited.get(lane, 0.0) for lane in WEIGHT_LANES)

        for period in range(PERIODS + 1):
            if period == 1:  # the first one allocates memory and is learned from
                engine.synchronize()
                engine._lanes.timeline.settle(wait=True)
                engine._lanes.timeline.listeners.append(add_waits)
                before, began = dict(vars(engine.counters)), time.perf_counter()
            for _ in range(STEPS):
                train(engine, optimizer, [ids])
            evaluate(engine, ids)
            if isinstance(used, Recorder):
                used.end_period()
        train(engine, optimizer, [ids])  # the waits of the last evaluation belong to this step
        engine.synchronize()
        engine._lanes.timeline.settle(wait=True)
        seconds = time.perf_counter() - began
        counts = {name: getattr(engine.counters, name) - before[name] for name in ("arrived", "late", "missed")}
        listed = " ".join(f"{name} {count:5}" for name, count in counts.items())
        print(f"{name:<12} {seconds:8.3f} s, waited for weights {sum(waits):7.3f} s   {listed}", flush=True)
        if isinstance(used, Recorder) and trace is not None:
            used.write(trace)
        engine.close()
        return used

    recorded = run("learned", Recorder)
    uses = [use for use, _ in recorded.uses]
    run("nothing", lambda engine: Nothing())
    run("static", lambda engine: Static(recorded.period))
    run("clairvoyant", lambda engine: Clairvoyant(uses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="folder for traces")
    parser.add_argument("--live", action="store_true", help="compare ways to prefetch in one run each")
    parser.add_argument("--shape", default="qwen2.5-7b", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--lanes", default="auto", help='"threads" on the CPU, where nothing is prefetched otherwise')
    parser.add_argument("--offload-dir", nargs="+", help="directories for weights and states")
    parser.add_argument("--compression", default=False, help="moments: bf16, 8bit or 4bit; default: FP32")
    arguments = parser.parse_args()
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.out is not None and not arguments.live:
        record(arguments.out)
    if arguments.live:
        settings = {
            "debug": mt.Debug(slots=arguments.slots, lanes=arguments.lanes),
            "optimizer_compression": arguments.compression,
        }
        if arguments.offload_dir:
            settings |= {"offload_dir": arguments.offload_dir, "on_disk": ["*"], "weights_on_disk": ["*"]}
        trace = None if arguments.out is None else arguments.out / "live.jsonl"
        live(arguments.shape, arguments.batch, arguments.length, trace, **settings)


if __name__ == "__main__":
    main()
