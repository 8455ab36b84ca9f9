"""Models of real shapes with random weights, without downloads."""

from __future__ import annotations

from functools import partial

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from megatrain.lazy import Load

QWEN = {"model_type": "qwen2", "vocab_size": 152064, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
SHAPES: dict[str, dict[str, object]] = {
    "tiny": {"model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 688,
             "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4},
    "llama2-7b": {"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
                  "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
                  "max_position_embeddings": 32768},
    "llama3.2-1b": {"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
                    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
                    "max_position_embeddings": 32768, "tie_word_embeddings": True},
    "llama3-8b": {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
                  "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                  "max_position_embeddings": 32768},
    "gpt2-xl": {"model_type": "gpt2", "vocab_size": 50257, "hidden_size": 1600, "num_hidden_layers": 48,
                "num_attention_heads": 25, "max_position_embeddings": 1024},
    "gemma2-2b": {"model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216,
                  "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "deepseek-v2-lite": {"model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
                         "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
                         "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
                         "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
                         "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                         "v_head_dim": 128, "max_position_embeddings": 32768},
    "qwen2.5-1.5b": QWEN | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                            "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
                            "tie_word_embeddings": True},
    "qwen2.5-3b": QWEN | {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
                          "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936,
                          "tie_word_embeddings": True},
    "qwen2.5-7b": QWEN | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                          "num_attention_heads": 28, "num_key_value_heads": 4},
    "qwen2.5-14b": QWEN | {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
                           "num_attention_heads": 40, "num_key_value_heads": 8},
    "qwen2.5-32b": QWEN | {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
                           "num_attention_heads": 40, "num_key_value_heads": 8},
    "qwen3-32b": QWEN | {"model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600,
                         "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
                         "vocab_size": 151936},
    "qwen3-30b-a3b": {"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
                      "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
                      "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
                      "max_position_embeddings": 32768, "norm_topk_prob": True},
}  # fmt: skip

PIECE = 1 << 25
"""Numbers that are drawn at once."""


def config_of(shape: str, **overrides: object) -> PreTrainedConfig:
    fields = SHAPES[shape] | overrides
    return AutoConfig.for_model(str(fields["model_type"]), **{k: v for k, v in fields.items() if k != "model_type"})


def random_model(
    shape: str, dtype: torch.dtype, seed: int = 0, device: str = "cpu", lazy: bool = False, **overrides: object
) -> PreTrainedModel:
    """A model of the given shape, with weights from N(0, 0.02), drawn on the GPU if there is one.

    `lazy`: every weight is drawn when an engine reads it, with the same bits. Until then the model takes no RAM.
    """
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config_of(shape, **overrides), dtype=dtype)
    load = Load()
    load.recording = False
    filled: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in filled:
                constant = None if parameter.ndim > 1 else float(key == "weight")
                draw = partial(_drawn, parameter.shape, dtype, constant, seed << 32 | len(filled), device)
                values = load.tensor(draw, tuple(parameter.shape), dtype) if lazy else draw()
                filled[id(parameter)] = torch.nn.Parameter(values)
            module._parameters[key] = filled[id(parameter)]
    model.tie_weights()
    return model if device == "cpu" else model.to(device)


def _drawn(size: torch.Size, dtype: torch.dtype, constant: float | None, seed: int, device: str) -> torch.Tensor:
    """One weight; in pieces, so that little GPU memory is needed beside what a plan has reserved."""
    values = torch.empty(size, dtype=dtype, device=device)
    if constant is not None:
        return values.fill_(constant)
    source = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(source).manual_seed(seed)
    for piece in values.view(-1).split(PIECE):
        piece.copy_(torch.empty(len(piece), dtype=dtype, device=source).normal_(0.0, 0.02, generator=generator))
    return values


def matmul_parameters(model: PreTrainedModel) -> int:
    """Parameters in matrix products of every token: all but the embedding and inactive experts, the head once."""
    embedding, config = model.get_input_embeddings().weight.numel(), model.config
    total = sum(p.numel() for p in model.parameters()) - (0 if config.tie_word_embeddings else embedding)
    routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    experts = getattr(config, "num_experts", 0) or getattr(config, "n_routed_experts", 0) or 1
    return total - routed + routed * getattr(config, "num_experts_per_tok", 1) // experts
