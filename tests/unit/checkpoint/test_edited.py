"""State that does not fit the model is refused before anything changes, even if the manifest is valid."""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import small

import megatrain as mt
from megatrain import files
from megatrain.checkpoint import manifest, states
from megatrain.errors import CheckpointError, NonFiniteGradients, UnsupportedCall
from megatrain.store.parameter import states_of

Tensors = dict[str, torch.Tensor]
SHARD = "megatrain/optimizer-00001-of-00001.safetensors"
NAME = "model.layers.0.mlp.up_proj.weight"


def weights_and_states(model: Any) -> Tensors:
    tensors_by_name = small.snapshot(model)
    for name, parameter in model.named_parameters():
        tensors_by_name |= {f"{name}/{role}": view.clone() for role, view in states_of(parameter).items()}
        tensors_by_name[f"{name}/step"] = torch.tensor(parameter.slab.steps[parameter.segment])
    return tensors_by_name


def reseal(directory: Path, change: Callable[[dict[str, Any]], Any] = lambda content: None) -> None:
    """Rewrite the manifest with the checksums of the present files."""
    path = directory / manifest.FILE
    content = json.loads(path.read_text())
    content.pop("sha256", None)
    for name, entry in content["files"].items():
        data = (directory / name).read_bytes()
        entry.update(bytes=len(data), crc32=zlib.crc32(data))
    change(content)
    text = json.dumps(content, indent=1).removesuffix("\n}")
    path.write_text(f'{text},\n "sha256": "{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n')


def edit_shard(directory: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(directory / SHARD)
    change(tensors)
    save_file(tensors, directory / SHARD, metadata={"format": "pt"})
    reseal(directory)


def put(key: str, tensor: torch.Tensor) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({key: tensor})


def encoded_as(code: torch.Tensor) -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        del tensors[f"{NAME}/exp_avg"]
        tensors[f"{NAME}/exp_avg.lossless"] = code

    return change


SHARD_EDITS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "a parameter gone": (lambda t: [t.pop(key) for key in list(t) if key.startswith(NAME)], "is in no shard"),
    "a moment gone": (lambda t: t.pop(f"{NAME}/exp_avg_sq"), "has no exp_avg_sq"),
    "a residual gone": (lambda t: t.pop(f"{NAME}/residual"), "lacks its residual"),
    "a moment of another shape": (put(f"{NAME}/exp_avg", torch.zeros(32)), "of shape"),
    "a moment transposed": (put(f"{NAME}/exp_avg", torch.zeros(16, 64)), "of shape"),
    "a moment of another dtype": (put(f"{NAME}/exp_avg", torch.zeros(32, 32, dtype=torch.float64)), "F64"),
    "a residual of another dtype": (put(f"{NAME}/residual", torch.zeros(32, 32, dtype=torch.int32)), "I32"),
    "a residual of another shape": (put(f"{NAME}/residual", torch.zeros(31, 32, dtype=torch.int16)), "of shape"),
    "a name unknown": (put("model.layers.9.weight/exp_avg", torch.zeros(1)), "does not train"),
    "a role unknown": (put(f"{NAME}/momentum", torch.zeros(32, 32)), "does not know"),
    "no role": (put(NAME, torch.zeros(32, 32)), "does not train"),
    "a moment twice": (put(f"{NAME}/exp_avg.bf16", torch.zeros(32, 32, dtype=torch.bfloat16)), "does not know"),
    "codes without scales": (put(f"{NAME}/exp_avg.8bit", torch.zeros(1024, dtype=torch.uint8)), "does not know"),
    "a code that is none": (encoded_as(torch.zeros(99, dtype=torch.uint8)), "damaged"),
    "a code in two dimensions": (encoded_as(torch.zeros(9, 9, dtype=torch.uint8)), "of shape"),
    "a code without dimensions": (encoded_as(torch.zeros((), dtype=torch.uint8)), "of shape"),
}

