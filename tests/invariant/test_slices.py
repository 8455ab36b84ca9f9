"""States and gradient sums can cover a part of a weight. Two engines each own a part of every slab and exchange the
weights they updated. The bits are those of one engine that owns everything, for any placement.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests import small
from tests.invariant.test_homes import MICRO_BATCHES, random_settings, random_windows
from tests.tiny import engine_of

import megatrain as mt
from megatrain.engine import adopt
from megatrain.errors import UnsupportedCall
from megatrain.geometry import ALIGN_ELEMENTS
from megatrain.store.layout import Layout
from megatrain.store.slab import Slab
from megatrain.stream.lanes import SyncLanes, ThreadLanes


def boundary(layout: Layout, name: str, seed: int) -> int:
    """Where the second part of a slab starts; a part can be empty."""
    return ALIGN_ELEMENTS * random.Random(f"{name} {seed}").randint(0, layout.numel // ALIGN_ELEMENTS)


def part(rank: int | None, seed: int) -> Any:
    """A slab class of which this rank owns a part; None owns all."""

    class Part(Slab):
        def __init__(self, index: int, name: str, layout: Layout, *args: Any, **options: Any) -> None:
            at = boundary(layout, name, seed)
            owned = None if rank is None else (0, at) if rank == 0 else (at, layout.numel)
            super().__init__(index, name, layout, *args, owned=owned, **options)

    return Part


class Trained:
    """A model in an engine that owns a part of every slab."""

    def __init__(self, rank: int | None, seed: int, precision: str, compression: Any) -> None:
        self.model = small.llama(num_hidden_layers=3, tie_word_embeddings=seed % 2 == 0).train()
        self.seed = seed
        lanes = ThreadLanes(seed=seed, max_delay=2e-4) if rank == 1 else SyncLanes()
        settings = random_settings(seed + (rank or 0), seed % 2 == 0)
        with patch.object(adopt, "Slab", part(rank, seed)):
            self.engine = engine_of(
                self.model, lanes=lanes, precision=precision, optimizer_compression=compression, **settings
            )
        self.optimizer = self.engine.optimizer(lr=1e-2)

    @property
    def slabs(self) -> list[Slab]:
        return list(self.engine.slabs)

    def step(self, number: int) -> None:
        def micro_batch(k: int) -> None:
            (self.model(**small.batch(2, seed=MICRO_BATCHES * number + k)).loss / MICRO_BATCHES).backward()

        tasks = [partial(micro_batch, k) for k in range(MICRO_BATCHES)]
        # In one step a single gradient arrives first, and the sum continues from it.
        for window in (1, 2, 2) if number == 1 else random_windows(1000 * self.seed + number):
            self.engine.window(tasks[:window], full_step=window == MICRO_BATCHES)
            del tasks[:window]
        self.optimizer.step()
        self.optimizer.zero_grad()


def gather(ours: list[Slab], theirs: list[Slab]) -> None:
    """The exchange that two engines would do on a lane when they run on two GPUs."""
    for mine, other in zip(ours, theirs, strict=True):
        for source, target in ((mine, other), (other, mine)):
            source.settle()
            target.before_write()
            with target.weight_buffer.changing(0, target.layout.nbytes) as weight:
                source.owned.slice_flat(weight.view(target.layout.dtype)).copy_(
                    source.owned.slice_flat(weights(source))
                )


def weights(slab: Slab) -> torch.Tensor:
    """The weights of a slab, flat, also if they are on disk."""
    return slab.weight_buffer.read(0, slab.layout.nbytes).view(slab.layout.dtype)


def states(slab: Slab, index: int) -> dict[str, torch.Tensor]:
    """Residual and moments of one parameter, flat."""
    slab.settle()
    found = {role: moment.read(index).reshape(-1) for role, moment in slab.moments.items()}
    if slab.residual is not None:
        found["residual"] = slab.read_residual(index)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_two_engines_with_parts_equal_one_engine(seed: int) -> None:
    source = random.Random(-seed)
    options = (seed, source.choice(["bf16", "fp32", "bf16-sr"]), source.choice([False, "8bit", "4bit"]))
    alone, first, second = (Trained(rank, *options) for rank in (None, 0, 1))
    for number in range(3):
        for trained in (alone, first, second):
            trained.step(number)
        gather(first.slabs, second.slabs)
    for full, mine, other in zip(alone.slabs, first.slabs, second.slabs, strict=True):
        full.settle()
        assert torch.equal(weights(full), weights(mine))
        assert torch.equal(weights(full), weights(other))
        for index in range(len(full.layout.segments)):
            for role, values in states(full, index).items():
                parts = torch.cat([states(mine, index)[role], states(other, index)[role]])
                assert torch.equal(values, parts), (full.name, role)
    for trained in (alone, first, second):
        trained.engine.close()


def test_partial_states_and_gradients_cannot_be_read() -> None:
    trained = Trained(0, 1, "bf16", False)
    trained.model(**small.batch(2, seed=0)).loss.backward()
    weight = trained.model.model.layers[1].mlp.up_proj.weight
    with pytest.raises(UnsupportedCall, match="only a part of the state"):
        weight.grad.sum()
    full = weight.slab.layout.view(weight.slab.weight, weight.segment)
    assert torch.equal(weight.detach().clone(), full), "weights are complete"
    trained.optimizer.step()
    with pytest.raises(mt.MegaTrainError, match="only a part of the state"):
        trained.engine.release()
