"""Bytes of GPU memory that computing takes beside state: what a layer keeps for its backward, and what it needs for it.

T tokens of a micro-batch, H hidden size, A attention width (heads × head dimension), I width of the MLP that one token
passes, P parameters of the block, V vocabulary. All bytes are for one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.model.shapes import BlockShape, ModelShape
from megatrain.planner.run import Run

CHUNK_LOGITS = 1 << 27
"""Logits in a chunk of the head, a constant of compute/head.py."""
LOGIT_BYTES = 13
"""Peak of one chunk, per logit: log-softmax, its gradient and the gradient of its input in FP32, 3 × 4 bytes. Measured
12.3 (1.67 GiB with 126.5M logits, less 0.2 GiB of weight gradients)."""
BLAS_BYTES = 32 << 20
"""cuBLAS takes a workspace of this size for every thread that computes (Hopper; less on older GPUs)."""


@dataclass(frozen=True)
class Kept:
    """Bytes per token that a layer's graph keeps, in BF16: so many per unit of each width."""

    hidden: float
    attention: float
    mlp: float
    expert_mlp: float
    expert_hidden: float


EAGER = Kept(hidden=25, attention=12, mlp=8, expert_mlp=14, expert_hidden=8)
"""Two norms keep an FP32 and two BF16 copies of their input (16 H), attention q, k, v and its output (8 A), the MLP
gate, its activation, up and their product (8 I). The rest (9 H + 4 A) is what a measured layer has on top: 7B shape
(H = A = 3584, I = 18944), 8k tokens, 2.16 GiB = 283,100 bytes per token; this gives 284,200. Experts with clamps
(gpt-oss) keep 14 bytes per unit of width, counted on the CPU, others 8; rows gathered for each expert and scattered
again, 8 H."""
COMPILED = Kept(hidden=6, attention=8, mlp=6, expert_mlp=10, expert_hidden=8)
"""The same layer compiled: 1.21 GiB = 158,600 bytes per token; this gives 163,800. Norms are recomputed from their
input, the MLP keeps gate, up and product."""
SCORE_BYTES = 10
"""Attention computed eagerly keeps scores: bytes per head, query and key (gemma2 on the CPU: 9)."""


def input_bytes(block: BlockShape, run: Run) -> int:
    """A block's input: all that `recompute` keeps of it."""
    return run.micro_tokens * block.hidden_size * run.itemsize


def graph_bytes(block: BlockShape, run: Run, attention: str) -> int:
    """What a layer's training graph keeps, without its weights: all that `store` holds, its input included."""
    kept = COMPILED if run.compile else EAGER
    mlp = kept.expert_mlp if block.experts else kept.mlp
    per_token = kept.hidden * block.hidden_size + kept.attention * block.attention_width + mlp * block.intermediate_size
    per_token += kept.expert_hidden * block.experts_per_token * block.hidden_size
    if attention == "eager":
        per_token += SCORE_BYTES * block.heads * run.length
    return int(per_token * run.micro_tokens * run.itemsize / 2)


def layer_bytes(block: BlockShape, run: Run, attention: str, stored: bool) -> int:
    """Peak of a layer's backward above what is there anyway: its graph, its weight gradients and temporaries.

    Early in it stand two gradients as wide as the MLP and those of its last weights, at its end all weight gradients.
    A 7B layer alone at 8k tokens peaks at its weights + graph + 0.51 (eager) and 0.56 GiB (compiled); this gives 0.72.
    """
    weights = block.trainable * run.itemsize
    wide = 2 * block.intermediate_size * run.micro_tokens * run.itemsize
    first = weights if block.experts else weights // 3
    extra = max(weights + 2 * input_bytes(block, run), first + wide)
    return extra + (0 if stored else graph_bytes(block, run, attention))


def embedding_bytes(block: BlockShape, run: Run) -> int:
    """Its dense gradient, and the gradient rows in FP32."""
    return block.trainable * run.itemsize + run.micro_tokens * block.hidden_size * 4


def chunk_tokens(vocabulary: int) -> int:
    """Tokens per chunk of the head, as compute/head.py cuts them."""
    return max(64, CHUNK_LOGITS // max(1, vocabulary) // 64 * 64)


def head_bytes(block: BlockShape, run: Run, vocabulary: int, trains: bool) -> int:
    """Peak of head and loss: one chunk of logits, the head's gradient in FP32, and copies of it as chunks make them.

    From the second chunk on two of the gradient stand side by side: the FP32 sum and, once the logits are gone, that
    of the chunk.
    """
    chunk = chunk_tokens(vocabulary)
    numel = block.hidden_size * vocabulary if trains else 0
    first = min(run.micro_tokens, chunk) * vocabulary
    second = min(run.micro_tokens - min(run.micro_tokens, chunk), chunk) * vocabulary
    peak = max(LOGIT_BYTES * first, first * run.itemsize + numel * run.itemsize, numel * (4 + run.itemsize))
    if second:
        peak = max(peak, numel * 4 + max(LOGIT_BYTES * second, (numel + second) * run.itemsize))
    # The gradient of its input, and that times the scale of the loss.
    return peak + 2 * input_bytes(block, run)


def evaluation_bytes(shape: ModelShape, run: Run) -> int:
    """Peak of an evaluation batch beside weights: logits as they are, in FP32, and their log-softmax."""
    widest = max((block.hidden_size for block in shape.blocks), default=0)
    return run.evaluation * (shape.vocab_size * (run.itemsize + 8) + 4 * widest * run.itemsize)


def workspace_bytes(shape: ModelShape, run: Run, attention: str, stored: int) -> int:
    """The highest peak of any block, if the first `stored` layers have kept their graphs."""
    peaks = [0]
    layers = 0
    head_trains = any(slab.trains for block in shape.blocks if block.kind == "head" for slab in block.slabs)
    head_trains = head_trains or any(b.kind == "head" and b.tied for b in shape.blocks)
    seen: set[tuple[object, ...]] = set()
    for block in shape.blocks:
        layers += block.kind == "layer"
        key = (block.kind, block.trainable, block.hidden_size, block.intermediate_size, layers > stored)
        if key in seen:
            continue
        seen.add(key)
        if block.kind == "layer":
            peaks.append(layer_bytes(block, run, attention, stored=layers <= stored))
        elif block.kind == "head":
            peaks.append(head_bytes(block, run, shape.vocab_size, head_trains))
        else:
            peaks.append(embedding_bytes(block, run))
    return max(peaks)
