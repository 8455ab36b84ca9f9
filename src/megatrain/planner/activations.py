"""Bytes of GPU memory that computing takes beside state: what a layer keeps for its backward, and what it needs for it.

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
"""Peak of one chunk with PyTorch's own loss, per logit: log-softmax, its gradient and the gradient of its input in
FP32, 3 × 4 bytes. Measured 12.3 (1.67 GiB with 126.5M logits, less 0.2 GiB of weight gradients)."""
BLAS_BYTES = 32 << 20
"""cuBLAS takes a workspace of this size for every thread that computes (Hopper; less on older GPUs)."""


@dataclass(frozen=True)
class SavedBytes:
    """Bytes per token and unit of width that a layer's graph keeps, in BF16."""

    hidden: float
    """Whatever the layer: its input."""
    norm: float
    """Per norm that is written out in FP32."""
    head_norm: float
    """Per unit of queries and keys, if those are normed."""
    mlp: float
    """Of experts, those that a token is sent to."""


EAGER = SavedBytes(hidden=2, norm=8, head_norm=6, mlp=8)
"""A norm keeps its input in FP32, that normed in BF16, and its output; attention q, k, v and its output (4 each per
unit of queries and of keys) and one FP32 number per head; the MLP gate, its activation, up and their product; experts
the rows they were given and those they gave. `benchmarks/layers.py` measures the same, to 0.5% where there are experts
and exactly elsewhere."""
COMPILED = SavedBytes(hidden=0, norm=4, head_norm=2, mlp=6)
"""The same compiled: norms are made again from their input, the activation of the MLP from gate and up."""
FUSED_NORM = 4
EXPERT_ROWS = 4
"""Per expert that a token is sent to, and unit of hidden size."""
CLAMPED_MLP = 6
"""More per unit of width of experts with biases (gpt-oss), whose activation is written out; counted on the CPU."""
ATTENTION = 4
LSE_BYTES = 4
"""The log of the sum of exponentials, per head."""
SCORE_BYTES = 10
"""Attention computed eagerly keeps scores: bytes per head, query and key (gemma2 in BF16 on the CPU: 9)."""
WRITTEN_SCORE_BYTES = (4, 10)
"""The same of FP32 attention that no kernel computes: in the graph, and beside it."""
ROUTER_BYTES = 16
"""Per expert: logits and softmax in FP32, and what chooses from them."""


def input_bytes(block: BlockShape, run: Run) -> int:
    """A block's input: all that `recompute` keeps of it."""
    return run.micro_tokens * block.hidden_size * run.itemsize


def uses_mask(block: BlockShape, run: Run, attention: str) -> bool:
    """Whether PyTorch's own attention is given a mask: sequences are padded, or as long as a query looks back."""
    return attention == "sdpa" and block.attends and (run.padded or 0 < block.span <= run.length)


def writes_scores(block: BlockShape, run: Run, attention: str) -> bool:
    """Whether PyTorch's own attention writes scores out: in FP32 it has no kernel for heads that share keys.

    With a mask transformers spreads the keys itself, and there is one.
    """
    shared = block.attends and 0 < block.kv_heads < block.heads
    return attention == "sdpa" and run.precision == "fp32" and shared and not uses_mask(block, run, attention)


def mask_bytes(shape: ModelShape, run: Run, attention: str) -> int:
    """The masks that layers are given: one for all that look back equally far."""
    kinds = {block.span for block in shape.blocks if uses_mask(block, run, attention)}
    return len(kinds) * run.micro_tokens * run.length


def _attention_extra(block: BlockShape, run: Run, attention: str) -> tuple[int, int]:
    """Bytes per token beyond what a fused causal kernel takes: in a layer's graph, and beside it."""
    if block.traced is not None:
        # The layer's own way of computing attention was counted; PyTorch's was as fused.
        attention = run.attention or (attention if attention == "sdpa" else "")
    pairs = block.heads * run.length
    if attention == "eager":
        return SCORE_BYTES * pairs if block.attends else 0, 0
    spread = 2 * (block.attention_width - block.kv_width) * run.itemsize
    if writes_scores(block, run, attention):
        return WRITTEN_SCORE_BYTES[0] * pairs + spread, WRITTEN_SCORE_BYTES[1] * pairs
    if uses_mask(block, run, attention):
        # Each layer makes numbers of the mask, in rows of whole 16, and keeps them.
        return round_up(run.length, 16) * run.itemsize + spread, 0
    return 0, 0


