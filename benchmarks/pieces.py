"""Measurements behind the planner's constants, one line each.

    PYTHONPATH=src python -m benchmarks.pieces threads attention fp32 head     # on a GPU
    PYTHONPATH=src python -m benchmarks.pieces sums turns                 # on the CPU

threads: GPU memory per thread outside PyTorch's allocator (`hardware/machine.py`); attention: its rate by length and
head dimension (`planner/cost.py`); fp32: memory of an FP32 layer (`planner/activations.py`); head: a chunked head with
its loss and gradients (`planner/cost.py`); sums: BF16 gradients added to an FP32 sum at once and in pieces
(`store/gradient.py`); turns: the cost of a micro-batch's turn in a window (`compute/window.py`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.shapes import SHAPES
from megatrain.compute.loss import cross_entropy
from megatrain.compute.window import WindowThreads, wait_for_turn
from megatrain.model.shapes import describe
from megatrain.planner.activations import graph_bytes, layer_bytes
from megatrain.planner.run import Run
from megatrain.store.gradient import ADD_CHUNK_ELEMENTS
from megatrain.stream.add import add_to

MIB = 1 << 20


def outside() -> float:
    """MiB on the GPU outside PyTorch's allocator."""
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / MIB


def threads() -> None:
    inputs = torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(2048, device="cuda", dtype=torch.bfloat16)
    torch.nn.functional.linear(inputs, weights, bias)
    torch.cuda.synchronize()
    print(f"threads: the first, {outside():.0f} MiB outside, {torch.cuda.memory_allocated() / MIB:.0f} inside")
    release = threading.Event()
    for number in range(2, 10):
        done = threading.Event()

        def compute(done: threading.Event = done) -> None:
            own = weights.clone().requires_grad_()
            with torch.autograd.set_multithreading_enabled(False):
                torch.nn.functional.linear(inputs, own, bias).float().square().mean().backward()
            torch.cuda.synchronize()
            done.set()
            release.wait()

        threading.Thread(target=compute, daemon=True).start()
        done.wait()
        print(f"threads: {number}, {outside():.0f} MiB outside, {torch.cuda.memory_allocated() / MIB:.0f} inside")
    release.set()


def attention() -> None:
    import triton.testing

    for heads, kv, dim in ((28, 28, 128), (28, 4, 128), (32, 8, 64)):
        for batch, length in ((16, 512), (8, 1024), (4, 2048), (2, 4096), (1, 8192), (1, 32768)):
            q = torch.randn(batch, heads, length, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            k, v = (torch.randn_like(q[:, :kv]).requires_grad_() for _ in range(2))
            upstream = torch.randn_like(q)

            def work(
                q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v, up: torch.Tensor = upstream
            ) -> None:
                shared = k.shape != q.shape
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
                torch.autograd.grad(out, (q, k, v), up)

            seconds = triton.testing.do_bench(work, warmup=30, rep=150, return_mode="median") / 1e3
            rate = 7 * batch * heads * length * length * dim / seconds / 1e12
            print(f"attention: {batch} x {length}, {heads} heads ({kv}) of {dim}: {rate:.0f} TFLOP/s")


def fp32() -> None:
    for shape, batch, length in (("llama3.2-1b", 2, 2048), ("qwen2.5-1.5b", 1, 4096), ("llama2-7b", 1, 2048)):
        fields = SHAPES[shape] | {"num_hidden_layers": 1, "vocab_size": 1024}
        config = AutoConfig.for_model(
            str(fields["model_type"]), **{k: v for k, v in fields.items() if k != "model_type"}
        )
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        layer = model.model.layers[0]
        hidden = torch.randn(batch, length, config.hidden_size, device="cuda", requires_grad=True)
        upstream, positions = torch.randn_like(hidden), torch.arange(length, device="cuda")[None]
        rotary = model.model.rotary_emb(hidden, positions)
        for _ in range(2):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            output = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
            output = output[0] if isinstance(output, tuple) else output
            kept = torch.cuda.memory_allocated() - before
            torch.cuda.reset_peak_memory_stats()
            gradients = torch.autograd.grad(output, [hidden, *layer.parameters()], upstream)
            above = torch.cuda.max_memory_allocated() - before - kept
            del output, gradients
        block = next(block for block in describe(model).blocks if block.kind == "layer")
        run = Run(micro_batch=batch, length=length, precision="fp32")
        planned = graph_bytes(block, run, "sdpa") / MIB, layer_bytes(block, run, "sdpa", stored=True) / MIB
        print(f"fp32: {shape}, {batch} x {length}: keeps {kept / MIB:.0f} MiB ({planned[0]:.0f} planned), "
              f"peaks {above / MIB:.0f} above ({planned[1]:.0f})")  # fmt: skip


def head() -> None:
    import triton.testing

    for tokens, hidden, vocabulary in ((8192, 3584, 152_064), (4096, 5120, 152_064), (8192, 2048, 128_256)):
        weight = torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        states = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(vocabulary, (tokens,), device="cuda")
        total = torch.zeros_like(weight, dtype=torch.float32)

        def chunks(size: int, losses: Callable[..., torch.Tensor], parts: tuple[torch.Tensor, ...]) -> None:
            weight, states, targets, total = parts
            for piece, wanted in zip(states.split(size), targets.split(size), strict=True):
                loss = losses(torch.nn.functional.linear(piece, weight), wanted, -100) / len(states)
                add_to(total, torch.autograd.grad(loss, (states, weight))[1])

        def own(logits: torch.Tensor, wanted: torch.Tensor, ignored: int) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(logits.float(), wanted, ignore_index=ignored, reduction="sum")

        for elements in (1 << 27, 1 << 28, 1 << 29):
            size = elements // vocabulary // 64 * 64
            for name, losses in (("fused", partial(cross_entropy, fused=True)), ("PyTorch's own", own)):
                parts = (weight, states, targets, total)
                seconds = triton.testing.do_bench(lambda: chunks(size, losses, parts), 50, 200, return_mode="median")  # noqa: B023
                print(f"head: {tokens} x {hidden} x {vocabulary}, chunks of {size}, {name}: {seconds:.1f} ms")


def sums() -> None:
    numel = 116_500_000
    total, values = torch.zeros(numel), torch.randn(numel).bfloat16()

    def pieces() -> None:
        for part, piece in zip(total.split(ADD_CHUNK_ELEMENTS), values.split(ADD_CHUNK_ELEMENTS), strict=True):
            part.add_(piece)

    for name, work in (("at once", lambda: total.add_(values)), ("in pieces", pieces)):
        print(f"sums: {numel:,} elements {name}, {torch.get_num_threads()} threads: {_best(work):.3f} s")


def turns() -> None:
    """Time per turn beyond that of the work itself, which is small."""
    torch.set_num_threads(1)
    values = torch.randn(256, 256)

    def task() -> None:
        result = values
        for position in range(200):
            wait_for_turn(position)
            for _ in range(10):
                result = torch.tanh(result)

    alone = _best(task)
    for count in (2, 8, 16):
        window_threads = WindowThreads(torch.device("cpu"))
        taken = _best(
            lambda window_threads=window_threads, n=count: window_threads.run([task] * n, range(n), lambda: None)
        )  # type: ignore[misc]
        print(f"turns: {count} micro-batches: {(taken - count * alone) / (200 * count) * 1e3:.2f} ms")
        window_threads.close()


def _best(work: Callable[[], object]) -> float:
    work()
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


PIECES = {piece.__name__: piece for piece in (threads, attention, fp32, head, sums, turns)}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        PIECES[name]()
