"""Homes, held state, coding on disk, windows and policies are chosen at random. The bits are those of a run where
everything streams, with one micro-batch after the other.
"""

from __future__ import annotations

import random
import tempfile
from functools import cache, partial
from typing import Any

import pytest
import torch
from tests import small
from tests.tiny import differences, engine_of, roles

from megatrain.geometry import PLACEMENT_SETTINGS
from megatrain.stream.lanes import SyncLanes, ThreadLanes

MICRO_BATCHES = 5
BLOCKS = ("model.embed_tokens", *(f"model.layers.{i}" for i in range(3)), "model.norm", "lm_head")

KINDS = ("resident", "states", "held", "streamed", "weights", "gradients", "disk", "disk, held", "disk, weights",
         "disk, gradients", "disk, all")  # fmt: skip


def random_settings(seed: int, tied: bool) -> dict[str, Any]:
    """Random settings that must not change bits."""
    source = random.Random(seed)
    homes: dict[str, list[str]] = {name: [] for name in PLACEMENT_SETTINGS}
    for block in BLOCKS[:-1] if tied else BLOCKS:
        kind = source.choice(KINDS)
        if kind == "resident":
            homes["resident"].append(block)
        homes["held_weights"] += [block] if kind in ("held", "states", "weights", "disk, held") else []
        homes["held_gradients"] += [block] if kind in ("held", "states", "gradients", "disk, held") else []
        homes["streamed_states"] += [block] if kind == "states" else []
        homes["on_disk"] += [block] if "disk" in kind else []
        homes["weights_on_disk"] += [block] if kind in ("disk, weights", "disk, all") else []
        homes["gradients_on_disk"] += [block] if kind in ("disk, gradients", "disk, all") else []
    policies = {block: source.choice(["recompute", "store", "offload"]) for block in BLOCKS}
    offloads = [block for block in BLOCKS[:-1] if policies[block] == "offload"]
    homes["inputs_on_disk"] = [block for block in offloads if source.random() < 0.5]
    return {
        **{name: tuple(blocks) for name, blocks in homes.items()},
        "policy": policies,
        "offload_dir": tempfile.gettempdir(),
        "allow_tmpfs": True,
        "disk_coding": "always",
        "slots": source.randint(1, 4),
        "grad_slots": source.randint(1, 3),
    }


def random_windows(seed: int) -> list[int]:
    """The windows of a step; sometimes only one."""
    source = random.Random(seed)
    windows: list[int] = [MICRO_BATCHES] if source.random() < 0.2 else []
    while sum(windows) < MICRO_BATCHES:
        windows.append(source.randint(1, MICRO_BATCHES - sum(windows)))
    return windows


def train(seed: int | None, tied: bool, clip: float | None, precision: str, compression: Any) -> list[Any]:
    """Three steps with dropout. A gradient is read, and one is written, between micro-batches."""
    model = small.llama(tie_word_embeddings=tied, num_hidden_layers=3, attention_dropout=0.1).train()
    settings = {} if seed is None else random_settings(seed, tied)
    lanes = SyncLanes() if seed is None or seed % 3 == 0 else ThreadLanes(seed=seed, max_delay=2e-4)
    engine = engine_of(model, lanes=lanes, precision=precision, optimizer_compression=compression, **settings)
    optimizer = engine.optimizer(lr=1e-2, max_grad_norm=clip)
    seen: list[Any] = []

    def micro_batch(number: int) -> torch.Tensor:
        loss = model(**small.batch(2, seed=number)).loss / MICRO_BATCHES
        loss.backward()
        return loss.detach()

    for step in range(3):
        windows = [1] * MICRO_BATCHES if seed is None else random_windows(1000 * seed + step)
        tasks = [partial(micro_batch, MICRO_BATCHES * step + k) for k in range(MICRO_BATCHES)]
        for window in windows[:-1]:
            seen += engine.window(tasks[:window])
            del tasks[:window]
            if step == 1 and len(tasks) == 1:
                break
        with optimizer.final_backward():
            seen += engine.window(tasks, full_step=len(tasks) == MICRO_BATCHES)
        if clip is not None:
            seen.append(engine.grad_norm())
            weight = model.model.layers[1].mlp.up_proj.weight
            seen.append(weight.grad + 0)
            weight.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    seen += [optimizer.grad_norm, roles(engine)]
    engine.close()
    return seen


@cache
def streamed(*options: Any) -> list[Any]:
    return train(None, *options)


@pytest.mark.parametrize("seed", range(24))
def test_random_placements_are_bitwise(seed: int) -> None:
    source = random.Random(-seed)
    options = (
        source.random() < 0.5,
        source.choice([None, 0.5]),
        source.choice(["bf16", "fp32", "bf16-sr"]),
        source.choice([False, "8bit", "lossless"]),
    )
    assert differences(train(seed, *options), streamed(*options)) == [], (random_settings(seed, options[0]), options)
