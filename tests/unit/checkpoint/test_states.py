"""Checkpoints restore every bit, and damage is detected before anything changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from tests import small
from transformers import AutoModelForCausalLM

import megatrain as mt
from megatrain import files
from megatrain.checkpoint import states
from megatrain.errors import CheckpointError
from megatrain.store.parameter import states_of
from megatrain.store.split import join
from megatrain.stream.lanes import ThreadLanes

WEIGHTS, STATES = "model.safetensors", "megatrain/optimizer-00001-of-00001.safetensors"
MANIFEST = "megatrain/manifest.json"
BUILDERS = {"llama": small.llama, "gpt2": small.gpt2, "mixtral": small.mixtral, "qwen3_moe": small.qwen3_moe}


def attached(build: Callable[..., Any] = small.llama, seed: int = 0, **settings: Any) -> tuple[Any, Any, Any]:
    model = build(seed)
    engine = mt.Engine(model, device="cpu", **settings)
    return model, engine, engine.optimizer(lr=1e-2, weight_decay=0.1, max_grad_norm=1.0)


def train(model: Any, optimizer: Any, steps: int, seed: int = 0) -> list[float]:
    results = []
    for step in range(steps):
        loss = model(**small.batch(seed=seed + step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.item())
    return results


def weights_and_states(model: Any) -> dict[str, torch.Tensor]:
    named: dict[str, Any] = dict(model.named_parameters())
    results = small.snapshot(model)
    for name, parameter in named.items():
        results |= {f"{name}/{role}": view.clone() for role, view in states_of(parameter).items()}
        results[f"{name}/step"] = torch.tensor(parameter.slab.steps[parameter.segment])
    return results


# ---- saving and loading


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", BUILDERS)
def test_a_training_loop_resumes_bitwise(tmp_path: Path, name: str, precision: str) -> None:
    model, engine, optimizer = attached(BUILDERS[name], precision=precision)
    model.eval()  # without dropout, because the engine does not save the loop's random state
    train(model, optimizer, 2)
    engine.save(tmp_path / "half", optimizer)
    losses = train(model, optimizer, 2, seed=2)

    other, fresh, another = attached(BUILDERS[name], seed=1, precision=precision)
    other.eval()
    train(other, another, 1, seed=9)
    another.param_groups[0]["lr"] = 123.0
    fresh.load(tmp_path / "half", another)
    assert another.param_groups[0]["lr"] == 1e-2
    assert isinstance(another.param_groups[0]["betas"], tuple)
    assert train(other, another, 2, seed=2) == losses
    assert small.same(weights_and_states(model), weights_and_states(other))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", BUILDERS)
def test_transformers_reads_the_same_bits(tmp_path: Path, name: str, precision: str) -> None:
    model, engine, optimizer = attached(BUILDERS[name], precision=precision)
    train(model, optimizer, 1)
    engine.save(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    named: dict[str, Any] = dict(model.named_parameters())
    assert small.same({name: named[name].master() for name in named}, dict(stock.named_parameters()))


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    _, engine, _ = attached(small.gpt2)
    engine.save(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert stock.lm_head.weight is stock.transformer.wte.weight


def test_sharded_weights(tmp_path: Path) -> None:
    model, _, optimizer = attached()
    train(model, optimizer, 1)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    states.save_optimizer(model, optimizer, tmp_path, states.SHARD_BYTES)
    states.seal(model, optimizer, tmp_path, files.regular_files(tmp_path))
    assert small.same(small.snapshot(model), small.snapshot(AutoModelForCausalLM.from_pretrained(tmp_path)))
    other, fresh, another = attached(seed=1)
    fresh.load(tmp_path, another)
    assert small.same(weights_and_states(model), weights_and_states(other))


def test_optimizer_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "SHARD_BYTES", 20_000)
    model, engine, optimizer = attached(precision="bf16")
    train(model, optimizer, 1)
    engine.save(tmp_path, optimizer)
    assert len(list(tmp_path.glob("megatrain/optimizer-*.safetensors"))) > 3
    other, fresh, another = attached(seed=1, precision="bf16")
    fresh.load(tmp_path, another)
    assert small.same(weights_and_states(model), weights_and_states(other))


def test_saving_again_removes_files_of_the_first_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine, optimizer = attached()
    with monkeypatch.context() as patched:
        patched.setattr(states, "SHARD_BYTES", 20_000)
        engine.save(tmp_path, optimizer)
    train(model, optimizer, 1)
    engine.save(tmp_path, optimizer)
    assert len(list(tmp_path.glob("megatrain/optimizer-*.safetensors"))) == 1
    other, fresh, another = attached(seed=1)
    fresh.load(tmp_path, another)
    assert small.same(weights_and_states(model), weights_and_states(other))


def test_saving_and_loading_weights_only(tmp_path: Path) -> None:
    model, engine, optimizer = attached()
    train(model, optimizer, 1)
    engine.save(tmp_path)
    assert not (tmp_path / "megatrain").exists()
    other, fresh, _ = attached(seed=1)
    fresh.load(tmp_path)
    assert small.same(small.snapshot(model), small.snapshot(other))
    # The next forward uses the loaded weights, not those still in a slot.
    with torch.no_grad():
        assert torch.equal(model(**small.batch()).logits, other(**small.batch()).logits)


def test_loading_while_gradients_and_updates_are_pending(tmp_path: Path) -> None:
    model, engine, optimizer = attached(debug=mt.Debug(lanes="threads"))
    before = weights_and_states(model)
    engine.save(tmp_path, optimizer)
    train(model, optimizer, 2)
    engine.load(tmp_path, optimizer)
    assert small.same(before, weights_and_states(model))
    engine.close()


def test_saving_states_waits_for_the_update(tmp_path: Path) -> None:
    """The update of the last step is still pending on its lane."""
    model, engine, optimizer = attached(debug=mt.Debug(lanes=ThreadLanes(seed=0, max_delay=2e-2)))
    model(**small.batch()).loss.backward()
    optimizer.step()
    states.save_optimizer(model, optimizer, tmp_path, states.SHARD_BYTES)
    states.seal(model, optimizer, tmp_path, files.regular_files(tmp_path))
    engine.synchronize()
    with safe_open(tmp_path / STATES, framework="pt") as file:
        saved = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    expected = weights_and_states(model)
    assert small.same(saved, {key: expected[key] for key in saved})
    assert set(json.loads((tmp_path / MANIFEST).read_text())["steps"].values()) == {1}
    engine.close()


def test_checkpoints_contain_no_absolute_path(tmp_path: Path) -> None:
    _, engine, optimizer = attached()
    engine.save(tmp_path / "there", optimizer)
    for path in (tmp_path / "there").rglob("*"):
        if path.is_file():
            assert str(tmp_path).encode() not in path.read_bytes(), path.name
    shutil.move(tmp_path / "there", tmp_path / "elsewhere")
    engine.load(tmp_path / "elsewhere", optimizer)


def test_a_plain_module(tmp_path: Path) -> None:
    def build(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(8, 8) for _ in range(3)]
        return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers), "norm": torch.nn.BatchNorm1d(8)})

    model = build(0)
    engine = mt.Engine(model, device="cpu")
    engine.save(tmp_path, engine.optimizer())
    other = build(1)
    fresh = mt.Engine(other, device="cpu")
    fresh.load(tmp_path, fresh.optimizer())
    assert small.same(weights_and_states(model), weights_and_states(other))


# ---- damage


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-64])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-64] ^= 0xFF
    path.write_bytes(content)


def spoil_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 0xFF
    path.write_bytes(content)


def rewrite(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "manifest missing": (MANIFEST, Path.unlink, "incomplete"),
    "manifest cut": (MANIFEST, shorten, "not valid JSON"),
    "manifest a list": (MANIFEST, rewrite("[]"), "format"),
    "manifest empty": (MANIFEST, rewrite("{}"), "format"),
    "manifest of the future": (MANIFEST, rewrite('{"format": 3}'), "format 3"),
    "manifest without groups": (MANIFEST, rewrite('{"format": 1, "files": {}, "steps": {}}'), "groups"),
    "states missing": (STATES, Path.unlink, "missing"),
    "states cut": (STATES, shorten, "bytes"),
    "states flipped": (STATES, flip, "CRC-32"),
    "states header": (STATES, spoil_header, "CRC-32"),
    "trainer state missing": ("trainer_state.json", Path.unlink, "missing"),
    "trainer state cut": ("trainer_state.json", shorten, "bytes"),
    "random state missing": ("rng_state.pth", Path.unlink, "missing"),
    "scheduler missing": ("scheduler.pt", Path.unlink, "missing"),
    "scheduler flipped": ("scheduler.pt", flip, "CRC-32"),
    "weights missing": (WEIGHTS, Path.unlink, "missing|has no"),
    "weights cut": (WEIGHTS, shorten, "bytes"),
    "weights flipped": (WEIGHTS, flip, "CRC-32"),
    "weights header": (WEIGHTS, spoil_header, "CRC-32"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one Trainer run."""
    directory = tmp_path_factory.mktemp("saved")
    args = small.arguments(directory, max_steps=4, save_strategy="steps", save_steps=2)
    mt.Trainer(model=small.llama(), args=args, train_dataset=small.rows()).train()
    return directory


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_detected_before_anything_changes(saved: Path, tmp_path: Path, case: str) -> None:
    name, damage, message = DAMAGE[case]
    shutil.copytree(saved / "checkpoint-4", tmp_path / "checkpoint-4")
    damage(tmp_path / "checkpoint-4" / name)
    args = small.arguments(tmp_path, max_steps=4)
    trainer = mt.Trainer(model=small.llama(1), args=args, train_dataset=small.rows())
    optimizer = trainer.create_optimizer()
    before, groups = weights_and_states(trainer.model), json.dumps([g["lr"] for g in optimizer.param_groups])
    with pytest.raises(CheckpointError, match=message):
        trainer.engine.load(tmp_path / "checkpoint-4", optimizer)
    assert small.same(before, weights_and_states(trainer.model))
    assert json.dumps([g["lr"] for g in optimizer.param_groups]) == groups
    with pytest.raises(CheckpointError, match=message):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert small.same(before, weights_and_states(trainer.model))
    trainer.train()
    assert len(small.losses(trainer)) == 4


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_skipped(
    saved: Path, tmp_path: Path, case: str, announced: pytest.LogCaptureFixture
) -> None:
    name, damage, _ = DAMAGE[case]
    shutil.copytree(saved, tmp_path / "out")
    damage(tmp_path / "out" / "checkpoint-4" / name)
    args = small.arguments(tmp_path / "out", max_steps=4)
    trainer = mt.Trainer(model=small.llama(1), args=args, train_dataset=small.rows())
    trainer.train(resume_from_checkpoint=True)
    assert any("checkpoint-4" in line and "skipped" in line for line in announced.messages)
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2, 3, 4]
    stored = AutoModelForCausalLM.from_pretrained(saved / "checkpoint-4")
    assert small.same(small.snapshot(trainer.model), small.snapshot(stored))


