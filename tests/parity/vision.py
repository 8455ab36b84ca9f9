"""Tiny vision-language models with random pixels and matching image tokens. Their vision layers stream too.

model = vision.build("qwen2_5_vl")
batch = vision.batch("qwen2_5_vl")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from . import generic, zoo

IMAGE, START, END, VIDEO = 3, 4, 5, 6
"""Token ids. Ordinary tokens start at 8."""

SIDE = 16
"""Side of an image in pixels. A patch has a side of 4, so there are 4 × 4 patches, and 2 × 2 after merging."""

TRAITS = {
    "tower": "a vision tower whose last hidden states are projected",
    "inner_states": "hidden states of inner vision layers are used",
    "deepstack": "inner vision states are added to several text layers",
    "grid_rope": "rotary positions over rows and columns",
    "vision_windows": "vision attention in windows, some layers whole",
    "tiles": "an image in several pieces",
    "merge": "neighbouring patches are merged into one token",
    "pooling": "patches are averaged into fewer tokens",
    "resampler": "learned queries read the patches through their own layers",
    "cross_attention": "text layers read the image through cross-attention",
    "loose_positions": "a position table that belongs to the tower itself",
    "image_attends_itself": "image tokens see each other in both directions",
    "hybrid_text": "a text model with layers of several kinds",
}

TEXT = {
    "vocab_size": zoo.VOCAB,
    "hidden_size": zoo.HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": zoo.HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VIT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 4,
    "num_channels": 3,
}
SIGLIP = {**VIT, "model_type": "siglip_vision_model", "vision_use_head": False}
SLIDING = {"sliding_window": zoo.WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
GRID = {
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_heads": 2,
    "intermediate_size": 24,
}
GRID_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}


def _mrope(*section: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}}


def _text(model_type: str | None = None, **more: Any) -> dict[str, Any]:
    named = {} if model_type is None else {"model_type": model_type}
    return {**TEXT, **named, **more}


def _pixels(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _tokens(images: int) -> dict[str, Tensor]:
    """Two rows of two tokens, the image tokens and ten more. Image tokens have no labels."""
    tokens = torch.randint(8, zoo.VOCAB, (2, 12 + images), generator=torch.Generator().manual_seed(0))
    tokens[:, 1] = START
    tokens[:, 2 : 2 + images] = IMAGE
    labels = tokens.clone()
    labels[:, 1 : 3 + images] = -100
    return {"input_ids": tokens, "labels": labels}


def _plain(images: int, *shape: int, **more: Tensor) -> Callable[[], dict[str, Tensor]]:
    return lambda: {**_tokens(images), "pixel_values": _pixels(*(shape or (2, 3, SIDE, SIDE))), **more}


def _captioned() -> dict[str, Tensor]:
    """Inputs of a model that itself puts the image tokens before the text."""
    tokens = torch.randint(8, zoo.VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens.clone(), "pixel_values": _pixels(2, 3, SIDE, SIDE)}


def _grid() -> dict[str, Tensor]:
    """Patches of both images in one list, as from the processors of the Qwen family."""
    tokens = _tokens(4)
    kinds = (tokens["input_ids"] == IMAGE).long()
    shape = torch.tensor([[1, 4, 4], [1, 4, 4]])
    return {**tokens, "mm_token_type_ids": kinds, "pixel_values": _pixels(32, 3 * 2 * 4 * 4), "image_grid_thw": shape}


def _with_types(images: int) -> dict[str, Tensor]:
    inputs = _plain(images)()
    return {**inputs, "token_type_ids": (inputs["input_ids"] == IMAGE).long()}


def _answer_only() -> dict[str, Tensor]:
    """Image and question attend to each other in both directions. The rest is causal."""
    inputs = _plain(16)()
    types = torch.zeros_like(inputs["input_ids"])
    types[:, 20:] = 1
    return {**inputs, "token_type_ids": types}


SIZES = torch.tensor([[SIDE, SIDE], [SIDE, SIDE]])


@dataclass(frozen=True, kw_only=True)
class Sight:
    config: dict[str, Any]
    inputs: Callable[[], dict[str, Tensor]]
    tower: str
    """Prefix of the names of vision layers."""

    traits: tuple[str, ...]
    layers: int = 2
    """Number of vision layers that must stream."""


VISION: dict[str, Sight] = {
    "llava": Sight(
        config={
            "text_config": _text("llama"),
            "vision_config": {**VIT, "model_type": "clip_vision_model", "projection_dim": 16},
            "image_token_index": IMAGE,
        },
        inputs=_plain(16), tower="model.vision_tower.encoder.layers", traits=("inner_states",),
    ),
    "llava_onevision": Sight(
        config={
            "text_config": _text("qwen2"), "vision_config": SIGLIP, "image_token_index": IMAGE,
            "video_token_index": VIDEO, "image_grid_pinpoints": [[SIDE, SIDE]],
        },
        inputs=_plain(36, 2, 2, 3, SIDE, SIDE, image_sizes=SIZES),
        tower="model.vision_tower.encoder.layers", traits=("tiles",),
    ),
    "paligemma": Sight(
        config={
            "text_config": _text("gemma", head_dim=8), "vision_config": {**SIGLIP, "projection_dim": zoo.HIDDEN},
            "image_token_index": IMAGE, "projection_dim": zoo.HIDDEN,
        },
        inputs=_answer_only, tower="model.vision_tower.encoder.layers", traits=("tower", "image_attends_itself"),
    ),
    "gemma3": Sight(
        config={
            "text_config": _text(head_dim=8, query_pre_attn_scalar=8, **SLIDING),
            "vision_config": {**VIT, "vision_use_head": False},
            "image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END, "mm_tokens_per_image": 4,
        },
        inputs=lambda: _with_types(4), tower="model.vision_tower.encoder.layers",
        traits=("pooling", "image_attends_itself"),
    ),
    "qwen2_vl": Sight(
        config={
            "text_config": _text(**_mrope(1, 1, 2)),
            "vision_config": {**GRID, "depth": 2, "embed_dim": 16, "hidden_size": zoo.HIDDEN, "mlp_ratio": 2},
            **GRID_TOKENS,
        },
        inputs=_grid, tower="model.visual.blocks", traits=("grid_rope", "merge"),
    ),
    "qwen2_5_vl": Sight(
        config={
            "text_config": _text(**_mrope(1, 1, 2)),
            "vision_config": {
                **GRID, "depth": 2, "hidden_size": 16, "out_hidden_size": zoo.HIDDEN, "window_size": 8,
                "fullatt_block_indexes": [1],
            },
            **GRID_TOKENS,
        },
        inputs=_grid, tower="model.visual.blocks", traits=("grid_rope", "merge", "vision_windows"),
    ),
    "qwen3_vl": Sight(
        config={
            "text_config": _text(head_dim=8, **{"num_hidden_layers": 3}, **_mrope(2, 1, 1)),
            "vision_config": {
                **GRID, "depth": 3, "hidden_size": 16, "out_hidden_size": zoo.HIDDEN, "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
            **GRID_TOKENS,
        },
        inputs=_grid, tower="model.visual.blocks", traits=("grid_rope", "merge", "deepstack"), layers=3,
    ),
    "glm4v": Sight(
        config={
            "text_config": _text(
                rope_parameters={
                    "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2],
                    "partial_rotary_factor": 1.0,
                }
            ),
            "vision_config": {
                **GRID, "depth": 2, "hidden_size": 16, "out_hidden_size": zoo.HIDDEN, "image_size": SIDE,
            },
            "image_token_id": IMAGE, "video_token_id": VIDEO, "image_start_token_id": START, "image_end_token_id": END,
            "video_start_token_id": VIDEO, "video_end_token_id": 7,
        },
        inputs=_grid, tower="model.visual.blocks", traits=("grid_rope", "merge"),
    ),
    "idefics2": Sight(
        config={
            "text_config": _text("mistral", head_dim=8), "vision_config": VIT,
            "perceiver_config": {
                "hidden_size": zoo.HIDDEN, "resampler_n_latents": 4, "resampler_depth": 2, "resampler_n_heads": 2,
                "resampler_head_dim": 8, "num_key_value_heads": 1,
            },
            "image_token_id": IMAGE,
        },
        inputs=_plain(4, 2, 1, 3, SIDE, SIDE), tower="model.vision_model.encoder.layers",
        traits=("tiles", "resampler"),
    ),
    "idefics3": Sight(
        config={
            "text_config": _text("llama"), "vision_config": VIT, "image_token_id": IMAGE, "scale_factor": 2,
        },
        inputs=_plain(4, 2, 1, 3, SIDE, SIDE), tower="model.vision_model.encoder.layers", traits=("tiles", "merge"),
    ),
    "smolvlm": Sight(
        config={
            "text_config": _text("llama"), "vision_config": VIT, "image_token_id": IMAGE, "scale_factor": 2,
        },
        inputs=_plain(4, 2, 1, 3, SIDE, SIDE), tower="model.vision_model.encoder.layers", traits=("tiles", "merge"),
    ),
    "internvl": Sight(
        config={
            "text_config": _text("qwen2"),
            "vision_config": {**VIT, "image_size": [SIDE, SIDE], "patch_size": [4, 4]},
            "image_token_id": IMAGE, "image_seq_length": 4,
        },
        inputs=_plain(4), tower="model.vision_tower.encoder.layer", traits=("tower", "merge"),
    ),
    "mistral3": Sight(
        config={
            "text_config": _text("mistral", head_dim=8),
            "vision_config": {**VIT, "model_type": "pixtral", "head_dim": 8},
            "image_token_index": IMAGE, "spatial_merge_size": 2,
        },
        inputs=_plain(4, image_sizes=SIZES), tower="model.vision_tower.transformer.layers",
        traits=("grid_rope", "merge"),
    ),
    "mllama": Sight(
        config={
            "text_config": _text(
                cross_attention_layers=[1], rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
            ),
            "vision_config": {
                "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_global_layers": 2,
                "attention_heads": 2, "image_size": SIDE, "patch_size": 4, "max_num_tiles": 2,
                "intermediate_layers_indices": [0], "vision_output_dim": 32,
                "supported_aspect_ratios": [[1, 1], [1, 2]],
            },
            "image_token_index": IMAGE,
        },
        inputs=_plain(
            1, 2, 1, 2, 3, SIDE, SIDE,
            aspect_ratio_ids=torch.tensor([[1], [2]]),
            aspect_ratio_mask=torch.tensor([[[1, 0]], [[1, 1]]]),
            cross_attention_mask=torch.ones(2, 13, 1, 2, dtype=torch.long),
        ),
        tower="model.vision_model", traits=("tiles", "inner_states", "cross_attention", "loose_positions"), layers=4,
    ),
    "blip-2": Sight(
        config={
            "text_config": {
                "model_type": "opt", "vocab_size": zoo.VOCAB, "hidden_size": zoo.HIDDEN, "ffn_dim": 48,
                "num_hidden_layers": 2, "num_attention_heads": zoo.HEADS, "max_position_embeddings": 128,
                "word_embed_proj_dim": zoo.HIDDEN, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
            },
            "vision_config": VIT,
            "qformer_config": {
                "vocab_size": zoo.VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
                "intermediate_size": 24, "encoder_hidden_size": 16, "cross_attention_frequency": 2,
            },
            "num_query_tokens": 4, "image_token_index": IMAGE,
        },
        inputs=_plain(4), tower="vision_model.encoder.layers", traits=("tower", "resampler", "loose_positions"),
    ),
    "got_ocr2": Sight(
        config={
            "text_config": _text("qwen2"),
            "vision_config": {
                "hidden_size": 16, "output_channels": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
                "image_size": 64, "patch_size": 4, "mlp_dim": 24, "global_attn_indexes": [1], "window_size": 4,
                "initializer_range": 0.02,
            },
            "image_token_index": IMAGE,
        },
        inputs=_plain(16, 2, 3, 64, 64), tower="model.vision_tower.layers",
        traits=("vision_windows", "loose_positions"),
    ),
    "git": Sight(
        config={**TEXT, "vision_config": VIT},
        inputs=_captioned, tower="git.image_encoder", traits=("tower",),
    ),
    "aya_vision": Sight(
        config={
            "text_config": _text("cohere2", **SLIDING), "vision_config": SIGLIP, "image_token_index": IMAGE,
            "downsample_factor": 2,
        },
        inputs=_plain(4), tower="model.vision_tower.encoder.layers", traits=("merge",),
    ),
    "lfm2_vl": Sight(
        config={
            "text_config": _text("lfm2", layer_types=["conv", "full_attention"]),
            "vision_config": {
                **{key: value for key, value in SIGLIP.items() if key != "image_size"},
                "model_type": "siglip2_vision_model", "num_patches": 16,
            },
            "image_token_id": IMAGE, "downsample_factor": 2, "projector_hidden_size": 32,
        },
        inputs=_plain(
            4, 2, 16, 48,
            spatial_shapes=torch.tensor([[4, 4], [4, 4]]),
            pixel_attention_mask=torch.ones(2, 16, dtype=torch.long),
        ),
        tower="model.vision_tower.encoder.layers", traits=("merge", "hybrid_text"),
    ),
}  # fmt: skip

ALL = tuple(VISION)


def build(name: str) -> PreTrainedModel:
    return generic.tiny(CONFIG_MAPPING[name](**VISION[name].config), AutoModelForImageTextToText)


def batch(name: str) -> dict[str, Tensor]:
    return VISION[name].inputs()
