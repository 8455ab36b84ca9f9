"""On the GPU: `compile="auto"` compiles, and results depend neither on the order of lengths nor on a restart."""

import itertools

import pytest
import torch
from tests import small

import megatrain as mt
from megatrain import settings
from megatrain.compute.compiled import graph_count


@pytest.fixture(autouse=True)
def auto():
    """As users have it: the other GPU tests run eagerly."""
    settings.store(settings.Settings())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def gradients_by_length(lengths, padded):
    model, found = small.llama(hidden_size=64, intermediate_size=128).to(torch.bfloat16).train(), {}
    with mt.Engine(model, device="cuda") as engine:
        assert engine.settings.compile is True
        for length in lengths:
            ids = torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(length))
            mask = torch.ones_like(ids)
            mask[0, -3:] = 0 if padded else 1
            model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
            engine.synchronize()
            gradients = torch.cat([parameter.grad.flatten().float().cpu() for parameter in model.parameters()])
            assert torch.equal(found.setdefault(length, gradients), gradients)
            for parameter in model.parameters():
                parameter.grad = None
    return found


@pytest.mark.parametrize("padded", [False, True], ids=["causal", "padded"])
def test_results_do_not_depend_on_the_order_of_lengths(deterministic, padded):
    """Nor on what ran before: each engine starts with another length, as after a restart."""
    # Sums over 2 × 1500 tokens are split into more parts than sums over 2 × 24.
    orders = ((56, 24, 37, 56), (37, 24, 56, 1500), (1500, 24), (24,))
    runs = [gradients_by_length(lengths, padded) for lengths in orders]
    assert graph_count() >= len(runs)
    for one, other in itertools.combinations(runs, 2):
        for length in one.keys() & other.keys():
            assert torch.equal(one[length], other[length]), length


def test_a_resumed_compiled_run_equals_the_uninterrupted_one(tmp_path, deterministic, announced):
    def run(directory, resume=None):
        trainer = mt.Trainer(
            model=small.llama(hidden_size=64, intermediate_size=128),
            args=small.arguments(
                directory, use_cpu=False, bf16=True, max_steps=4, save_strategy="steps", save_steps=2,
                gradient_accumulation_steps=2,
            ),
            train_dataset=small.rows(32),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(tmp_path / "whole")
    resumed = run(tmp_path / "resumed", resume=str(tmp_path / "whole" / "checkpoint-2"))
    assert any(line.startswith("compiled LlamaDecoderLayer for batches of ") for line in announced.messages)
    assert small.losses(whole)[2:] == small.losses(resumed)[2:]
    assert small.same(small.snapshot(whole.model), small.snapshot(resumed.model))


def test_evaluation_runs_compiled(deterministic, announced):
    model = small.llama(hidden_size=64, intermediate_size=128).to(torch.bfloat16).eval()
    ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(0))
    with mt.Engine(model, device="cuda"), torch.no_grad():
        losses = {model(input_ids=ids, labels=ids, use_cache=False).loss.item() for _ in range(3)}
    assert len(losses) == 1
    assert any("without gradients" in line for line in announced.messages if line.startswith("compiled"))
