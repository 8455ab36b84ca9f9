"""More architectures: state-space and hybrid models, encoder-decoders, encoders and older models.

Sizes come from `generic.shrunken`. An entry adds only fields whose value cannot be found by name. Each model is trained
for two steps in test_wider.py. Models of the zoo are tested in more ways.

    model = wider.build("jamba")
    batches = wider.batches("jamba")
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedModel,
)

from . import generic, zoo

CAUSAL = "causal"
STATE_SPACE = "state space"
HYBRID = "hybrid"
ENCODER_DECODER = "encoder-decoder"
ENCODER = "encoder"

AUTO: dict[str, Any] = {
    CAUSAL: AutoModelForCausalLM,
    STATE_SPACE: AutoModelForCausalLM,
    HYBRID: AutoModelForCausalLM,
    ENCODER_DECODER: AutoModelForSeq2SeqLM,
    ENCODER: AutoModelForMaskedLM,
}

CAUSAL_KINDS = (CAUSAL, STATE_SPACE, HYBRID)

TRAITS = zoo.TRAITS | {
    "recurrence": "a state that runs along the sequence, in place of attention",
    "short_conv": "short convolutions mix neighbouring tokens",
    "linear_attention": "attention as a recurrence, in chunks",
    "sparse_attention": "an indexer chooses the keys",
    "dynamic_mask": "the values decide which keys are seen",
    "hyper_connections": "several residual streams, mixed at every layer",
    "unmarked": "no GradientCheckpointingLayer: layers are members of a ModuleList",
    "split_layers": "attention and MLP of a layer live in different lists",
    "looped": "the same layers run several times",
    "reversible": "activations are rebuilt in the model's own backward, which reads weights outside any block",
    "byte_patches": "bytes gathered in patches by another small model",
    "position_bias": "a bias computed from token distances and given to every layer",
    "language_adapters": "a set of adapters per language; only one is used",
    "post_norm": "norms after the residual sum",
    "segments": "token types beside positions",
    "audio": "spectrograms through a convolution",
}


@dataclass(frozen=True, kw_only=True)
class Wide:
    kind: str
    traits: tuple[str, ...]
    fields: dict[str, Any] = field(default_factory=dict)
    """Changes to the reduced default configuration."""

    model_type: str | None = None
    """The key in `CONFIG_MAPPING`, if it is not the entry's name."""

    masked: bool = True
    """Whether a padded batch is tested. False if the model ignores padding or needs fixed lengths."""

    seeds_itself: bool = False
    """Whether the model takes seeds from the clock, so that random states cannot be compared."""


def _hybrid(*kinds: str) -> list[str]:
    return list(kinds)


_DROPOUTS_OFF = {
    "hidden_dropout_prob": 0.0,
    "local_attention_probs_dropout_prob": 0.0,
    "lsh_attention_probs_dropout_prob": 0.0,
}

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}

_BLT_PART = {
    "vocab_size": zoo.VOCAB,
    "hidden_size": zoo.HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": zoo.HEADS,
    "num_key_value_heads": zoo.HEADS,
    "max_position_embeddings": 128,
}
_BLT_LOCAL = {**_BLT_PART, "hidden_size_global": 64, "num_hidden_layers": 2, "cross_attn_k": 2}

