"""Random numbers of Python and NumPy in a model or a loss: the same bits for every window and every policy."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from tests import small
from tests.tiny import Layer, Stack, backward, differences, engine_of, gradients, inputs, roles

import megatrain as mt

POLICIES = ("recompute", "store", "offload")


@pytest.fixture(autouse=True)
def restore_generators() -> Iterator[None]:
    python, numpys = random.getstate(), numpy.random.get_state()
    yield
    random.setstate(python)
    numpy.random.set_state(numpys)


def start(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def generator_states() -> list[Any]:
    """The states of all generators."""
    _, key, *rest = numpy.random.get_state()
    return [torch.get_rng_state(), random.getstate(), key.tolist(), rest]


class LayerDrop(Stack):
    """Skips layers at random, as speech models do."""

    def forward(self, x: Any, skip: Any = ()) -> Any:
        x = self.entry(x)
        for layer in self.layers:
            if numpy.random.uniform(0, 1) > 0.4:
                x = layer(x)
        return x * (self.gain + random.random())


class Noisy(Layer):
    """Random numbers scale the output, so a recompute that draws others gives other gradients."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) * (1 + random.random() + numpy.random.randn() + random.gauss(0, 1))


def trained(make: Callable[[], Any], size: int, policy: str = "recompute", **settings: Any) -> Any:
    model = make()
    with engine_of(model, policy=policy, **settings) as engine:
        optimizer = engine.optimizer(lr=0.1)
        start(7)
        for step in range(3):
            tasks = [partial(backward, model, 10 * step + number) for number in range(4)]
            for first in range(0, 4, size):
                engine.window(tasks[first : first + size])
            optimizer.step()
            optimizer.zero_grad()
        return roles(engine), generator_states()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [partial(LayerDrop, depth=4), partial(Stack, layer=Noisy)], ids=["dropped", "noisy"])
def test_window_sizes_do_not_change_random_numbers(make: Any, policy: str) -> None:
    expected = trained(make, 1)
    for size in (1, 2, 3, 4):
        assert not differences(trained(make, size, policy, lanes="threads"), expected), size


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_every_policy_draws_as_plain_pytorch_does(policy: str, micro_batches: int) -> None:
    plain = Stack(layer=Noisy)
    model = copy.deepcopy(plain)
    with engine_of(model, policy=policy):
        states = []
        for each in (plain, model):
            start(3)
            for seed in range(micro_batches):
                loss = each(inputs(seed)).square().sum()
                random.random(), numpy.random.rand()
                loss.backward()
            states.append(generator_states())
        assert not differences(*states)
        for name, expected in gradients(plain).items():
            torch.testing.assert_close(gradients(model)[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("failing", [False, True])
def test_a_window_does_not_advance_the_callers_generators(failing: bool) -> None:
    """Except for the seeds, which are drawn from PyTorch's generator on the CPU."""
    model = LayerDrop()
    with engine_of(model) as engine:

        def task(number: int) -> None:
            backward(model, number)
            if failing and number == 1:
                raise ValueError("the bomb")

        start(9)
        torch.randint(0, 2**62, (3,))
        # The generators cache one normal number.
        numpy.random.randn(), random.gauss(0, 1)
        expected = generator_states()
        start(9)
        numpy.random.randn(), random.gauss(0, 1)
        tasks = [partial(task, number) for number in range(3)]
        if failing:
            with pytest.raises(ValueError, match="the bomb"):
                engine.window(tasks)
        else:
            engine.window(tasks)
        assert not differences(generator_states(), expected)


class RandomLoss(mt.Trainer):  # type: ignore[misc]
    """A loss that draws random numbers before and after the forward."""

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        before = numpy.random.rand()
        loss = super().compute_loss(model, inputs, **kwargs)
        return loss * (1 + before) * (1 + random.random())


def test_a_loss_with_random_numbers_does_not_depend_on_the_window(tmp_path: Path) -> None:
    def run(window: int) -> Any:
        mt.init(window=window)
        transformers.set_seed(1)
        model = small.gpt2()
        arguments = small.arguments(tmp_path / str(window), max_steps=3, gradient_accumulation_steps=4)
        trainer = RandomLoss(model=model, args=arguments, train_dataset=small.rows(48))
        trainer.train()
        trainer.engine.close()
        return small.losses(trainer), small.snapshot(model)

    expected = run(1)
    for window in (2, 4):
        losses, weights = run(window)
        assert losses == expected[0]
        assert small.same(weights, expected[1])
