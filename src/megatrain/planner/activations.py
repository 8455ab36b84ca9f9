"""GPU memory for activations and workspace: what a layer keeps for its backward, and the peak of computing it.

All bytes are for one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from megatrain.geometry import chunk_tokens, fuses_loss, round_up
from megatrain.model.shapes import BlockShape, ModelShape
from megatrain.model.trace import SizeFormula
from megatrain.planner.run import Run

LOGIT_BYTES = 13
"""Peak per logit of a chunk with PyTorch's loss: log-softmax, its gradient and that of its input in FP32, 3 × 4 bytes.
Measured 12.3 (1.67 GiB with 126.5M logits, less 0.2 GiB of weight gradients)."""
BLAS_BYTES = 32 << 20
"""Workspace of cuBLAS for every thread that computes (Hopper; less on older GPUs)."""


@dataclass(frozen=True)
class SavedBytes:
    """Bytes per token and unit of width that autograd saves for a layer, in BF16."""

    hidden: float
    """Of the layer's input."""
    norm: float
    """Per norm that computes in FP32 without a fused kernel."""
    fused_norm: float
    """Per norm with a fused kernel."""
    head_norm: float
    """Per unit of queries and keys, if they are normalized."""
    mlp: float
    """Of a mixture of experts: per expert that a token is routed to."""
    rows: float
    """Per unit of hidden size and expert that a token is routed to: its input row and its output row."""
    clamped: float
    """More per unit of width of experts with biases (gpt-oss), whose activation is clamped."""


EAGER = SavedBytes(hidden=2, norm=8, fused_norm=4, head_norm=6, mlp=8, rows=4, clamped=6)
"""A norm saves its input in FP32, the normalized input in BF16, and its output. Attention saves q, k, v and its output
(4 bytes per unit of queries and of keys) and one FP32 number per head. The MLP saves gate, its activation, up and their
product. Experts save their input and output rows. `benchmarks/layers.py` measures the same, within 0.5% for experts and
exactly otherwise."""
COMPILED = SavedBytes(hidden=0, norm=2, fused_norm=2, head_norm=2, mlp=4, rows=2, clamped=0)
"""The same compiled: norms are recomputed from their input, the MLP's activation and product from gate and up, input
rows of experts from the layer's hidden states (compute/partition.py)."""
ATTENTION = 4
LSE_BYTES = 4
"""Log-sum-exp, per head."""
SCORE_BYTES = 10
"""Eager attention saves scores: bytes per head, query and key (gemma2 in BF16 on the CPU: 9)."""
WRITTEN_SCORE_BYTES = (4, 10)
"""The same for FP32 attention without a fused kernel: saved, and temporary."""
ROUTER_BYTES = 16
"""Per expert: logits and softmax in FP32, and the selection of experts."""


def input_bytes(block: BlockShape, run: Run) -> int:
    """A block's input, which is all that policy `recompute` keeps."""
    return run.micro_tokens * block.hidden_size * run.itemsize


def uses_mask(block: BlockShape, run: Run, attention: str) -> bool:
    """Whether SDPA gets a mask: sequences are padded, or at least as long as the sliding window."""
    return attention == "sdpa" and block.attends and (run.padded or 0 < block.span <= run.length)


def writes_scores(block: BlockShape, run: Run, attention: str) -> bool:
    """Whether SDPA materializes scores: in FP32 it has no fused kernel for grouped-query attention.

    With a mask it has one, because transformers then repeats the keys itself.
    """
    shared = block.attends and 0 < block.kv_heads < block.heads
    return attention == "sdpa" and run.precision == "fp32" and shared and not uses_mask(block, run, attention)


def mask_bytes(shape: ModelShape, run: Run, attention: str) -> int:
    """Attention masks: one for each sliding window of the model."""
    kinds = {block.span for block in shape.blocks if uses_mask(block, run, attention)}
    return len(kinds) * run.micro_tokens * run.length


def _attention_extra(block: BlockShape, run: Run, attention: str) -> tuple[int, int]:
    """Bytes per token beyond those of a fused causal kernel: saved for the backward, and temporary."""
    if block.traced is not None:
        # The trace counted the layer's own attention; it counted SDPA as fused.
        attention = run.attention or (attention if attention == "sdpa" else "")
    pairs = block.heads * run.length
    if attention == "eager":
        return SCORE_BYTES * pairs if block.attends else 0, 0
    spread = 2 * (block.attention_width - block.kv_width) * run.itemsize
    if writes_scores(block, run, attention):
        return WRITTEN_SCORE_BYTES[0] * pairs + spread, WRITTEN_SCORE_BYTES[1] * pairs
    if uses_mask(block, run, attention):
        # Each layer converts the mask to floating point, with rows padded to 16, and saves it.
        return round_up(run.length, 16) * run.itemsize + spread, 0
    return 0, 0


