"""Loss curves on real text: plain PyTorch, FP32 states, low-bit states, stochastic rounding; several seeds.

    PYTHONPATH=src python -m benchmarks.convergence --steps 1000 --seeds 3 --lr 1e-3 --picture docs/convergence.svg
    PYTHONPATH=src python -m benchmarks.convergence --shape qwen2.5-1.5b --device cuda --steps 500 --seeds 1 --lr 1e-4 \
        --length 512 --only "plain bf16" "bf16 weights" --out curves.json --picture curves.svg

All runs have the same model, data order, schedule and clipping. By default the model is a small transformer; with
`--shape`, one of that shape. Tokens are the bytes of the text that `megatrain demo` uses. "plain" and "plain bf16" are
PyTorch's AdamW over FP32 weights, the second under autocast. The others are an engine, which compiles layers on a GPU;
only the optimizer's storage differs between them. Placement, windows and policies do not change bits, so they are left
at their defaults. "2bit" is an experiment that is not shipped: second moments in 2 bits, first moments in 4.

Reported: the final training loss (mean over the last tenth of the steps) and the loss on held-out text, each relative
to the run that `BASE` names, by default "fp32", with the same seed; and the largest distance between the two curves,
each smoothed over 5% of the steps. `--load` takes the results of an earlier `--out` instead of running them again; they
must be of the same model and steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import megatrain as mt
from benchmarks.peer_rows import CLIP
from benchmarks.picture import draw, smooth
from benchmarks.resumable import dated, here, place
from benchmarks.shapes import SHAPES, config_of
from megatrain.optim.optimizer import Optimizer
from megatrain.store.formats import FORMATS, Format

LENGTH, BATCH = 64, 8
HELD_OUT = 0.1
HELD_OUT_BATCHES = 16


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


PLAIN = {"plain": False, "plain bf16": True}
"""Runs of plain PyTorch: whether autocast is on."""
RUNS: dict[str, dict[str, Any]] = {
    **{name: {} for name in PLAIN},
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "fp32", "optimizer_compression": "bf16"},
    "8bit": {"precision": "fp32", "optimizer_compression": "8bit"},
    "4bit": {"precision": "fp32", "optimizer_compression": "4bit"},
    "2bit": {"precision": "fp32", "debug": mt.Debug(kernels="reference")},
    "bf16 weights": {"precision": "bf16"},
    "bf16-sr": {"precision": "bf16-sr"},
    "bf16-sr, 8bit": {"precision": "bf16-sr", "optimizer_compression": "8bit"},
}
"""Compared with "fp32"; those in `BASE` are compared with another run: "bf16 weights" has an exact FP32 master."""
BASE = {"fp32": "plain", "bf16 weights": "plain bf16", "bf16-sr": "bf16 weights", "bf16-sr, 8bit": "bf16 weights",
        "plain": "plain", "plain bf16": "plain bf16"}  # fmt: skip


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Training bytes and held-out bytes (every tenth piece of a thousand)."""
    raw = resources.files("megatrain.cli").joinpath("text/us-founding.txt").read_bytes()
    pieces = torch.tensor(list(raw)).split(1000)
    every = round(1 / HELD_OUT)
    training = torch.cat([piece for number, piece in enumerate(pieces) if number % every])
    return training, torch.cat([piece for number, piece in enumerate(pieces) if number % every == 0])


def model_of(shape: str | None, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    if shape is not None:
        return AutoModelForCausalLM.from_config(config_of(shape), dtype=torch.float32).train()
    small = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **small))


