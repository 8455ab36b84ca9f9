"""Models as plain numbers: from configs, live models, models on the meta device, and models attached to an engine."""

from types import SimpleNamespace

import pytest
import torch
from benchmarks.shapes import SHAPES, matmul_parameters, random_model
from tests.unit.planner.made_up import shape_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

import megatrain as mt
from megatrain.errors import NothingToStream, SettingsError
from megatrain.model.shapes import describe
from megatrain.planner.memory import slab_bytes
from megatrain.planner.run import Run


def tiny(**overrides):
    return random_model("tiny", torch.bfloat16, **overrides)


@pytest.mark.parametrize("shape", ["qwen3-30b-a3b", "deepseek-v2-lite"])
def test_only_active_experts_count_as_matmul_parameters(shape):
    small = {"num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 48, "vocab_size": 256}
    model = random_model(shape, torch.bfloat16, **small)
    described, experts = describe(model), [p for name, p in model.named_parameters() if ".experts." in name]
    config = model.config
    per_token, total = config.num_experts_per_tok, getattr(config, "num_experts", 0) or config.n_routed_experts
    active = sum(p.numel() for p in experts) * per_token // total
    assert sum(block.expert_matmul_parameters for block in described.blocks) == active
    assert described.matmul_parameters == pytest.approx(matmul_parameters(model), rel=0.01)


def test_a_config_and_its_model_are_described_alike():
    model = tiny()
    live, config = describe(model), describe(model.config)
    assert live.blocks == config.blocks
    assert live.precision == "bf16"
    assert live.parameters == sum(p.numel() for p in model.parameters())
    assert live.matmul_parameters == pytest.approx(matmul_parameters(model), rel=0.001)
    kinds = [block.kind for block in live.blocks]
    assert kinds == ["embedding", *["layer"] * 6, "other", "head"]
    layer = live.blocks[1]
    assert (layer.hidden_size, layer.intermediate_size, layer.heads, layer.kv_heads, layer.head_dim) == (
        256, 688, 8, 4, 32
    )  # fmt: skip


def test_a_model_attached_to_an_engine():
    before = describe(tiny())
    model = tiny()
    with mt.Engine(model, device="cpu") as engine:
        after = describe(model)
        assert after.blocks == before.blocks
        real = [slab.layout.nbytes for slab in engine.slabs]
        assert [slab_bytes(slab, Run().itemsize)[0] for block in after.blocks for slab in block.slabs] == real


def test_a_model_on_meta():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny().config, dtype=torch.bfloat16)
    assert describe(model).blocks == describe(tiny()).blocks


def test_tied_weights_have_one_owner():
    shape = describe(tiny(tie_word_embeddings=True))
    embedding, head = shape.blocks[0], shape.blocks[-1]
    assert embedding.tied
    assert head.tied
    assert head.slabs == ()
    assert head.matmul_parameters == embedding.parameters == 512 * 256


def test_frozen_parameters_have_no_states():
    model = tiny()
    model.model.layers[0].requires_grad_(False)
    shape = describe(model)
    assert shape.blocks[1].trainable == 0
    assert shape.trainable == shape.parameters - shape.blocks[1].parameters


def test_fp32_parameters_of_a_bf16_model_stay_fp32():
    model = tiny()
    norm = model.model.layers[0].input_layernorm
    norm.weight = torch.nn.Parameter(norm.weight.float())
    assert sorted(slab.itemsize or 0 for slab in describe(model).blocks[1].slabs) == [0, 4]


def test_plain_modules():
    model = torch.nn.ModuleList(torch.nn.Linear(16, 64) for _ in range(3))
    shape = describe(model)
    assert [block.kind for block in shape.blocks] == ["layer"] * 3
    assert shape.precision == "fp32"
    with pytest.raises(NothingToStream):
        describe(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("config", [SimpleNamespace(n_embd=16), {"n_embd": 16}, "small", None])
def test_configs_of_other_libraries_are_ignored(config):
    model = torch.nn.Module()
    model.config = config
    model.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 64) for _ in range(3))
    shape = describe(model)
    assert [block.kind for block in shape.blocks] == ["layer"] * 3
    assert shape.blocks[0].parameters == 16 * 64 + 64


