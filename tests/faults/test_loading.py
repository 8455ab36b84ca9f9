"""Loading a model must not take RAM for the model beside the store. Measured in processes of their own."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, threading, time, torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
import megatrain as mt
path, scratch = sys.argv[1:]

def write():
    shape = dict(vocab_size=8192, hidden_size=1024, intermediate_size=4096, num_attention_heads=8, num_hidden_layers=18)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape)).bfloat16()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    model.save_pretrained(path, max_shard_size="200MB")

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

def load(way):
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
    print(way, (peak[0] - before) / model_bytes, flush=True)

# Each in a child, so that none finds memory that another one has freed.
for work in (write, lambda: load("weights"), lambda: load("init"), lambda: load("plain")):
    if os.fork() == 0:
        work()
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    model, scratch = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("scratch")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), str(scratch)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return {way: float(share) for way, share in map(str.split, done.stdout.splitlines())}


@pytest.mark.parametrize(("way", "least", "most"), [("weights", 0, 0.2), ("init", 0, 0.2), ("plain", 0.8, 2)])
def test_the_model_does_not_pass_through_ram(shares: dict[str, float], way: str, least: float, most: float) -> None:
    """Anonymous memory beside the store, which is shared memory, as a share of an FP32 model of 320 million parameters.
    A plain load takes all of it."""
    assert least <= shares[way] <= most
