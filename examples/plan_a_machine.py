"""Plan a run on a machine you do not have: 13B parameters on a 24 GB card with 64 GB of RAM. No weights are loaded.

Run it as it stands: `python examples/plan_a_machine.py`. For your model, replace `MODEL` by the directory of its
config.json or its name. For your machine, replace `MACHINE` by another name of `mt.Machine.shipped()`, by the path of
what `megatrain probe --json` printed there, or by None for this one.
"""

from pathlib import Path

import megatrain as mt

MODEL = Path(__file__).parent / "llama-13b"
MACHINE = "rtx4090-64gb"
print("machines with a description:", ", ".join(sorted(mt.Machine.shipped())))

print("\n1. An exact FP32 master and FP32 moments:")
try:
    print(mt.plan(MODEL, machine=MACHINE, batch=1, length=2048).table())
except mt.Refusal as refusal:
    print(refusal)  # what is short, and what would make it fit

print("\n2. With what it suggests, which is lossy:")
smaller = {"optimizer_compression": "4bit", "precision": "bf16-sr"}
print(mt.plan(MODEL, machine=MACHINE, batch=1, length=2048, **smaller).table())

print("\n3. What is the most that fits?")
batch = mt.largest_batch(MODEL, MACHINE, length=1024, **smaller)
print(f"batch of 1024 tokens: {batch.value}, at {batch.plan.tokens_per_second:,.0f} tokens/s")
context = mt.largest_context(MODEL, MACHINE, batch=1, **smaller)
print(f"context: {context.value:,} tokens")
exact = mt.largest_model(MACHINE, batch=1, length=2048)
print(f"largest model with an exact FP32 master: {exact.value / 1e9:.1f}B parameters")
lossy = mt.largest_model(MACHINE, batch=1, length=2048, **smaller)
print(f"largest model with the settings of 2.: {lossy.value / 1e9:.1f}B parameters")