@pytest.mark.parametrize("where", ["_save_rng_state", "_save_optimizer_and_scheduler", "_save"])
def test_interrupted_while_saving(tmp_path: Path, where: str, announced: pytest.LogCaptureFixture) -> None:
    """The run resumes from the previous checkpoint, whichever part was being written."""

    class Dies(mt.Trainer):
        pass

    def dies(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step == 4:
            raise KeyboardInterrupt
        getattr(mt.Trainer, where)(self, *args, **kwargs)

    setattr(Dies, where, dies)
    options: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    first = Dies(model=small.gpt2(), args=small.arguments(tmp_path, **options), train_dataset=small.rows())
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert not (tmp_path / "checkpoint-4").exists()
    again = mt.Trainer(model=small.gpt2(1), args=small.arguments(tmp_path, **options), train_dataset=small.rows())
    again.train(resume_from_checkpoint=True)
    uninterrupted = mt.Trainer(
        model=small.gpt2(), args=small.arguments(tmp_path / "whole", **options), train_dataset=small.rows()
    )
    uninterrupted.train()
    assert small.losses(again) == small.losses(uninterrupted)
    assert small.same(weights_and_states(again.model), weights_and_states(uninterrupted.model))


def test_the_last_complete_checkpoint_is_kept_until_the_next_is_complete(tmp_path: Path) -> None:
    def dies(operation: str, path: Path) -> None:
        if operation == "rename" and path == tmp_path / "checkpoint-4" / MANIFEST:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    first = mt.Trainer(model=small.llama(), args=small.arguments(tmp_path, **options), train_dataset=small.rows())
    with files.observing(dies), pytest.raises(KeyboardInterrupt):
        first.train()
    again = mt.Trainer(model=small.llama(1), args=small.arguments(tmp_path, **options), train_dataset=small.rows())
    again.train(resume_from_checkpoint=True)
    assert small.same(small.snapshot(again.model), small.snapshot(first.model))
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]


