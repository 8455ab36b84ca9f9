"""Weights are saved in the dtype they were loaded in. FP32 is joined from the master's halves without a full copy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests import small

import megatrain as mt
from megatrain import files
from megatrain.checkpoint import states
from megatrain.lazy import is_lazy
from megatrain.native import library as native
from megatrain.store.parameter import states_of

BUILDERS = {"llama": small.llama, "gpt2": small.gpt2, "mixtral": small.mixtral, "qwen3_moe": small.qwen3_moe}


def attached(build: Callable[..., Any] = small.llama, seed: int = 0, **settings: Any) -> tuple[Any, Any, Any]:
    model = build(seed)
    engine = mt.Engine(model, device="cpu", **({"precision": "bf16"} | settings))
    return model, engine, engine.optimizer(lr=1e-2)


def step(model: Any, optimizer: Any) -> None:
    model(**small.batch()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def masters(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.master().clone() for name, parameter in model.named_parameters()}


def dtypes(directory: Path) -> set[torch.dtype]:
    return {tensor.dtype for path in directory.glob("*.safetensors") for tensor in load_file(path).values()}


def config_dtype(directory: Path) -> Any:
    return json.loads((directory / "config.json").read_text())["dtype"]


@pytest.mark.parametrize("name", BUILDERS)
def test_a_model_loaded_in_fp32_is_saved_in_fp32(tmp_path: Path, name: str) -> None:
    model, engine, optimizer = attached(BUILDERS[name])
    step(model, optimizer)
    engine.save(tmp_path / "engine", optimizer)
    model.save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "given", True, model.state_dict())
    expected = masters(model)
    for folder in ("engine", "model", "given"):
        assert dtypes(tmp_path / folder) == {torch.float32}
        assert config_dtype(tmp_path / folder) == "float32"
        stock = type(model).from_pretrained(tmp_path / folder)
        assert small.same(dict(stock.named_parameters()), expected)
    assert model.dtype == torch.bfloat16, "saving must not change the compute dtype"
    for with_optimizer in (True, False):
        other, fresh, another = attached(BUILDERS[name], seed=1)
        fresh.load(tmp_path / "engine", another if with_optimizer else None)
        assert small.same(masters(other), expected)


@pytest.mark.parametrize("build", [small.mixtral, small.qwen3_moe], ids=["mixtral", "qwen3_moe"])
def test_merged_experts_are_read_one_by_one_and_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Callable[..., Any]
) -> None:
    """RAM may not hold the model a second time. The config of a model made from another one's may say BF16."""
    model, engine, optimizer = attached(build)
    step(model, optimizer)
    engine.save(tmp_path, optimizer)
    other, fresh, another = attached(build, seed=1)
    other.config.dtype = torch.bfloat16
    load, loaded = type(other).from_pretrained, list[Any]()

    def from_pretrained(*args: Any, **options: Any) -> Any:
        result = load(*args, **options)
        loaded.append(result[0])
        return result

    monkeypatch.setattr(type(other), "from_pretrained", from_pretrained)
    fresh.load(tmp_path, another)
    assert all(is_lazy(parameter) for parameter in loaded[0].parameters())
    assert small.same(masters(other), masters(model))


def test_residuals_are_not_zero(tmp_path: Path) -> None:
    """Otherwise the tests above would pass with BF16 values in FP32 files."""
    model, engine, _ = attached()
    engine.save(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in saved.values())
    assert small.same({name: saved[name] for name in masters(model)}, dict(small.llama().named_parameters()))


@pytest.mark.parametrize("again", [False, True], ids=["one engine", "a second engine"])
def test_a_model_loaded_in_bf16_is_saved_in_bf16(tmp_path: Path, again: bool) -> None:
    model = small.llama().to(torch.bfloat16)
    engine = mt.Engine(model, device="cpu")
    step(model, engine.optimizer(lr=1e-2))
    if again:
        # The second engine adopts the masters in FP32.
        engine.close()
        engine = mt.Engine(model, device="cpu")
    engine.save(tmp_path)
    assert dtypes(tmp_path) == {torch.bfloat16}
    assert config_dtype(tmp_path) == "bfloat16"