def windows(source: torch.Tensor, length: int, count: int, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(0, len(source) - length, (count,), generator=generator)
    return torch.stack([source[start : start + length] for start in starts])


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warm-up over 5% of the steps, then a cosine to a tenth of the peak."""
    warm = min(1.0, (step + 1) / max(1, steps // 20))
    return peak * warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def run(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    train, held = text()
    model = model_of(options.shape, seed)
    plain, device = name in PLAIN, torch.device(options.device)
    adamw: dict[str, Any] = {"lr": options.lr, "betas": (0.9, 0.999), "weight_decay": 0.1}
    generator = torch.Generator().manual_seed(1000 + seed)
    with ExitStack() as stack:
        optimizer: torch.optim.Optimizer
        if plain:
            optimizer = torch.optim.AdamW(model.to(device).parameters(), **adamw)
        else:
            engine = stack.enter_context(mt.Engine(model, device=options.device, **RUNS[name]))
            if name == "2bit":
                FORMATS["2bit"] = (FORMATS["4bit"][0], TwoBit("2bit", 8, 128))
                parameters = list(model.parameters())
                optimizer = Optimizer(parameters, engine._step, moment_width=name, max_grad_norm=CLIP, **adamw)
            else:
                optimizer = engine.optimizer(max_grad_norm=CLIP, **adamw)

        def loss_of(source: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
            ids = windows(source, options.length, options.batch, draws).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=PLAIN.get(name, False)):
                loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
            return loss

        losses = []
        for step in range(options.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, options.steps, options.lr)
            loss = loss_of(train, generator)
            loss.backward()
            if plain:
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        draws = torch.Generator().manual_seed(0)
        with torch.no_grad():
            held_losses = [loss_of(held, draws).item() for _ in range(HELD_OUT_BATCHES)]
        if plain:
            stored = sum(8 * parameter.numel() for parameter in model.parameters())
        else:
            stored = sum(moment.bytes.numel() for slab in engine.slabs for moment in slab.moments.values())
    tail = losses[-max(1, options.steps // 10) :]
    return {
        "losses": losses, "final": statistics.mean(tail), "held_out": statistics.mean(held_losses),
        "state_bytes": stored,
    }  # fmt: skip


def apart(one: list[float], other: list[float]) -> float:
    """The largest relative distance between two curves, each smoothed over 5% of the steps."""
    pairs = zip(*(smooth(curve, max(1, len(curve) // 20)) for curve in (one, other)), strict=True)
    return max(abs(mine / theirs - 1) for mine, theirs in pairs)


def picture(path: Path, results: dict[str, list[dict[str, Any]]]) -> None:
    """Training loss, mean over seeds, smoothed over 5% of the run."""
    curves = {}
    for name, entries in results.items():
        mean = [statistics.mean(values) for values in zip(*(entry["losses"] for entry in entries), strict=True)]
        span = max(1, len(mean) // 20)
        curves[name] = smooth(mean, span)
    draw(path, curves, span, ("step", "training loss"))


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--only", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--load", type=Path, nargs="*", default=[], help="results written by --out")
    parser.add_argument("--out", type=Path, help="write all losses here, as JSON")
    parser.add_argument("--picture", type=Path, help="write the curves here, as SVG")
    parser.add_argument("--shape", choices=SHAPES, help="default: a transformer of 0.6M parameters")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--batch", type=int, default=BATCH)
    arguments = parser.parse_args(given)
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    results: dict[str, list[dict[str, Any]]] = {}
    for path in arguments.load:
        results |= json.loads(path.read_text())
    results = {name: results[name] for name in RUNS if name in results}
    for name in filter(arguments.only.__contains__, RUNS):  # each after the one it is compared with
        start = time.perf_counter()
        if name not in results:
            results[name] = [run(name, seed, arguments) for seed in range(arguments.seeds)]
            if arguments.device != "cpu":
                gc.collect()
                torch.cuda.empty_cache()
        base = results.get(BASE.get(name, "fp32"), results[name])
        ratios = [mine["final"] / other["final"] - 1 for mine, other in zip(results[name], base, strict=True)]
        held = [mine["held_out"] / other["held_out"] - 1 for mine, other in zip(results[name], base, strict=True)]
        distance = max(apart(a["losses"], b["losses"]) for a, b in zip(results[name], base, strict=True))
        final = statistics.mean(entry["final"] for entry in results[name])
        print(
            f"{name:15} final {final:.4f} ({statistics.mean(ratios):+.2%}; per seed "
            f"{', '.join(f'{ratio:+.2%}' for ratio in ratios)}), curves up to {distance:.2%} apart, held out "
            f"{statistics.mean(entry['held_out'] for entry in results[name]):.4f} ({statistics.mean(held):+.2%}), "
            f"states {results[name][0]['state_bytes'] / 1e6:.2f} MB, {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    about = here() | dated(None)
    print(place(about))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.with_suffix(".json").write_text(json.dumps(results | {"about": about}))
    if arguments.picture is not None:
        picture(arguments.picture, results)


if __name__ == "__main__":
    main()
