"""Tiny models and datasets for several test files."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TrainingArguments,
)

VOCAB = 64
LENGTH = 8
WEIGHTS = 2.0**-21
"""Limit on `drift` between two equivalent FP32 runs of a few steps: in each run, each step rounds a weight below 2 to a
multiple of 2**-23. Runs that are not equivalent differ a hundred times as much.
"""
LOSSES = 2.0**-17
"""Limit on the difference between losses of such runs: 16 units in the last place of a loss between 4 and 8."""
_SHAPE = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(_SHAPE | _HEADS | _TOKENS | changes)))


def gpt2(seed: int = 0, **changes: Any) -> GPT2LMHeadModel:
    """Has tied embeddings and dropout of 0.1 in four modules."""
    torch.manual_seed(seed)
    shape = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**(shape | _TOKENS | changes)))


def mixtral(seed: int = 0, **changes: Any) -> MixtralForCausalLM:
    """Its experts are merged in memory and separate on disk."""
    torch.manual_seed(seed)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**(_SHAPE | _HEADS | _TOKENS | experts | changes)))


def qwen3_moe(seed: int = 0, **changes: Any) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
    options = _SHAPE | _HEADS | _TOKENS | experts | {"output_router_logits": True} | changes
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**options))


def rows(count: int = 16, length: int = LENGTH, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Rows of random tokens; the labels are the tokens."""
    source = torch.Generator().manual_seed(seed)
    ids = [torch.randint(1, VOCAB, (length,), generator=source) for _ in range(count)]
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def batch(size: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    found = rows(size, seed=seed)
    return {name: torch.stack([row[name] for row in found]) for name in found[0]}


def arguments(directory: Any, **changes: Any) -> TrainingArguments:
    """Arguments of a short, quiet run on the CPU that logs every step and saves nothing."""
    options: dict[str, Any] = {
        "output_dir": str(directory),
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(**(options | changes))


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the model's state."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether names, dtypes and bits are equal."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def furthest(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest difference between two states, over all elements."""
    assert left.keys() == right.keys()
    return max((left[name].double() - right[name].double()).abs().max().item() for name in left)


def drift(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The mean difference between two states, in the tensor where it is largest.

    The largest difference would depend on the CPU: Adam divides by the magnitude of the gradient, so where a gradient
    is close to zero, its last bits decide how far an element moves.
    """
    assert left.keys() == right.keys()
    return max((left[name].double() - right[name].double()).abs().mean().item() for name in left)


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
