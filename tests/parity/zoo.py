"""Tiny models of many architectures, each chosen for a special property.

An entry of the table `ZOO` has the configuration, the traits it tests, the settings that switch dropout on, and the
parameters that are key biases.

    model = zoo.build("gemma2", attention_dropout=0.1)
    batch = zoo.batch("gemma2", seed=0, padded=True)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

VOCAB = 97
WINDOW = 8
"""The size of every sliding window in the zoo. Sequences are longer, so the window has an effect."""

LENGTH = 20
HEADS = 4
HIDDEN = 32
DROPOUT = 0.1


@dataclass(frozen=True, kw_only=True)
class KeyBias:
    """A bias added to attention keys that are not rotated.

    A constant added to every key shifts all scores of a query equally, and softmax ignores the shift. The true gradient
    is zero, and the computed one is rounding noise, which Adam scales up to full steps. Rotated keys (qwen2, gpt_oss)
    are different, because there the shift depends on the position."""

    parameter: str
    """A regular expression for the full name of the parameter."""

    part: Callable[[Tensor], Tensor]
    """Returns a mask of the elements of the parameter that belong to keys without rotation."""


def _all_of_it(bias: Tensor) -> Tensor:
    return torch.ones(bias.shape, dtype=torch.bool)


def _middle_third(bias: Tensor) -> Tensor:
    """The key biases, if query, key and value biases are concatenated."""
    mask = torch.zeros(3, bias.numel() // 3, dtype=torch.bool)
    mask[1] = True
    return mask.flatten()


def _middle_third_of_each_head(bias: Tensor, rotated: int = 0) -> Tensor:
    """The key biases, if the three biases are concatenated per head. A head may start with rotated elements."""
    mask = torch.zeros(HEADS, 3, bias.numel() // (3 * HEADS), dtype=torch.bool)
    mask[:, 1, rotated:] = True
    return mask.flatten()


@dataclass(frozen=True, kw_only=True)
class Entry:
    config: dict[str, Any]
    """Arguments of the architecture's config class. They are not filtered, so a wrong name raises."""

    traits: frozenset[str]
    """Special properties of this architecture; see `TRAITS`."""

    required: bool = False
    """Whether the architecture must be supported."""

    dropout: dict[str, Any] = field(default_factory=dict)
    """Config changes that switch every dropout on."""

    key_bias: KeyBias | None = None
    """Parameters whose gradient is rounding noise, if the architecture has any."""

    encoder_decoder: bool = False


TRAITS = {
    "plain": "rotary positions, RMS norm, gated MLP: the common decoder",
    "tied": "embedding and head share one weight",
    "sliding_window": "attention limited to the last tokens",
    "layers_differ": "layers of several kinds in one stack",
    "attention_bias": "biases on the attention projections",
    "qk_norm": "norms on queries and keys",
    "softcap": "scores or logits squashed by tanh",
    "sandwich_norm": "norms after attention and MLP as well as before",
    "parallel_residual": "attention and MLP read the same input",
    "fused_qkv": "one matrix makes queries, keys and values",
    "learned_positions": "a position embedding beside the token embedding",
    "alibi": "positions as biases on the scores, handed to every layer",
    "no_rope_layers": "some layers run without rotary positions",
    "multipliers": "scalars on embedding, residual, attention and logits",
    "sinks": "a learned score per head that no token owns",
    "moe": "a router and several experts",
    "router_logits": "the router's scores can join the loss",
    "router_bias": "a buffer, not a parameter, shifts the routing",
    "shared_expert": "an expert every token visits",
    "latent_attention": "low-rank queries and keys",
    "state_space": "a recurrence in place of attention",
    "shared_weights": "one set of weights used by several layers",
    "shared_kv": "late layers read the keys and values of earlier ones",
    "per_layer_inputs": "an embedding that feeds every layer",
    "encoder_decoder": "two stacks; the second reads the first through cross-attention",
    "relative_bias": "a position bias made in the first layer and passed on",
    "conv1d": "weights stored transposed",
}


