"""An engine without a plan says where everything is; one with a plan, what it has otherwise."""

from __future__ import annotations

import pytest
import torch
from tests import small
from tests.tiny import engine_of

import megatrain as mt
from megatrain.optim.rules import AdamW


def printed(said: pytest.LogCaptureFixture) -> list[str]:
    (text,) = [line for line in said.messages if line.startswith("no plan; ")]
    return text.splitlines()


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"


def test_it_says_where_everything_is(said: pytest.LogCaptureFixture) -> None:
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
    title, *rows = printed(said)
    assert title.startswith("no plan; LlamaForCausalLM: 0.")
    assert title.endswith(f"in {len(engine.blocks)} blocks on cpu, bf16")
    found = {row.split()[0]: row[11:] for row in rows}

    def nbytes(name: str) -> int:
        return sum(slab.layout.nbytes for slab in engine.slabs if slab.name.startswith(name))

    everything, head, first = nbytes(""), nbytes("lm_head"), nbytes("model.layers.0")
    assert found["weights"] == (
        f"ram {mib(everything - head)}, vram {mib(head)}, copies in vram {mib(nbytes('model.layers'))}"
    )
    assert found["gradients"] == f"ram {mib(everything - head - first)}, vram {mib(head + first)} for one micro-batch"
    assert found["policy"] == f"{len(engine.blocks) - 1} recompute, 1 store"
    assert found["window"] == "4 micro-batches"
    states = {True: 0, False: 0}
    for slab in engine.slabs:
        states[slab.name == "lm_head"] += slab.state_bytes(AdamW.moments, "8bit")
    assert found["states"] == f"ram {mib(states[False])}, vram {mib(states[True])} with AdamW and 8bit moments"


def test_what_is_frozen_has_no_gradients_or_states(said: pytest.LogCaptureFixture) -> None:
    model = small.llama().requires_grad_(False)
    engine_of(model)
    _, weights, gradients, states, *_ = printed(said)
    assert weights.startswith("weights    ram ")
    assert gradients == "gradients  none for one micro-batch"
    assert states.startswith("states     none ")


def test_one_block_is_said_so(said: pytest.LogCaptureFixture) -> None:
    engine_of(torch.nn.Linear(4, 4))
    title, *rows = printed(said)
    assert title == "no plan; Linear: 0.0M parameters on cpu, fp32"
    assert [row.split()[0] for row in rows] == ["weights", "gradients", "states"]


def test_a_plan_is_printed_instead_and_what_differs_from_it_is_named(said: pytest.LogCaptureFixture) -> None:
    plan = mt.plan(small.llama(), machine="h200-128gb", batch=2, length=8, precision="bf16", optimizer_compression=True)
    engine_of(small.llama(), plan=plan, precision="bf16", optimizer_compression="4bit")
    assert not [record for record in said.records if record.levelname == "WARNING"]
    assert not [line for line in said.messages if line.startswith("no plan")]
    engine_of(small.llama(), plan=plan, optimizer_compression="8bit", compile=True)
    lines = " ".join(record.getMessage() for record in said.records if record.levelname == "WARNING")
    for contradiction in (
        "the plan is for precision bf16, this engine has fp32",
        "the plan is for moments in 4bit, this engine has 8bit",
        "the plan is for compile False, this engine has True",
    ):
        assert contradiction in lines
