"""LoRA adapters inside blocks: the frozen base streams, the adapters train, and results match plain peft."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity import compare, zoo
from tests.tiny import differences, engine_of, gradients, roles

import megatrain as mt
from megatrain.compute.head import Head
from megatrain.compute.logits import LazyLogits
from megatrain.errors import UnsupportedCall

peft = pytest.importorskip("peft")

STEPS = 3
TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "qwen3_moe": ["q_proj", "o_proj"],
}


def lora(family: str = "llama", *, dropout: float = 0.0, base: torch.dtype = torch.float32, **options: Any) -> Any:
    """A LoRA model with adapters that are not zero, so every adapter matrix has a gradient."""
    model = zoo.build(family).to(base)
    config_fields = {"target_modules": TARGETS[family], "fan_in_fan_out": family == "gpt2"} | options
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=dropout, **config_fields)
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, config, autocast_adapter_dtype=True)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return wrapped.train()


def train(model: Any, optimizer: Any, family: str = "llama", steps: int = STEPS) -> list[Any]:
    seen: list[Any] = []
    torch.manual_seed(3)
    for window in zoo.windows(family, steps, micro_batches=2):
        for batch in window:
            loss = model(**batch).loss
            (loss / 2).backward()
            seen.append(loss.detach().float())
        seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach() + 0 for name, p in model.named_parameters() if p.requires_grad}


def assert_match(ours: list[Any], plain: list[Any], tolerance: float = compare.GRADIENT) -> None:
    """Compare the losses of all steps and the gradients of the first. In later steps the weights differ."""
    mine, theirs = ([e for e in seen if isinstance(e, torch.Tensor)] for seen in (ours, plain))
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    first, expected = (next(e for e in seen if isinstance(e, dict)) for seen in (ours, plain))
    assert {name for name, g in first.items() if g is None} == {name for name, g in expected.items() if g is None}
    for name, gradient in expected.items():
        if gradient is not None:
            off = (first[name].double() - gradient.double()).norm() / gradient.double().norm()
            assert off < tolerance, f"{name}: {off:.1e}"


@pytest.mark.parametrize("policy", ["recompute", "store", "offload"])
@pytest.mark.parametrize("family", TARGETS)
def test_equals_plain_peft(family: str, policy: str):
    plain = lora(family)
    model = copy.deepcopy(plain)
    options = {"lr": 1e-3, "weight_decay": 0.01}
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    reference = train(
        plain, torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], foreach=False, **options), family
    )
    with engine_of(model, policy=policy, slots=2, precision="fp32") as engine:
        ours = train(model, engine.optimizer(max_grad_norm=None, **options), family)
        assert_match(ours, reference)
        adapters = trained(model)
        for name, expected in trained(plain).items():
            torch.testing.assert_close(adapters[name], expected, rtol=0, atol=compare.WEIGHT)
            assert not torch.equal(expected, before[name]), "an adapter did not train"
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                assert torch.equal(parameter.detach() + 0, before[name]), f"{name} is frozen but changed"
                assert "lora" not in name


def test_the_frozen_base_streams_and_has_no_states():
    """The base streams through slots layer by layer and has only weights."""
    model = lora()
    with engine_of(model, slots=1) as engine:
        optimizer = engine.optimizer(lr=1e-3)
        train(model, optimizer, steps=1)
        frozen = {p.slab.index for p in model.parameters() if not p.requires_grad}
        adapters = {p.slab.index for p in model.parameters() if p.requires_grad}
        assert frozen
        assert adapters
        assert not frozen & adapters, "a slab must be frozen or trained"
        for slab in engine.slabs:
            assert (not slab.moments) == (slab.index in frozen), slab.name
            assert slab.grad.allocated == (slab.index in adapters), slab.name
        base, adapter_bytes = (sum(engine.slabs[i].layout.nbytes for i in ids) for ids in (frozen, adapters))
        assert base > 2 * adapter_bytes
        # Only one layer of the base is in a slot at a time, and all layers were fetched in forward and backward.
        fetched = engine.counters.bytes_h2d
        assert engine._step.fetcher.slot_bytes() < base
        assert fetched > 2 * base, "two micro-batches fetch the base at least twice"
        names = [block.name for block in engine.blocks]
        assert sum(".layers." in name for name in names) == 3, "adapters must be part of the block that contains them"


def test_dropout_matches_plain_peft():
    plain = lora(dropout=0.2)
    model = copy.deepcopy(plain)
    adamw = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.01)
    reference = train(plain, adamw)
    with engine_of(model) as engine:
        assert_match(train(model, engine.optimizer(lr=1e-3, weight_decay=0.01)), reference)
    without_dropout = lora()
    with engine_of(without_dropout) as engine:
        assert differences(train(without_dropout, engine.optimizer(lr=1e-3))[:1], reference[:1]) != []


def test_a_bf16_base_with_fp32_adapters():
    """The base stays in BF16 and the adapters in FP32, as loaded, without residuals."""
    plain = lora(base=torch.bfloat16)
    model = copy.deepcopy(plain)
    assert {p.dtype for p in plain.parameters() if p.requires_grad} == {torch.float32}
    adamw = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.01)
    reference = train(plain, adamw)
    with engine_of(model, slots=2) as engine:
        assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {
            (torch.bfloat16, False), (torch.float32, True),
        }  # fmt: skip
        ours = train(model, engine.optimizer(lr=1e-3, weight_decay=0.01))
        # Matrix products are in BF16, and the chunked head rounds differently.
        assert_match(ours, reference, tolerance=2e-2)
        for name, expected in trained(plain).items():
            assert (trained(model)[name] - expected).abs().max() < 2 * 1e-3 * STEPS
        assert all(slab.residual is None for slab in engine.slabs)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_policies_windows_and_slots_are_bitwise_neutral(precision: str):
    results = []
    for settings in ({}, {"policy": "store", "slots": 1}, {"policy": "offload", "lanes": "threads"}, {"window": True}):
        windowed = settings.pop("window", False)
        model = lora(dropout=0.1)
        with engine_of(model, precision=precision, **settings) as engine:
            optimizer = engine.optimizer(lr=1e-2)
            for step in range(2):

                def task(seed: int, model: Any = model) -> torch.Tensor:
                    torch.manual_seed(seed)
                    loss = model(**zoo.batch("llama", seed)).loss
                    loss.backward()
                    return loss.detach()

                tasks = [lambda seed=seed: task(seed) for seed in range(3 * step, 3 * step + 3)]
                losses = engine.window(tasks) if windowed else [each() for each in tasks]
                optimizer.step()
                optimizer.zero_grad()
            results.append([losses, roles(engine)])
    for other in results[1:]:
        assert differences(other, results[0]) == []


def test_a_saved_adapter_loads_in_plain_peft(tmp_path: Path):
    model = lora()
    base = zoo.build("llama")
    with engine_of(model) as engine:
        train(model, engine.optimizer(lr=1e-2))
        model.save_pretrained(tmp_path)
        with torch.no_grad():
            expected = model.eval()(**zoo.batch("llama", 5)).logits
    written = {path.name for path in tmp_path.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= written
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 200_000, "the file must hold only the adapter"
    again = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(**zoo.batch("llama", 5)).logits, expected, rtol=1e-6, atol=1e-6)
        plain = zoo.build("llama").eval()(**zoo.batch("llama", 5)).logits
    assert not torch.allclose(plain, expected, atol=1e-3), "the adapter has no effect"


def test_release_returns_a_plain_peft_model():
    model = lora()
    with engine_of(model) as engine:
        train(model, engine.optimizer(lr=1e-2))
        with torch.no_grad():
            expected = model.eval()(**zoo.batch("llama", 5)).logits
        engine.release()
    merged = model.merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(merged(**zoo.batch("llama", 5)).logits, expected, rtol=1e-4, atol=1e-4)


def test_disabled_adapters():
    """`disable_adapter` gives the reference model of preference losses."""
    model = lora()
    with engine_of(model), torch.no_grad():
        with model.disable_adapter():
            got = model(**zoo.batch("llama", 5)).logits
        torch.testing.assert_close(got, zoo.build("llama")(**zoo.batch("llama", 5)).logits, rtol=1e-6, atol=1e-6)
        assert not torch.allclose(got, model(**zoo.batch("llama", 5)).logits, atol=1e-3)


def test_the_head_is_chunked_with_adapters(monkeypatch: pytest.MonkeyPatch):
    """The model with the loss is inside peft's wrapper."""
    calls: list[int] = []
    loss = Head.chunked
    monkeypatch.setattr(Head, "chunked", lambda self, *a: calls.append(self.tokens) or loss(self, *a))
    model = lora()
    with engine_of(model, head_chunk=7):
        out = model(**zoo.batch("llama", 0))
        out.loss.backward()
        assert isinstance(out.logits, LazyLogits)
    assert calls


