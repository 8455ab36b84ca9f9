"""Convergence with low-bit states and stochastic rounding: a small transformer on real text, several seeds.

    PYTHONPATH=src python -m benchmarks.convergence --steps 1000 --seeds 3 --lr 1e-3 --picture docs/convergence.svg

All runs have the same model, data order and schedule; only the optimizer's storage differs. Reported per format: the
final training loss (mean over the last tenth of the steps) and the loss on held-out text, each relative to FP32 states
with the same seed. "2bit" is an experiment that is not shipped: second moments in 2 bits, first moments in 4.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain as mt
from benchmarks.picture import draw, smooth
from megatrain.optim.optimizer import Optimizer
from megatrain.store.formats import FORMATS, Format

LENGTH, BATCH = 64, 8
HELD_OUT = 0.1


@dataclass(frozen=True)
class TwoBit(Format):
    """Experiment: levels 1, 1/16, 1/256, 1/4096 of the block's largest, rounded stochastically; stored as bytes."""

    def decode(self, payload: torch.Tensor, scales: torch.Tensor | None, count: int) -> torch.Tensor:
        assert scales is not None
        levels = 16.0 ** (payload.view(-1, self.block).float() - 3.0)
        return (levels * scales[:, None]).reshape(-1)[:count]

    def encode(
        self, values: torch.Tensor, payload: torch.Tensor, scales: torch.Tensor | None, draws: torch.Tensor | None
    ) -> None:
        assert scales is not None
        assert draws is not None
        missing = -values.numel() % self.block
        values = torch.cat([values, values.new_zeros(missing)]).view(-1, self.block)
        draws = torch.cat([draws, draws.new_zeros(missing)]).view(-1, self.block)
        scale = values.amax(dim=1).clamp(min=2.0**-126)
        share = (values / scale[:, None]).clamp(16.0**-3, 1.0)
        below = torch.floor(torch.log2(share) / 4).clamp(-3, -1)
        low = 16.0**below
        up = (share - low) / (15 * low) * 65536 > draws
        payload.copy_((below + 3 + up).reshape(-1).to(torch.uint8))
        scales.copy_(scale)


FORMATS["2bit"] = (FORMATS["4bit"][0], TwoBit("2bit", 8, 128))
RUNS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "fp32", "optimizer_compression": "bf16"},
    "8bit": {"precision": "fp32", "optimizer_compression": "8bit"},
    "4bit": {"precision": "fp32", "optimizer_compression": "4bit"},
    "2bit": {"precision": "fp32", "debug": mt.Debug(kernels="reference")},
    "bf16 weights": {"precision": "bf16"},
    "bf16-sr": {"precision": "bf16-sr"},
    "bf16-sr, 8bit": {"precision": "bf16-sr", "optimizer_compression": "8bit"},
}
"""Compared with "fp32"; those in `BASE` are compared with "bf16 weights" (an exact FP32 master)."""
BASE = {"bf16-sr": "bf16 weights", "bf16-sr, 8bit": "bf16 weights"}


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Training bytes and held-out bytes (every tenth piece of a thousand)."""
    raw = resources.files("megatrain.cli").joinpath("text/us-founding.txt").read_bytes()
    pieces = torch.tensor(list(raw)).split(1000)
    every = round(1 / HELD_OUT)
    training = torch.cat([piece for number, piece in enumerate(pieces) if number % every])
    return training, torch.cat([piece for number, piece in enumerate(pieces) if number % every == 0])


def model_of(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **shape))


def windows(source: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(0, len(source) - LENGTH, (count,), generator=generator)
    return torch.stack([source[start : start + LENGTH] for start in starts])


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warm-up over 5% of the steps, then a cosine to a tenth of the peak."""
    warm = min(1.0, (step + 1) / max(1, steps // 20))
    return peak * warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def run(name: str, seed: int, steps: int, lr: float) -> dict[str, Any]:
    train, held = text()
    model = model_of(seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    with mt.Engine(model, device="cpu", **RUNS[name]) as engine:
        options: dict[str, Any] = {"lr": lr, "betas": (0.9, 0.999), "weight_decay": 0.1, "max_grad_norm": 1.0}
        if name == "2bit":
            optimizer = Optimizer(list(model.parameters()), engine._step, moment_width="2bit", **options)
        else:
            optimizer = engine.optimizer(**options)
        losses = []
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, lr)
            ids = windows(train, BATCH, generator)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        ids = windows(held, 128, torch.Generator().manual_seed(0))
        with torch.no_grad():
            held_loss = model(input_ids=ids, labels=ids).loss.item()
        stored = sum(moment.bytes.numel() for slab in engine.slabs for moment in slab.moments.values())
    tail = losses[-max(1, steps // 10) :]
    return {"losses": losses, "final": sum(tail) / len(tail), "held_out": held_loss, "state_bytes": stored}


def picture(path: Path, results: dict[str, list[dict[str, Any]]]) -> None:
    """Training loss, mean over seeds, smoothed over 5% of the run."""
    curves = {}
    for name, entries in results.items():
        mean = [statistics.mean(values) for values in zip(*(entry["losses"] for entry in entries), strict=True)]
        span = max(1, len(mean) // 20)
        curves[name] = smooth(mean, span)
    draw(path, curves, span, ("step", "training loss"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--only", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--load", type=Path, nargs="*", default=[], help="results written by --out")
    parser.add_argument("--out", type=Path, help="write all losses here, as JSON")
    parser.add_argument("--picture", type=Path, help="write the curves here, as SVG")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, list[dict[str, Any]]] = {}
    for path in arguments.load:
        results |= json.loads(path.read_text())
    results = {name: results[name] for name in RUNS if name in results}
    for name in arguments.only:
        start = time.perf_counter()
        if name not in results:
            results[name] = [run(name, seed, arguments.steps, arguments.lr) for seed in range(arguments.seeds)]
        base = results.get(BASE.get(name, "fp32"), results[name])
        ratios = [mine["final"] / other["final"] - 1 for mine, other in zip(results[name], base, strict=True)]
        held = [mine["held_out"] / other["held_out"] - 1 for mine, other in zip(results[name], base, strict=True)]
        final = statistics.mean(entry["final"] for entry in results[name])
        print(
            f"{name:15} final {final:.4f} ({statistics.mean(ratios):+.2%}; per seed "
            f"{', '.join(f'{ratio:+.2%}' for ratio in ratios)}), held out "
            f"{statistics.mean(entry['held_out'] for entry in results[name]):.4f} ({statistics.mean(held):+.2%}), "
            f"states {results[name][0]['state_bytes'] / 1e6:.2f} MB, {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.with_suffix(".json").write_text(json.dumps(results))
    if arguments.picture is not None:
        picture(arguments.picture, results)


if __name__ == "__main__":
    main()
