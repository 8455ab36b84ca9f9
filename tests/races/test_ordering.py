"""No two uses of a buffer are unordered, however late compute and the lanes run, and however far the host is ahead."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from tests import small
from tests.races import test_delays as scenarios
from tests.races.ordering import ordering_of
from tests.tiny import Stack, engine_of, gradients, inputs, roles

from megatrain.stream.lanes import Lanes

SMALL_MODELS: dict[str, dict[str, Any]] = {
    "recompute": {}, "store": {"policy": "store"}, "offload": {"policy": "offload"},
    "held": {"held_weights": ("*",), "held_gradients": ("*layers.1*",), "streamed_states": ("*layers.1*",)},
}  # fmt: skip


@pytest.mark.parametrize("scenario", scenarios.SCENARIOS)
def test_every_use_of_a_buffer_is_ordered(scenario: Callable[[Lanes], Any]) -> None:
    ordering = ordering_of(scenario)
    assert ordering.count > 100
    assert ordering.races == set()


@pytest.mark.parametrize("settings", SMALL_MODELS.values(), ids=SMALL_MODELS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_language_model_in_several_windows(tied: bool, settings: dict[str, Any]) -> None:
    """With the chunked head, and sums of earlier windows that are fetched ahead."""

    def scenario(lanes: Lanes) -> None:
        model = small.gpt2().train() if tied else small.llama().to(torch.bfloat16).train()
        names = {name: value for name, value in settings.items() if not tied or name == "policy"}
        with engine_of(model, lanes=lanes, slots=2, grad_slots=2, **names) as engine:
            optimizer = engine.optimizer(lr=1e-3, max_grad_norm=0.5)

            def micro_batch(seed: int) -> None:
                model(**small.batch(seed=seed)).loss.backward()

            for step in range(2):
                for window in range(3):
                    engine.window([partial(micro_batch, 9 * step + 3 * window + each) for each in range(2)])
                micro_batch(100 + step)
                optimizer.step()
                optimizer.zero_grad()

    assert ordering_of(scenario).races == set()


def random_placement(seed: int, lanes: Lanes) -> None:
    """Steps of windows and single micro-batches, with or without clipping, on blocks placed at random."""
    source = random.Random(seed)
    names = ["entry", *[f"layers.{number}" for number in range(5)]]
    homes = ("resident", "states", "held", "streamed", "weights", "gradients", "disk", "all on disk")
    home = {name: source.choice(homes) for name in names}

    def of(*kinds: str) -> tuple[str, ...]:
        return tuple(name for name in names if home[name] in kinds)

    policy = {name: source.choice(["recompute", "store", "offload"]) for name in names}
    inputs_on_disk = tuple(name for name in names if policy[name] == "offload" and source.random() < 0.5)
    on_disk, all_on_disk = of("disk", "all on disk"), of("all on disk")
    settings: dict[str, Any] = {
        "resident": of("resident"), "held_weights": of("held", "states", "weights"),
        "held_gradients": of("held", "states", "gradients"), "streamed_states": of("states"),
        "on_disk": on_disk, "weights_on_disk": all_on_disk, "gradients_on_disk": all_on_disk,
        "inputs_on_disk": inputs_on_disk,
    }  # fmt: skip
    settings = {name: blocks for name, blocks in settings.items() if blocks}
    if on_disk or inputs_on_disk:
        settings |= {"offload_dir": tempfile.gettempdir(), "allow_tmpfs": True}
    model, precision = Stack(depth=5), source.choice(["fp32", "bf16"])
    slots, grad_slots = source.randint(1, 4), source.randint(1, 3)
    engine = engine_of(
        model, lanes=lanes, policy=policy, slots=slots, grad_slots=grad_slots, precision=precision, **settings
    )
    optimizer = engine.optimizer(lr=0.1, max_grad_norm=source.choice([None, 0.5]))

    def micro_batch(seed: int) -> None:
        model(inputs(seed, rows=40)).square().mean().backward()

    for step in range(4):
        sizes = source.choice([[1], [2, 2], [3], [1, 2], [1, 1, 1]])
        for number, size in enumerate(sizes):
            tasks = [partial(micro_batch, 100 * step + 10 * number + each) for each in range(size)]
            with optimizer.final_backward() if number == len(sizes) - 1 else nullcontext():
                if size > 1 or source.random() < 0.5:
                    engine.window(tasks, full_step=len(sizes) == 1)
                else:
                    tasks[0]()
        if source.random() < 0.25 and not engine._step.updates.early_started:
            gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        if source.random() < 0.3:
            with torch.no_grad():
                model(inputs(7))
    roles(engine)
    engine.close()


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 200), marks=pytest.mark.slow)], ids=str)
def test_random_placements(seeds: range) -> None:
    for seed in seeds:
        assert ordering_of(partial(random_placement, seed)).races == set(), seed


NOT_IN_BUFFERS = {
    ("disk_in", "read gradient", "gradient written"), ("disk_weights", "read weight", "weight written"),
    ("disk_update", "update", "norm"), ("gpu_update", "update", "norm"), ("update", "norm", "measured"),
    ("update", "norm", "update"), ("update", "norm", "gradient written"),
}  # fmt: skip
"""Waits for files on disk and for numbers, which only runs with delays show (tests/races/test_delays.py)."""
LATE_COMPUTE = [
    (("d2h", "land", "compute"), scenarios.train),
    (("d2h", "land sum", "compute"), scenarios.windows),
    (("h2d", "fetch", "slot read"), scenarios.train),
    (("refresh", "fetch", "slot read"), scenarios.rewritten),
    (("sums_out", "send sum", "compute"), scenarios.interfere_held),
    (("gpu_update", "measure", "compute"), scenarios.interfere_held),
    (("gpu_update", "update", "slot read"), scenarios.streamed_states),
    (("update", "update", "weight read"), scenarios.interfere),
]
"""Waits that only late compute shows: on the CPU it is never behind."""
NEEDED = [
    *LATE_COMPUTE,
    # Of a sum in RAM. The norm of a gradient that was copied out is a number.
    (("update", "norm", "gradient written"), scenarios.windows),
    *[
        ((missing.who, missing.job, missing.wait), missing.scenario)
        for missing in scenarios.NEEDED
        if (missing.who, missing.job, missing.wait) not in NOT_IN_BUFFERS
    ],
]


@pytest.mark.parametrize(("wait", "scenario"), NEEDED, ids=lambda value: str(value) if type(value) is tuple else "")
def test_a_missing_wait_is_a_race(wait: tuple[str, str, str], scenario: Callable[[Lanes], Any]) -> None:
    assert ordering_of(scenario, without=[wait]).races
