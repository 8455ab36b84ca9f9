"""On the GPU, in deterministic mode: state on disk gives the bits of state in RAM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.shapes import random_model

import megatrain as mt
from megatrain.store.parameter import states_of


def train(clip: float | None, compression: Any = False, steps: int = 3, **settings: Any) -> dict[str, Any]:
    model: Any = random_model("tiny", torch.bfloat16, num_hidden_layers=6).train()
    with mt.Engine(model, device="cuda", precision="bf16", optimizer_compression=compression, **settings) as engine:
        optimizer = engine.optimizer(lr=1e-3, max_grad_norm=clip)
        generator = torch.Generator().manual_seed(7)
        for _ in range(steps):
            ids = torch.randint(0, 512, (2, 96), generator=generator).cuda()
            with optimizer.final_backward():
                model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.synchronize()
        found = {name: p.detach().cpu() for name, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            found |= {f"{name}/{role}": view.clone() for role, view in states_of(parameter).items()}
        found["written"] = engine.counters.bytes_disk_out
        return found


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("clip", [None, 1.0], ids=["early", "clipped"])
@pytest.mark.parametrize("compression", [False, "8bit", "lossless"])
@pytest.mark.parametrize("where", ["states", "held", "everything", "with inputs"])
def test_state_on_disk_is_bitwise(tmp_path: Path, clip: float | None, compression: Any, where: str) -> None:
    held: dict[str, Any] = {"held_weights": ["*"], "held_gradients": ["*"]} if where == "held" else {}
    more: dict[str, Any] = {}
    if where in ("everything", "with inputs"):
        more = {name: ["*"] for name in ("weights_on_disk", "gradients_on_disk")}
    if where == "with inputs":
        more |= {"policy": "offload", "inputs_on_disk": ["*"]}
    expected = train(clip, compression, **held)
    debug = mt.Debug(allow_tmpfs=True, disk_coding="always")
    found = train(clip, compression, offload_dir=tmp_path, on_disk=["*"], debug=debug, **held, **more)
    assert expected.pop("written") == 0
    assert found.pop("written") > 0
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