def test_resuming_without_a_complete_checkpoint_raises(saved: Path, tmp_path: Path) -> None:
    trainer = mt.Trainer(model=small.llama(), args=small.arguments(tmp_path / "out"), train_dataset=small.rows())
    with pytest.raises(CheckpointError, match=r"No valid checkpoint found .*, which holds no checkpoint at all"):
        trainer.train(resume_from_checkpoint=True)
    shutil.copytree(saved, tmp_path / "out", dirs_exist_ok=True)
    for path in (tmp_path / "out").rglob("manifest.json"):
        path.unlink()
    with pytest.raises(CheckpointError, match="2 that cannot be resumed from"):
        trainer.train(resume_from_checkpoint=True)


def test_the_newest_checkpoint_is_found_by_number(saved: Path, tmp_path: Path) -> None:
    """checkpoint-10 is newer than checkpoint-2, and checkpoint-best is not a checkpoint of ours."""
    from megatrain.hf.checkpoint_list import last_complete

    for name in ("checkpoint-10", "checkpoint-2", "checkpoint-best"):
        shutil.copytree(saved / "checkpoint-4", tmp_path / name)
    assert Path(last_complete(str(tmp_path))).name == "checkpoint-10"


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    for changes in ({"hidden_size": 64}, {"num_hidden_layers": 2}, {"num_hidden_layers": 4}, {"intermediate_size": 64}):
        other = small.llama(**changes)
        engine = mt.Engine(other, device="cpu")
        engine.save(tmp_path / "other", engine.optimizer())
        model, matching_engine, optimizer = attached()
        before = weights_and_states(model)
        with pytest.raises(CheckpointError):
            matching_engine.load(tmp_path / "other", optimizer)
        assert small.same(before, weights_and_states(model)), changes
        with pytest.raises(CheckpointError):
            matching_engine.load(tmp_path / "other")
        assert small.same(before, weights_and_states(model)), changes


