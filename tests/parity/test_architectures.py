"""Every architecture of the zoo trains as in plain transformers with torch's AdamW in FP32.

Compared are loss, logits and all gradients of the first step, and the weights after five steps.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from . import compare, zoo
from .compare import STEPS, adopted, assert_gradients_match, assert_runs_match, engine_adamw, train_both

REQUIRED_ARCHITECTURES = {
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gpt_oss",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "gpt2",
}


def windows(name: str, *, micro_batches: int = 1, padded: bool = False) -> list[list[compare.Batch]]:
    return zoo.windows(name, STEPS, micro_batches=micro_batches, padded=padded)


def test_the_zoo_has_the_required_architectures():
    assert set(zoo.REQUIRED) == REQUIRED_ARCHITECTURES
    for name, entry in zoo.ZOO.items():
        assert entry.traits, name
        assert entry.traits <= set(zoo.TRAITS), name
    assert all(zoo.having(trait) for trait in zoo.TRAITS), "a trait has no architecture"
    assert zoo.LENGTH > 2 * zoo.WINDOW


@pytest.mark.parametrize("name", zoo.having("sliding_window"))
def test_the_sliding_window_changes_the_loss(name: str):
    """Otherwise the comparisons below could not distinguish the two kinds of layers."""
    batch = zoo.batch(name, seed=0)
    wide = zoo.build(name, sliding_window=zoo.LENGTH)(**batch).loss
    assert (zoo.build(name)(**batch).loss - wide).abs() > 1e-5


@pytest.mark.parametrize("name", zoo.ALL)
def test_training(name: str):
    assert_runs_match(name, *train_both(zoo.build(name), windows(name)))


@pytest.mark.parametrize("name", zoo.ALL)
def test_padded_batches(name: str):
    assert_runs_match(name, *train_both(zoo.build(name), windows(name, padded=True)))


@pytest.mark.parametrize("name", [name for name in zoo.ALL if zoo.ZOO[name].dropout])
def test_dropout(name: str):
    model = zoo.build(name, **zoo.ZOO[name].dropout)
    without = zoo.build(name)(**zoo.batch(name, seed=0)).loss
    reference, ours = train_both(model, windows(name, padded=name in zoo.REQUIRED))
    assert reference.losses[0] != without, "dropout has no effect"
    assert_runs_match(name, reference, ours)


@pytest.mark.parametrize("name", zoo.having("router_logits"))
def test_router_auxiliary_loss(name: str):
    """The router's scores leave the blocks outside the return value and are used in the loss."""
    model = zoo.build(name, output_router_logits=True, router_aux_loss_coef=0.5)
    without = deepcopy(model)
    without.router_aux_loss_coef = 0.0

    reference, ours = train_both(model, windows(name, padded=True))
    assert_runs_match(name, reference, ours)

    # The auxiliary loss changes the router's gradient, so the comparison above fails without it.
    without_aux = compare.train(without, compare.torch_adamw(without), windows(name, padded=True)[:1])
    for parameter_name, gradient in reference.gradients[0].items():
        if parameter_name.endswith("mlp.gate.weight"):
            share = (gradient - without_aux.gradients[0][parameter_name]).norm() / gradient.norm()
            assert share > 0.1, parameter_name


@pytest.mark.parametrize("name", zoo.having("router_logits"))
def test_router_logits_requested_in_the_call(name: str):
    model = zoo.build(name, router_aux_loss_coef=0.5)
    with_router_logits = [[{**batch, "output_router_logits": True} for batch in window] for window in windows(name)]
    assert_runs_match(name, *train_both(model, with_router_logits))


