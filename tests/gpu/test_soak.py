"""On the GPU: memory and compilations do not grow in thousands of tiny steps with random lengths."""

import random
import statistics
import time

import pytest
import torch
from benchmarks.shapes import random_model

import megatrain as mt
from megatrain.compute.compiled import graph_count

STEPS = 2000


@pytest.mark.slow
def test_vram_and_compilations_stay_flat():
    model = random_model("tiny", torch.bfloat16, num_hidden_layers=3).train()
    lengths = random.Random(0)
    with mt.Engine(model, device="cuda", compile=True) as engine:
        optimizer = engine.optimizer(lr=1e-4, max_grad_norm=1.0)
        allocated, reserved, graphs = [], [], []
        start = time.perf_counter()
        for number in range(STEPS):
            ids = torch.randint(0, 512, (2, lengths.randint(8, 160)), device="cuda")
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            allocated.append(torch.cuda.memory_allocated())
            reserved.append(torch.cuda.memory_reserved())
            graphs.append(graph_count())
            if number % 250 == 249:
                print(f"{number + 1} steps, {time.perf_counter() - start:.0f} s", flush=True)
    third = STEPS // 3
    early, late = statistics.median(allocated[third // 2 : third]), statistics.median(allocated[-third:])
    print(
        f"\n{STEPS} steps: allocated {early / 2**20:.1f} -> {late / 2**20:.1f} MiB, reserved "
        f"{reserved[third] / 2**20:.0f} -> {reserved[-1] / 2**20:.0f} MiB, graphs {graphs[0]} -> {graphs[-1]}"
    )
    assert late <= early * 1.01
    assert reserved[-1] <= reserved[third] * 1.05
    assert graphs[-1] == graphs[third]
    assert graphs[-1] - graphs[0] <= 4