MANIFEST_EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a step missing": (lambda m: m["steps"].pop(NAME), "other parameters"),
    "a step too many": (lambda m: m["steps"].update(more=1), "other parameters"),
    "another group": (lambda m: m["groups"][0]["params"].pop(), "other parameters"),
    "another kind": (lambda m: m.update(optimizer="lion"), "was saved by lion"),
    "no lr": (lambda m: m["groups"][0].pop("lr"), "has no lr in its groups"),
    "lr a text": (lambda m: m["groups"][0].update(lr="0.1"), "lr='0.1', which must be a number"),
    "lr not a number": (lambda m: m["groups"][0].update(lr=float("nan")), "lr=nan, which must be finite"),
    "lr huge": (lambda m: m["groups"][0].update(lr=10**400), "lr=1000"),
    "one beta": (lambda m: m["groups"][0].update(betas=[0.9]), "two numbers"),
    "betas of text": (lambda m: m["groups"][0].update(betas=["a", "b"]), "must be a number"),
    "no shards": (lambda m: m["files"].pop(SHARD), "is in no shard"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a Trainer run in BF16."""
    directory = tmp_path_factory.mktemp("saved")
    args = small.arguments(directory, max_steps=2, save_strategy="steps", save_steps=2, bf16=True)
    mt.Trainer(model=small.llama(), args=args, train_dataset=small.rows()).train()
    return directory / "checkpoint-2"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    args = small.arguments(tmp_path_factory.mktemp("other"), max_steps=3, bf16=True)
    new_trainer = mt.Trainer(model=small.llama(1), args=args, train_dataset=small.rows())
    new_trainer.create_optimizer()
    return new_trainer


def assert_refused(trainer: Any, directory: Path, message: str) -> None:
    """Check that both ways of loading raise this error and change nothing."""
    optimizer = trainer.optimizer
    before, groups = weights_and_states(trainer.model), json.dumps([g["lr"] for g in optimizer.param_groups])
    for load in (
        lambda: trainer.engine.load(directory, trainer._own_optimizer()),
        lambda: trainer.train(resume_from_checkpoint=str(directory)),
    ):
        with pytest.raises(CheckpointError, match=message) as error:
            load()
        assert str(directory) in str(error.value) or "no shard" in str(error.value)
        assert small.same(before, weights_and_states(trainer.model))
        assert json.dumps([g["lr"] for g in trainer.optimizer.param_groups]) == groups


@pytest.mark.parametrize("case", SHARD_EDITS)
def test_an_edited_shard_changes_nothing(saved: Path, trainer: Any, tmp_path: Path, case: str) -> None:
    shutil.copytree(saved, tmp_path / "checkpoint-2")
    change, message = SHARD_EDITS[case]
    edit_shard(tmp_path / "checkpoint-2", change)
    assert_refused(trainer, tmp_path / "checkpoint-2", message)


@pytest.mark.parametrize("case", MANIFEST_EDITS)
def test_a_changed_manifest_changes_nothing(saved: Path, trainer: Any, tmp_path: Path, case: str) -> None:
    shutil.copytree(saved, tmp_path / "checkpoint-2")
    change, message = MANIFEST_EDITS[case]
    reseal(tmp_path / "checkpoint-2", change)
    assert_refused(trainer, tmp_path / "checkpoint-2", message)


def test_a_parameter_in_two_shards(saved: Path, trainer: Any, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint-2"
    shutil.copytree(saved, directory)
    tensors = load_file(directory / SHARD)
    second = {f"{NAME}/exp_avg": tensors.pop(f"{NAME}/exp_avg")}
    save_file(second, directory / "megatrain/optimizer-00002-of-00002.safetensors")
    entry = {"megatrain/optimizer-00002-of-00002.safetensors": {"bytes": 0, "crc32": 0}}
    reseal(directory, lambda m: m["files"].update(entry))
    reseal(directory)
    assert_refused(trainer, directory, "both have the state of")


def test_a_shard_missing_from_the_manifest_is_ignored(saved: Path, trainer: Any, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint-2"
    shutil.copytree(saved, directory)
    (directory / "megatrain/optimizer-00009-of-00009.safetensors").write_bytes(b"nothing")
    trainer.engine.load(directory, trainer._own_optimizer())


def test_format_1_still_resumes(saved: Path, tmp_path: Path) -> None:
    """A manifest of format 1 has no checksum of itself, no sequence number and no list of residuals."""
    directory = tmp_path / "checkpoint-2"
    shutil.copytree(saved, directory)
    content = json.loads((directory / manifest.FILE).read_text())
    for key in ("sha256", "sequence", "residuals"):
        del content[key]
    (directory / manifest.FILE).write_text(json.dumps(content | {"format": 1}, indent=1))
    args = small.arguments(tmp_path, max_steps=3, bf16=True, save_strategy="steps", save_steps=3)
    again = mt.Trainer(model=small.llama(1), args=args, train_dataset=small.rows())
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3
    assert [manifest.sequence_of(tmp_path / f"checkpoint-{n}") for n in (2, 3)] == [0, 1]


def test_loading_weights_checks_the_manifest(saved: Path, trainer: Any, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint-2"
    shutil.copytree(saved, directory)
    (directory / SHARD).write_bytes(b"not read")
    trainer.engine.load(directory)
    content = bytearray((directory / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (directory / "model.safetensors").write_bytes(content)
    before = weights_and_states(trainer.model)
    with pytest.raises(CheckpointError, match="CRC-32"):
        trainer.engine.load(directory)
    assert small.same(before, weights_and_states(trainer.model))


# ---- saving


def step(model: Any, optimizer: Any, seed: int) -> None:
    loss = model(**small.batch(seed=seed)).loss
    with optimizer.final_backward():
        loss.backward()


@pytest.mark.parametrize("build", [small.llama, small.gpt2], ids=["untied", "tied"])
def test_saving_between_final_backward_and_step_is_refused(tmp_path: Path, build: Any) -> None:
    model = build()
    engine = mt.Engine(model, device="cpu")
    optimizer = engine.optimizer(lr=1e-2)
    for number in range(2):
        step(model, optimizer, number)
        if number:
            with pytest.raises(UnsupportedCall, match="between final_backward"):
                engine.save(tmp_path / "one", optimizer)
            with pytest.raises(UnsupportedCall, match="between final_backward"):
                engine.save(tmp_path / "one")
            assert list(tmp_path.iterdir()) == []
        optimizer.step()
        optimizer.zero_grad()
    engine.save(tmp_path / "one", optimizer)
    assert set(manifest.verify(tmp_path / "one")["steps"].values()) == {2}


def test_a_partly_applied_step_is_not_saved(tmp_path: Path) -> None:
    """The gradient norm is computed on the update lane after `step()` has returned."""
    model = small.llama()
    engine = mt.Engine(model, device="cpu", debug=mt.Debug(lanes="threads"))
    optimizer = engine.optimizer(lr=1e-2)
    step(model, optimizer, 0)
    optimizer.step()
    optimizer.zero_grad()
    hook = model.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: gradient * float("nan"))
    step(model, optimizer, 1)
    hook.remove()
    with pytest.raises(NonFiniteGradients, match="Resume from the last checkpoint"):
        optimizer.step() or engine.save(tmp_path / "one", optimizer)
    assert list(tmp_path.iterdir()) == []
    engine.close()


def test_two_threads_save_into_one_directory(tmp_path: Path) -> None:
    """The saves run one after the other, because each removes the temporary files of earlier saves."""
    engine = mt.Engine(small.llama(), device="cpu")
    optimizer = engine.optimizer()
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(engine.save, tmp_path / "one", optimizer) for _ in range(8)]:
            done.result()
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert manifest.verify(tmp_path / "one")["sequence"] == 8


def test_save_model_of_a_trainer_syncs_its_files(tmp_path: Path) -> None:
    trainer = mt.Trainer(model=small.llama(), args=small.arguments(tmp_path / "out"), train_dataset=small.rows())
    synced = set()
    with files.observing(lambda operation, path: synced.add(path) if operation.startswith("sync") else None):
        trainer.save_model(str(tmp_path / "model"))
    assert {*(tmp_path / "model").iterdir(), tmp_path / "model", tmp_path} <= synced
    trainer.engine.close()
    trainer.save_model(str(tmp_path / "model"))


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 1}', "[" * 100_000, '{"weight_map": {"a": ["b"]}}'])
def test_a_damaged_index_of_weights_is_refused(tmp_path: Path, text: str) -> None:
    model = small.llama()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    engine = mt.Engine(model, device="cpu")
    with pytest.raises(CheckpointError, match=r"index"):
        engine.load(tmp_path)


# ---- the order of writes


def test_files_are_synced_before_the_manifest_and_old_checkpoints_are_deleted_last(tmp_path: Path) -> None:
    operations: list[tuple[str, str]] = []

    def record(operation: str, path: Path) -> None:
        operations.append((operation, str(path.relative_to(tmp_path)) if path.is_relative_to(tmp_path) else ""))
        if operation == "rename" and path.name == "manifest.json" and "4" in path.parts[-3]:
            assert (tmp_path / "checkpoint-2").is_dir()

    options: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    trainer = mt.Trainer(model=small.llama(), args=small.arguments(tmp_path, **options), train_dataset=small.rows())
    with files.observing(record):
        trainer.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "run.jsonl"]
    sealing = [entry for entry in operations if entry[1].startswith("checkpoint-4") or entry[1] == "."]
    order = [operation for operation, _ in sealing]
    listed = json.loads((tmp_path / "checkpoint-4" / manifest.FILE).read_text())["files"]
    renamed = sealing.index(("rename", "checkpoint-4/megatrain/manifest.json"))
    synced = max(i for i, entry in enumerate(sealing[:renamed]) if entry == ("sync_directory", "checkpoint-4"))
    for name in listed:
        assert sealing.index(("sync", f"checkpoint-4/{name}")) < synced
    assert order[renamed - 2 : renamed + 2] == ["write", "sync", "rename", "sync_directory"]
    assert sealing[renamed + 1] == ("sync_directory", "checkpoint-4/megatrain")
    assert ("sync_directory", ".") in sealing[renamed:]


def test_a_failed_sync_does_not_complete_a_checkpoint(tmp_path: Path) -> None:
    model = small.llama()
    engine = mt.Engine(model, device="cpu")
    optimizer = engine.optimizer()
    engine.save(tmp_path / "one", optimizer)
    before = manifest.verify(tmp_path / "one")

    def fails(operation: str, path: Path) -> None:
        if operation == "sync" and path.name == "model.safetensors":
            raise OSError(5, "Input/output error")

    with files.observing(fails), pytest.raises(OSError, match="while syncing") as error:
        engine.save(tmp_path / "one", optimizer)
    assert error.value.filename.endswith("model.safetensors")
    assert manifest.verify(tmp_path / "one") == before
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    states.save_optimizer(model, optimizer, tmp_path / "one", states.SHARD_BYTES)
    with files.observing(fails), pytest.raises(OSError, match="while syncing"):
        states.seal(model, optimizer, tmp_path / "one", files.regular_files(tmp_path / "one"))
    with pytest.raises(OSError, match="has not been written again"):
        states.seal(model, optimizer, tmp_path / "one", files.regular_files(tmp_path / "one"))


def test_the_time_of_a_save_is_announced(tmp_path: Path, announced: pytest.LogCaptureFixture) -> None:
    engine = mt.Engine(small.llama(), device="cpu")
    engine.save(tmp_path / "one")
    assert any(line.startswith("one written to disk: ") and "s of it syncing" in line for line in announced.messages)