def graph_bytes(block: BlockShape, run: Run, attention: str) -> int:
    """What a layer's training graph keeps, without its weights: all that `store` holds, its input included."""
    more, _ = _attention_extra(block, run, attention)
    if block.traced is not None:
        # Compiled, it keeps no more; how much less has been measured for other layers only.
        return _traced(block, block.traced.graph, run, attention, run.micro_tokens, more)
    kept = COMPILED if run.compile else EAGER
    heads = block.attention_width + block.kv_width
    per_token = (kept.hidden + kept.norm * block.norms + FUSED_NORM * block.fused_norms) * block.hidden_size
    per_token += (ATTENTION + (kept.head_norm if block.head_norms else 0)) * heads + LSE_BYTES * block.heads
    per_token += kept.mlp * block.intermediate_size
    if block.experts:
        per_token += ROUTER_BYTES * block.experts + EXPERT_ROWS * block.experts_per_token * block.hidden_size
        per_token += CLAMPED_MLP * block.intermediate_size if block.expert_biases else 0
    return int(per_token * run.micro_tokens * run.itemsize / 2) + run.micro_tokens * more


def _traced(block: BlockShape, counted: SizeFormula, run: Run, attention: str, tokens: int, more: int) -> int:
    """Bytes of so many tokens of a layer that was counted, with `more` per token that it was not counted with."""
    if counted.pair:
        # Scores or a bias of positions, a number per head; where that is given to attention, a mask joins it.
        more = block.heads * run.length * run.itemsize if uses_mask(block, run, attention) else 0
    return int(counted.at(tokens, run.length) * run.itemsize / 2) + tokens * more


def layer_bytes(block: BlockShape, run: Run, attention: str, stored: bool) -> int:
    """Peak of a layer's backward above what is there anyway: its graph, its weight gradients and temporaries.

    Early in it stand gradients as wide as the MLP (two, compiled one) and that of its last weights; then the graph is
    given back faster than weight gradients come.
    """
    inputs, weights = input_bytes(block, run), block.trainable * run.itemsize
    graph, beside = graph_bytes(block, run, attention), _attention_extra(block, run, attention)[1]
    if block.traced is not None:
        # How much of the graph is given back before which gradient of a weight comes is not known: all are counted.
        early = weights + _traced(block, block.traced.work, run, attention, run.micro_tokens, beside)
    else:
        width = block.intermediate_size * run.micro_tokens * run.itemsize
        last = weights // 3 if block.experts else block.hidden_size * block.intermediate_size * run.itemsize
        rows = 2 * block.experts_per_token * inputs
        early = last + rows + (width + inputs if run.compile else 2 * width)
    # When scores come the MLP is done, but for the gradients of its weights.
    extra = max(early, weights + 2 * inputs - graph, weights + 2 * inputs + run.micro_tokens * beside if beside else 0)
    # A graph that is made again has an input and an output of its own.
    return extra + (0 if stored else graph + 2 * inputs)


def materializes_logits(shape: ModelShape, run: Run) -> bool:
    """Whether training has all logits at once: the model's loss needs them, or the run's."""
    return shape.logits == "whole" or (shape.logits == "chunked" and run.head_chunk == 0)


def head_chunk(shape: ModelShape, run: Run, tokens: int, gpu: bool) -> int:
    """Of so many tokens, those whose logits are there at once."""
    if materializes_logits(shape, run):
        return tokens
    return min(tokens, run.head_chunk or chunk_tokens(shape.vocab_size, fuses_loss(run.compile, gpu)))


def logits_bytes(shape: ModelShape, run: Run) -> int:
    """Logits that are computed whole, and what their loss keeps: until the backward has passed the head."""
    return run.micro_tokens * shape.vocab_size * (4 + 2 * run.itemsize) if materializes_logits(shape, run) else 0


def bytes_per_logit(shape: ModelShape, run: Run, gpu: bool) -> int:
    """Peak of one chunk, per logit; of the fused loss the logits and their gradient, and a soft cap's."""
    itemsize = 4 if shape.fp32_logits else run.itemsize
    return (3 if shape.softcap else 2) * itemsize if fuses_loss(run.compile, gpu) else LOGIT_BYTES


