"""A tiny model of any architecture, made from its default configuration by reducing every size field.

This module has no list of architectures, so it also builds new ones.

    config = shrunken(MambaConfig)
    model = tiny(config)                 # raises NotTiny if the model is still large
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from . import zoo

LAYERS = 4
"""Enough for three kinds of layers, one of them repeated."""

MOST_PARAMETERS = 3_000_000


class NotTiny(Exception):
    """The shrunken configuration still makes a large model."""


class NotPlain(Exception):
    """The model does not run in plain PyTorch on tokens and labels, so it cannot be compared."""


RULES: tuple[tuple[str, int], ...] = (
    # The first pattern that matches a field's name applies.
    (r"vocab_size|num_embeddings", zoo.VOCAB),
    (r"expert_layer|attn_layer|layer_(freq|interval|period)|every|step$|_freq|interval|period", 2),
    (r"offset|top_?k_group|num_mem_blocks|num_nextn|n_shared_experts|num_shared_experts|num_token_predict|mtp", 1),
    (r"experts_per_tok|top_?k|moe_k$|n_groups?$|ngroups|num_groups?$|hash_layers|num_kv_shared", 2),
    (r"num_experts|n_routed|_experts$|num_local|expert_num|moe_num", 4),
    (r"rotary_dim|rotary_ndims", 4),
    (r"head_dim|headdim|d_head|kv_channels|d_kv|head_size|dim_head|_head_width", 8),
    (r"mamba.*heads|linear.*value_heads", 8),
    (r"linear.*key_heads", 4),
    (r"key_value_heads|kv_heads|query_groups|num_kv", 2),
    (r"heads?$|num_head", zoo.HEADS),
    (r"rank", 16),
    (r"(num|n)_(hidden_|encoder_|decoder_)?layers?$|coder_layers$|num_blocks|num_layer|n_blocks|depth$", LAYERS),
    (r"window|chunk|block_size|block_length|stride", zoo.WINDOW),
    (r"max_.*(position|length|len)|n_positions|n_ctx|context_length|position_embeddings|ctx_len", 128),
    (r"state|d_conv|conv_kernel|conv_l", 4),
    (r"expert.*(intermediate|ffn|ff)|moe.*(intermediate|ffn|ff|size)", 16),
    (r"intermediate|ffn|d_ff|n_inner|ff_dim|mlp|inner|feed", 48),
    (r"hidden|d_model|n_embd|emb|dim|width|channels|lru|size|d_inner", zoo.HIDDEN),
)

REQUIRED_FIELDS = {"head_dim": 8, "num_key_value_heads": zoo.HEADS, "n_routed_experts": 4}
"""Fields that are None by default in some classes but that their models need."""


def shrunken(kind: type[PreTrainedConfig], **fields: Any) -> PreTrainedConfig:
    """An instance of a configuration class with small sizes. `fields` override the values found by name."""
    return kind(**{**_changes(kind()), **fields})


def tiny(config: PreTrainedConfig, auto: Any = AutoModelForCausalLM, seed: int = 0) -> PreTrainedModel:
    """A model with random weights in training mode, as from `zoo.build`."""
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(config, dtype=torch.float32).parameters())
    if size > MOST_PARAMETERS:
        raise NotTiny(f"{size / 1e6:.1f} million parameters")
    torch.manual_seed(seed)
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and not parameter.any():
                # A zero projection makes all gradients before it zero, and zeros always agree.
                parameter.normal_(std=0.05)
    zoo.stir(model)
    return model.train()


def runnable(
    kind: type[PreTrainedConfig], inputs: dict[str, torch.Tensor], auto: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """A tiny model that plain PyTorch can train on these inputs, if necessary without a key/value cache."""
    try:
        model = tiny(shrunken(kind), auto)
    except NotTiny:
        raise
    except Exception as cause:  # an unknown architecture may raise any error for a reduced configuration
        raise NotPlain(f"cannot be built: {type(cause).__name__}: {cause}") from cause
    failures = []
    for cache in (None, False):
        plain = deepcopy(model)
        if cache is False:
            model.config.use_cache = plain.config.use_cache = False
        try:
            loss = plain(**inputs).loss
            loss.backward()
        except Exception as cause:
            failures.append(cause)
            continue
        if not torch.isfinite(loss):
            raise NotPlain(f"its loss is {loss.item()}")
        return model
    raise NotPlain(f"does not run: {type(failures[0]).__name__}: {failures[0]}") from failures[0]


def batch(padded: bool = False) -> dict[str, torch.Tensor]:
    """Random tokens with labels. With `padded`, row 0 is padded on the left, row 1 on the right, row 2 not at all."""
    generator = torch.Generator().manual_seed(1000)
    tokens = torch.randint(5, zoo.VOCAB, (3 if padded else 2, zoo.LENGTH), generator=generator)
    if not padded:
        return {"input_ids": tokens, "labels": tokens.clone()}
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    mask[1, -7:] = 0
    hidden = mask == 0
    labels = tokens.masked_fill(hidden, -100)
    return {"input_ids": tokens.masked_fill(hidden, 0), "attention_mask": mask, "labels": labels}


def _changes(config: PreTrainedConfig) -> dict[str, Any]:
    """Constructor arguments that make the configuration small, including its sub-configurations."""
    changes: dict[str, Any] = {}
    fields = vars(config)
    layers = fields.get(_own_name(config, "num_hidden_layers"))
    for name, value in fields.items():
        if name in config.sub_configs:
            if isinstance(value, PreTrainedConfig):
                changes[name] = {**_changes(value), "model_type": value.model_type}
        elif name.startswith("_") or isinstance(value, bool) or _is_fixed(config, name):
            continue
        elif name.endswith(("token_id", "token_index")):
            changes[name] = _token(name)
        elif isinstance(value, int):
            changes[name] = _small(name, value)
        elif value is None and name in REQUIRED_FIELDS:
            changes[name] = REQUIRED_FIELDS[name]
        elif isinstance(value, list | tuple) and isinstance(layers, int) and len(value) == layers > LAYERS:
            changes[name] = type(value)(_sample(list(value)))
    _agree(config, changes)
    return changes


def _agree(config: PreTrainedConfig, changes: dict[str, Any]) -> None:
    """Make fields consistent with each other."""
    heads, groups = _own_name(config, "num_attention_heads"), _own_name(config, "num_key_value_heads")
    if groups in changes and getattr(config, groups) == getattr(config, heads, None):
        changes[groups] = changes[heads]
    if "expand" in changes and "num_heads" in changes and "head_dim" in changes:
        changes["num_heads"] = changes["expand"] * zoo.HIDDEN // changes["head_dim"]
    if isinstance(getattr(config, "is_decoder", None), bool) and not config.is_encoder_decoder:
        changes["is_decoder"] = True


def _own_name(config: PreTrainedConfig, name: str) -> str:
    return config.attribute_map.get(name, name)


def _is_fixed(config: PreTrainedConfig, name: str) -> bool:
    """Whether the field is a property computed from other fields."""
    attribute = getattr(type(config), name, None)
    return isinstance(attribute, property) and attribute.fset is None


def _token(name: str) -> int:
    known = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return known.get(name, 3)


def _small(name: str, value: int) -> int:
    for pattern, size in RULES:
        if re.search(pattern, name):
            return min(value, size)
    return value


def _sample(values: list[Any]) -> list[Any]:
    """`LAYERS` entries in order, with as many different values as fit."""
    first: dict[Any, int] = {}
    for position, value in enumerate(values):
        first.setdefault(repr(value), position)
    chosen = sorted(first.values())[:LAYERS]
    rest = [i for i in range(len(values)) if i not in chosen]
    return [values[i] for i in sorted(chosen + rest[: LAYERS - len(chosen)])]


def config_classes(names: Iterable[str] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) -> dict[str, type[PreTrainedConfig]]:
    """Configuration classes by model type, by default those for which transformers has a causal LM."""
    return {name: CONFIG_MAPPING[name] for name in names}
