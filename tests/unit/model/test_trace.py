"""A trace on meta tensors counts the bytes that layers keep on the CPU and covers their peaks."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2LMHeadModel

from megatrain.model import shapes, trace
from megatrain.model.shapes import describe
from megatrain.planner.activations import evaluation_bytes, graph_bytes, layer_bytes
from megatrain.planner.run import Run

LENGTH = 256
BASE = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 48, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, **EXPERTS,
}  # fmt: skip
FORMULA = {
    "llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {"head_dim": 32}, "granite": {}, "olmo2": {},
    "gemma2": {"head_dim": 32}, "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {"num_experts": 8, "head_dim": 32, **EXPERTS},
}  # fmt: skip
COUNTED = {
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
    "phi": {}, "phi3": {}, "gpt_neox": {}, "opt": {"ffn_dim": 352, "word_embed_proj_dim": 128}, "falcon": {},
    "bloom": {"n_layer": 2, "n_head": 4}, "cohere2": {}, "starcoder2": {}, "gemma3_text": {"head_dim": 32},
    "deepseek_v3": LATENT, "deepseek_v2": LATENT | {"topk_method": "greedy"},
    "llama4_text": {"num_local_experts": 4, "head_dim": 32, "intermediate_size_mlp": 352},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 96, "moe_layer_start_index": 0},
    "qwen3_next": {
        "num_experts": 8, "shared_expert_intermediate_size": 96, "head_dim": 32, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32, **EXPERTS,
    },
    "mamba": {}, "mamba2": {"num_heads": 8, "head_dim": 32, "expand": 2, "state_size": 32},
    "jamba": {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 4, "attn_layer_offset": 3},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16},
}  # fmt: skip


def config_of(kind, **fields):
    return AutoConfig.for_model(kind, **BASE | (FORMULA | COUNTED)[kind] | fields)


def on_the_cpu(config, name):
    """Bytes that a layer's graph keeps, and the peak of its backward above them, measured on the CPU."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    layer = model.get_submodule(name)
    calls = []
    hook = layer.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    model(input_ids=torch.randint(0, 256, (1, LENGTH)), use_cache=False)
    hook.remove()
    args, kwargs = trace.tree_map(trace._detach, calls[0])
    weights = list(layer.parameters())
    external = {trace._storage(t) for t in (*trace._tensors((args, kwargs)), *weights)}
    kept = {}

    def pack(tensor):
        if trace._storage(tensor) not in external:
            kept[trace._storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with trace._LiveBytes(external) as live:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = trace._tensors(layer(*args, **kwargs))[0]
        before_backward = live.now
        wanted = [t for t in (*trace._tensors((args, kwargs)), *weights) if t.requires_grad]
        torch.autograd.grad(output, wanted, torch.ones_like(output), allow_unused=True)
    return sum(kept.values()), live.peak - before_backward


def last_layer(config):
    """A model's shape, its last layer, and the bytes which that layer keeps and needs on the CPU."""
    shape = describe(config)
    assert shape.guessed == ()
    block = [block for block in shape.blocks if block.kind == "layer"][-1]
    return shape, block, *on_the_cpu(config, block.name)


@pytest.mark.parametrize("kind", COUNTED)
def test_traced_bytes_match_the_cpu(kind):
    shape, block, kept, peak = last_layer(config_of(kind))
    assert block.traced is not None
    run = Run(length=LENGTH)
    planned = graph_bytes(block, run, shape.attention)
    assert kept * 0.95 <= planned <= kept * 1.25
    assert graph_bytes(block, Run(length=LENGTH, compile=True), shape.attention) >= planned
    assert layer_bytes(block, run, shape.attention, stored=True) >= peak * 0.95
    assert layer_bytes(block, run, shape.attention, stored=False) >= (peak + kept) * 0.95


@pytest.mark.parametrize("kind", FORMULA)
def test_the_formula_matches_the_cpu(kind):
    shape, block, kept, _ = last_layer(config_of(kind))
    assert block.traced is None
    assert kept * 0.95 <= graph_bytes(block, Run(length=LENGTH), shape.attention) <= kept * 1.6


def test_a_trace_agrees_with_a_gpu_measurement():
    """Bytes per token of a layer's graph, from benchmarks/results/2026-11-15-h200.md."""
    config = AutoConfig.for_model(
        "llama", hidden_size=4096, intermediate_size=11008, num_hidden_layers=2, num_attention_heads=32
    )
    model = shapes.meta_model(config)
    counted = trace.trace(model, ["model.layers.0", "model.layers.1"], encoder_decoder=False)
    assert counted["model.layers.0"].graph.at(8192, 2048) / 8192 == pytest.approx(194_696, rel=1e-3)


def test_value_heads_of_another_width_keep_no_scores():
    config = config_of("deepseek_v3", v_head_dim=32)
    layer = next(block for block in describe(config).blocks if block.kind == "layer")
    assert layer.head_dim == (32 + 16 + 32) // 2
    assert layer.traced.graph.pair == 0


def test_shared_experts_of_ernie():
    layer = next(block for block in describe(config_of("ernie4_5_moe")).blocks if block.kind == "layer")
    assert layer.intermediate_size == (2 + 2) * 96


def test_every_kind_of_layer_is_counted():
    config = config_of("jamba", num_hidden_layers=4)
    layers = [block for block in describe(config).blocks if block.kind == "layer"]
    assert len({block.traced for block in layers}) == 3
    mixer, attention = layers[0], layers[3]
    assert mixer.traced.graph.token > 3 * attention.traced.graph.token


def test_scores_are_counted_in_hybrid_models():
    config = config_of("jamba", num_hidden_layers=4)
    config._attn_implementation = "eager"
    mixer, *_, attention = [block for block in describe(config).blocks if block.kind == "layer"]
    assert mixer.traced.graph.pair == mixer.traced.work.pair == mixer.traced.forward.pair == 0
    # For each of four heads: at least scores and probabilities, two bytes each.
    assert attention.traced.graph.pair >= 4 * (2 + 2)


def test_evaluation_is_counted():
    shape = describe(config_of("mamba"))
    block = next(block for block in shape.blocks if block.kind == "layer")
    assert block.traced.forward.pair == 0
    run = Run(length=LENGTH, evaluation=4096, predictions=False)
    for gpu in (False, True):
        assert evaluation_bytes(shape, run, shape.attention, gpu) >= block.traced.forward.at(4096, LENGTH) > 0


def test_scores_of_eager_attention_are_counted():
    shape = describe(config_of("phi"))
    block = next(block for block in shape.blocks if block.kind == "layer")
    fused, eager = (graph_bytes(block, Run(length=LENGTH, attention=a), "sdpa") for a in (None, "eager"))
    assert eager - fused >= 8 * block.heads * LENGTH * LENGTH


def test_tracing_does_not_change_the_model():
    config = config_of("phi")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    shapes._trace_cache.clear()
    before, random = [p.clone() for p in model.parameters()], torch.get_rng_state()
    assert describe(model).blocks == describe(config).blocks
    assert not model.training
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))
    assert "forward" not in vars(model.model.layers[0])


