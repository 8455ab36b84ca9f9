"""On the GPU: policies give the same bits, eager and compiled, and `offload` makes memory independent of depth."""

import functools
import gc
import logging

import pytest
import torch
from benchmarks.shapes import random_model

import megatrain as mt

GIB = 1 << 30
DTYPES = [pytest.param(torch.bfloat16, id="bf16"), pytest.param(torch.float32, id="fp32", marks=pytest.mark.slow)]


def run(dtype, dropout=0.1, **settings):
    model = random_model("tiny", dtype, attention_dropout=dropout).train()
    with mt.Engine(model, device="cuda", **settings) as engine:
        optimizer = engine.optimizer(lr=1e-3, max_grad_norm=0.5)
        generator = torch.Generator().manual_seed(7)
        losses = []

        def task(ids):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            return loss.item()

        torch.manual_seed(0)
        for _ in range(3):
            data = [torch.randint(0, 512, (2, 96), generator=generator) for _ in range(3)]
            losses += engine.window([functools.partial(task, ids) for ids in data], full_step=True)
            optimizer.step()
            optimizer.zero_grad()
        engine.synchronize()
        return losses, [slab.weight.clone() for slab in engine.slabs]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_policies_are_equal(dtype, compiled, deterministic):
    losses, weights = run(dtype, compile=compiled)
    for policy in ("store", "offload", {"*layers.1*": "store", "*layers.[24]*": "offload"}):
        # Inputs pass a staging ring if host memory is not pinned.
        got, other = run(dtype, compile=compiled, policy=policy, debug=mt.Debug(slots=2, pin=policy != "offload"))
        assert got == losses, policy
        assert all(torch.equal(a, b) for a, b in zip(other, weights, strict=True)), policy


def test_a_compiled_recompute_leaves_out_the_last_product(deterministic, caplog):
    """Its graph differs from the forward's, but its gradients are the same."""
    torch._dynamo.reset()
    caplog.set_level(logging.DEBUG, "megatrain.compute.partition")
    # PyTorch does not partition graphs again that are in its cache on disk.
    with torch._inductor.config.patch(force_disable_caches=True):
        losses, weights = run(torch.bfloat16, dropout=0.0, compile=True)
    assert any("leaves out 1 products" in record.getMessage() for record in caplog.records)
    stored, other = run(torch.bfloat16, dropout=0.0, compile=True, policy="store")
    assert stored == losses
    assert all(torch.equal(a, b) for a, b in zip(other, weights, strict=True))


def peak_of(layers):
    gc.collect()
    torch.cuda.empty_cache()
    model = random_model(
        "tiny", torch.bfloat16, hidden_size=2048, intermediate_size=5504, num_attention_heads=16, num_key_value_heads=4,
        num_hidden_layers=layers,
    ).train()  # fmt: skip
    with mt.Engine(model, device="cuda", policy="offload") as engine:
        optimizer = engine.optimizer(lr=1e-4)
        ids = torch.randint(0, 512, (4, 2048), device="cuda")
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.synchronize()
        return torch.cuda.max_memory_allocated()


@pytest.mark.slow
def test_offload_makes_memory_independent_of_depth():
    shallow, deep = peak_of(12), peak_of(24)
    print(f"\noffload: 12 layers {shallow / GIB:.3f} GiB, 24 layers {deep / GIB:.3f} GiB ({deep / shallow - 1:+.2%})")
    assert abs(deep - shallow) < 0.02 * shallow


def test_pending_copies_of_a_failed_backward_overwrite_nothing():
    """Under `offload`, the backward fails while the next input is being copied back."""
    model = random_model(
        "tiny", torch.bfloat16, hidden_size=2048, intermediate_size=4096, num_attention_heads=16,
        num_key_value_heads=16, num_hidden_layers=6,
    ).train()  # fmt: skip
    with mt.Engine(model, device="cuda", policy="offload") as engine:
        optimizer = engine.optimizer(lr=1e-3)
        ids = torch.randint(0, 512, (64, 2048), device="cuda")
        loss = model(input_ids=ids, labels=ids).loss
        torch.cuda.synchronize()
        failing = model.model.layers[3].input_layernorm.register_forward_pre_hook(_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        failing.remove()
        del loss
        others = [torch.full((64, 2048, 2048), 7.0, dtype=torch.bfloat16, device="cuda") for _ in range(12)]
        engine.quiesce()
        torch.cuda.synchronize()
        assert all(bool((tensor == 7).all()) for tensor in others)
        del others
        optimizer.zero_grad()
        model(input_ids=ids[:4], labels=ids[:4]).loss.backward()
        optimizer.step()


def _out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory.")
