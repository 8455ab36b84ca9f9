"""Speed of an AdamW step in GPU memory, relative to memory bandwidth.

    PYTHONPATH=src python -m benchmarks.adamw_gpu

For each moment width: MegaTrain's kernel (split weights, BF16 gradient), and a kernel that only reads and writes as
many bytes in place. Then torch's fused AdamW on FP32 weights, gradient and moments. GB/s counts bytes read and written.
Medians, measured with CUDA events.
"""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

from megatrain.optim.rules import AdamW
from megatrain.optim.update import Operands
from megatrain.optim.update_triton import triton_kernel
from megatrain.store.formats import FORMATS, Format
from megatrain.store.moments import Piece
from megatrain.store.random import seed_of
from megatrain.store.split import split

RULE = AdamW(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)


@triton.jit
def _touch_kernel(words, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(words + at, tl.load(words + at) + 1)


def touch(words: torch.Tensor) -> None:
    """Read and write every word."""
    _touch_kernel[(words.numel() // 2048,)](words, TILE=2048, num_warps=8)


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def moment(chosen: Format, numel: int) -> Piece:
    """A moment with random codes and realistically small values."""
    if not chosen.block:
        values = torch.rand(numel, device="cuda") * 1e-4
        return Piece(chosen, values.to(torch.float32 if chosen.bits == 32 else torch.bfloat16).view(torch.uint8), None)
    payload = torch.randint(0, 256, (chosen.payload_bytes(numel),), dtype=torch.uint8, device="cuda")
    return Piece(chosen, payload, torch.rand(numel // chosen.block, device="cuda") * 1e-4)


def make_operands(width: str, numel: int) -> Operands:
    weight, residual = split(torch.randn(numel, device="cuda") * 0.02)
    return Operands(
        rule=AdamW,
        scalars=RULE.scalars(1000, 0.5),
        weight=weight,
        residual=residual,
        gradient=(torch.randn(numel, device="cuda") * 1e-3).bfloat16(),
        gradient_dtype=torch.bfloat16,
        moments=tuple(moment(chosen, numel) for chosen in FORMATS[width]),
        seed=seed_of(0, 1000),
        first=0,
    )


def transferred(operands: Operands) -> int:
    """Bytes read and written by one update."""
    assert operands.residual is not None
    states = [operands.weight, operands.residual]
    for piece in operands.moments:
        states += [piece.payload] if piece.scales is None else [piece.payload, piece.scales]
    return operands.gradient.nbytes + 2 * sum(tensor.nbytes for tensor in states)


def torch_adamw(numel: int) -> Callable[[], object]:
    weight = torch.nn.Parameter(torch.randn(numel, device="cuda") * 0.02)
    weight.grad = torch.randn(numel, device="cuda") * 1e-3
    optimizer = torch.optim.AdamW([weight], lr=RULE.lr, weight_decay=RULE.weight_decay, fused=True)
    return optimizer.step


def report(name: str, numel: int, nbytes: int, repeats: int, work: Callable[[], object]) -> None:
    ms = milliseconds(work, repeats)
    words = torch.zeros(nbytes // 2 // 4 // 2048 * 2048, dtype=torch.int32, device="cuda")
    ceiling = milliseconds(lambda: touch(words), repeats)
    figures = f"{numel / ms / 1e6:10.1f} {nbytes / ms / 1e6:8.0f} {nbytes / ceiling / 1e6:13.0f}"
    print(f"{name:12} {nbytes / numel:12.2f} {ms:8.2f} {figures}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=400 << 20)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, {options.numel:,}")
    print(f"{'moments':12} {'byte / param':>12} {'ms':>8} {'Gparam / s':>10} {'GB / s':>8} {'in-place GB/s':>13}")
    for width in FORMATS:
        operands = make_operands(width, options.numel)
        report(width, options.numel, transferred(operands), options.repeats, partial(triton_kernel, operands))
        del operands
    report("torch fp32", options.numel, 28 * options.numel, options.repeats, torch_adamw(options.numel))


if __name__ == "__main__":
    main()
