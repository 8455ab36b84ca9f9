"""Measurements behind the planner's constants, one line each.

    PYTHONPATH=src python -m benchmarks.pieces threads attention experts fp32 head     # on a GPU
    PYTHONPATH=src python -m benchmarks.pieces sums turns                 # on the CPU

threads: GPU memory per thread outside PyTorch's allocator (`hardware/machine.py`); attention: its backends by length,
head dimension, grouped keys and mask, deterministic or not (`hardware/attention.py`, `planner/cost.py`); experts: their
products, and what moves their rows; fp32: memory of an FP32 layer (`planner/activations.py`); head: a chunked head with
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
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from benchmarks.shapes import SHAPES
from megatrain.compute.loss import LinearLoss, cross_entropy
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


BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip


def attention() -> None:
    """Milliseconds of forward + backward, per backend; the first call; "~": two backwards differ in bits."""
    print(
        f"attention: {torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    )
    for dim, heads in ((64, 32), (128, 28)):
        for kv, masked in ((heads, False), (4, False), (heads, True)):
            for length in (512, 1000, 1024, 2048, 4096, 8192, 32768)[: 6 if masked else 7]:
                shape = (max(1, 8192 // length), heads, length, dim)
                cells = [
                    _attend(shape, kv, masked, name, deterministic)
                    for deterministic in (False, True)
                    for name in BACKENDS
                    if not (deterministic and name in ("cudnn", "math")) and not (name == "math" and length > 2048)
                ]
                what = "masked" if masked else "causal"
                print(
                    f"attention: {shape[0]:2} x {length:5}, {heads} heads ({kv}) of {dim}, {what}: {'; '.join(cells)}"
                )
                torch.cuda.empty_cache()


def _attend(shape: tuple[int, int, int, int], kv: int, masked: bool, name: str, deterministic: bool) -> str:
    """One backend at one shape: the time of a forward and of a backward, as transformers calls SDPA."""
    q = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn_like(q[:, :kv]).requires_grad_() for _ in range(2))
    upstream, length = torch.randn_like(q), shape[2]
    # Right padding: a quarter of the last sequence.
    mask = torch.ones(shape[0], 1, length, length, device="cuda", dtype=torch.bool).tril_() if masked else None
    if mask is not None:
        mask[-1, :, :, -length // 4 :] = False

    def forward() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, enable_gqa=kv != shape[1]
        )

    def backward(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True)

    label = name + (", deterministic" if deterministic else "")
    torch.use_deterministic_algorithms(deterministic)
    try:
        with sdpa_kernel(BACKENDS[name]):
            began = time.perf_counter()
            out = forward()
            one, two = backward(out), backward(out)
            torch.cuda.synchronize()
            first = time.perf_counter() - began
            same = all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
            seconds = f"{_milliseconds(forward):.3f} + {_milliseconds(partial(backward, out)):.3f}"
            more = "" if same else "~"
            return f"{label} {seconds}{more}" + (f" (first {first * 1e3:.0f})" if name == "cudnn" else "")
    except RuntimeError as error:
        return f"{label} refused ({(str(error).splitlines() or [''])[0][:40]})"
    finally:
        torch.use_deterministic_algorithms(False)


def _milliseconds(work: Callable[[], object]) -> float:
    """The mean of repetitions that take about 30 ms. They are queued behind a pause, so that launches do not count."""
    count = 1
    for _ in range(2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(10_000_000)
        start.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
        each = start.elapsed_time(end) / count
        count = max(2, min(30, int(30 / each)))
    return each


class _Rows(torch.autograd.Function):
    """Rows of tokens by expert. The backward gathers and sums, where PyTorch's adds row by row with atomics."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, order: torch.Tensor, back: torch.Tensor, each: int) -> torch.Tensor:
        ctx.save_for_backward(back)
        ctx.each = each
        return hidden[order // each]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (back,) = ctx.saved_tensors
        return gradient[back].unflatten(0, (-1, ctx.each)).sum(1), None, None, None


def _gathered(self: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """transformers' grouped experts (no biases, gated), with gathers in both directions."""
    each = chosen.shape[-1]
    experts, order = torch.sort(chosen.reshape(-1))
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = torch.histc(experts.int(), bins=self.num_experts, min=0, max=self.num_experts - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    rows = _Rows.apply(hidden, order, back, each)
    rows = torch._grouped_mm(rows, self.gate_up_proj.transpose(-2, -1), offs=ends)
    rows = torch._grouped_mm(self._apply_gate(rows), self.down_proj.transpose(-2, -1), offs=ends)
    # Each row of the result is one row of `rows`: the backward of this gather has no duplicates, and is a gather too.
    weighted = _Rows.apply(rows, back, order, 1).unflatten(0, (-1, each)) * weights[..., None]
    return weighted.sum(1).to(hidden.dtype)


def experts() -> None:
    """Experts of one layer of Qwen3-30B-A3B, 8k tokens: as transformers computes them, and with gathers only."""
    values = SHAPES["qwen3-30b-a3b"] | {"num_hidden_layers": 1, "vocab_size": 64}
    config = AutoConfig.for_model(
        "qwen3_moe", **{name: value for name, value in values.items() if name != "model_type"}
    )
    with torch.device("cuda"):
        block = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).model.layers[0].mlp
        hidden = torch.randn(4, 2048, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    module, towards = block.experts, torch.randn_like(hidden)
    ALL_EXPERTS_FUNCTIONS.register("gathered", _gathered)
    torch.compiler.allow_in_graph(torch._grouped_mm)
    for compiled in (False, True):
        for name in ("eager", "grouped_mm", "gathered")[compiled:]:
            module.config._experts_implementation = name
            torch._dynamo.reset()
            call: Any = torch.compile(block) if compiled else block
            leaves, out = [hidden, *block.parameters()], call(hidden)
            backward = partial(torch.autograd.grad, out, leaves, towards, retain_graph=not compiled)
            if compiled:  # a compiled backward frees what it saved
                both = _milliseconds(lambda: torch.autograd.grad(call(hidden), leaves, towards))  # noqa: B023
                seconds = f"{(forward := _milliseconds(lambda: call(hidden))):.2f} + {both - forward:.2f} ms"  # noqa: B023
            else:
                seconds = f"{_milliseconds(lambda: call(hidden)):.2f} + {_milliseconds(backward):.2f} ms"  # noqa: B023
            print(f"experts: {name}{', compiled' if compiled else ''}: {seconds}")


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

        def linear(size: int, parts: tuple[torch.Tensor, ...]) -> None:
            weight, states, targets, _ = (part.detach() for part in parts)
            loss, by_states = LinearLoss(weight, -100), torch.empty_like(states)
            for piece, wanted, by in zip(states.split(size), targets.split(size), by_states.split(size), strict=True):
                loss.add(piece, wanted, len(states), by, trains=True)

        def own(logits: torch.Tensor, wanted: torch.Tensor, ignored: int) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(logits.float(), wanted, ignore_index=ignored, reduction="sum")

        for elements in (1 << 27, 1 << 28, 1 << 29):
            size = elements // vocabulary // 64 * 64
            parts = (weight, states, targets, total)
            seconds = triton.testing.do_bench(lambda: linear(size, parts), 50, 200, return_mode="median")  # noqa: B023
            print(f"head: {tokens} x {hidden} x {vocabulary}, chunks of {size}, linear: {seconds:.1f} ms")
            for name, losses in (("fused", partial(cross_entropy, fused=True)), ("PyTorch's own", own)):
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


PIECES = {piece.__name__: piece for piece in (threads, attention, experts, fp32, head, sums, turns)}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        PIECES[name]()
