"""Your own training loop with `mt.Engine`: gradient accumulation, evaluation, save and load.

Run it as it stands: `python examples/own_loop.py [OUTPUT_DIR]`. It takes seconds on a laptop; with a GPU, it uses it.
For a real model, replace `small_llama()` by `AutoModelForCausalLM.from_pretrained("company/model",
dtype=torch.bfloat16)` and `batch()` by your data.
"""

import sys
import tempfile
from pathlib import Path

import torch

import megatrain as mt
from megatrain.cli.demo import bundled_text, byte_tokenizer, small_llama

STEPS, MICRO_BATCHES, ROWS, LENGTH = 30, 4, 4, 64
directory = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()) / "checkpoint"

tokens = torch.tensor(byte_tokenizer()(bundled_text())["input_ids"])
train, held_out = tokens[:-2000], tokens[-2000:]
model = small_llama()
engine = mt.Engine(model)  # the GPU if there is one, else the CPU
optimizer = engine.optimizer(lr=3e-3, weight_decay=0.1, max_grad_norm=1.0)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))


def batch(text):
    starts = torch.randint(len(text) - LENGTH, (ROWS,))
    ids = torch.stack([text[start : start + LENGTH] for start in starts]).to(engine.device)
    return {"input_ids": ids, "labels": ids}


def micro_batch(inputs):
    loss = model(**inputs).loss / MICRO_BATCHES
    loss.backward()
    return loss.detach()


def evaluate():
    torch.manual_seed(1)  # the same batches each time
    model.eval()
    with torch.no_grad(), engine.loss_only():
        mean = sum(model(**batch(held_out)).loss.item() for _ in range(4)) / 4
    model.train()
    return mean


print(f"step  0: held-out loss {evaluate():.4f}")
for step in range(1, STEPS + 1):
    # All micro-batches of the step pass a layer together: its weights are fetched once for them.
    inputs = [batch(train) for _ in range(MICRO_BATCHES)]
    losses = engine.window([lambda one=one: micro_batch(one) for one in inputs], whole=True)
    optimizer.step()  # returns at once; updates run under the next forward
    schedule.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step:2}: loss {sum(losses).item():.4f}, held-out loss {evaluate():.4f}")

saved = evaluate()
engine.save(directory, optimizer)  # weights as safetensors, and the optimizer's state
engine.close()

model = small_llama()
engine = mt.Engine(model)
optimizer = engine.optimizer(lr=3e-3, weight_decay=0.1, max_grad_norm=1.0)
engine.load(directory, optimizer)
print(f"saved and loaded again: held-out loss {evaluate():.4f}, {'equal' if evaluate() == saved else 'DIFFERENT'}")
engine.close()
