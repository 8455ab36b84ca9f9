"""Runs with LoRA adapters resume bitwise and load their best model as in transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests import small

import megatrain as mt
from megatrain.errors import CheckpointError

peft = pytest.importorskip("peft")

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dora": {"use_dora": True},
    "whole modules": {"modules_to_save": ["lm_head"]},
    "embeddings": {"target_modules": ["embed_tokens", "v_proj"]},
    "two": {"second": True},
    "two, second active": {"second": True, "active": "other"},
    "inside the model": {"inside": True},
}


def adapted(
    seed: int = 0, second: bool = False, active: str | None = None, inside: bool = False, **options: Any
) -> Any:
    """A fixed base model with adapters that are initialized from the seed."""
    base = small.llama()
    torch.manual_seed(seed)
    config_fields = {
        "task_type": "CAUSAL_LM",
        "r": 4,
        "target_modules": ["q_proj", "v_proj"],
        "lora_dropout": 0.1,
    } | options
    if inside:
        base.add_adapter(peft.LoraConfig(**config_fields))
        return base
    model = peft.get_peft_model(base, peft.LoraConfig(**config_fields))
    if second:
        model.add_adapter("other", peft.LoraConfig(**config_fields))
    if active is not None:
        model.set_adapter(active)
    return model


def new_trainer(kind: Any, directory: Path, model: Any, **changes: Any) -> Any:
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4} | changes
    return kind(
        model=model,
        args=small.arguments(directory, **options),
        train_dataset=small.rows(),
        eval_dataset=small.rows(4, seed=3),
    )


def masters(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.master().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_a_run_resumes_bitwise(tmp_path: Path, case: str, bf16: bool) -> None:
    uninterrupted = new_trainer(mt.Trainer, tmp_path, adapted(**CASES[case]), bf16=bf16)
    uninterrupted.train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = new_trainer(mt.Trainer, tmp_path, adapted(seed=1, **CASES[case]), bf16=bf16)
    before = masters(resumed.model)
    resumed.train(resume_from_checkpoint=True)
    assert small.same(masters(resumed.model), masters(uninterrupted.model))
    assert small.losses(resumed) == small.losses(uninterrupted)
    frozen = [name for name, parameter in resumed.model.named_parameters() if not parameter.requires_grad]
    other = [name for name in frozen if "lora" not in name and "modules_to_save" not in name]
    assert other
    assert all(torch.equal(before[name], masters(resumed.model)[name]) for name in other)


@pytest.mark.parametrize("case", ["plain", "whole modules"])
def test_the_best_model_matches_transformers(tmp_path: Path, case: str) -> None:
    """The evaluation loss on unseen rows rises, so the first checkpoint is the best."""
    options = {
        "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True,
        "metric_for_best_model": "loss", "greater_is_better": False,
    }  # fmt: skip
    runs = {}
    for kind in (transformers.Trainer, mt.Trainer):
        for only_model in (False, True):
            trainer = new_trainer(
                kind, tmp_path / f"{kind.__module__}-{only_model}", adapted(**CASES[case] | {"lora_dropout": 0.0}),
                save_only_model=only_model, **options,
            )  # fmt: skip
            trainer.train()
            assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
            adapter_state = peft.get_peft_model_state_dict(trainer.model)
            runs[kind.__module__, only_model] = {key: value.detach() + 0 for key, value in adapter_state.items()}
            best = load_file(Path(trainer.state.best_model_checkpoint) / "adapter_model.safetensors")
            assert small.same(best, runs[kind.__module__, only_model])
    first, *others = runs.values()
    for other in others:
        assert small.furthest(first, other) < 2e-6


def test_adapters_of_a_transformers_checkpoint_are_adopted(tmp_path: Path) -> None:
    stock = new_trainer(transformers.Trainer, tmp_path, adapted(lora_dropout=0.0))
    stock.train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    ours = new_trainer(mt.Trainer, tmp_path, adapted(seed=1, lora_dropout=0.0))
    ours.train(resume_from_checkpoint=True)
    assert small.losses(ours) == pytest.approx(small.losses(stock), abs=2e-6)


@pytest.mark.parametrize("damage", ["a tensor missing", "a tensor too many", "another shape", "no file", "cut"])
def test_a_different_adapter_is_refused_before_anything_changes(tmp_path: Path, damage: str) -> None:
    model = adapted(second=True)
    engine = mt.Engine(model, device="cpu")
    engine.save(tmp_path)
    path = tmp_path / "other" / "adapter_model.safetensors"
    values = load_file(path)
    first = next(iter(values))
    if damage == "no file":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-8])
    else:
        changed: dict[str, Any] = {
            "a tensor missing": {}, "a tensor too many": {first: values[first], "more": torch.zeros(1)},
            "another shape": {first: torch.zeros(3, 3)},
        }[damage]  # fmt: skip
        del values[first]
        save_file(values | changed, path, {"format": "pt"})
    other = adapted(seed=1, second=True)
    fresh = mt.Engine(other, device="cpu")
    before = masters(other)
    with pytest.raises(CheckpointError, match="other"):
        fresh.load(tmp_path)
    assert small.same(before, masters(other))


def test_adapter_weights_are_refused_for_a_model_without_adapters(tmp_path: Path) -> None:
    mt.Engine(adapted(), device="cpu").save(tmp_path)
    engine = mt.Engine(small.llama(), device="cpu")
    with pytest.raises(CheckpointError, match="the weights of adapters, but the model has no adapter"):
        engine.load(tmp_path)
