"""State that the kernel's memory limit could not hold is on disk, within the limit: optimizer states, or everything.

Needs a cgroup hierarchy that this user may write to; skipped elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.faults.test_cgroup import LARGE, limited

PROGRAM = """
import json, os, sys
group, scratch, room, layers, hidden, precision, weights = sys.argv[1:]
with open(os.path.join(group, "cgroup.procs"), "w") as members:
    members.write(str(os.getpid()))
import torch, transformers
import megatrain as mt
from megatrain.geometry import PLACEMENT_SETTINGS
from megatrain.hardware import inventory

torch.set_num_threads(1)
hidden = int(hidden)
config = transformers.LlamaConfig(
    vocab_size=8192, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=int(layers),
    num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=256, bos_token_id=None, eos_token_id=None)
with torch.device("meta" if weights else "cpu"):
    model = transformers.LlamaForCausalLM(config)
numel = sum(p.numel() for p in model.parameters())
# The weights are there already, unless they stay in their files.
own = inventory.own_ram() - (0 if weights else 4 * numel)
limit = own + int(float(room) * numel)
def setting(*names):
    return next(path for path in (os.path.join(group, name) for name in names) if os.path.exists(path))
open(setting("memory.limit_in_bytes", "memory.max"), "w").write(str(limit))
for name in ("memory.swappiness", "memory.swap.max"):
    if os.path.exists(os.path.join(group, name)):
        open(os.path.join(group, name), "w").write("0")
found = {"parameters": numel, "own": own, "limit": limit}
try:
    engine = mt.Engine(model, device="cpu", precision=precision, weights=weights or None,
                       offload_dir=scratch if scratch != "none" else None)
    optimizer = engine.optimizer(lr=1e-3)
    losses = []
    ids = torch.randint(1, 8192, (2, 16), generator=torch.Generator().manual_seed(0))
    for step in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    engine.synchronize()
    found["settings"] = {name: len(getattr(engine.settings, name)) for name in PLACEMENT_SETTINGS if "disk" in name}
    disk = engine._placement.disk
    found |= {"losses": losses, "on_disk": 0 if disk is None else disk.allocated_bytes}
except mt.errors.MegaTrainError as refused:
    found |= {"refused": f"{type(refused).__name__}: {refused}"}
found["peak"] = int(open(setting("memory.max_usage_in_bytes", "memory.peak")).read())
print("found:", json.dumps(found))
"""


def run(
    scratch: Path | None, room: float, layers: int, hidden: int, precision: str, weights: Path | str = ""
) -> dict[str, Any]:
    with limited(LARGE) as group:
        arguments = [str(group), str(scratch or "none"), str(room), str(layers), str(hidden), precision, str(weights)]
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stdout[-2000:], done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.partition("found: ")[2])
    print(found)
    return found


@pytest.mark.parametrize(
    ("layers", "hidden", "precision", "room"),
    [
        (10, 640, "fp32", 16),
        pytest.param(24, 1024, "fp32", 15, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
        pytest.param(24, 1024, "bf16", 15, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_states_that_ram_cannot_hold(tmp_path: Path, layers: int, hidden: int, precision: str, room: float) -> None:
    """`room` is the limit in bytes per parameter beyond the process itself. Weights, gradients and moments take 16 to
    18, slots and activations come on top.
    """
    refused = run(None, room, layers, hidden, precision)
    assert "NotEnoughMemory" in refused.get("refused", "OutOfRam"), refused
    found = run(tmp_path / "scratch", room, layers, hidden, precision)
    assert "refused" not in found, found
    assert found["on_disk"] > found["parameters"]
    assert found["peak"] <= found["limit"]
    assert found["losses"][-1] < found["losses"][0]
    assert list((tmp_path / "scratch").iterdir()) == []


SAVE = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
path, layers, hidden = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(
    vocab_size=8192, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
    num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=256, bos_token_id=None, eos_token_id=None)
).save_pretrained(path)
"""


def test_weights_alone_are_larger_than_ram(tmp_path: Path) -> None:
    """The limit is 3.6 bytes per parameter, and FP32 weights take 4: they pass from their files to the drive block by
    block, and train there with their gradients and states, 16 bytes per parameter in all."""
    layers, hidden = 48, 512
    subprocess.run([sys.executable, "-c", SAVE, str(tmp_path / "model"), str(layers), str(hidden)], check=True)
    found = run(tmp_path / "scratch", 3.6, layers, hidden, "fp32", tmp_path / "model")
    assert "refused" not in found, found
    assert found["limit"] - found["own"] < 4 * found["parameters"]
    assert found["peak"] <= found["limit"]
    assert all(found["settings"].values()), found
    assert found["on_disk"] > 13 * found["parameters"]
    assert found["losses"][-1] < found["losses"][0]