def test_the_precision_is_that_of_the_config():
    assert describe(AutoConfig.for_model("llama", num_hidden_layers=2, dtype="float32")).precision == "fp32"
    assert describe(AutoConfig.for_model("llama", num_hidden_layers=2)).precision == "bf16"


@pytest.mark.parametrize("kind", ["t5", "bart", "mixtral", "gemma2", "mamba"])
def test_other_architectures(kind):
    config = AutoConfig.for_model(kind)
    shape = describe(config)
    assert shape.parameters > 1e7
    assert shape.matmul_parameters <= shape.parameters * 1.5
    assert sum(block.kind == "layer" for block in shape.blocks) > 1


@pytest.mark.parametrize(
    "kind", ["llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "paligemma", "idefics3", "mllama", "llama4"]
)
def test_configs_with_images_describe_the_full_model(kind):
    config = AutoConfig.for_model(kind)
    assert not config.architectures
    shape = describe(config)
    assert sum("vision" in block.name or "visual" in block.name for block in shape.blocks if block.kind == "layer") > 1
    assert shape.vocab_size == config.get_text_config().vocab_size


def test_speech():
    shape = describe(AutoConfig.for_model("whisper"))
    assert [block.name for block in shape.blocks if block.kind == "layer"][::4] == [
        "model.encoder.layers.0", "model.decoder.layers.0"
    ]  # fmt: skip


def test_a_vision_tower_is_read_from_its_own_config():
    shape = describe(AutoConfig.for_model("llava"))
    layers = [block for block in shape.blocks if block.kind == "layer"]
    seen = {(b.hidden_size, b.intermediate_size, b.heads, b.kv_heads, b.head_dim) for b in layers if "vision" in b.name}
    assert seen == {(1024, 4096, 16, 16, 64)}
    assert {(b.hidden_size, b.intermediate_size, b.heads) for b in layers if "vision" not in b.name} == {
        (4096, 11008, 32)
    }


def test_sliding_windows_belong_to_attention_layers():
    config = AutoConfig.for_model("gemma3")
    layers = [block for block in describe(config).blocks if block.kind == "layer"]
    assert all(block.span == 0 for block in layers if "vision" in block.name)
    text = config.get_text_config()
    assert [block.span for block in layers if "vision" not in block.name] == [
        text.sliding_window if kind == "sliding_attention" else 0 for kind in text.layer_types
    ]
    projections = [b for b in describe(AutoConfig.for_model("gemma3n_text")).blocks if "altup_projections" in b.name]
    assert projections
    assert not any(block.span for block in projections)


def test_other_objects_are_refused():
    with pytest.raises(SettingsError, match="int"):
        describe(7)
    with pytest.raises(SettingsError, match="no file or directory"):
        describe("/nowhere/at/all")
    config = AutoConfig.for_model("llama")
    config.hidden_act = "none of these"
    with pytest.raises(SettingsError, match=r"LlamaConfig \(KeyError.*complete the config"):
        describe(config)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
        return func(*args, **kwargs or {})


def test_a_dense_config_is_described_without_running_its_layers():
    fields = SHAPES["llama2-7b"] | {"num_hidden_layers": 100}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with Products() as products:
        model = torch.nn.Linear(2, 2, bias=False)
        model(torch.zeros(1, 2))
        assert products.count == 1
        assert len(describe(config).blocks) == 103
    assert products.count == 1


def test_7b():
    shape = shape_of("qwen2.5-7b")
    assert shape.parameters == 7_615_616_512
    assert shape.vocab_size == 152064
    assert shape.blocks[1].parameters == 233_057_792