def test_a_model_is_traced_once(monkeypatch):
    traced = []
    monkeypatch.setattr(shapes, "trace", lambda *args: traced.append(args) or trace.trace(*args))
    config = config_of("mamba", hidden_size=192)
    assert describe(config) == describe(config)
    assert len(traced) == 1


def test_layers_that_cannot_be_traced_are_named():
    assert describe(AutoConfig.for_model("whisper")).guessed == ("WhisperDecoderLayer", "WhisperEncoderLayer")
    assert describe(torch.nn.ModuleList(torch.nn.Linear(16, 64) for _ in range(3))).guessed == ("Linear",)
    # The language model is covered by the formula.
    assert describe(AutoConfig.for_model("llava")).guessed == ("CLIPEncoderLayer",)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((2560, 5120, 7680), (0, 10, 0)),
        ((2660, 5220, 7780), (100, 10, 0)),
        ([3 * n * n + 10 * n for n in trace.LENGTHS], (0, 10, 3)),
        # The peak grows faster than linearly, but too little for a quadratic term.
        ((2560, 5120, 7700), (0, 2580 / 256, 0)),
    ],
)
def test_growth(sizes, expected):
    formula = trace._fit(trace.LENGTHS, list(sizes), trace.MIN_QUADRATIC_SHARE)
    assert (formula.fixed, formula.token, formula.pair) == pytest.approx(expected, abs=1e-6)
    assert formula.at(768, 768) >= sizes[2] - 1e-6


def test_tracing_draws_no_random_numbers():
    """OPT with layerdrop draws a number per layer and skips some layers."""
    traced_shapes = []
    for seed in range(3):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        shapes._trace_cache.clear()
        traced_shapes.append(describe(config_of("opt", layerdrop=0.5, num_hidden_layers=8)))
        assert torch.equal(torch.get_rng_state(), before)
    assert traced_shapes[0] == traced_shapes[1] == traced_shapes[2]
    assert any(block.traced for block in traced_shapes[0].blocks)


class LoopsOnValues(GPT2LMHeadModel):
    """Loops until a value is reached. Meta tensors have no values."""

    def forward(self, input_ids=None, **more):
        remaining = input_ids.float()
        while (remaining > 0.5).any():
            remaining = remaining / 2
        return super().forward(input_ids=input_ids, **more)


def test_models_that_differ_from_their_config_can_be_planned():
    def build(cls=GPT2LMHeadModel, layers=3):
        return cls(config_of("gpt2", n_layer=layers)).to(torch.bfloat16)

    grown, odd, cut = build(), build(layers=4), build(layers=5)
    grown.transformer.h.append(copy.deepcopy(grown.transformer.h[0]))
    odd.config.unheard_of = torch.nn.ReLU()
    cut.transformer.h = cut.transformer.h[:2]
    for model in (grown, odd, cut, build(LoopsOnValues)):
        before = {name: repr(value) for name, value in vars(model.config).items()}
        assert describe(model).parameters == sum(p.numel() for p in model.parameters())
        assert {name: repr(value) for name, value in vars(model.config).items()} == before
    # A trace of the shortened model must not be used for the full one.
    assert all(block.traced for block in describe(build(layers=5)).blocks if block.kind == "layer")


def test_tracing_does_not_change_the_config():
    config = AutoConfig.for_model("llava")
    config.text_config.dtype, config.vision_config.dtype = torch.bfloat16, torch.float32
    describe(config)
    assert (config.text_config.dtype, config.vision_config.dtype) == (torch.bfloat16, torch.float32)