def _llama_like(**more: Any) -> dict[str, Any]:
    """Fields with the names that most configurations use."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def _traits(*names: str) -> frozenset[str]:
    return frozenset(names)


ZOO: dict[str, Entry] = {
    "llama": Entry(
        required=True,
        config=_llama_like(),
        traits=_traits("plain"),
        dropout={"attention_dropout": DROPOUT},
    ),
    "qwen2": Entry(
        required=True,
        config=_llama_like(
            use_sliding_window=True,
            sliding_window=WINDOW,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        ),
        traits=_traits("attention_bias", "sliding_window", "layers_differ"),
        dropout={"attention_dropout": DROPOUT},
    ),
    "qwen3": Entry(
        required=True,
        config=_llama_like(head_dim=8),
        traits=_traits("qk_norm"),
        dropout={"attention_dropout": DROPOUT},
    ),
    "mistral": Entry(
        required=True,
        config=_llama_like(head_dim=8, sliding_window=WINDOW),
        traits=_traits("sliding_window"),
        dropout={"attention_dropout": DROPOUT},
    ),
    "gemma2": Entry(
        required=True,
        config=_llama_like(
            head_dim=8,
            sliding_window=WINDOW,
            query_pre_attn_scalar=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        traits=_traits("tied", "softcap", "sandwich_norm", "sliding_window", "layers_differ"),
        dropout={"attention_dropout": DROPOUT},
    ),
    "gemma3_text": Entry(
        config=_llama_like(
            head_dim=8,
            sliding_window=WINDOW,
            query_pre_attn_scalar=8,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        ),
        traits=_traits("tied", "qk_norm", "sandwich_norm", "sliding_window", "layers_differ"),
        dropout={"attention_dropout": DROPOUT},
    ),
    "gpt_oss": Entry(
        required=True,
        config=_llama_like(
            head_dim=8,
            sliding_window=WINDOW,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        traits=_traits("moe", "sinks", "attention_bias", "sliding_window", "layers_differ"),
        dropout={"attention_dropout": DROPOUT},
    ),
    "mixtral": Entry(
        required=True,
        config=_llama_like(sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2),
        traits=_traits("moe", "router_logits", "sliding_window"),
        dropout={"attention_dropout": DROPOUT},
    ),
    "qwen3_moe": Entry(
        required=True,
        config=_llama_like(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
        traits=_traits("moe", "router_logits", "qk_norm"),
        dropout={"attention_dropout": DROPOUT},
    ),
    "qwen2_moe": Entry(
        config=_llama_like(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            mlp_only_layers=[0],
        ),
        traits=_traits("moe", "router_logits", "shared_expert", "attention_bias", "layers_differ"),
        dropout={"attention_dropout": DROPOUT},
    ),
    "deepseek_v3": Entry(
        required=True,
        config=_llama_like(
            num_key_value_heads=HEADS,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        ),
        traits=_traits("moe", "router_bias", "shared_expert", "latent_attention", "layers_differ"),
        dropout={"attention_dropout": DROPOUT},
    ),
    "glm4_moe": Entry(
        config=_llama_like(
            head_dim=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
        ),
        traits=_traits("moe", "router_bias", "shared_expert", "layers_differ"),
        dropout={"attention_dropout": DROPOUT},
    ),
    "gpt2": Entry(
        required=True,
        config={
            "vocab_size": VOCAB,
            "n_embd": HIDDEN,
            "n_layer": 3,
            "n_head": HEADS,
            "n_inner": 48,
            "n_positions": 128,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        traits=_traits("tied", "conv1d", "fused_qkv", "attention_bias", "learned_positions"),
        dropout={"resid_pdrop": DROPOUT, "embd_pdrop": DROPOUT, "attn_pdrop": DROPOUT},
        key_bias=KeyBias(parameter=r"transformer\.h\.\d+\.attn\.c_attn\.bias", part=_middle_third),
    ),
    "phi3": Entry(
        config=_llama_like(sliding_window=WINDOW),
        traits=_traits("fused_qkv", "sliding_window"),
        dropout={"resid_pdrop": DROPOUT, "embd_pdrop": DROPOUT, "attention_dropout": DROPOUT},
    ),
    "olmo2": Entry(
        config=_llama_like(),
        traits=_traits("qk_norm", "sandwich_norm"),
        dropout={"attention_dropout": DROPOUT},
    ),
    "falcon": Entry(
        config={
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "num_hidden_layers": 3,
            "num_attention_heads": HEADS,
            "ffn_hidden_size": 48,
            "max_position_embeddings": 128,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        traits=_traits("tied", "fused_qkv", "parallel_residual"),
        dropout={"hidden_dropout": DROPOUT, "attention_dropout": DROPOUT},
    ),
    "mpt": Entry(
        config={
            "vocab_size": VOCAB,
            "d_model": HIDDEN,
            "n_heads": HEADS,
            "n_layers": 3,
            "expansion_ratio": 2,
            "max_seq_len": 128,
            "pad_token_id": 0,
        },
        traits=_traits("tied", "fused_qkv", "alibi"),
        # No dropout, because the config accepts only 0 and 1 for the field that the model reads.
    ),
    "opt": Entry(
        config={
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "ffn_dim": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": HEADS,
            "max_position_embeddings": 128,
            "word_embed_proj_dim": 16,
            "dropout": 0.0,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        traits=_traits("tied", "attention_bias", "learned_positions"),
        dropout={"dropout": DROPOUT, "attention_dropout": DROPOUT},
        key_bias=KeyBias(parameter=r"model\.decoder\.layers\.\d+\.self_attn\.k_proj\.bias", part=_all_of_it),
    ),
    "gpt_neox": Entry(
        config={
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": HEADS,
            "max_position_embeddings": 128,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        traits=_traits("fused_qkv", "attention_bias", "parallel_residual"),
        dropout={"hidden_dropout": DROPOUT, "attention_dropout": DROPOUT},
        key_bias=KeyBias(
            parameter=r"gpt_neox\.layers\.\d+\.attention\.query_key_value\.bias",
            part=partial(_middle_third_of_each_head, rotated=2),  # a quarter of a head size of 8
        ),
    ),
    "bloom": Entry(
        config={
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "n_layer": 3,
            "n_head": HEADS,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        traits=_traits("tied", "fused_qkv", "attention_bias", "alibi"),
        dropout={"hidden_dropout": DROPOUT, "attention_dropout": DROPOUT},
        key_bias=KeyBias(
            parameter=r"transformer\.h\.\d+\.self_attention\.query_key_value\.bias",
            part=_middle_third_of_each_head,
        ),
    ),
    "smollm3": Entry(
        config=_llama_like(no_rope_layers=[1, 0, 1]),
        traits=_traits("tied", "no_rope_layers", "layers_differ"),
        dropout={"attention_dropout": DROPOUT},
    ),
    "granite": Entry(
        config=_llama_like(
            embedding_multiplier=4.0,
            residual_multiplier=0.5,
            attention_multiplier=0.25,
            logits_scaling=2.0,
        ),
        traits=_traits("multipliers"),
        dropout={"attention_dropout": DROPOUT},
    ),
    "cohere": Entry(
        config=_llama_like(use_qk_norm=True, logit_scale=0.5),
        traits=_traits("tied", "parallel_residual", "qk_norm", "multipliers"),
        dropout={"attention_dropout": DROPOUT},
    ),
    "mamba2": Entry(
        config={
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "num_hidden_layers": 3,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 8,
            "expand": 2,
            "n_groups": 2,
            "chunk_size": 8,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        traits=_traits("state_space"),
    ),
    "zamba2": Entry(
        config=_llama_like(
            num_hidden_layers=4,
            num_key_value_heads=HEADS,
            layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
            mamba_d_state=8,
            mamba_ngroups=1,
            n_mamba_heads=8,
            chunk_size=8,
            num_mem_blocks=1,
            use_mem_rope=True,
            adapter_rank=4,
        ),
        traits=_traits("tied", "shared_weights", "state_space", "layers_differ"),
        dropout={"attention_dropout": DROPOUT},
    ),
    "gemma3n_text": Entry(
        config=_llama_like(
            num_hidden_layers=5,
            head_dim=8,
            sliding_window=WINDOW,
            layer_types=[
                "sliding_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCAB,
            num_kv_shared_layers=2,
            laurel_rank=8,
            activation_sparsity_pattern=None,
            altup_num_inputs=2,
        ),
        traits=_traits("tied", "shared_kv", "per_layer_inputs", "qk_norm", "sliding_window", "layers_differ"),
        dropout={"attention_dropout": DROPOUT},
    ),
    "t5": Entry(
        encoder_decoder=True,
        config={
            "vocab_size": VOCAB,
            "d_model": HIDDEN,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 3,
            "num_heads": HEADS,
            "initializer_factor": 0.5,  # with the default of 1, rounding grows 1000 times after `stir`
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 16,
            "dropout_rate": 0.0,
            "pad_token_id": 0,
            "eos_token_id": 2,
            "decoder_start_token_id": 0,
        },
        traits=_traits("tied", "encoder_decoder", "relative_bias", "layers_differ"),
        dropout={"dropout_rate": DROPOUT},
    ),
    "bart": Entry(
        encoder_decoder=True,
        config={
            "vocab_size": VOCAB,
            "d_model": HIDDEN,
            "encoder_layers": 3,
            "decoder_layers": 3,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "encoder_attention_heads": HEADS,
            "decoder_attention_heads": HEADS,
            "max_position_embeddings": 64,
            "dropout": 0.0,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": 2,
        },
        traits=_traits("tied", "encoder_decoder", "attention_bias", "learned_positions", "layers_differ"),
        dropout={"dropout": DROPOUT, "attention_dropout": DROPOUT, "activation_dropout": DROPOUT},
        key_bias=KeyBias(
            parameter=r"model\.(en|de)coder\.layers\.\d+\.(self|encoder)_attn\.k_proj\.bias",
            part=_all_of_it,
        ),
    ),
}

ALL = tuple(ZOO)
REQUIRED = tuple(name for name, entry in ZOO.items() if entry.required)


def having(*traits: str) -> tuple[str, ...]:
    """Names of the architectures with all of these traits."""
    unknown = set(traits) - set(TRAITS)
    if unknown:
        raise KeyError(f"no such trait: {sorted(unknown)}")
    return tuple(name for name, entry in ZOO.items() if entry.traits >= set(traits))


def build(name: str, *, seed: int = 0, attention: str | None = None, **overrides: Any) -> PreTrainedModel:
    """A new FP32 model in training mode, equal for equal seeds. `overrides` change its config."""
    entry = ZOO[name]
    config = AutoConfig.for_model(name, **{**entry.config, **overrides})
    auto = AutoModelForSeq2SeqLM if entry.encoder_decoder else AutoModelForCausalLM
    options = {} if attention is None else {"attn_implementation": attention}
    torch.manual_seed(seed)
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32, **options)
    stir(model)
    return model.train()


def stir(model: nn.Module) -> None:
    """Change initial values that would hide errors.

    Norms of one and biases of zero are equal in every layer, and with the usual small weights a tiny model is almost
    linear."""
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "bias" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
            else:
                parameter.mul_(3.0)
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                # gemma3n divides by the norm of this row and would return NaN gradients for padded batches.
                module.weight[module.padding_idx].normal_(std=0.05)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)


def batch(
    name: str, seed: int, padded: bool = False, length: int = LENGTH, rows: int | None = None
) -> dict[str, Tensor]:
    """Random tokens with labels. With `padded`, row 0 is padded on the left and row 1 on the right."""
    generator = torch.Generator().manual_seed(1000 + seed)
    if rows is None:
        rows = 3 if padded else 2
    tokens = torch.randint(3, VOCAB, (rows, length), generator=generator)
    encoder_decoder = ZOO[name].encoder_decoder
    labels = tokens.clone()
    if encoder_decoder:
        labels = torch.randint(3, VOCAB, (rows, length - 6), generator=generator)
    if not padded:
        return {"input_ids": tokens, "labels": labels}

    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    mask[1, -7:] = 0
    tokens = tokens.masked_fill(mask == 0, 0)
    if encoder_decoder:
        labels[1, -4:] = -100
    else:
        labels = labels.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def windows(name: str, steps: int, *, micro_batches: int = 1, padded: bool = False) -> list[list[dict[str, Tensor]]]:
    """A batch for every micro-batch of every step.

    Later steps have the tokens of the first step in another order. An embedding row that first occurs in a later step
    could have a gradient near Adam's eps, and rounding would decide its first update."""
    first = [batch(name, seed, padded=padded) for seed in range(micro_batches)]
    return [[_reordered(one, step) for one in first] for step in range(steps)]


def _reordered(tensors: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """Rotate columns that are neither padded nor last in any row. The last token gets no gradient."""
    middle = slice(5, 12)
    reordered = {key: value.clone() for key, value in tensors.items()}
    for key in ("input_ids", "labels"):
        reordered[key][:, middle] = tensors[key][:, middle].roll(step, dims=1)
    return reordered


def key_bias_elements(name: str, parameter_name: str, parameter: Tensor) -> Tensor:
    """A mask of the elements of a parameter that are key biases; see `KeyBias`."""
    key_bias = ZOO[name].key_bias
    if key_bias is None or not re.fullmatch(key_bias.parameter, parameter_name):
        return torch.zeros(parameter.shape, dtype=torch.bool)
    return key_bias.part(parameter)