def graph_bytes(block: BlockShape, run: Run, attention: str) -> int:
    """What autograd saves for a layer, weights excluded: all that policy `store` keeps, the input included."""
    more, _ = _attention_extra(block, run, attention)
    if block.traced is not None:
        # Compiled, it saves no more. How much less has only been measured for other layers.
        return _traced(block, block.traced.graph, run, attention, run.micro_tokens, more)
    kept = COMPILED if run.compile else EAGER
    heads = block.attention_width + block.kv_width
    per_token = (kept.hidden + kept.norm * block.norms + kept.fused_norm * block.fused_norms) * block.hidden_size
    per_token += (ATTENTION + (kept.head_norm if block.head_norms else 0)) * heads + LSE_BYTES * block.heads
    per_token += kept.mlp * block.intermediate_size
    if block.experts:
        per_token += ROUTER_BYTES * block.experts + kept.rows * block.experts_per_token * block.hidden_size
        per_token += kept.clamped * block.intermediate_size if block.expert_biases else 0
    return int(per_token * run.micro_tokens * run.itemsize / 2) + run.micro_tokens * more


def _traced(block: BlockShape, counted: SizeFormula, run: Run, attention: str, tokens: int, more: int) -> int:
    """Bytes of `tokens` tokens of a traced layer, plus `more` per token that the trace did not count."""
    if counted.pair:
        # The trace has scores or a position bias per head. SDPA adds a mask to such a bias.
        more = block.heads * run.length * run.itemsize if uses_mask(block, run, attention) else 0
    return int(counted.at(tokens, run.length) * run.itemsize / 2) + tokens * more


def layer_bytes(block: BlockShape, run: Run, attention: str, stored: bool) -> int:
    """Peak of a layer's backward, beside what the policy keeps: its graph, its weight gradients and temporaries.

    The peak is early, with the gradient of the MLP's last weights and two gradients as wide as the MLP (compiled: and
    their product, which one kernel computes). After that the graph is released faster than weight gradients are
    produced.
    """
    inputs, weights = input_bytes(block, run), block.trainable * run.itemsize
    graph, temporary = graph_bytes(block, run, attention), _attention_extra(block, run, attention)[1]
    if block.traced is not None:
        # The order in which the graph is released and weight gradients are produced is unknown: count both.
        early = weights + _traced(block, block.traced.work, run, attention, run.micro_tokens, temporary)
    else:
        width = block.intermediate_size * run.micro_tokens * run.itemsize
        last = weights // 3 if block.experts else block.hidden_size * block.intermediate_size * run.itemsize
        rows = block.experts_per_token * inputs
        early = last + 2 * rows + (3 * width + 5 * inputs if run.compile else 2 * width)
        if block.experts:
            # All gradients of experts exist before attention's part of the graph is released. By then the MLP's part is
            # released, and as many output rows as there are gradients of input rows. Compiled, input rows are computed
            # again. One layer of Qwen3-30B-A3B, eager: 0.937 GiB measured, 0.9375 so.
            kept = COMPILED if run.compile else EAGER
            released = (kept.mlp + (kept.clamped if block.expert_biases else 0)) / 2 - 2
            routed = block.expert_matmul_parameters * block.experts // block.experts_per_token * run.itemsize
            late_rows = rows if run.compile else 0
            early = max(early, int(min(routed, weights) + late_rows - released * width))
    # When attention computes scores, only the weight gradients of the MLP are still there.
    late = weights + 2 * inputs
    extra = max(early, late - graph, late + run.micro_tokens * temporary if temporary else 0)
    # A recomputed graph has an input and an output of its own.
    return extra + (0 if stored else graph + 2 * inputs)


def materializes_logits(shape: ModelShape, run: Run) -> bool:
    """Whether all logits of a micro-batch exist at once, because the loss of the model or of the run needs them."""
    return shape.logits == "whole" or (shape.logits == "chunked" and run.head_chunk == 0)


def head_chunk(shape: ModelShape, run: Run, tokens: int, gpu: bool) -> int:
    """How many of `tokens` tokens have their logits in memory at once."""
    if materializes_logits(shape, run):
        return tokens
    return min(tokens, run.head_chunk or chunk_tokens(shape.vocab_size, fuses_loss(run.compile, gpu)))


def logits_bytes(shape: ModelShape, run: Run) -> int:
    """Materialized logits and what their loss saves, until the backward has passed the head."""
    return run.micro_tokens * shape.vocab_size * (4 + 2 * run.itemsize) if materializes_logits(shape, run) else 0


def fuses_head(shape: ModelShape, run: Run, gpu: bool) -> bool:
    """Whether the product with the head's matrix sums its gradient, and that of the logits takes their place."""
    return fuses_loss(run.compile, gpu) and shape.bare_head and run.itemsize == 2