def test_other_groups_change_nothing(tmp_path: Path) -> None:
    model, engine, optimizer = attached()
    train(model, optimizer, 1)
    engine.save(tmp_path, optimizer)
    other = small.llama(1)
    fresh = mt.Engine(other, device="cpu")
    parameters = list(other.parameters())
    grouped = fresh.optimizer([{"params": parameters[:3]}, {"params": parameters[3:]}])
    before = weights_and_states(other)
    with pytest.raises(CheckpointError, match="other parameters or groups"):
        fresh.load(tmp_path, grouped)
    assert small.same(before, weights_and_states(other))


# ---- other precisions, other trainers


def test_fp32_states_load_into_bf16_exactly(tmp_path: Path) -> None:
    """A split master holds every bit of an FP32 checkpoint."""
    model, engine, optimizer = attached()
    train(model, optimizer, 1)
    engine.save(tmp_path, optimizer)
    other, fresh, another = attached(seed=1, precision="bf16")
    fresh.load(tmp_path, another)
    named: dict[str, Any] = dict(other.named_parameters())
    for name, value in small.snapshot(model).items():
        residual = states_of(named[name])["residual"]
        assert torch.equal(join(named[name].host(), residual), value), name


def test_a_checkpoint_of_transformers_is_adopted(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "weight_decay": 0.1}
    stock = transformers.Trainer(
        model=small.llama(), args=small.arguments(tmp_path, **options), train_dataset=small.rows()
    )
    stock.train()
    shutil.rmtree(tmp_path / "checkpoint-6")
    for resume in (str(tmp_path / "checkpoint-3"), True):
        ours = mt.Trainer(model=small.llama(1), args=small.arguments(tmp_path, **options), train_dataset=small.rows())
        ours.train(resume_from_checkpoint=resume)
        assert any("taking over" in line for line in announced.messages)
        announced.clear()
        assert small.losses(ours) == pytest.approx(small.losses(stock), abs=2e-6)
        assert small.furthest(small.snapshot(ours.model), small.snapshot(stock.model)) < 2e-6
        shutil.rmtree(tmp_path / "checkpoint-6")


def test_weights_without_states_cannot_be_resumed(tmp_path: Path) -> None:
    small.llama().save_pretrained(tmp_path / "checkpoint-1")
    trainer = mt.Trainer(model=small.llama(1), args=small.arguments(tmp_path), train_dataset=small.rows())
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text('{"global_step": 1}')
    before = small.snapshot(trainer.model)
    with pytest.raises(CheckpointError):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert small.same(before, small.snapshot(trainer.model))


def test_optimizer_state_dicts_are_exchangeable_with_torch() -> None:
    """The state dict has the form of torch.optim.AdamW's."""
    model, _, optimizer = attached()
    train(model, optimizer, 2)
    stored = optimizer.state_dict()
    plain = small.llama()
    stock = torch.optim.AdamW(plain.parameters())
    stock.load_state_dict(stored)
    assert stock.param_groups[0]["lr"] == 1e-2
    for parameter, entry in zip(plain.parameters(), stored["state"].values(), strict=True):
        assert torch.equal(stock.state[parameter]["exp_avg"], entry["exp_avg"])
    other, _, another = attached(seed=1)
    train(other, another, 1)
    another.load_state_dict(stock.state_dict())
    moments = {name: view for name, view in weights_and_states(model).items() if "/" in name}
    assert small.same(moments, {name: view for name, view in weights_and_states(other).items() if "/" in name})
