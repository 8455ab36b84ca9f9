"""Mixtures of experts in BF16: grouped products, with the bits of the plain model in every way to run a layer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from benchmarks.shapes import random_model
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import megatrain as mt
from megatrain.compute.partition import PARTITIONER
from megatrain.model.shapes import describe
from megatrain.planner.activations import graph_bytes
from megatrain.planner.run import Run

from . import zoo

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]


def built(name: str) -> PreTrainedModel:
    """Wide enough for rows of 16 bytes, which grouped products need. Batches have no padding."""
    return zoo.build(name).bfloat16()


def gradients(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model(**batch).loss.backward()
    return {name: p.grad + 0 for name, p in model.named_parameters() if p.grad is not None}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@contextmanager
def grouped_products() -> Iterator[list[int]]:
    """Counts grouped products: `[count]`."""
    count = [0]

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            count[0] += func is torch.ops.aten._grouped_mm.default
            return func(*args, **(kwargs or {}))

    with Counting():
        yield count


@pytest.mark.parametrize("policy", ["recompute", "store", "offload"])
@pytest.mark.parametrize("name", FAMILIES)
def test_streamed_experts_have_the_bits_of_the_plain_model(name: str, policy: str) -> None:
    batch, plain, model = zoo.batch(name, 0), built(name), built(name)
    expected = gradients(plain, batch)
    with mt.Engine(model, device="cpu", policy=policy), grouped_products() as count:
        assert_same(gradients(model, batch), expected)
    layers = sum(name.endswith("experts.down_proj") for name, _ in plain.named_parameters())
    # Two in the forward, and two for each of them in the backward, which may run the forward again.
    assert count[0] == layers * (6 if policy == "store" else 8)


def test_unused_experts_get_no_gradient() -> None:
    model, plain = built("qwen3_moe"), built("qwen3_moe")
    ids = torch.tensor([[5]])
    plain(input_ids=ids).logits.float().square().mean().backward()
    with mt.Engine(model, device="cpu"):
        model(input_ids=ids).logits.float().square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad + 0, q.grad), name
            if ".experts." in name:
                # One token is sent to two of four experts.
                assert int((p.grad + 0).flatten(1).any(1).sum()) == 2


def test_frozen_experts() -> None:
    models = [built("qwen3_moe") for _ in range(2)]
    for model in models:
        for name, p in model.named_parameters():
            p.requires_grad_(".experts." not in name)
    batch = zoo.batch("qwen3_moe", 0)
    expected = gradients(models[0], batch)
    assert not any(".experts." in name for name in expected)
    with mt.Engine(models[1], device="cpu"):
        assert_same(gradients(models[1], batch), expected)


def test_a_window_has_the_bits_of_its_micro_batches_one_by_one() -> None:
    batches, sums = [zoo.batch("qwen3_moe", seed) for seed in range(3)], []
    for together in (False, True):
        model = built("qwen3_moe")
        with mt.Engine(model, device="cpu") as engine:

            def task(batch: dict[str, Tensor], model: PreTrainedModel = model) -> None:
                model(**batch).loss.backward()

            tasks = [lambda batch=batch, task=task: task(batch) for batch in batches]
            for group in [tasks] if together else [[one] for one in tasks]:
                engine.window(group)
            sums.append({name: p.grad + 0 for name, p in model.named_parameters()})
    assert_same(*sums)


@pytest.mark.parametrize(("implementation", "said"), [(None, "grouped_mm"), ("eager", "a loop over experts (eager)")])
def test_the_summary_and_the_record_name_the_implementation(
    implementation: str | None, said: str, announced: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    model = built("qwen3_moe")
    if implementation is not None:
        model.set_experts_implementation(implementation)
    with mt.Engine(model, device="cpu") as engine, engine.record(tmp_path / "run.jsonl"):
        pass
    assert f"  experts     2 of 4 per token, {said}\n" in announced.messages[0]
    start = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])
    assert start["experts"] == f"2 of 4 per token, {said}"
    assert zoo.build("llama").config._experts_implementation == "eager"


def test_a_dense_model_has_no_experts(tmp_path: Any, announced: pytest.LogCaptureFixture) -> None:
    with mt.Engine(zoo.build("llama"), device="cpu") as engine, engine.record(tmp_path / "run.jsonl"):
        pass
    assert json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])["experts"] is None
    assert "experts" not in announced.messages[0]


def split(graph: Any, inputs: Any) -> Any:
    """Split a layer as compiled layers are, without Inductor, which takes many seconds."""
    made = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    with torch._functorch.config.patch(PARTITIONER):
        return made(graph, inputs)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_plan_covers_what_a_layer_saves(compiled: bool) -> None:
    model = random_model(
        "qwen3-30b-a3b", torch.bfloat16, num_hidden_layers=1, hidden_size=128, moe_intermediate_size=96, num_experts=16,
        num_experts_per_tok=4, num_attention_heads=4, num_key_value_heads=4, head_dim=32, vocab_size=64,
    )  # fmt: skip
    layer, (rows, length) = model.model.layers[0], (2, 256)
    hidden = torch.randn(rows, length, 128, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(length)[None]
    rotary = model.model.rotary_emb(hidden, positions)

    def call() -> Tensor:
        return layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)

    torch._dynamo.reset()
    forward = torch.compile(call, backend=split) if compiled else call
    forward()
    given = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *rotary)}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = forward()
    kept = sum(saved.values())
    del output
    block = next(block for block in describe(model).blocks if block.kind == "layer")
    planned = graph_bytes(block, Run(micro_batch=rows, length=length, compile=compiled), "sdpa")
    assert kept <= planned <= 1.05 * kept
