"""Reads the dimensions of a layer from its config and modules."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch


def experts(config: Any, named: Sequence[tuple[str, torch.Tensor]]) -> tuple[int, int]:
    """The number of routed experts, and of experts per token."""
    if config is None or not any(is_routed(name) for name, _ in named):
        return 0, 0
    total = _first(config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    chosen = _first(config, "num_experts_per_tok", "top_k_experts", "moe_top_k", "moe_k", "top_k")
    return (total, min(chosen or 2, total)) if total else (0, 0)


def widths(config: Any, named: Sequence[tuple[str, torch.Tensor]], experts: int, per_token: int) -> tuple[int, int]:
    """Hidden size and MLP width, from the config or, if it does not describe the block, from the block's matrices."""
    sizes = {int(size) for _, parameter in named for size in parameter.shape}
    hidden = _first(config, "hidden_size", "d_model", "n_embd")
    if not hidden or hidden not in sizes:
        vectors = [int(p.numel()) for _, p in named if p.ndim == 1]
        return (vectors[0] if vectors else min(sizes, default=1)), max(sizes, default=1)
    wide = _first(config, "intermediate_size", "ffn_dim", "n_inner", "d_ff") or 4 * hidden
    if not experts:
        return hidden, wide
    narrow = _first(config, "moe_intermediate_size") or wide
    shared = _first(config, "shared_expert_intermediate_size")
    shared = shared or (_first(config, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts") * narrow)
    return hidden, narrow * per_token + shared


def attention(config: Any, hidden: int) -> dict[str, int]:
    """Query heads, key/value heads and head width, which is averaged if queries and values differ."""
    described = hidden == _first(config, "hidden_size", "d_model", "n_embd")
    heads = _first(config, "num_attention_heads", "n_head") if described else 0
    if not heads:
        return {"heads": max(1, hidden // 64), "kv_heads": max(1, hidden // 64), "head_dim": min(64, hidden)}
    width = _first(config, "head_dim") or max(1, hidden // heads)
    content, values = _first(config, "qk_nope_head_dim"), _first(config, "v_head_dim")
    if content and values:
        # Latent attention: the config's head_dim is only the rotated part of queries and keys.
        width = (content + _first(config, "qk_rope_head_dim") + values) // 2
    return {"heads": heads, "kv_heads": _first(config, "num_key_value_heads") or heads, "head_dim": width}


def head_dim(config: Any) -> int | None:
    """The width of a model's heads; None if its config does not tell."""
    hidden = _first(config, "hidden_size", "d_model", "n_embd")
    return attention(config, hidden)["head_dim"] if hidden else None


def span(config: Any, name: str) -> int:
    """The attention window of a layer in tokens; 0: unlimited."""
    kind = _layer_type(config, name)
    if not kind and getattr(config, "use_sliding_window", None) is not False:
        kind = "sliding"  # if the config has a window, it is for all layers
    named = {"sliding": "sliding_window", "chunked": "attention_chunk_size"}
    return next((_first(config, field) for word, field in named.items() if word in kind), 0)


def attends(config: Any, name: str, layer: torch.nn.Module) -> bool:
    """Whether a layer has softmax attention and not another mixer; True for a layer without a config."""
    if kind := _layer_type(config, name):
        return ("attention" in kind and "linear" not in kind) or "hybrid" in kind
    parts = (f"{part} {type(module).__name__}".lower() for part, module in layer.named_modules())
    return config is None or any("attn" in part or "attention" in part for part in parts)


def _layer_type(config: Any, name: str) -> str:
    """The config's type of this layer; empty if the config does not list layer types."""
    types = getattr(config, "layer_types", None) or ()
    index = next((int(part) for part in reversed(name.split(".")) if part.isdigit()), 0)
    return str(types[index]) if index < len(types) else ""


def norms(layer: torch.nn.Module, hidden: int) -> dict[str, int]:
    """The number of unfused and fused norms over the hidden size, and whether queries and keys are normed."""
    modules = {
        name: module
        for name, module in layer.named_modules()
        if any(p.ndim == 1 for p in module.parameters(recurse=False)) and not isinstance(module, torch.nn.Linear)
    }
    heads = any(name.split(".")[-1] in ("q_norm", "k_norm", "q_layernorm", "k_layernorm") for name in modules)
    wide = [m for name, m in modules.items() if getattr(getattr(m, "weight", None), "shape", None) == (hidden,)]
    fused = sum(isinstance(module, torch.nn.LayerNorm) for module in wide)
    return {"norms": len(wide) - fused, "fused_norms": fused, "head_norms": heads}


def is_routed(name: str) -> bool:
    """Whether a parameter belongs to routed experts."""
    return ".experts." in f".{name}"


def _first(config: Any, *names: str) -> int:
    """The first of these fields that is a positive integer, else 0."""
    for name in names:
        with suppress(Exception):  # transformers raises for fields that differ between layers
            value = getattr(config, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return 0
