"""Bad input raises one clear sentence of the right class, and corrupts nothing."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests import small
from torch import nn
from transformers import modeling_layers
from transformers.utils import output_capturing

import megatrain as mt
from megatrain import errors
from megatrain import settings as settings_module
from megatrain.hardware import inventory
from megatrain.store import ram
from megatrain.store.parameter import StoreTensor

GIB = 1 << 30


def sentence(caught: pytest.ExceptionInfo[BaseException]) -> str:
    """The message, after checking its form: one line, not too short, ending like a sentence."""
    message = str(caught.value)
    assert isinstance(caught.value, errors.MegaTrainError)
    assert "\n" not in message
    assert len(message) > 30
    assert message.endswith("."), message
    return message


def loss_of(model: Any) -> float:
    with torch.no_grad():
        return float(model(**small.batch()).loss)


def train_a_step(model: Any, optimizer: Any) -> float:
    loss = model(**small.batch()).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def assert_plain(model: nn.Module, original: dict[str, torch.Tensor]) -> None:
    """Check that the model is ordinary and has its original weights: it runs, trains, copies, casts and saves."""
    assert not any(isinstance(parameter, StoreTensor) for parameter in model.parameters())
    assert small.same(original, small.snapshot(model))
    reference = small.llama()
    assert loss_of(model) == loss_of(reference)
    for each in (model, reference):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        train_a_step(each, optimizer)
    assert small.same(small.snapshot(model), small.snapshot(reference))
    copy.deepcopy(model)
    assert "forward" not in model.model.layers[0].__dict__
    assert next(model.half().parameters()).dtype == torch.float16


# ---- one engine per model, open and closed


def test_a_second_engine_on_one_model_is_refused() -> None:
    model = small.llama()
    engine = mt.Engine(model, device="cpu")
    optimizer = engine.optimizer(lr=1e-2)
    with pytest.raises(errors.AlreadyAttached) as caught:
        mt.Engine(model, device="cpu")
    assert "already belongs to an engine" in sentence(caught)
    assert train_a_step(model, optimizer) == pytest.approx(loss_of(small.llama()), abs=1e-6)


def test_a_closed_engine_refuses_every_call(tmp_path: Path) -> None:
    model = small.llama()
    engine = mt.Engine(model, device="cpu")
    optimizer = engine.optimizer(lr=1e-2)
    train_a_step(model, optimizer)
    engine.close()
    engine.close()
    assert engine.closed
    for act in (
        lambda: model(**small.batch()),
        lambda: model.generate(torch.tensor([[1, 2]]), max_new_tokens=1),
        optimizer.step,
        engine.optimizer,
        engine.grad_norm,
        lambda: engine.save(tmp_path),
        lambda: engine.load(tmp_path),
    ):
        with pytest.raises(errors.EngineClosed) as caught:
            act()
        assert "closed" in sentence(caught)


def test_a_closed_engines_model_can_be_read(tmp_path: Path) -> None:
    model = small.llama()
    with mt.Engine(model, device="cpu") as engine:
        train_a_step(model, engine.optimizer(lr=1e-2))
        trained = small.snapshot(model)
    assert small.same(trained, small.snapshot(model))
    assert model.num_parameters() == small.llama().num_parameters()
    assert all(torch.equal(parameter, trained[name]) for name, parameter in model.named_parameters())
    model.save_pretrained(tmp_path)
    assert small.same(trained, small.snapshot(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    assert small.same(trained, torch.load(tmp_path / "state.pt", weights_only=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_attaching_again_after_closing(precision: str) -> None:
    """A new optimizer starts with fresh state. In BF16, the low halves of the masters stay with the weights."""
    found = []
    for again in (False, True):
        model = small.llama()
        engine = mt.Engine(model, device="cpu", precision=precision)
        train_a_step(model, engine.optimizer(lr=1e-2))
        if again:
            engine.close()
            engine = mt.Engine(model, device="cpu", precision=precision)
        optimizer = engine.optimizer(lr=1e-2)
        losses = [train_a_step(model, optimizer) for _ in range(3)]
        found.append((losses, small.snapshot(model)))
    assert found[0][0] == found[1][0]
    assert small.same(found[0][1], found[1][1])


def test_a_trainer_after_closing(tmp_path: Path) -> None:
    model = small.llama()
    mt.Engine(model, device="cpu").close()
    trainer = mt.Trainer(model=model, args=small.arguments(tmp_path), train_dataset=small.rows())
    trainer.train()
    assert len(small.losses(trainer)) == 4


# ---- moving, casting, copying, resizing


MOVES: dict[str, Callable[[Any], Any]] = {
    "to meta": lambda model: model.to("meta"),
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "to a tensor's dtype": lambda model: model.to(torch.zeros(1, dtype=torch.float64)),
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "type": lambda model: model.type(torch.float16),
    "the decoder": lambda model: model.model.half(),
    "a layer": lambda model: model.model.layers[1].to(torch.bfloat16),
    "a part of a layer": lambda model: model.model.layers[1].mlp.half(),
    "the head": lambda model: model.lm_head.to("meta"),
    "a module with buffers only": lambda model: model.model.rotary_emb.to("meta"),
    "to_empty": lambda model: model.to_empty(device="meta"),
    "cuda": lambda model: model.to("cuda"),
}


@pytest.mark.parametrize("move", MOVES)
def test_moving_or_casting_a_model_is_refused(move: str) -> None:
    model = small.llama()
    engine = mt.Engine(model, device="cpu")
    before = small.snapshot(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(errors.ModelMoved) as caught:
        MOVES[move](model)
    assert "cannot be moved or cast" in sentence(caught)
    assert small.same(before, small.snapshot(model))
    assert small.same(buffers, dict(model.named_buffers()))
    assert train_a_step(model, engine.optimizer()) == pytest.approx(loss_of(small.llama()), abs=1e-6)


@pytest.mark.parametrize("act", ["cpu", "float"])
def test_moves_without_effect_are_allowed(act: str) -> None:
    model = small.llama()
    engine = mt.Engine(model, device="cpu")
    assert getattr(model, act)() is model
    assert model.to("cpu") is model
    assert model.to(torch.float32) is model
    assert train_a_step(model, engine.optimizer()) == pytest.approx(loss_of(small.llama()), abs=1e-6)


def test_moving_works_again_after_release() -> None:
    model = small.llama()
    mt.Engine(model, device="cpu").release()
    assert_plain(model, small.snapshot(small.llama()))


def test_deepcopy_is_refused() -> None:
    model = small.llama()
    engine = mt.Engine(model, device="cpu")
    with pytest.raises(errors.MegaTrainError) as caught:
        copy.deepcopy(model)
    assert "deep-copied" in sentence(caught)
    assert train_a_step(model, engine.optimizer()) == pytest.approx(loss_of(small.llama()), abs=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_resizing_the_embeddings_is_refused(tied: bool) -> None:
    model = small.llama(tie_word_embeddings=tied)
    engine = mt.Engine(model, device="cpu")
    before = loss_of(model)
    with pytest.raises(errors.MegaTrainError) as caught:
        model.resize_token_embeddings(small.VOCAB + 16)
    assert "resize" in sentence(caught)
    assert model.config.vocab_size == small.VOCAB
    assert model.get_input_embeddings().weight.shape[0] == small.VOCAB
    assert loss_of(model) == before
    train_a_step(model, engine.optimizer())
    model = engine.release()
    model.resize_token_embeddings(small.VOCAB + 16)
    assert model.get_output_embeddings().weight.shape[0] == small.VOCAB + 16


def test_a_replaced_parameter_is_refused(tmp_path: Path) -> None:
    """`state_dict` and the computation would differ, so the model must not be trained or saved."""
    model = small.llama()
    engine = mt.Engine(model, device="cpu")
    model.lm_head.weight = nn.Parameter(torch.zeros(small.VOCAB, 32))
    for act in (engine.optimizer, lambda: engine.save(tmp_path)):
        with pytest.raises(errors.MegaTrainError) as caught:
            act()
        assert "lm_head.weight was replaced" in sentence(caught)


def test_data_of_another_shape_is_refused() -> None:
    model = small.llama()
    engine = mt.Engine(model, device="cpu")
    with pytest.raises(errors.MegaTrainError) as caught:
        model.lm_head.weight.data = torch.zeros(3, 3)
    assert "shape (3, 3)" in sentence(caught)
    assert train_a_step(model, engine.optimizer()) == pytest.approx(loss_of(small.llama()), abs=1e-6)


# ---- devices, processes, versions


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_cuda_is_refused(tmp_path: Path) -> None:
    model = small.llama()
    for act in (
        lambda: mt.Engine(model, device="cuda"),
        lambda: mt.Engine(model, device="cuda:3"),
        lambda: mt.init(device="cuda"),
    ):
        with pytest.raises(errors.DeviceUnavailable) as caught:
            act()
        assert "device='cuda" in sentence(caught)
    assert settings_module.current() == settings_module.Settings(), "a refused init leaves the settings unchanged"
    assert_plain(model, small.snapshot(small.llama()))


def test_more_than_one_process_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small.llama()
    args = small.arguments(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for act in (
        lambda: mt.init(),
        lambda: mt.Engine(model),
        lambda: mt.Trainer(model=model, args=args, train_dataset=small.rows()),
    ):
        with pytest.raises(errors.DistributedUnsupported) as caught:
            act()
        assert "WORLD_SIZE=2" in sentence(caught)
    monkeypatch.setenv("WORLD_SIZE", "1")
    mt.init()
    assert_plain(model, small.snapshot(small.llama()))


@pytest.mark.parametrize(
    ("module", "name"),
    [(modeling_layers, "GradientCheckpointingLayer"), (output_capturing, "_active_collector")],
    ids=["layer", "collector"],
)
def test_an_unsupported_transformers_is_refused(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    model = small.llama()
    with monkeypatch.context() as patched:
        patched.delattr(module, name)
        with pytest.raises(errors.UnsupportedTransformers) as caught:
            mt.Engine(model, device="cpu")
        assert f"transformers {transformers.__version__} has no {module.__name__}.{name}" in str(caught.value)
        assert "pip install" in str(caught.value)
    assert_plain(model, small.snapshot(small.llama()))


# ---- settings


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("max_vram_gb", 0, "positive number of GiB"),
        ("max_vram_gb", -1.0, "positive number of GiB"),
        ("max_vram_gb", "80", "positive number of GiB"),
        ("max_vram_gb", True, "positive number of GiB"),
        ("max_ram_gb", float("nan"), "positive number of GiB"),
        ("max_vram_gb", float("inf"), "positive number of GiB"),
        ("plan", "yes", "megatrain.plan"),
        ("plan", True, "megatrain.plan"),
        ("precision", "fp16", "bf16, fp32"),
        ("optimizer_compression", "2bit", "'4bit'"),
        ("device", "tpu", "'cuda:N'"),
        ("max_vram", 80, "max_vram_gb"),
    ],
)
def test_bad_settings_are_refused(setting: str, value: Any, message: str) -> None:
    model = small.llama()
    for act in (lambda: mt.init(**{setting: value}), lambda: mt.Engine(model, **{setting: value})):
        with pytest.raises(errors.SettingsError) as caught:
            act()
        assert setting in sentence(caught)
        assert message in str(caught.value)
    assert settings_module.current() == settings_module.Settings()
    assert small.same(small.snapshot(model), small.snapshot(small.llama()))
    assert not any(isinstance(parameter, StoreTensor) for parameter in model.parameters())


def test_an_unknown_machine_is_refused() -> None:
    for asked in ("h200-128g", "/nowhere.json", 5):
        with pytest.raises(errors.SettingsError, match="h200-128gb"):
            mt.init(machine=asked)
    assert settings_module.current() == settings_module.Settings()


def test_cuda_lanes_on_the_cpu_are_refused() -> None:
    model = small.llama()
    with pytest.raises(errors.SettingsError) as caught:
        mt.Engine(model, device="cpu", debug=mt.Debug(lanes="cuda"))
    assert "lanes='cuda' needs a CUDA device" in sentence(caught)
    assert_plain(model, small.snapshot(small.llama()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0, which must be finite and not negative"),
        ({"lr": float("nan")}, "lr=nan, which must be finite and not negative"),
        ({"betas": (0.9, 1.0)}, "which must be in [0, 1)"),
        ({"eps": -1e-8}, "eps=-1e-08, which must be finite"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1, which must be finite"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive"),
    ],
    ids=str,
)
def test_bad_hyperparameters_are_refused(options: dict[str, Any], message: str) -> None:
    model = small.llama()
    engine = mt.Engine(model, device="cpu")
    with pytest.raises(errors.SettingsError) as caught:
        engine.optimizer(**options)
    assert message in sentence(caught)
    train_a_step(model, engine.optimizer())


def test_parameters_of_another_model_are_refused() -> None:
    model = small.llama()
    originals = list(model.parameters())
    engine = mt.Engine(model, device="cpu")
    other = small.llama(1)
    other_engine = mt.Engine(other, device="cpu")
    for foreign in (originals, [nn.Parameter(torch.zeros(3))], list(other.parameters())):
        with pytest.raises(errors.SettingsError) as caught:
            engine.optimizer(foreign)
        assert "does not belong to this engine's model" in sentence(caught)
    optimizer = engine.optimizer()
    with pytest.raises(errors.SettingsError):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(optimizer.param_groups) == 1
    train_a_step(model, optimizer)
    train_a_step(other, other_engine.optimizer())


def test_a_model_without_trainable_parameters_is_refused() -> None:
    model = small.llama().requires_grad_(False)
    engine = mt.Engine(model, device="cpu")
    with pytest.raises(errors.SettingsError) as caught:
        engine.optimizer()
    assert "nothing to optimize" in sentence(caught)
    assert loss_of(model) == pytest.approx(loss_of(small.llama()), abs=1e-6)


# ---- models


def test_parameters_on_meta_are_refused() -> None:
    with torch.device("meta"):
        model = small.llama()
    with pytest.raises(errors.UnsupportedModel) as caught:
        mt.Engine(model, device="cpu")
    assert "meta device" in sentence(caught)
    partly = small.llama()
    partly.model.norm.to("meta")
    with pytest.raises(errors.UnsupportedModel) as caught:
        mt.Engine(partly, device="cpu")
    assert "model.norm.weight" in sentence(caught)
    assert not any(isinstance(parameter, StoreTensor) for parameter in partly.parameters())


def test_a_model_without_parameters_is_refused() -> None:
    model = nn.ReLU()
    with pytest.raises(errors.NothingToStream) as caught:
        mt.Engine(model, device="cpu")
    assert "ReLU" in sentence(caught)
    assert model(torch.ones(1)).item() == 1


def test_untrainable_dtypes_are_refused() -> None:
    model = small.llama().double()
    with pytest.raises(errors.UnsupportedModel) as caught:
        mt.Engine(model, device="cpu")
    assert "float64" in sentence(caught)
    assert loss_of(model) > 0


# ---- memory: refused in advance, or undone


def test_too_little_memory_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small.llama()
    original = small.snapshot(model)
    allocated: list[int] = []
    real = ram.HostBuffer.__init__
    monkeypatch.setattr(
        ram.HostBuffer, "__init__", lambda self, nbytes, *rest: (allocated.append(nbytes), real(self, nbytes, *rest))[1]
    )
    with monkeypatch.context() as patched:
        patched.setattr(inventory, "available_ram", lambda: 1000)
        with pytest.raises(errors.NotEnoughMemory) as caught:
            mt.Engine(model, device="cpu")
        assert "are available" in sentence(caught)
    with pytest.raises(errors.NotEnoughMemory) as caught:
        mt.Engine(model, device="cpu", max_ram_gb=1e-5)
    assert "max_ram_gb=1e-05" in sentence(caught)
    assert allocated == []
    assert_plain(model, original)


def test_the_full_model_counts_against_max_ram_gb() -> None:
    """Refused at the start, not at the block that exceeds the limit."""
    model = small.llama()
    nbytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    with pytest.raises(errors.NotEnoughMemory):
        mt.Engine(model, device="cpu", max_ram_gb=nbytes * 0.9 / GIB)
    assert_plain(model, small.snapshot(small.llama()))
    model = small.llama()
    mt.Engine(model, device="cpu", max_ram_gb=nbytes * 1.5 / GIB)
    assert loss_of(model) == pytest.approx(loss_of(small.llama()), abs=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lanes", ["sync", "threads"])
@pytest.mark.parametrize("call", range(1, 6))
def test_a_failed_attach_is_undone(monkeypatch: pytest.MonkeyPatch, precision: str, lanes: str, call: int) -> None:
    """Whichever block does not fit: weights, dtypes, tied names and hooks are restored."""
    model = small.llama()
    original = small.snapshot(model)
    checkpointing = call == 3
    if checkpointing:
        model.gradient_checkpointing_enable()
    real, calls = ram.HostBuffer.__init__, iter(range(1, 1000))

    def fails(self: Any, *args: Any) -> None:
        if next(calls) == call:
            raise MemoryError("no more pages")
        real(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(ram.HostBuffer, "__init__", fails)
        with pytest.raises(MemoryError):
            mt.Engine(model, device="cpu", precision=precision, debug=mt.Debug(lanes=lanes))
    assert model.is_gradient_checkpointing == checkpointing
    model.gradient_checkpointing_disable()
    assert_plain(model, original)


def test_attaching_works_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small.gpt2()
    calls = iter([1 << 40, 1 << 40, 1 << 40] + [0] * 100)
    with monkeypatch.context() as patched:
        patched.setattr(inventory, "available_ram", lambda: next(calls))
        with pytest.raises(errors.NotEnoughMemory):
            mt.Engine(model, device="cpu")
    assert model.lm_head.weight is model.transformer.wte.weight
    model.eval()
    engine = mt.Engine(model, device="cpu")
    assert train_a_step(model, engine.optimizer()) == pytest.approx(loss_of(small.gpt2().eval()), abs=1e-6)


def test_too_little_memory_for_the_optimizer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments take twice the weights. Refused when the optimizer is created, not in the first step."""
    model = small.llama()
    engine = mt.Engine(model, device="cpu")
    with monkeypatch.context() as patched:
        patched.setattr(inventory, "available_ram", lambda: 1000)
        with pytest.raises(errors.NotEnoughMemory) as caught:
            engine.optimizer()
        assert "AdamW" in sentence(caught)
    assert all(not slab.moments for slab in engine.slabs)
    assert train_a_step(model, engine.optimizer()) == pytest.approx(loss_of(small.llama()), abs=1e-6)


