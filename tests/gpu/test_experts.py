"""Mixtures of experts on the GPU in BF16: grouped products in one graph, with the bits of a resident model."""

import copy

import pytest
import torch
from benchmarks.shapes import random_model
from torch._dynamo.utils import counters

import megatrain as mt

SMALL = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
         "vocab_size": 512}  # fmt: skip
MODELS = {
    "qwen3-30b-a3b": SMALL | {"num_attention_heads": 4, "head_dim": 64, "num_experts": 16},
    "deepseek-v2-lite": SMALL | {"num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 16},
}


def built(shape):
    return random_model(shape, torch.bfloat16, **MODELS[shape]).train()


def ids():
    return torch.randint(0, 512, (2, 192), generator=torch.Generator().manual_seed(3)).cuda()


def gradients(model):
    loss = model(input_ids=ids(), labels=ids()).loss
    loss.backward()
    return loss.item(), {name: p.grad.cpu() + 0 for name, p in model.named_parameters()}


def assert_same(one, other):
    assert one[0] == other[0]
    assert [name for name, gradient in one[1].items() if not torch.equal(gradient, other[1][name])] == []


@pytest.mark.parametrize("policy", ["recompute", "store"])
@pytest.mark.parametrize("shape", [*MODELS])
def test_streamed_and_resident_experts_have_the_same_bits(shape, policy, deterministic):
    model = built(shape)
    assert model.config._experts_implementation == "grouped_mm"
    expected = gradients(copy.deepcopy(model).cuda())
    with mt.Engine(model, device="cuda", policy=policy, compile=False):
        assert_same(gradients(model), expected)


@pytest.mark.parametrize("shape", [*MODELS])
def test_a_layer_is_one_graph(shape, deterministic):
    results = {}
    for policy in ("recompute", "store"):
        torch._dynamo.reset()
        counters.clear()
        model = built(shape)
        with mt.Engine(model, device="cuda", policy=policy, compile=True):
            results[policy] = gradients(model)
        # DeepSeek's first layer is dense.
        assert dict(counters["graph_break"]) == {}
        assert counters["stats"]["unique_graphs"] == (1 if shape.startswith("qwen") else 2)
    assert_same(results["recompute"], results["store"])


def test_unused_experts_get_no_gradient():
    """The kernel must write zeros for experts without rows."""
    model = built("qwen3-30b-a3b")
    # Memory that is reused holds other numbers than zero.
    torch.full((1 << 26,), float("nan"), device="cuda")
    with mt.Engine(model, device="cuda"):
        model(input_ids=ids()[:1, :1]).logits.float().square().mean().backward()
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                gradient = parameter.grad.cpu() + 0
                assert torch.isfinite(gradient).all(), name
                assert int(gradient.flatten(1).any(1).sum()) == 8, name
