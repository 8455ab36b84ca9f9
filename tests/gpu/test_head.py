"""The fused loss of compiled runs, on the GPU: loss and gradients of a model's own loss, for every kind of head."""

import pytest
import torch
from tests.parity import zoo
from tests.tiny import gradients

import megatrain as mt
from megatrain.compute import loss

ROWS, LENGTH, CHUNK = 3, 20, 32
FAMILIES = {"llama": True, "gpt2": True, "gemma2": False, "cohere": False, "granite": False, "biased": False}
"""Family → whether its head is one matrix and nothing else: the others have a softcap, a scale or a bias."""


@pytest.fixture
def linear(monkeypatch):
    """The number of chunks that `LinearLoss` has computed."""
    calls, add = [], loss.LinearLoss.add

    def counted(self, *args):
        calls.append(args)
        return add(self, *args)

    monkeypatch.setattr(loss.LinearLoss, "add", counted)
    return calls


def loss_and_gradients(family, fused, precision, frozen, items):
    model = zoo.build("llama" if family == "biased" else family).train()
    if family == "biased":
        torch.manual_seed(0)
        model.lm_head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)
    model.get_output_embeddings().weight.requires_grad_(not frozen)
    batch = zoo.batch("llama", 0, padded=True, length=LENGTH, rows=ROWS)
    batch["labels"][:, 5:9] = -100
    if items is not None:
        batch["num_items_in_batch"] = torch.tensor(items)
    with mt.Engine(model, device="cuda", compile=False, precision=precision, head_chunk=CHUNK) as engine:
        engine._step.head.fused = fused
        result = model(**batch).loss
        result.backward()
        assert engine._step.head.enabled
        return result.item(), {name: None if g is None else g.cpu() for name, g in gradients(model).items()}


@pytest.mark.parametrize("items", [None, 100])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("family", [*FAMILIES])
def test_the_fused_loss_is_that_of_the_model(family, precision, frozen, items, linear, deterministic):
    expected = loss_and_gradients(family, False, precision, frozen, items)
    assert not linear
    found = loss_and_gradients(family, True, precision, frozen, items)
    assert bool(linear) == (FAMILIES[family] and precision == "bf16")
    # PyTorch's own operations round the gradient of BF16 logits to BF16 too, but sum that of the matrix per chunk.
    tolerance = 2e-2 if precision == "bf16" else 2e-5
    assert found[0] == pytest.approx(expected[0], rel=tolerance / 10)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (gradient is None) == (found[1][name] is None), name
        if gradient is not None:
            off = (found[1][name].double() - gradient.double()).norm()
            assert off <= tolerance * gradient.double().norm() + 1e-12, name