WIDER: dict[str, Wide] = {
    # ---- causal, with the usual structure
    "gemma": Wide(kind=CAUSAL, traits=("tied",)),
    "gemma4_text": Wide(
        kind=CAUSAL,
        traits=("tied", "shared_kv", "per_layer_inputs", "sliding_window", "layers_differ", "qk_norm"),
        fields={
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gptj": Wide(kind=CAUSAL, traits=("parallel_residual",)),
    "codegen": Wide(kind=CAUSAL, traits=("parallel_residual", "fused_qkv")),
    "gpt_neo": Wide(
        kind=CAUSAL, traits=("tied", "layers_differ", "learned_positions"),
        fields={"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    ),
    "gpt_bigcode": Wide(kind=CAUSAL, traits=("tied", "fused_qkv", "learned_positions", "attention_bias")),
    "xglm": Wide(kind=CAUSAL, traits=("tied", "attention_bias")),
    "biogpt": Wide(kind=CAUSAL, traits=("tied", "attention_bias", "learned_positions")),
    "persimmon": Wide(kind=CAUSAL, traits=("fused_qkv", "qk_norm")),
    "phi": Wide(kind=CAUSAL, traits=("parallel_residual", "attention_bias")),
    "phimoe": Wide(kind=CAUSAL, traits=("moe",)),
    "stablelm": Wide(kind=CAUSAL, traits=("plain",)),
    "starcoder2": Wide(kind=CAUSAL, traits=("tied", "attention_bias", "sliding_window")),
    "nemotron": Wide(kind=CAUSAL, traits=("plain",)),
    "arcee": Wide(kind=CAUSAL, traits=("plain",)),
    "apertus": Wide(kind=CAUSAL, traits=("qk_norm",)),
    "seed_oss": Wide(kind=CAUSAL, traits=("attention_bias",)),
    "helium": Wide(kind=CAUSAL, traits=("plain",)),
    "glm4": Wide(kind=CAUSAL, traits=("sandwich_norm",)),
    "exaone4": Wide(kind=CAUSAL, traits=("qk_norm", "sandwich_norm", "no_rope_layers", "layers_differ")),
    "olmo3": Wide(kind=CAUSAL, traits=("qk_norm", "sandwich_norm", "sliding_window", "layers_differ")),
    "cohere2": Wide(kind=CAUSAL, traits=("tied", "parallel_residual", "sliding_window", "layers_differ")),
    "ernie4_5": Wide(kind=CAUSAL, traits=("tied",)),
    "ernie4_5_moe": Wide(kind=CAUSAL, traits=("moe", "layers_differ")),
    "hunyuan_v1_dense": Wide(kind=CAUSAL, traits=("qk_norm",)),
    "hunyuan_v1_moe": Wide(kind=CAUSAL, traits=("moe", "shared_expert", "qk_norm")),
    "llama4_text": Wide(kind=CAUSAL, traits=("moe", "shared_expert", "no_rope_layers", "layers_differ")),
    "olmoe": Wide(kind=CAUSAL, traits=("moe", "qk_norm")),
    "granitemoeshared": Wide(
        kind=CAUSAL, traits=("moe", "shared_expert", "multipliers"), fields={"shared_intermediate_size": 16}
    ),
    "minimax_m2": Wide(kind=CAUSAL, traits=("moe", "router_bias", "qk_norm")),
    "dbrx": Wide(
        kind=CAUSAL, traits=("moe", "fused_qkv"),
        fields={
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": zoo.HIDDEN},
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        },
    ),
    "deepseek_v2": Wide(
        kind=CAUSAL, traits=("moe", "shared_expert", "latent_attention", "layers_differ"),
        fields={"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "dots1": Wide(
        kind=CAUSAL, traits=("moe", "shared_expert", "router_bias", "layers_differ"),
        fields={"n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    ),
    "longcat_flash": Wide(
        kind=CAUSAL, traits=("moe", "latent_attention", "split_layers"), fields={"qk_head_dim": 16}
    ),
    "jetmoe": Wide(kind=CAUSAL, traits=("moe", "tied")),
    "doge": Wide(kind=CAUSAL, traits=("dynamic_mask", "qk_norm")),
    "diffllama": Wide(kind=CAUSAL, traits=("layers_differ",)),
    "moshi": Wide(kind=CAUSAL, traits=("sliding_window",)),
    "deepseek_v4": Wide(
        kind=CAUSAL, traits=("moe", "hyper_connections", "sparse_attention", "layers_differ")
    ),
    "cohere_compass_text": Wide(
        kind=CAUSAL, traits=("tied",),
        fields={
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
                for kind in ("full_attention", "sliding_attention")
            },
        },
    ),
    "qwen4_exp_text": Wide(
        kind=HYBRID, traits=("sparse_attention", "linear_attention", "moe", "layers_differ"),
        fields={
            "indexer_budget": 8, "indexer_compress_ratio": 4, "indexer_n_heads": 4, "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
        },
    ),
    "bailing_hybrid": Wide(
        kind=HYBRID, traits=("linear_attention", "moe", "layers_differ"),
        fields={"num_expert_group": 2, "topk_group": 1},
    ),
    "hrm_text": Wide(kind=CAUSAL, traits=("looped",), fields={"use_cache": False}),
    "blt": Wide(
        kind=CAUSAL, traits=("byte_patches", "layers_differ"), masked=False,
        fields={
            "patcher_config": {**_BLT_PART, "num_hidden_layers": 2},
            "encoder_config": _BLT_LOCAL,
            "decoder_config": _BLT_LOCAL,
            "global_config": {**_BLT_PART, "hidden_size": 64, "num_hidden_layers": 3},
            "encoder_hash_byte_group_vocab": 50,
            "encoder_hash_byte_group_size": [2, 3],
            "max_patch_length": 4,
            "use_cache": False,
        },
    ),
    # ---- causal, older or unusual
    "ctrl": Wide(kind=CAUSAL, traits=("unmarked", "tied"), fields={"n_positions": 64, "dff": 48}),
    "openai-gpt": Wide(kind=CAUSAL, traits=("unmarked", "tied", "post_norm", "learned_positions")),
    "xlnet": Wide(kind=CAUSAL, traits=("unmarked", "relative_bias", "segments")),
    "xlm": Wide(kind=CAUSAL, traits=("unmarked", "tied", "split_layers", "post_norm")),
    "gpt_neox_japanese": Wide(kind=CAUSAL, traits=("unmarked", "fused_qkv")),
    "cpmant": Wide(kind=CAUSAL, traits=("unmarked", "position_bias"), masked=False),
    "reformer": Wide(
        kind=CAUSAL, traits=("unmarked", "reversible", "layers_differ"), masked=False, seeds_itself=True,
        # Its dropout takes seeds from the clock, so two plain runs would differ. Dropout is off.
        fields={
            **_DROPOUTS_OFF,
            "axial_pos_shape": (4, 5),
            "axial_pos_embds_dim": (16, 16),
            "attn_layers": ["local", "lsh", "local", "lsh"],
            "local_attn_chunk_length": 5,
            "lsh_attn_chunk_length": 5,
            "num_buckets": 2,
            "hash_seed": 0,
        },
    ),
    "bert-generation": Wide(kind=CAUSAL, traits=("learned_positions", "attention_bias")),
    "bert-lm": Wide(kind=CAUSAL, model_type="bert", traits=("tied", "post_norm", "segments", "attention_bias")),
    "xmod": Wide(
        kind=CAUSAL, traits=("language_adapters", "tied"),
        fields={"default_language": "en_XX", "languages": ["en_XX", "de_DE"]},
    ),
    "modernbert-decoder": Wide(kind=CAUSAL, traits=("tied", "sliding_window", "layers_differ")),
    # ---- state space and recurrent
    "mamba": Wide(kind=STATE_SPACE, traits=("state_space", "tied")),
    "falcon_mamba": Wide(kind=STATE_SPACE, traits=("state_space",)),
    "rwkv": Wide(kind=STATE_SPACE, traits=("recurrence",)),
    "xlstm": Wide(
        kind=STATE_SPACE, traits=("recurrence", "softcap"), masked=False,
        # With a cache, its backward fails in plain PyTorch because states were changed in place.
        fields={"chunk_size": 4, "mode": "train", "use_cache": False},
    ),
    # ---- hybrids
    "jamba": Wide(
        kind=HYBRID, traits=("state_space", "moe", "layers_differ"),
        fields={
            "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
            "num_experts": 4,
        },
    ),
    "bamba": Wide(
        kind=HYBRID, traits=("state_space", "layers_differ"), fields={**_MAMBA, "attn_layer_indices": [1, 3]}
    ),
    "falcon_h1": Wide(
        kind=HYBRID, traits=("state_space", "multipliers"), fields={**_MAMBA, "mamba_d_ssm": 64}
    ),
    "granitemoehybrid": Wide(
        kind=HYBRID, traits=("state_space", "moe", "multipliers", "layers_differ"),
        fields={
            **_MAMBA, "layer_types": _hybrid("mamba", "attention", "mamba", "attention"),
            "num_local_experts": 4, "num_experts_per_tok": 2,
        },
    ),
    "nemotron_h": Wide(kind=HYBRID, traits=("state_space", "layers_differ")),
    "zamba": Wide(
        kind=HYBRID, traits=("state_space", "shared_weights", "layers_differ"),
        fields={
            "num_hidden_layers": 6,
            "layers_block_type": _hybrid("mamba", "mamba", "hybrid", "mamba", "mamba", "hybrid"),
            "attn_layer_period": 3, "attn_layer_offset": 2, "n_mamba_heads": 2,
            "attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": zoo.HEADS,
        },
    ),
    "recurrent_gemma": Wide(kind=HYBRID, traits=("recurrence", "tied", "softcap", "layers_differ")),
    "lfm2": Wide(
        kind=HYBRID, traits=("short_conv", "tied", "layers_differ"),
        fields={"layer_types": _hybrid("conv", "full_attention", "conv", "full_attention")},
    ),
    "lfm2_moe": Wide(
        kind=HYBRID, traits=("short_conv", "moe", "layers_differ"),
        fields={"layer_types": _hybrid("conv", "full_attention", "conv", "full_attention"), "num_dense_layers": 1},
    ),
    "qwen3_next": Wide(kind=HYBRID, traits=("linear_attention", "moe", "shared_expert", "layers_differ")),
    "qwen3_5_text": Wide(kind=HYBRID, traits=("linear_attention", "layers_differ")),
    "olmo_hybrid": Wide(kind=HYBRID, traits=("linear_attention", "layers_differ")),
    "kimi_linear": Wide(
        kind=HYBRID, traits=("linear_attention", "latent_attention", "moe", "layers_differ")
    ),
    "minimax": Wide(kind=HYBRID, traits=("linear_attention", "moe", "layers_differ")),
    # ---- encoder-decoder
    "mt5": Wide(kind=ENCODER_DECODER, traits=("relative_bias",), fields={"initializer_factor": 0.3}),
    "umt5": Wide(kind=ENCODER_DECODER, traits=("relative_bias",), fields={"initializer_factor": 0.3}),
    "longt5": Wide(
        kind=ENCODER_DECODER, traits=("relative_bias", "sliding_window"),
        fields={"decoder_start_token_id": 0, "initializer_factor": 0.3},
    ),
    "switch_transformers": Wide(
        kind=ENCODER_DECODER, traits=("relative_bias", "moe", "layers_differ"),
        fields={"decoder_start_token_id": 0, "initializer_factor": 0.3},
    ),
    "t5gemma": Wide(kind=ENCODER_DECODER, traits=("softcap", "sliding_window", "layers_differ")),
    "mbart": Wide(kind=ENCODER_DECODER, traits=("tied", "attention_bias", "learned_positions")),
    "marian": Wide(kind=ENCODER_DECODER, traits=("tied", "attention_bias")),
    "pegasus": Wide(kind=ENCODER_DECODER, traits=("tied", "attention_bias")),
    "pegasus_x": Wide(kind=ENCODER_DECODER, traits=("tied", "layers_differ"), masked=False),
    "led": Wide(kind=ENCODER_DECODER, traits=("tied", "sliding_window", "learned_positions")),
    "m2m_100": Wide(kind=ENCODER_DECODER, traits=("tied", "attention_bias")),
    "nllb-moe": Wide(kind=ENCODER_DECODER, traits=("tied", "moe", "layers_differ")),
    "prophetnet": Wide(kind=ENCODER_DECODER, traits=("relative_bias",), masked=False),
    "whisper": Wide(kind=ENCODER_DECODER, traits=("audio", "tied", "attention_bias"), masked=False),
    # ---- encoder only
    "bert": Wide(kind=ENCODER, traits=("tied", "post_norm", "segments"), fields={"is_decoder": False}),
    "albert": Wide(
        kind=ENCODER, traits=("unmarked", "shared_weights", "looped"), fields={"num_hidden_groups": 2}
    ),
    "modernbert": Wide(kind=ENCODER, traits=("tied", "sliding_window", "layers_differ")),
    "deberta-v2": Wide(kind=ENCODER, traits=("relative_bias", "post_norm"), fields={"is_decoder": False}),
    "funnel": Wide(
        kind=ENCODER, traits=("unmarked", "relative_bias"), masked=False,
        fields={"initializer_range": 0.01, "initializer_std": 0.02},
    ),
}  # fmt: skip

ALL = tuple(WIDER)
PADDED = tuple(name for name, entry in WIDER.items() if entry.masked)


def present(name: str) -> bool:
    """Whether the installed transformers has this architecture."""
    return (WIDER[name].model_type or name) in CONFIG_MAPPING


def model_types(*kinds: str) -> set[str]:
    return {entry.model_type or name for name, entry in WIDER.items() if entry.kind in kinds}


def build(name: str) -> PreTrainedModel:
    entry = WIDER[name]
    auto = AutoModelForSpeechSeq2Seq if "audio" in entry.traits else AUTO[entry.kind]
    return generic.tiny(generic.shrunken(CONFIG_MAPPING[entry.model_type or name], **entry.fields), auto)


def batches(name: str, steps: int = 2, padded: bool = False) -> list[dict[str, Tensor]]:
    """The same tokens in every step. New tokens could have a gradient near Adam's eps; see `zoo.windows`."""
    return [_batch(WIDER[name], padded)] * steps


def _batch(entry: Wide, padded: bool) -> dict[str, Tensor]:
    batch = generic.batch(padded=padded)
    if entry.kind != ENCODER_DECODER:
        return batch
    labels = torch.randint(5, zoo.VOCAB, (len(batch["labels"]), 14), generator=torch.Generator().manual_seed(2))
    if padded:
        labels[1, -4:] = -100
    if "audio" in entry.traits:
        frames = torch.randn(2, 80, 256, generator=torch.Generator().manual_seed(3))
        return {"input_features": frames, "labels": labels}
    return {**batch, "labels": labels}
