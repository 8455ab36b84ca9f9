"""How often a step, and a `train()`, call from one file of the source to another, and how often up its layers.

    PYTHONPATH=src python -m benchmarks.walk --files 10    # for another commit: its src, with its native library built

Counted with `sys.setprofile`: calls of megatrain's Python functions, where resuming a generator is a call too, and
comprehensions are part of their function. A *hop* is a call that comes from another file of megatrain, with or without
functions of other packages in between. It goes *up* if its folder is later in `LAYERS` than the one it comes from.

The model is a Llama with three layers on the CPU, where lanes run inline. The step is the third of a loop with AdamW
and clipping; `train()` runs two steps of two micro-batches. Its threads wait for each other with a few calls more or
less. The RAM monitor looks every 0.25 s; if that is while the step is counted, the step has 28 calls more.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import megatrain as mt

ROOT = str(Path(mt.__file__).parent) + "/"
LAYERS = ("store", "stream", "optim", "compute", "engine", "hf")
COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<module>")


class Walk:
    """Calls by file, and hops from file to file, inside `counting`."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.hops: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def counting(self) -> Iterator[None]:
        sys.setprofile(self._event)
        yield
        sys.setprofile(None)

    @property
    def up(self) -> int:
        layers = {name: number for number, name in enumerate(LAYERS)}
        found = [[layers.get(file.split("/")[0], -1) for file in hop] + [count] for hop, count in self.hops.items()]
        return sum(count for source, target, count in found if 0 <= source < target)

    def _event(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or code.co_name in COMPREHENSIONS or not code.co_filename.startswith(ROOT):
            return
        file, caller = code.co_filename.removeprefix(ROOT), frame.f_back
        self.calls[file] += 1
        while caller is not None and not caller.f_code.co_filename.startswith(ROOT):
            caller = caller.f_back
        if caller is not None and (source := caller.f_code.co_filename.removeprefix(ROOT)) != file:
            self.hops[source, file] += 1


def llama() -> LlamaForCausalLM:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, num_attention_heads=4, **sizes))


def of_step() -> dict[str, Walk]:
    """The third step: forward, backward, optimizer."""
    engine = mt.Engine(llama(), device="cpu")
    optimizer = engine.optimizer(lr=1e-3, max_grad_norm=1.0)
    ids = torch.arange(32).view(2, 16)
    for _ in range(3):
        forward, backward, update = Walk(), Walk(), Walk()
        with forward.counting():
            loss = engine.model(input_ids=ids, labels=ids).loss
        with backward.counting():
            loss.backward()
        with update.counting():
            optimizer.step()
            optimizer.zero_grad()
    engine.close()
    whole, parts = Walk(), {"forward": forward, "backward": backward, "`optimizer.step()` and `zero_grad()`": update}
    for part in parts.values():
        whole.calls, whole.hops = whole.calls + part.calls, whole.hops + part.hops
    return parts | {"**the step**": whole}


def of_train() -> dict[str, Walk]:
    with tempfile.TemporaryDirectory() as directory:
        batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
        args = TrainingArguments(directory, **batches, use_cpu=True, save_strategy="no", report_to=[])
        trainer, walk = mt.Trainer(model=llama(), train_dataset=[{"input_ids": [*range(16)]}] * 8, args=args), Walk()
        with walk.counting():
            trainer.train()
    return {"**`train()`**": walk}


def table(walks: dict[str, Walk], files: int) -> Iterable[str]:
    yield "| what happens | calls | hops | up |\n|---|---|---|---|"
    for name, walk in walks.items():
        yield f"| {name} | {walk.calls.total():,} | {walk.hops.total():,} | {walk.up} |"
    if files:
        yield f"\n| of {[*walks][-1].strip('*')}, in | calls |\n|---|---|"
        yield from (f"| `{file}` | {count:,} |" for file, count in walk.calls.most_common(files))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=0, help="list so many files, those with most calls first")
    files = parser.parse_args().files
    print("\n".join([*table(of_step(), files), "", *table(of_train(), files)]))


if __name__ == "__main__":
    main()