def head_bytes(shape: ModelShape, block: BlockShape, run: Run, trains: bool, gpu: bool) -> int:
    """Peak of head and loss: one chunk of logits, the head's gradient in FP32, and copies of it as chunks make them.

    From the second chunk on two of the gradient stand side by side: the FP32 sum and, once the logits are gone, that
    of the chunk.
    """
    chunk = head_chunk(shape, run, run.micro_tokens, gpu)
    numel = block.hidden_size * shape.vocab_size if trains else 0
    first = chunk * shape.vocab_size
    if materializes_logits(shape, run):
        return max((5 + run.itemsize) * first, (first + numel) * run.itemsize) + 2 * input_bytes(block, run)
    second = min(run.micro_tokens - chunk, chunk) * shape.vocab_size
    each = bytes_per_logit(shape, run, gpu)
    peak = max(each * first, first * run.itemsize + numel * run.itemsize, numel * (4 + run.itemsize))
    if second:
        peak = max(peak, numel * 4 + max(each * second, (numel + second) * run.itemsize))
    # The gradient of its input, and that times the scale of the loss.
    return peak + 2 * input_bytes(block, run)


def evaluation_bytes(shape: ModelShape, run: Run, attention: str, gpu: bool) -> int:
    """Peak of an evaluation batch beside weights: logits as they are, in FP32, and their log-softmax; or a layer."""
    if not run.evaluation:
        return 0
    widest = max((block.hidden_size for block in shape.blocks), default=0)
    tokens = run.evaluation if run.predictions else head_chunk(shape, run, run.evaluation, gpu)
    fused = fuses_loss(run.compile, gpu) and not run.predictions
    each = bytes_per_logit(shape, run, gpu) if fused else run.itemsize + 8
    head = tokens * max(1, shape.vocab_size) * each + 4 * run.evaluation * widest * run.itemsize
    return max([head, *(_forward_bytes(block, run, attention) for block in shape.blocks)])


def _forward_bytes(block: BlockShape, run: Run, attention: str) -> int:
    """Peak of a layer whose graph is not kept: the MLP's gate, up and product, the stream and norms of it."""
    scores = max(_attention_extra(block, run, attention))
    if block.traced is not None:
        flowing = 2 * block.hidden_size * run.evaluation * run.itemsize
        return _traced(block, block.traced.forward, run, attention, run.evaluation, scores) + flowing
    # Experts are given rows of their own, and give as many.
    rows = 2 * block.experts_per_token * block.hidden_size
    return run.evaluation * ((3 * block.intermediate_size + 4 * block.hidden_size + rows) * run.itemsize + scores)


@lru_cache(maxsize=16)
def first_identical(shape: ModelShape) -> tuple[int, ...]:
    """For each block, the first one that is the same but for its name: what is computed for that holds for all."""
    seen: dict[BlockShape, int] = {}
    return tuple(seen.setdefault(replace(block, name=""), index) for index, block in enumerate(shape.blocks))


def workspace_bytes(shape: ModelShape, run: Run, attention: str, gpu: bool) -> list[int]:
    """The highest peak of any block, by how many layers, from the first, have kept their graphs."""
    head_trains = any(block.trainable or block.tied for block in shape.blocks if block.kind == "head")
    others, kept, again = [0], [0], [0]
    known: dict[int, tuple[int, int]] = {}
    for block, alike in zip(shape.blocks, first_identical(shape), strict=True):
        if block.kind == "head":
            others.append(head_bytes(shape, block, run, head_trains, gpu))
        elif block.kind != "layer":
            # An embedding's dense gradient, and the gradient rows in FP32.
            others.append(block.trainable * run.itemsize + run.micro_tokens * block.hidden_size * 4)
        else:
            if alike not in known:
                known[alike] = layer_bytes(block, run, attention, True), layer_bytes(block, run, attention, False)
            kept.append(known[alike][0])
            again.append(known[alike][1])
    if materializes_logits(shape, run):
        # Also of heads that are part of another block.
        others.append((5 + run.itemsize) * run.micro_tokens * shape.vocab_size)
    before = [*accumulate(kept, max)]
    after = [*accumulate([0, *again[:0:-1]], max)][::-1]
    return [max(*others, *pair) for pair in zip(before, after, strict=True)]
