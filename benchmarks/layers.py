"""Memory and time of one layer: the source of the planner's coefficients.

    PYTHONPATH=src python -m benchmarks.layers [--shapes qwen2.5-7b ...] [--batch 4] [--length 2048]

One line per shape, eager and compiled: measured on this GPU, and predicted by megatrain.planner.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
import triton.testing
from transformers import AutoConfig, AutoModelForCausalLM

import megatrain as mt
from benchmarks.shapes import SHAPES
from megatrain.compute.partition import backend
from megatrain.model.shapes import describe
from megatrain.planner.activations import graph_bytes, layer_bytes
from megatrain.planner.cost import Costs
from megatrain.planner.run import Run

GIB = 1 << 30


def one_layer(fields: dict[str, object]) -> torch.nn.Module:
    """A model of the shape with a single layer, on the GPU in BF16."""
    values = {name: value for name, value in fields.items() if name not in ("model_type", "num_hidden_layers")}
    config = AutoConfig.for_model(str(fields["model_type"]), **values)
    config = copy.deepcopy(config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    config.vocab_size = 1024
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def measure(name: str, batch: int, length: int, compiled: bool) -> dict[str, object]:
    model = one_layer(SHAPES[name])
    layer, hidden_size = model.model.layers[0], model.config.hidden_size
    hidden = torch.randn(batch, length, hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(length, device="cuda")[None]
    rotary = model.model.rotary_emb(hidden, positions)
    leaves = [hidden, *layer.parameters()]

    def call() -> torch.Tensor:
        result = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        return result[0] if isinstance(result, tuple) else result

    forward = torch.compile(call, backend=backend(call.__code__, lambda: False, recomputes=False)) if compiled else call

    output = forward()
    towards = torch.ones_like(output)
    torch.autograd.grad(output, leaves, towards)
    del output
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    output = forward()
    kept = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    grads = torch.autograd.grad(output, leaves, towards)
    peak = torch.cuda.max_memory_allocated() - before - kept
    del output, grads
    forward_s = triton.testing.do_bench(forward, warmup=100, rep=300, return_mode="median") / 1e3
    both_ms = triton.testing.do_bench(
        lambda: torch.autograd.grad(forward(), leaves, towards), warmup=100, rep=400, return_mode="median"
    )
    machine = mt.probe()
    shape = describe(model)
    block = next(block for block in shape.blocks if block.kind == "layer")
    run = Run(micro_batch=batch, length=length, compile=compiled)
    costs = Costs(shape, machine, run)
    piece = costs.pieces[shape.blocks.index(block)]
    # Collecting the gradient is the engine's work, not the layer's.
    collected = block.trainable * 4 * run.itemsize / machine.hbm
    return {
        "layer": f"{name}{', compiled' if compiled else ''}",
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"] if compiled else None,
        "tokens": batch * length,
        "graph_gib": [kept / GIB, graph_bytes(block, run, shape.attention) / GIB],
        "graph_bytes_per_token": kept / batch / length,
        "peak_above_graph_gib": [peak / GIB, layer_bytes(block, run, shape.attention, True) / GIB],
        "forward_ms": [forward_s * 1e3, piece.forward * 1e3],
        "backward_ms": [both_ms - forward_s * 1e3, (piece.backward - collected) * 1e3],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=[name for name in SHAPES if name != "tiny"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    args = parser.parse_args()
    for name in args.shapes:
        for compiled in (False, True):
            try:
                print(json.dumps(measure(name, args.batch, args.length, compiled)), flush=True)
            except Exception as error:  # report the other shapes
                print(json.dumps({"layer": name, "compiled": compiled, "error": repr(error)[:300]}), flush=True)
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