def bytes_per_logit(shape: ModelShape, run: Run, gpu: bool) -> int:
    """Peak of one chunk, per logit. The fused loss has the logits and their gradient, and those of a soft cap."""
    if fuses_head(shape, run, gpu):
        return run.itemsize
    itemsize = 4 if shape.fp32_logits else run.itemsize
    return (3 if shape.softcap else 2) * itemsize if fuses_loss(run.compile, gpu) else LOGIT_BYTES


def head_bytes(shape: ModelShape, block: BlockShape, run: Run, trains: bool, gpu: bool) -> int:
    """Peak of head and loss: one chunk of logits, and the head's weight gradient in FP32.

    From the second chunk on there are two gradients: the FP32 sum and, after the logits are freed, that of the chunk.
    """
    chunk = head_chunk(shape, run, run.micro_tokens, gpu)
    numel = block.hidden_size * shape.vocab_size if trains else 0
    first = chunk * shape.vocab_size
    if materializes_logits(shape, run):
        return max((5 + run.itemsize) * first, (first + numel) * run.itemsize) + 2 * input_bytes(block, run)
    second = min(run.micro_tokens - chunk, chunk) * shape.vocab_size
    each = bytes_per_logit(shape, run, gpu)
    if fuses_head(shape, run, gpu):
        return max(each * first + numel * 4, numel * (4 + run.itemsize)) + 2 * input_bytes(block, run)
    peak = max(each * first, first * run.itemsize + numel * run.itemsize, numel * (4 + run.itemsize))
    if second:
        peak = max(peak, numel * 4 + max(each * second, (numel + second) * run.itemsize))
    # The gradient of its input, before and after it is multiplied by the scale of the loss.
    return peak + 2 * input_bytes(block, run)


def evaluation_bytes(shape: ModelShape, run: Run, attention: str, gpu: bool) -> int:
    """Peak of an evaluation batch: its logits in two precisions and their log-softmax, or one layer."""
    if not run.evaluation:
        return 0
    widest = max((block.hidden_size for block in shape.blocks), default=0)
    tokens = run.evaluation if run.predictions else head_chunk(shape, run, run.evaluation, gpu)
    fused = fuses_loss(run.compile, gpu) and not run.predictions
    each = bytes_per_logit(shape, run, gpu) if fused else run.itemsize + 8
    head = tokens * max(1, shape.vocab_size) * each + 4 * run.evaluation * widest * run.itemsize
    return max([head, *(_forward_bytes(block, run, attention) for block in shape.blocks)])


def _forward_bytes(block: BlockShape, run: Run, attention: str) -> int:
    """Peak of a layer's forward without autograd: the MLP's gate, up and product, the residual stream and its norms."""
    scores = max(_attention_extra(block, run, attention))
    if block.traced is not None:
        inputs = 2 * block.hidden_size * run.evaluation * run.itemsize
        return _traced(block, block.traced.forward, run, attention, run.evaluation, scores) + inputs
    # Experts have copies of their input rows, and as many output rows.
    rows = 2 * block.experts_per_token * block.hidden_size
    return run.evaluation * ((3 * block.intermediate_size + 4 * block.hidden_size + rows) * run.itemsize + scores)


@lru_cache(maxsize=16)
def first_identical(shape: ModelShape) -> tuple[int, ...]:
    """For each block the index of the first identical one (apart from the name), so that results can be reused."""
    seen: dict[BlockShape, int] = {}
    return tuple(seen.setdefault(replace(block, name=""), index) for index, block in enumerate(shape.blocks))


def workspace_bytes(shape: ModelShape, run: Run, attention: str, gpu: bool) -> list[int]:
    """The highest peak of any block, indexed by how many of the first layers have stored graphs."""
    head_trains = any(block.trainable or block.tied for block in shape.blocks if block.kind == "head")
    others, stored, recomputed = [0], [0], [0]
    known: dict[int, tuple[int, int]] = {}
    for block, identical in zip(shape.blocks, first_identical(shape), strict=True):
        if block.kind == "head":
            others.append(head_bytes(shape, block, run, head_trains, gpu))
        elif block.kind != "layer":
            # The dense gradient of an embedding, and the gradient rows in FP32.
            others.append(block.trainable * run.itemsize + run.micro_tokens * block.hidden_size * 4)
        else:
            if identical not in known:
                known[identical] = layer_bytes(block, run, attention, True), layer_bytes(block, run, attention, False)
            stored.append(known[identical][0])
            recomputed.append(known[identical][1])
    if materializes_logits(shape, run):
        # The head may also be part of another block.
        others.append((5 + run.itemsize) * run.micro_tokens * shape.vocab_size)
    before = [*accumulate(stored, max)]
    after = [*accumulate([0, *recomputed[:0:-1]], max)][::-1]
    return [max(*others, *pair) for pair in zip(before, after, strict=True)]
