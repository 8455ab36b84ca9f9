"""In a window that is the full step, complete sums stay on the device in the gradient dtype."""

import torch
from tests import small
from tests.tiny import engine_of


def gradient_bytes(full_step: bool) -> dict[str, int]:
    model = small.llama(num_hidden_layers=2)
    engine = engine_of(model, precision="bf16", resident=("model.layers.0",), held_gradients=("model.layers.1",))
    optimizer = engine.optimizer(lr=1e-2, max_grad_norm=1.0)
    for _ in range(2):
        tasks = [lambda k=k: model(**small.batch(2, seed=k)).loss.backward() for k in range(3)]
        engine.window(tasks, full_step=full_step)
        found = {
            slab.name: sum(b.nbytes for part in slab.grad.parts.values() for b in part.buffers.values())
            for slab in engine.slabs
            if slab.grad.on_device
        }
        optimizer.step()
        optimizer.zero_grad()
    numel = {slab.name: slab.layout.numel for slab in engine.slabs}
    engine.close()
    return {name: nbytes // numel[name] for name, nbytes in found.items()}


def test_sums_of_a_full_step_are_rounded_and_partial_ones_are_not():
    torch.manual_seed(0)
    assert gradient_bytes(full_step=True) == {"model.layers.0": 2, "model.layers.1": 2}
    assert gradient_bytes(full_step=False) == {"model.layers.0": 4, "model.layers.1": 4}