# ---- the native library


MISSING = """
import torch
from torch import nn

import megatrain as mt
from megatrain import errors

torch.manual_seed(0)
layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(1536, 1536), nn.Linear(1536, 1536)]
model = nn.ModuleDict({"layers": nn.ModuleList(layers)})
before = {name: value.clone() for name, value in model.state_dict().items()}
try:
    mt.Engine(model, device="cpu")
except errors.MegaTrainError as error:
    print(type(error).__name__, "|", error)
else:
    print("no error")
after = model.state_dict()
plain = all(type(parameter) is nn.Parameter for parameter in model.parameters())
print(plain and all(torch.equal(before[name], after[name]) for name in before))
print(tuple(layers[2](torch.ones(1536)).shape))
"""


def test_a_missing_native_library_is_refused(tmp_path: Path) -> None:
    """A slab of 9 MiB needs it. The message names the command that builds it, and the model is restored."""
    environment = dict(os.environ) | {"MEGATRAIN_NATIVE": str(tmp_path / "nowhere.so"), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run([sys.executable, "-c", MISSING], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    message, intact, shape = done.stdout.splitlines()
    assert message.startswith("NativeLibraryMissing | ")
    assert "nowhere.so" in message
    assert "cmake --build build" in message
    assert (intact, shape) == ("True", "(1536,)")