@pytest.mark.parametrize("bf16", [True, False])
def test_a_trainer_saves_the_same_dtypes_as_transformers(tmp_path: Path, bf16: bool) -> None:
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "bf16": bf16}
    for kind in (transformers.Trainer, mt.Trainer):
        trainer = kind(
            model=small.llama(), args=small.arguments(tmp_path / kind.__module__, **options), train_dataset=small.rows()
        )
        trainer.train()
        trainer.save_model(str(tmp_path / kind.__module__ / "last"))
    for folder in ("checkpoint-2", "last"):
        ours, theirs = (tmp_path / kind.__module__ / folder for kind in (mt.Trainer, transformers.Trainer))
        left, right = (load_file(path / "model.safetensors") for path in (ours, theirs))
        assert left.keys() == right.keys()
        assert dtypes(ours) == dtypes(theirs) == {torch.float32}
        assert config_dtype(ours) == config_dtype(theirs)


def test_a_checkpoint_with_bf16_weights_and_residuals_resumes_exactly(tmp_path: Path) -> None:
    """Versions before 0.5 saved these weights in BF16 and the residuals with the moments."""
    model, engine, optimizer = attached()
    step(model, optimizer)
    engine.save(tmp_path, optimizer)
    named: dict[str, Any] = dict(model.named_parameters())
    save_file({n: p.host().clone() for n, p in named.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    listed = [path for path in files.regular_files(tmp_path) if path.name != "manifest.json"]
    states.seal(model, optimizer, tmp_path, listed)
    other, fresh, another = attached(seed=1)
    fresh.load(tmp_path, another)
    assert small.same(masters(other), masters(model))
    for name, parameter in other.named_parameters():
        assert torch.equal(states_of(parameter)["residual"], states_of(named[name])["residual"])


def test_a_plain_module_with_split_masters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
    model = torch.nn.ModuleDict({"layers": layers, "again": layers[0]})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = mt.Engine(model, device="cpu", precision="bf16")
    engine.save(tmp_path, engine.optimizer())
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], before[name]) for name in saved)
    assert {name.removeprefix("again.") for name in before if name not in saved} == {"weight", "bias"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_host_state_dict_can_be_read_and_pickled_but_not_written(tmp_path: Path, precision: str) -> None:
    model, engine, _ = attached(precision=precision)
    state = engine.host_state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    expected = masters(model)[name]
    assert torch.equal(state[name].cpu(), expected)
    assert torch.equal(state[name] + 0, expected)
    assert torch.equal(state[name].t().cpu(), expected.t())
    assert torch.equal(torch.from_numpy(state[name].numpy()), expected)
    torch.save(state, tmp_path / "state.pt")
    assert torch.equal(torch.load(tmp_path / "state.pt")[name], expected)
    with pytest.raises(mt.errors.MegaTrainError, match="read-only"):
        state[name].zero_()
    assert torch.equal(masters(model)[name], expected)


def peak_growth(work: Callable[[], None]) -> int:
    """The largest growth of the process in bytes during `work`."""

    def read(field: str) -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split(f"{field}:")[1].split()[0]) << 10

    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the peak of a process cannot be reset here")
    before = read("VmRSS")
    work()
    return read("VmHWM") - before


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_save_makes_no_second_copy_of_the_weights(tmp_path: Path, precision: str) -> None:
    model = small.llama(hidden_size=256, intermediate_size=1024, num_hidden_layers=24)
    weight_bytes = sum(parameter.numel() for parameter in model.parameters()) * 4
    engine = mt.Engine(model, device="cpu", precision=precision)
    shard = weight_bytes // 16
    # Memory cached by the allocator would hide a copy.
    native.trim()
    grown = peak_growth(lambda: model.save_pretrained(tmp_path, max_shard_size=shard))
    # FP32 needs no copy, and split masters are joined one shard at a time. The bound of half the weights allows for
    # memory that the allocator caches.
    assert grown < weight_bytes // 2, f"{grown / 1e6:.0f} MB for {weight_bytes / 1e6:.0f} MB of weights"
    engine.close()