def test_training_with_a_trainer(tmp_path: Path):
    """Runs with accumulation match transformers, and peft can read the checkpoint."""
    import transformers
    from tests import small

    runs = []
    for kind in (mt.Trainer, transformers.Trainer):
        torch.manual_seed(0)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
        model = peft.get_peft_model(small.llama(), config)
        arguments = small.arguments(
            tmp_path / kind.__module__, gradient_accumulation_steps=2, save_strategy="steps", save_steps=2
        )
        trainer = kind(model=model, args=arguments, train_dataset=small.rows())
        trainer.train()
        runs.append(trainer)
    assert small.losses(runs[0]) == pytest.approx(small.losses(runs[1]), abs=2e-6)
    mine, theirs = (trained(trainer.model) for trainer in runs)
    for name, expected in theirs.items():
        torch.testing.assert_close(mine[name], expected, rtol=0, atol=2e-6)
    folder = Path(runs[0].args.output_dir) / "checkpoint-4"
    again = peft.PeftModel.from_pretrained(small.llama(), folder)
    for name, value in again.named_parameters():
        if "lora" in name:
            assert torch.equal(value.detach(), mine[name]), name


@pytest.mark.parametrize("wrapped", [True, False], ids=["prefix tuning", "passed by the user"])
def test_a_filled_cache_is_refused(wrapped: bool) -> None:
    """It was dropped, so that layers attended to nothing of the prefix."""
    model = zoo.build("llama")
    batch = zoo.batch("llama", 0)
    if wrapped:
        model = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    else:
        with torch.no_grad():
            batch["past_key_values"] = model(input_ids=batch["input_ids"], use_cache=True).past_key_values
        batch.pop("attention_mask", None)
    with engine_of(model.train()), pytest.raises(UnsupportedCall, match="a filled key/value cache"):
        model(**batch)


