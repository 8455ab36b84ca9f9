"""Weights stay in their files until an engine reads them: `Engine(weights=...)`, and `from_pretrained` after `init`
with an `offload_dir`. Every model must equal that of a plain `from_pretrained`, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests import small, tiny
from tests.parity import zoo
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, modeling_utils

import megatrain as mt
from megatrain import errors
from megatrain.lazy import is_lazy

MODELS = (
    small.llama,
    lambda: small.llama(tie_word_embeddings=True),
    small.gpt2,
    small.mixtral,
    small.qwen3_moe,
    # It has a buffer that its checkpoint fills and that it would initialise otherwise.
    lambda: zoo.build("deepseek_v3"),
)
DTYPES = (torch.float32, torch.bfloat16)
STOCK = modeling_utils.convert_and_load_state_dict_in_model


def saved(path: Path, make: Callable[[], Any]) -> Path:
    make().bfloat16().save_pretrained(path, max_shard_size="20KB")
    return path


def on_meta(path: Path, dtype: torch.dtype) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype).eval()


def require_same(model: Any, plain: Any) -> None:
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    buffers = dict(model.named_buffers()), dict(plain.named_buffers())
    for mine, theirs in ((model.state_dict(), plain.state_dict()), buffers):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert mine[name].dtype == tensor.dtype, name
            assert torch.equal(mine[name], tensor), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", MODELS)
def test_weights_fill_a_model_on_meta(tmp_path: Path, make: Any, dtype: torch.dtype) -> None:
    path = saved(tmp_path, make)
    model, plain = on_meta(path, dtype), AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    with mt.Engine(model, weights=path, device="cpu") as engine:
        require_same(model, plain)
        require_same(engine.release(), plain)


def test_one_file_of_weights_comes_before_an_index(tmp_path: Path) -> None:
    """As in transformers, which leaves the index of an earlier save in shards."""
    path = saved(tmp_path, small.llama)
    small.llama(1).bfloat16().save_pretrained(path)
    assert (path / "model.safetensors.index.json").exists()
    model, plain = on_meta(path, torch.bfloat16), AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    with mt.Engine(model, weights=path, device="cpu"):
        require_same(model, plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", MODELS)
def test_from_pretrained_after_init_stays_in_files(tmp_path: Path, make: Any, dtype: torch.dtype) -> None:
    path = saved(tmp_path / "model", make)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    mt.init(offload_dir=tmp_path / "scratch", device="cpu")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    assert all(is_lazy(parameter) for parameter in model.parameters())
    require_same(model, plain)
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids).logits, plain(ids).logits)
    assert all(is_lazy(parameter) for parameter in model.parameters())
    with mt.Engine(model):
        assert modeling_utils.convert_and_load_state_dict_in_model is STOCK
        require_same(model, plain)


def test_training_on_lazy_weights_has_the_same_bits(tmp_path: Path) -> None:
    path, ids = saved(tmp_path / "model", small.mixtral), torch.arange(8)[None]
    found = []
    for settings in ({}, {"offload_dir": tmp_path / "scratch"}):
        mt.init(device="cpu", **settings)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        optimizer = mt.Engine(model, precision="bf16").optimizer(lr=1e-2)
        for _ in range(3):
            model(ids, labels=ids).loss.backward()
            optimizer.step()
        found.append(model.state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_trainer_takes_a_lazy_model(tmp_path: Path) -> None:
    path = saved(tmp_path / "model", small.llama)
    mt.init(offload_dir=tmp_path / "scratch")
    model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float32)
    assert is_lazy(model.lm_head.weight)
    args = small.arguments(tmp_path / "out", max_steps=2)
    assert mt.Trainer(model=model, args=args, train_dataset=small.rows()).train().global_step == 2


def test_init_without_a_directory_and_attaching_restore_transformers(tmp_path: Path) -> None:
    mt.init(offload_dir=tmp_path)
    assert modeling_utils.convert_and_load_state_dict_in_model is not STOCK
    mt.init()
    assert modeling_utils.convert_and_load_state_dict_in_model is STOCK


def test_a_new_head_is_initialised_as_without_us(tmp_path: Path) -> None:
    path = saved(tmp_path / "model", small.llama)
    models = []
    for directory in (None, tmp_path / "scratch"):
        mt.init(offload_dir=directory)
        torch.manual_seed(1)
        models.append(AutoModelForSequenceClassification.from_pretrained(path, num_labels=3))
    require_same(models[1], models[0])
    assert not is_lazy(models[1].score.weight)


def test_what_cannot_stay_in_files_is_announced(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    state = small.llama().state_dict()
    mt.init(offload_dir=tmp_path)
    model = type(small.llama()).from_pretrained(None, config=small.llama().config, state_dict=state)
    assert not any(is_lazy(parameter) for parameter in model.parameters())
    assert any("were loaded into RAM: they are not read from mapped" in message for message in announced.messages)


def test_a_lazy_model_can_be_changed_saved_and_cast(tmp_path: Path) -> None:
    path = saved(tmp_path / "model", small.llama)
    plain = AutoModelForCausalLM.from_pretrained(path)
    mt.init(offload_dir=tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path)
    for each in (model, plain):
        each.lm_head.weight.data[0].zero_()
        torch.manual_seed(0)
        each.resize_token_embeddings(small.VOCAB + 2)
    require_same(model, plain)
    model.save_pretrained(tmp_path / "again")
    require_same(model.to(torch.float32), plain.to(torch.float32))
    mt.init()
    require_same(AutoModelForCausalLM.from_pretrained(tmp_path / "again").float(), plain)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_in_8_bit_floats_are_converted(tmp_path: Path, stored: torch.dtype) -> None:
    model, plain = tiny.Stack(), tiny.Stack(seed=1)
    state = {name: value.to(stored) for name, value in plain.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    plain.load_state_dict({name: value.float() for name, value in state.items()})
    with mt.Engine(model.to("meta"), weights=tmp_path, device="cpu") as engine:
        require_same(engine.release(), plain)


def test_data_of_lazy_weights_can_be_assigned(tmp_path: Path) -> None:
    """Also to themselves, as `Module.to` does."""
    path = saved(tmp_path / "model", lambda: small.llama(tie_word_embeddings=True))
    plain = AutoModelForCausalLM.from_pretrained(path)
    mt.init(offload_dir=tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path).to("cpu")
    for parameter in model.parameters():
        parameter.data = parameter.data
        parameter.data = parameter.data.contiguous()
    assert all(is_lazy(parameter) for parameter in model.parameters())
    require_same(model, plain)
    before = model.lm_head.weight.data
    model.lm_head.weight.data = before.view(before.shape)
    for each in (model, plain):
        each.lm_head.weight.data.mul_(3)
    require_same(model, plain)
    assert torch.equal(before, plain.lm_head.weight)


def test_a_plain_module_is_filled_by_name(tmp_path: Path) -> None:
    plain = tiny.Stack()
    save_file(plain.state_dict(), tmp_path / "weights.safetensors")
    with torch.device("meta"):
        model = tiny.Stack()
    tiny.engine_of(model, weights=tmp_path / "weights.safetensors")
    require_same(model, plain)


def test_what_weights_cannot_do_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "model", small.llama)
    with pytest.raises(errors.SettingsError, match="on the meta device"):
        mt.Engine(small.llama(), weights=path, device="cpu")
    with pytest.raises(errors.CheckpointError, match="does not exist"):
        mt.Engine(on_meta(path, torch.bfloat16), weights=tmp_path / "none", device="cpu")
    state = small.llama().state_dict()
    del state["model.norm.weight"]
    save_file(state, tmp_path / "part.safetensors")
    model = on_meta(path, torch.bfloat16)
    with pytest.raises(errors.CheckpointError, match=r"model\.norm\.weight"):
        mt.Engine(model, weights=tmp_path / "part.safetensors", device="cpu")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_failed_attach_leaves_the_weights_in_their_files(tmp_path: Path) -> None:
    path = saved(tmp_path / "model", small.llama)
    mt.init(offload_dir=tmp_path, device="cpu")
    lazy, model = AutoModelForCausalLM.from_pretrained(path), on_meta(path, torch.bfloat16)
    for each, options in ((lazy, {}), (model, {"weights": path})):
        with pytest.raises(errors.SettingsError, match="weights are not held"):
            mt.Engine(each, streamed_states=["lm_head"], **options)
    assert all(is_lazy(parameter) for parameter in lazy.parameters())
    assert all(parameter.is_meta for parameter in model.parameters())
