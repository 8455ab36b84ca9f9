"""A checkpoint says which kernels its run computed with, and a resume with others is refused or warned about."""

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import small

import megatrain as mt
from megatrain.checkpoint import manifest
from megatrain.compute import compiled
from megatrain.engine import kernels
from megatrain.errors import CheckpointError


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.compile` without a C compiler."""
    torch._dynamo.reset()
    plain = torch.compile
    monkeypatch.setattr(compiled.torch, "compile", lambda function, **_: plain(function, backend="eager"))


def trained(**settings: Any) -> tuple[mt.Engine, Any]:
    engine = mt.Engine(small.llama(), device="cpu", **settings)
    optimizer = engine.optimizer(lr=1e-2)
    engine.model(**small.batch(2)).loss.backward()
    optimizer.step()
    return engine, optimizer


def saved(directory: Path, **settings: Any) -> dict[str, Any]:
    engine, optimizer = trained(**settings)
    engine.save(directory, optimizer)
    engine.close()
    return manifest.read(directory)["kernels"]  # type: ignore[no-any-return]


def resume(directory: Path, **settings: Any) -> None:
    engine = mt.Engine(small.llama(), device="cpu", **settings)
    with engine:
        engine.load(directory, engine.optimizer(lr=1e-2))


def test_what_a_checkpoint_says_of_an_eager_run(tmp_path: Path) -> None:
    found = saved(tmp_path / "a")
    assert (found["compile"], found["layers"], found["batch"], found["gpu"]) == (False, {}, None, None)
    assert found["torch"] == torch.__version__
    assert found["deterministic"] is False
    resume(tmp_path / "a")


def test_other_versions_do_not_matter_to_eager_runs_on_the_cpu(
    tmp_path: Path, announced: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    saved(tmp_path / "a")
    monkeypatch.undo()
    resume(tmp_path / "a")
    assert not [record for record in announced.records if record.levelname == "WARNING"]


def test_a_compiled_run_is_not_continued_eagerly_unless_the_user_says_so(
    tmp_path: Path, announced: pytest.LogCaptureFixture, quick: None
) -> None:
    assert saved(tmp_path / "a", compile=True)["layers"] == {"LlamaDecoderLayer": "compiled"}
    with pytest.raises(CheckpointError, match=re.escape("other kernels (compile True → False), so the last bits")):
        resume(tmp_path / "a")
    resume(tmp_path / "a", compile=True)
    assert not [record for record in announced.records if record.levelname == "WARNING"]
    resume(tmp_path / "a", compile=False)
    [warning] = [record.getMessage() for record in announced.records if record.levelname == "WARNING"]
    assert warning.endswith("other kernels (compile True → False), so the last bits will differ")


def test_an_eager_run_on_the_cpu_warns_of_what_the_user_has_set(
    tmp_path: Path, announced: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path / "a", head_chunk=64)
    resume(tmp_path / "a", head_chunk=7)
    [warning] = [record.getMessage() for record in announced.records if record.levelname == "WARNING"]
    assert warning.endswith("other kernels (head_chunk 64 → 7), so the last bits will differ")


def test_other_versions_matter_to_compiled_runs(
    tmp_path: Path, announced: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    saved(tmp_path / "a", compile=True)
    monkeypatch.setattr(torch.version, "cuda", "98.0")
    resume(tmp_path / "a", compile=True)
    [warning] = [record.getMessage() for record in announced.records if record.levelname == "WARNING"]
    assert "cuda 99.0 → 98.0" in warning


def test_another_version_of_transformers_may_have_other_layers(
    tmp_path: Path, announced: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    saved(tmp_path / "a", compile=True)
    installed = version("transformers")
    monkeypatch.setattr(kernels, "version", lambda name: "99.0" if name == "transformers" else version(name))
    resume(tmp_path / "a", compile=True)
    [warning] = [record.getMessage() for record in announced.records if record.levelname == "WARNING"]
    assert f"other kernels (transformers {installed} → 99.0)" in warning


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"attn_implementation": "eager"}}, "attention_implementation sdpa → eager"),
        ({"model": {"experts_implementation": "grouped_mm"}}, "experts_implementation eager → grouped_mm"),
        ({"head_chunk": 7}, "head_chunk 64 → 7"),
        ({"head_chunk": 0}, "head_chunk 64 → 0"),
    ],
)
def test_other_implementations_and_chunks_matter(
    tmp_path: Path, announced: pytest.LogCaptureFixture, quick: None, changes: dict[str, Any], said: str, compile: bool
) -> None:
    plain = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
    settings = {"compile": compile, "head_chunk": 64}

    def attached(model: dict[str, str], **settings: Any) -> mt.Engine:
        return mt.Engine(small.mixtral(**model), device="cpu", **settings)

    with attached(plain, **settings) as engine:
        engine.save(tmp_path / "a", engine.optimizer(lr=1e-2))
    with attached(
        plain | changes.get("model", {}), **settings | {"head_chunk": changes.get("head_chunk", 64)}
    ) as other:
        other.load(tmp_path / "a", other.optimizer(lr=1e-2))
    [warning] = [record.getMessage() for record in announced.records if record.levelname == "WARNING"]
    assert f"other kernels ({said})" in warning


def test_only_what_a_checkpoint_says_is_compared(
    tmp_path: Path, announced: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    of_now, known = kernels.kernels_of, ("compile", "layers", "torch")
    monkeypatch.setattr(kernels, "kernels_of", lambda engine: {name: of_now(engine)[name] for name in known})
    assert set(saved(tmp_path / "a", compile=True)) == set(known)
    monkeypatch.setattr(kernels, "kernels_of", of_now)
    resume(tmp_path / "a", compile=True)
    assert not [record for record in announced.records if record.levelname == "WARNING"]


def test_a_checkpoint_that_does_not_say_is_resumed_with_a_notice(
    tmp_path: Path, announced: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    plain = manifest.write

    def older(directory: Any, listed: Any, content: dict[str, Any], place: Any) -> int:
        return plain(directory, listed, {name: value for name, value in content.items() if name != "kernels"}, place)

    monkeypatch.setattr(manifest, "write", older)
    engine, optimizer = trained()
    engine.save(tmp_path / "a", optimizer)
    engine.close()
    resume(tmp_path / "a")
    assert not [line for line in announced.messages if "does not say" in line]
    resume(tmp_path / "a", compile=True)
    assert [line for line in announced.messages if "does not say whether its layers were compiled" in line]


def test_a_structure_that_is_decided_otherwise_after_a_resume_is_refused() -> None:
    layer = compiled.Compiled("Layer", torch.device("cpu"), None, recomputes=True)

    def refuse(change: str) -> None:
        raise CheckpointError(change)

    layer.expect({"Layer": "compiled"}, refuse)

    def call(found: Any) -> None:
        if found is not None:
            raise compiled.CannotCompile("no") from RuntimeError("no kernel")

    with pytest.raises(CheckpointError, match="Layer compiled → eager"):
        layer.run((torch.Size((2, 8, 4)),), compiled.TRAINED, call)


def test_frozen_layers_are_compared_on_a_resume() -> None:
    changes: list[str] = []

    def call(found: Any) -> None:
        if found is not None:
            raise compiled.CannotCompile("no") from RuntimeError("no kernel")

    layer = compiled.Compiled("Layer", torch.device("cpu"), None, recomputes=True)
    layer.expect({"Layer": "eager", "Layer, frozen": "compiled"}, changes.append)
    for kind in (compiled.EVALUATED, compiled.FROZEN, compiled.TRAINED):
        layer.run((torch.Size((2, 8, 4)),), kind, call)
    assert changes == ["Layer, frozen compiled → eager"]
    layer.expect({"Layer": "compiled"}, changes.append)
    assert changes[1:] == ["Layer compiled → eager"]


def test_a_record_says_how_layers_run(tmp_path: Path, quick: None) -> None:
    engine = mt.Engine(small.llama(), device="cpu", compile=True)
    with engine, engine.record(tmp_path / "run.jsonl"):
        engine.model(**small.batch(2)).loss.backward()
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    [line] = [line for line in lines if line["event"] == "compiled"]
    assert (line["layer"], line["gradients"], line["compiled"], line["reason"]) == (
        "LlamaDecoderLayer", True, True, None,
    )  # fmt: skip