PROJECTIONS = {"target_modules": ["q_proj", "v_proj"]}
METHODS: dict[str, Any] = {
    "IA3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "VeRA": peft.VeraConfig(r=4, **PROJECTIONS),
    # Its vectors are one parameter of all layers.
    "VB-LoRA": peft.VBLoRAConfig(num_vectors=16, vector_length=8, r=2, topk=2, **PROJECTIONS),
    "AdaLoRA": peft.AdaLoraConfig(r=4, total_step=10, tinit=1, tfinal=1, **PROJECTIONS),
    "LoKr": peft.LoKrConfig(r=4, **PROJECTIONS),
    "OFT": peft.OFTConfig(r=0, oft_block_size=8, use_cayley_neumann=False, **PROJECTIONS),
    "layer norms": peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "tokens": peft.TrainableTokensConfig(token_indices=[1, 2, 3]),
    "prompt tuning": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "adapter prompts": peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=2),
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_other_methods_have_the_gradients_of_plain_peft(method: str) -> None:
    model = zoo.build("llama")
    torch.manual_seed(1)
    plain = peft.get_peft_model(model, METHODS[method]).train()
    model = copy.deepcopy(plain)
    batch = zoo.batch("llama", 0)
    plain(**batch).loss.backward()
    with engine_of(model):
        model(**batch).loss.backward()
        found = gradients(model)
    expected = gradients(plain)
    assert any(gradient is not None and gradient.any() for gradient in expected.values())
    for name, gradient in expected.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7, msg=name)
