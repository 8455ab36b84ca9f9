"""What docs/optimizer.md assumes: an engine's optimizer, and a loss of its model."""

import megatrain as mt
from megatrain.cli.demo import small_llama

model = small_llama()
opt = mt.Engine(model, device="cpu").optimizer(lr=1e-3)
ids = model.dummy_inputs["input_ids"]
loss = model(input_ids=ids, labels=ids).loss
