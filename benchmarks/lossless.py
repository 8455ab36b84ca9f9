"""Ratio and speed of the lossless compression of real optimizer states.

    PYTHONPATH=src python -m benchmarks.lossless --threads 1

The states are those of a small transformer after some hundred steps of AdamW on the demo's text, in plain PyTorch. They
are repeated to `--elements`, which does not change the ratio, since chunks are encoded independently. GB/s counts
uncompressed bytes, in the best of several runs, into memory that is already faulted in.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

import megatrain
from megatrain.native import lossless

TEXT = Path(megatrain.__file__).parent / "cli" / "text" / "us-founding.txt"
WIDTH, LAYERS, HEADS, LENGTH, BATCH = 192, 4, 4, 64, 8


class Small(nn.Module):
    """A causal transformer on bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.head(self.layers(hidden, mask=mask, is_causal=True))


def trained(steps: int) -> tuple[dict[str, torch.Tensor], float]:
    """Weights and moments after training, each as one flat tensor, and the last loss."""
    torch.manual_seed(0)
    text = torch.tensor(list(TEXT.read_bytes()))
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1))
        rows = text[starts + torch.arange(LENGTH + 1)]
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def flat(tensors: Iterator[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.detach().flatten() for tensor in tensors])

    states = [optimizer.state[parameter] for parameter in model.parameters()]
    return {
        "exp_avg": flat(state["exp_avg"] for state in states),
        "exp_avg_sq": flat(state["exp_avg_sq"] for state in states),
        "weights bf16": flat(parameter.bfloat16() for parameter in model.parameters()),
    }, loss.item()


def best(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def measure(name: str, source: torch.Tensor, threads: int, repeats: int) -> None:
    room = torch.zeros(lossless.bound(source.numel(), source.itemsize), dtype=torch.uint8)
    out = torch.zeros_like(source)
    encoded = lossless.encode(source, threads, room)
    encode_s = best(lambda: lossless.encode(source, threads, room), repeats)
    decode_s = best(lambda: lossless.decode(encoded, out, threads), repeats)
    if not torch.equal(out.view(torch.uint8), source.view(torch.uint8)):
        raise SystemExit(f"{name}: decoded to other bits")
    nbytes = source.numel() * source.itemsize
    print(
        f"{name:14} {nbytes / encoded.numel():9.3f} {8 * encoded.numel() / source.numel():13.2f} "
        f"{nbytes / encode_s / 1e9:12.2f} {nbytes / decode_s / 1e9:12.2f}"
    )


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 24, help="elements of every tensor")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300, help="training steps before the states are taken")
    parser.add_argument("--repeats", type=int, default=5, help="runs of which the best counts")
    arguments = parser.parse_args()

    states, loss = trained(arguments.steps)
    count = states["exp_avg"].numel()
    print(f"{processor()}, {arguments.threads} thread(s), torch {torch.__version__}")
    print(f"{count} parameters after {arguments.steps} steps, loss {loss:.3f}; {arguments.elements} elements each\n")
    print(f"{'':14} {'ratio':>9} {'bits/element':>13} {'encode GB/s':>12} {'decode GB/s':>12}")
    copies = -(-arguments.elements // count)
    sources = {name: state.repeat(copies)[: arguments.elements] for name, state in states.items()}
    sources["normal"] = torch.randn(arguments.elements)
    sources["zeros"] = torch.zeros(arguments.elements)
    for name, source in sources.items():
        measure(name, source, arguments.threads, arguments.repeats)


if __name__ == "__main__":
    main()
