"""Loading a model must not take RAM for the model beside the store. Measured in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WRITE = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
shape = dict(vocab_size=8192, hidden_size=1024, intermediate_size=4096, num_attention_heads=8, num_hidden_layers=18)
LlamaForCausalLM(LlamaConfig(**shape)).bfloat16().save_pretrained(sys.argv[1], max_shard_size="200MB")
"""
LOAD = """
import sys, threading, time, torch
from transformers import AutoConfig, AutoModelForCausalLM
import megatrain as mt
way, path, scratch = sys.argv[1:]

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

peak = [0]

def watch():
    while True:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.002)

threading.Thread(target=watch, daemon=True).start()
mt.init(device="cpu", **({"offload_dir": scratch} if way == "init" else {}))
before = anonymous()
if way == "weights":
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
else:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
engine = mt.Engine(model, precision="bf16", **({"weights": path} if way == "weights" else {}))
model_bytes = sum(p.numel() * 4 for p in model.parameters())
print("share", (peak[0] - before) / model_bytes)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, "-c", WRITE, str(path)], check=True, timeout=240)
    return path


@pytest.mark.parametrize(("way", "least", "most"), [("weights", 0, 0.2), ("init", 0, 0.2), ("plain", 0.8, 2)])
def test_the_model_does_not_pass_through_ram(path: Path, tmp_path: Path, way: str, least: float, most: float) -> None:
    """Anonymous memory beside the store, which is shared memory, as a share of an FP32 model of 320 million parameters.
    A plain load takes all of it."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, way, str(path), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    share = float(done.stdout.split("share")[1])
    assert least <= share <= most
