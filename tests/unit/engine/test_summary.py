"""An engine prints what it trains, in which precision and where its state is. With a plan, it prints the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests import small
from tests.tiny import engine_of

import megatrain as mt
from megatrain.optim.rules import AdamW


def printed(announced: pytest.LogCaptureFixture) -> list[str]:
    (text,) = [line for line in announced.messages if "\n  parameters  " in line]
    return text.splitlines()


def rows(lines: list[str]) -> dict[str, str]:
    return {line.split()[0]: line[14:] for line in lines if line.startswith("  ")}


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"


def test_the_summary_says_where_everything_is(announced: pytest.LogCaptureFixture) -> None:
    engine = engine_of(
        small.llama(hidden_size=64, vocab_size=2048),
        precision="bf16",
        optimizer_compression="8bit",
        resident=["lm_head"],
        held_weights=["model.layers.*", "lm_head"],
        held_gradients=["model.layers.0"],
        policy={"model.layers.0": "store", "*": "recompute"},
        window=4,
    )
    title, *lines = printed(announced)
    assert title == "LlamaForCausalLM on cpu"
    summary = rows(lines)
    assert summary["parameters"] == "0.3M, all trained"
    assert summary["blocks"] == f"{len(engine.blocks)}"
    assert summary["precision"] == "computes in bf16, exact FP32 master, saved in fp32"
    assert summary["optimizer"] == "AdamW, moments in 8bit"

    def nbytes(name: str) -> int:
        return sum(slab.layout.nbytes for slab in engine.slabs if slab.name.startswith(name))

    everything, head, first = nbytes(""), nbytes("lm_head"), nbytes("model.layers.0")
    copies = f"copies in device memory {mib(nbytes('model.layers'))}"
    assert summary["weights"] == f"RAM {mib(everything - head)}, device memory {mib(head)}, {copies}"
    assert summary["gradients"] == f"RAM {mib(everything - head - first)}, device memory {mib(head + first)}"
    assert summary["policy"] == f"{len(engine.blocks) - 1} recompute, 1 store"
    assert summary["window"] == "4 micro-batches"
    states = {True: 0, False: 0}
    for slab in engine.slabs:
        states[slab.name == "lm_head"] += slab.state_bytes(AdamW.moments, "8bit")
    assert summary["states"] == f"RAM {mib(states[False])}, device memory {mib(states[True])}"


def test_what_is_on_disk_is_named(announced: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    first = "model.layers.0"
    settings = {"on_disk": [first], "weights_on_disk": [first], "gradients_on_disk": [first]}
    engine = engine_of(small.llama(), precision="bf16", offload_dir=tmp_path, allow_tmpfs=True, **settings)
    summary, (slab,) = rows(printed(announced)), [slab for slab in engine.slabs if slab.name == first]
    assert summary["weights"].endswith(f"disk {mib(slab.layout.nbytes)}")
    assert summary["gradients"].endswith(f"disk {mib(slab.owned.nbytes)}")
    assert summary["states"].endswith(f"disk {mib(slab.state_bytes(AdamW.moments, 'fp32'))}")
    engine.close()


def test_frozen_parameters_have_no_gradients_or_states(announced: pytest.LogCaptureFixture) -> None:
    model = small.llama().requires_grad_(False)
    engine_of(model)
    summary = rows(printed(announced))
    assert summary["parameters"].endswith(", none trained")
    assert summary["weights"].startswith("RAM ")
    assert summary["gradients"] == summary["states"] == "none"


def test_trained_parameters_are_counted(announced: pytest.LogCaptureFixture) -> None:
    model = small.llama(vocab_size=4096).requires_grad_(False)
    model.lm_head.requires_grad_(True)
    engine_of(model)
    assert rows(printed(announced))["parameters"] == "0.3M, 0.1M trained"


@pytest.mark.parametrize(
    ("loaded", "precision", "expected"),
    [
        (torch.float32, "fp32", "computes in fp32, saved in fp32"),
        (torch.bfloat16, "fp32", "computes in fp32, saved in fp32"),
        (torch.float32, "bf16", "computes in bf16, exact FP32 master, saved in fp32"),
        (torch.bfloat16, "bf16", "computes in bf16, exact FP32 master, saved in bf16"),
        (torch.float32, "bf16-sr", "computes in bf16, no FP32 master, rounded stochastically, saved in bf16"),
    ],
)
def test_weights_are_saved_in_the_announced_precision(
    loaded: torch.dtype, precision: str, expected: str, announced: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    engine = engine_of(small.llama().to(loaded), precision=precision)
    assert rows(printed(announced))["precision"] == expected
    engine.save(tmp_path)
    dtypes = {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()}
    assert dtypes == {{"fp32": torch.float32, "bf16": torch.bfloat16}[engine.saved_precision]}


def test_a_model_of_one_block_is_announced(announced: pytest.LogCaptureFixture) -> None:
    engine_of(torch.nn.Linear(4, 4))
    title, *lines = printed(announced)
    assert title == "Linear on cpu"
    assert rows(lines)["parameters"] == "20, all trained"
    assert rows(lines)["blocks"] == "1, the whole model"
    assert [*rows(lines)][-3:] == ["weights", "gradients", "states"]


def test_a_plan_is_printed_and_differences_from_it_are_announced(announced: pytest.LogCaptureFixture) -> None:
    options = {"precision": "bf16", "optimizer_compression": True, "compile": False}
    plan = mt.plan(small.llama(), machine="h200-128gb", batch=2, length=8, **options)
    engine_of(small.llama(), plan=plan, precision="bf16", optimizer_compression="4bit")
    assert not [record for record in announced.records if record.levelname == "WARNING"]
    text = "\n".join(printed(announced))
    assert text.endswith(f"\n\nThe plan:\n{plan.table()}")
    assert rows(printed(announced))["optimizer"] == "AdamW, moments in 4bit"
    engine_of(small.llama(), plan=plan, optimizer_compression="8bit", compile=True)
    lines = " ".join(record.getMessage() for record in announced.records if record.levelname == "WARNING")
    for contradiction in (
        "the plan is for precision bf16, this engine has fp32",
        "the plan is for moments in 4bit, this engine has 8bit",
        "the plan is for compile False, this engine has True",
    ):
        assert contradiction in lines