@pytest.mark.parametrize("name", zoo.having("router_bias"))
def test_the_router_bias_has_an_effect(name: str):
    """The bias changes the routing, and training does not change the bias."""
    model = zoo.build(name)
    before = {key: buffer.clone() for key, buffer in model.named_buffers() if "correction_bias" in key}
    assert len(before) == 2
    unbiased = deepcopy(model)
    for key, buffer in unbiased.named_buffers():
        if key in before:
            buffer.zero_()

    reference, ours = train_both(model, windows(name))
    assert_runs_match(name, reference, ours)
    assert unbiased(**zoo.batch(name, seed=0)).loss != reference.losses[0]
    for key, buffer in model.named_buffers():
        if key in before:
            assert torch.equal(buffer + 0, before[key]), key


def decay_only_matrices(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.5},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "lr": 5e-4},
    ]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_oss", "zamba2"])
def test_two_parameter_groups(name: str):
    model = zoo.build(name)
    reference, ours = train_both(model, windows(name), groups=decay_only_matrices)
    assert_runs_match(name, reference, ours)


def test_parameter_groups_change_the_weights():
    """One decay and learning rate for all gives different weights, so the comparison above can fail."""
    grouped, ungrouped = zoo.build("llama"), zoo.build("llama")
    options: dict[str, Any] = {"weight_decay": 0.5}
    grouped_run = compare.train(grouped, compare.torch_adamw(grouped, decay_only_matrices(grouped)), windows("llama"))
    ungrouped_run = compare.train(ungrouped, compare.torch_adamw(ungrouped, **options), windows("llama"))
    difference = grouped_run.weights["model.norm.weight"] - ungrouped_run.weights["model.norm.weight"]
    assert difference.abs().max() > 10 * compare.WEIGHT


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "qwen3_moe", "deepseek_v3", "zamba2", "t5"])
def test_accumulation_equals_torch_accumulation(name: str):
    assert_runs_match(name, *train_both(zoo.build(name), windows(name, micro_batches=3)))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "qwen3_moe", "deepseek_v3", "t5"])
def test_accumulation_equals_the_large_batch(name: str):
    micro_batches = [zoo.batch(name, seed=seed) for seed in range(3)]
    large = {key: torch.cat([batch[key] for batch in micro_batches]) for key in micro_batches[0]}
    model = zoo.build(name)
    plain = deepcopy(model)
    reference = compare.train(plain, compare.torch_adamw(plain), [[large]])
    with adopted(model) as engine:
        ours = compare.train(model, engine_adamw(engine), [micro_batches])

    torch.testing.assert_close(torch.stack(ours.losses).mean(), reference.losses[0], rtol=1e-6, atol=1e-6)
    assert_gradients_match(name, reference.gradients[0], ours.gradients[0])
    compare.assert_weights_match(name, reference, ours)


@pytest.mark.parametrize("name", [name for name in zoo.ALL if zoo.ZOO[name].key_bias])
def test_key_biases_do_not_change_the_output(name: str):
    """The weight comparison skips these elements. Even large changes of them do not change the logits."""
    model = zoo.build(name).eval()
    batch = zoo.batch(name, seed=0)
    with torch.no_grad():
        before = model(**batch).logits
        changed = _add_noise(model, lambda key, p: zoo.key_bias_elements(name, key, p))
        after = model(**batch).logits
        assert changed, "the pattern matches no parameter"
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)

        # The other elements of the same parameters do change the logits.
        if _add_noise(model, lambda key, p: _rest_of_the_parameter(name, key, p)):
            assert (model(**batch).logits - before).abs().max() > 1e-2


def _add_noise(model: nn.Module, elements: Callable[[str, torch.Tensor], torch.Tensor]) -> int:
    """Add noise to some elements and return their number."""
    generator = torch.Generator().manual_seed(3)
    count = 0
    for key, parameter in model.named_parameters():
        mask = elements(key, parameter)
        parameter += mask * torch.randn(parameter.shape, generator=generator)
        count += int(mask.sum())
    return count


def _rest_of_the_parameter(name: str, key: str, parameter: torch.Tensor) -> torch.Tensor:
    mask = zoo.key_bias_elements(name, key, parameter)
    return ~mask if mask.any() else mask
